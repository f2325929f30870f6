"""Quotas by GPU model: each model is divided by itself, from the policy file to victims, verdicts and replay."""

from __future__ import annotations

from collections.abc import Mapping
from math import fsum
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from accountant.wire.policy_models import Policy, UsageWindow, WindowSpec
from accountant.wire.usage_cost_and_job_models import BudgetState
from fairshare.cli.decision_replay import ReplayDifference, recount
from fairshare.controller.cycle_report import CycleReport
from fairshare.controller.policy_file import load
from fairshare.core.gpu_models import OTHERS, window_of_part
from fairshare.core.queues_and_weights import Standing
from fairshare.explain.queue_and_pod_explanation import explain_queue
from fairshare.laws.weight_calculation import ModelPart, WeightInputs, WeightResult, calculate_weights
from gputally.base.gpu_model_names import most_precise
from gputally.base.version import __version__
from gputally.base.yaml_file import FileFault
from gputally.kubernetes.memory_cluster import MemoryCluster
from gputally.kubernetes.objects import Object
from gputally.testing.fake_accountant import usage_window
from gputally.testing.fake_scheduler import pod_group, queue_object
from tests.fairshare.builders import cluster_with, fake_pod, policy_of
from tests.fairshare.by_model import (
    A10,
    H100,
    HOUR_US,
    LABEL,
    ByModel,
    by_model_policy,
    one_cycle,
    two_models,
    waiting_for,
)
from tests.fairshare.conftest import NOW_MS, Accountant, Make
from tests.fairshare.observations import condition
from tests.fairshare.scheduler_kinds import KINDS
from tests.hypothesis_examples import examples


def _differences(accountant: Accountant, policy: Policy) -> tuple[tuple[ReplayDifference, ...], str]:
    """Return what a replay of the only recorded cycle finds."""
    decisions = [d.model_validate_json(d.model_dump_json()) for d in accountant.decisions if d.kind != "hold"]
    (count,) = recount(decisions, {policy.version(): policy}, __version__)
    assert count.compared > 5
    return count.differences, count.fault


def _due(report: CycleReport) -> dict[str, dict[str, float]]:
    (target,) = report.targets
    return {model: {due.queue: due.gpus for due in of_model} for model, of_model in target.by_model.items()}


def test_a_claim_takes_gpus_of_its_own_model_alone() -> None:
    """b borrows four H100 and four A10. a's pod needs two H100 by its selector, and b's work on A10 stays."""
    held = [fake_pod(f"b-{node}{i}", "b", node=node, gpus=2) for node in "ht" for i in range(4)]
    cluster = cluster_with(*two_models(), *held, waiting_for("a0", "a", 2, H100))
    policy, used = by_model_policy(), ByModel()
    (target,) = one_cycle(cluster, policy, used).targets
    assert target.preemption is not None
    (verdict,) = target.preemption.verdicts
    assert [pod.name for victim in verdict.victims for pod in victim.pods] == ["b-h0"]
    assert _differences(used, policy) == ((), "")
    assert "H100 GPUs" in verdict.victims[0].reason
    assert {model: due for model, due in _due_of(target.by_model).items() if model} == {
        "H100": {"a": 2.0, "b": 6.0}, "A10": {"a": 0.0, "b": 8.0},
    }  # fmt: skip


def _due_of(by_model: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    return {model: {due.queue: due.gpus for due in of_model} for model, of_model in by_model.items()}


def test_a_surplus_of_one_model_is_no_right_to_another() -> None:
    """b holds no more than its quota of H100, and eight A10. A pod of a that needs H100 beyond its quota waits, and is
    told why, though b is far above the sum of its quotas."""
    held = [fake_pod(f"b-t{i}", "b", node="t") for i in range(2)]
    held += [fake_pod("a-h", "a", node="h"), fake_pod("b-h", "b", node="h")]
    cluster = cluster_with(*two_models(), *held, waiting_for("a1", "a", 2, H100))
    report = one_cycle(cluster, by_model_policy())
    (target,) = report.targets
    assert target.preemption is not None
    (verdict,) = target.preemption.verdicts
    assert (verdict.outcome, verdict.victims) == ("denied", ())
    assert "H100 GPUs" in verdict.reason
    (account,) = explain_queue(by_model_policy(), report, "a")
    assert any("on H100 GPUs" in sentence for sentence in account.sentences)
    assert [(each.gpus, each.queue.deserved, each.entitlement.allocated) for each in account.models] == [
        ("H100 GPUs", 4.0, 4.0), ("A10 GPUs", 4.0, 0.0), ("GPUs of other models", 0.0, 0.0),
    ]  # fmt: skip


def test_a_pod_without_a_selector_may_start_on_either_model() -> None:
    """All H100 are held within quotas, and b borrows A10: the victim runs on A10."""
    held = [fake_pod(f"{q}-h", q, node="h") for q in "ab"] + [fake_pod(f"b-t{i}", "b", node="t") for i in range(2)]
    cluster = cluster_with(*two_models(), *held, waiting_for("a1", "a", 4, None))
    (target,) = one_cycle(cluster, by_model_policy()).targets
    assert target.preemption is not None
    (verdict,) = target.preemption.verdicts
    assert [pod.node for victim in verdict.victims for pod in victim.pods] == ["t"]


def test_a_limit_of_a_model_binds_although_the_whole_has_none() -> None:
    queues = [{"name": "a", "refs": ["fake-pods:a"], "gpu_models": {"H100": {"deserved": 2, "limit": 2}}}]
    policy = policy_of(queues, preemption={"mode": "enforce", "min_runtime": 0, "wait": 0})
    cluster = cluster_with(*two_models(), fake_pod("a0", node="h", gpus=2), waiting_for("a1", "a", 2, H100))
    (target,) = one_cycle(cluster, policy).targets
    assert target.preemption is not None
    assert [verdict.outcome for verdict in target.preemption.verdicts] == ["denied"]


def test_usage_and_budgets_of_one_model_leave_the_other_as_it_is() -> None:
    """Both ask for all GPUs. a has used all H100 and nothing else; its budget of H100 is used up."""
    free = {"H100": {"weight": 1}, "A10": {"weight": 1}}
    queues = [{"name": name, "refs": [f"fake-pods:{name}"], "gpu_models": free} for name in "ab"]
    budget = {"name": "m", "queue": "a", "limit": 100, "exhausted": "no-over-quota", "gpu_models": {"H100": 10}}
    pods = [waiting_for(f"{q}{model[-1]}", q, 8, model) for q in "ab" for model in (H100, A10)]
    used = ByModel(H100={"a": 1.0})
    even, past = (_due(one_cycle(cluster_with(*two_models(), *pods), policy_of(queues, k=k), used)) for k in (0.0, 3.0))
    assert even["H100"] == even["A10"] == past["A10"] == {"a": 4.0, "b": 4.0}
    assert past["H100"] == {"a": 0.0, "b": 8.0}
    state = {"month": "2026-10", "unit": "GPU-hours", "queue": "a", "team": None, "ratio": None, "threshold": None}
    state |= {"forecast": None, "forecast_low": None, "forecast_high": None, "as_of_ms": 0}
    used.states = [
        BudgetState(name="m", limit=100, spent=20, **state),
        BudgetState(name="m: H100", gpu_model="H100", limit=10, spent=20, **state),
    ]
    spent = _due(one_cycle(cluster_with(*two_models(), *pods), policy_of(queues, k=0.0, budgets=[budget]), used))
    assert (spent["H100"], spent["A10"]) == ({"a": 0.0, "b": 8.0}, {"a": 4.0, "b": 4.0})


def _gang(name: str, queue: str, *on: tuple[str, int], model: str | None = None, **group: Any) -> list[Object]:
    """A workload with a pod of so many GPUs on each of these nodes ("": it waits)."""
    notes, labels = {"fake.gputally.dev/pod-group": name}, {"fake.gputally.dev/queue": queue}
    pods = [
        fake_pod(f"{name}{i}", queue, node=node, gpus=gpus, annotations=notes, labels=labels)
        for i, (node, gpus) in enumerate(on)
    ]
    for pod in pods:
        pod["spec"] |= {"schedulerName": "fake-scheduler"} | ({"nodeSelector": {LABEL: model}} if model else {})
    return [pod_group(name, queue, **{"least": len(on), **group}), *pods]


def _verdicts(*work: list[Object]) -> dict[str, tuple[str, list[str]]]:
    """Return by claimant the outcome and the workloads that give way."""
    queues = [queue_object(name) for name in "ab"]
    cluster = cluster_with(*two_models(), *queues, *(obj for each in work for obj in each))
    (target,) = one_cycle(cluster, by_model_policy("fake")).targets
    assert target.preemption is not None
    return {
        verdict.claimant: (verdict.outcome, [victim.gang.name for victim in verdict.victims])
        for verdict in target.preemption.verdicts
    }


def test_a_gang_on_two_models_gives_way_for_either_of_them() -> None:
    """b borrows four GPUs of each model with one gang, whose end makes room for a's claims of both."""
    kept = _gang("kept", "b", ("h", 4), ("t", 4), preemptible=False)
    both = _gang("both", "b", ("h", 4), ("t", 4))
    found = _verdicts(kept, both, _gang("big", "a", ("", 2), model=H100), _gang("small", "a", ("", 2), model=A10))
    assert sorted(outcome for outcome, _ in found.values()) == ["preempts", "room"]
    assert [victims for _, victims in found.values() if victims] == [["both"]]


def test_a_gang_on_two_models_stays_where_its_end_costs_a_quota_of_the_other() -> None:
    """Without its gang on both models b would hold less A10 than its quota: the other one gives way, though it loses
    more. Where there is no other, the claim waits."""
    kept, both = _gang("kept", "b", ("h", 4), preemptible=False), _gang("both", "b", ("h", 1), ("t", 1))
    claim = _gang("big", "a", ("", 1), model=H100)
    assert _verdicts(kept, both, _gang("other", "b", ("h", 3)), claim) == {"PodGroup/ns/big": ("preempts", ["other"])}
    assert _verdicts(kept, both, _gang("mine", "a", ("h", 3)), claim) == {"PodGroup/ns/big": ("denied", [])}


def test_what_a_gang_frees_of_another_model_is_no_room_on_the_needed_one() -> None:
    """Four GPUs of the needed model are not eight, however many of another model end with them."""
    held = [_gang("both", "b", ("h", 4), ("t", 8)), _gang("mine", "a", ("h", 4))]
    assert _verdicts(*held, _gang("big", "a", ("", 8), model=H100))["PodGroup/ns/big"][0] == "denied"


@st.composite
def gangs_on_two_models(draw: st.DrawFn) -> list[list[Object]]:
    """Workloads of both queues on both nodes, as far as they have room, and two that wait."""
    free = {"h": 8, "t": 8}
    work: list[list[Object]] = []
    for number, queue in enumerate(draw(st.lists(st.sampled_from("abb"), min_size=2, max_size=6))):
        on = []
        for node in draw(st.sampled_from(("h", "t", "ht", "hht"))):
            gpus = draw(st.integers(1, 4))
            if gpus <= free[node]:
                free[node] -= gpus
                on.append((node, gpus))
        if on:
            least = draw(st.integers(1, len(on)))
            work.append(_gang(f"{queue}-{number}", queue, *on, least=least))
    waiting = draw(st.lists(st.tuples(st.sampled_from((H100, A10)), st.integers(1, 6)), min_size=1, max_size=2))
    return [*work, *(_gang(f"w{i}", "a", ("", gpus), model=model) for i, (model, gpus) in enumerate(waiting))]


@given(gangs_on_two_models())
@settings(max_examples=examples(30, 500), deadline=None)
def test_no_queue_falls_below_its_quota_of_any_model(work: list[list[Object]]) -> None:
    """What gives way leaves its queue its quota of each model that it ends on, and makes the room that was needed."""
    cluster = cluster_with(
        *two_models(), *(queue_object(name) for name in "ab"), *(obj for each in work for obj in each)
    )
    (target,) = one_cycle(cluster, by_model_policy("fake")).targets
    assert target.preemption is not None
    ended = [pod for verdict in target.preemption.verdicts for victim in verdict.victims for pod in victim.pods]
    assert len({pod.uid for pod in ended}) == len(ended), "a pod ends once"
    for node in "ht":
        lost = fsum(pod.gpus for pod in ended if pod.node == node)
        held = fsum(pod.gpus for gang in target.gangs if gang.queue == "b" for pod in gang.pods if pod.node == node)
        assert not lost or held - lost >= 4, f"{held} of node {node} less {lost}"


def test_a_scheduler_with_one_quantity_of_gpus_is_named() -> None:
    cluster = MemoryCluster(KINDS, [*two_models(), *(queue_object(name) for name in "ab")])
    (target,) = one_cycle(cluster, by_model_policy("fake")).targets
    found = condition(target, "ByModel")
    assert (found.status, found.reason) == ("False", "OneQuantity")
    (plain,) = one_cycle(cluster, policy_of()).targets
    assert not plain.models
    assert "ByModel" not in {each.type for each in plain.conditions}


def test_a_recorded_cycle_with_models_comes_to_the_same_bit_for_bit() -> None:
    used = ByModel(H100={"a": 0.7, "b": 0.1}, A10={"b": 0.4})
    policy = by_model_policy("fake", k=1.0)
    groups = [queue_object(name, requested="16", allocated="4") for name in "ab"]
    cluster = MemoryCluster(KINDS, [*two_models(), *groups, fake_pod("b0", "b", node="h")])
    one_cycle(cluster, policy, used)
    assert _differences(used, policy) == ((), "")
    assert {"H100", "A10", OTHERS} == used.decisions[0].inputs["due_by_model"].keys()


@pytest.mark.parametrize(
    ("queue", "line"),
    [
        ("deserved: 20, gpu_models: {H100: {deserved: 4}, A10: {deserved: 20}}", "queues.0.deserved"),
        ("limit: 3, gpu_models: {H100: {limit: 4}}", "queues.0.limit"),
        ("gpu_models: {H100: {}, NVIDIA H100: {}}", "queues.0.gpu_models"),
        ("gpu_models: {H100: {deserved: -0.5}}", "queues.0.gpu_models.H100.deserved"),
        ("gpu_models: {'*': {}}", "queues.0.gpu_models"),
    ],
)
def test_figures_that_contradict_each_other_are_refused_with_their_place(queue: str, line: str, file: Make) -> None:
    path: Path = file(f"queues:\n  - {{name: a, {queue}}}\n")
    with pytest.raises(FileFault) as fault:
        load(path)
    assert f"input:2: {line}" in str(fault.value)


def test_a_quota_of_no_stated_model_beside_quotas_by_model_is_refused(file: Make) -> None:
    path: Path = file("queues:\n  - {name: a, gpu_models: {H100: {deserved: 4}}}\n  - {name: b, deserved: 2}\n")
    with pytest.raises(FileFault) as fault:
        load(path)
    assert "input:3: queues.1.gpu_models" in str(fault.value)


def test_a_deserved_quota_that_is_left_out_is_the_sum_and_plain_policies_keep_their_version(file: Make) -> None:
    path: Path = file("queues:\n  - {name: a, gpu_models: {H100: {deserved: 4}, A10: {deserved: 20}}}\n")
    policy = load(path)[0]
    assert policy.queues[0].deserved == 24
    assert "gpu_models" not in policy_of().model_dump_json()


MODELS = ("H100", "A10", OTHERS)
NAMES = ("a", "b", "c")


@st.composite
def divisions(draw: st.DrawFn) -> WeightInputs:
    """Inputs with a part for each model, whose figures are drawn one by one."""
    figure = st.integers(0, 12).map(float)
    quota = st.fixed_dictionaries({"deserved": figure, "weight": st.sampled_from((0.0, 1.0, 2.0))})
    queues = [
        {"name": name, "refs": [f"fake:{name}"], "gpu_models": {m: draw(quota) for m in MODELS[:2]}} for name in NAMES
    ]
    policy = policy_of(queues, k=draw(st.sampled_from((0.0, 2.0))))

    def standings() -> dict[str, Standing]:
        return {name: Standing(held + draw(figure), held) for name in NAMES for held in (draw(figure),)}

    def window() -> UsageWindow:
        used = {name: draw(st.integers(0, 4 * HOUR_US)) for name in NAMES}
        return usage_window(used, 16 * HOUR_US, end_ms=NOW_MS)

    parts = tuple(ModelPart(model, window(), standings(), draw(figure)) for model in MODELS)
    gpus = fsum(part.gpus for part in parts) or 1.0
    return WeightInputs(policy, window(), standings(), gpus, NOW_MS, models=parts)


@given(divisions(), st.sampled_from(MODELS))
@settings(max_examples=examples(40, 1000), deadline=None)
def test_models_add_up_and_never_mix(inputs: WeightInputs, other: str) -> None:
    result = calculate_weights(inputs)
    for each in result.entitlements:
        of_models = [due.gpus for part in result.by_model.values() for due in part if due.queue == each.queue]
        assert each.gpus == fsum(of_models)
    for part in inputs.models:
        assert fsum(due.gpus for due in result.by_model[part.model]) <= _most(part, inputs.policy) + 1e-6
    changed = tuple(
        ModelPart(part.model, part.window, {}, 99.0) if part.model == other else part for part in inputs.models
    )
    again: WeightResult = calculate_weights(WeightInputs(
        inputs.policy, inputs.window, inputs.standings, inputs.gpus, NOW_MS, models=changed,
    ))  # fmt: skip
    for model in MODELS:
        if model != other:
            assert again.by_model[model] == result.by_model[model], "another model's state changes nothing"
    assert again.weights == result.weights


def _most(part: ModelPart, policy: Policy) -> float:
    """Return the GPUs that the queues can be due together: all of them, or their quotas if these are more."""
    quotas = [queue.gpu_models[part.model].deserved for queue in policy.queues if part.model in queue.gpu_models]
    return max(part.gpus, fsum(quotas)) if part.gpus > 0 else 0.0


@given(
    st.lists(st.sampled_from(["H100", "H100 PCIe", "A10", "A100 80GB"]), min_size=1, max_size=4, unique=True),
    st.dictionaries(st.sampled_from(["H100", "A100", "H100 PCIe 80GB", "*"]), st.sampled_from([0, 1, 3])),
    st.sampled_from([H100, "NVIDIA H100 PCIe", "NVIDIA-A100-SXM4-80GB", "Tesla T4", A10]),
)
def test_the_windows_of_all_parts_count_each_model_once(
    models: list[str], weights: dict[str, int], device: str
) -> None:
    spec = WindowSpec.model_validate({"gpu_weights": weights})

    def weight(of: WindowSpec) -> int:
        known = [name for name in of.gpu_weights if name != "*"]
        found = most_precise(device, known)
        return int(of.gpu_weights.get(found if found is not None else "*", 1))

    assert sum(weight(window_of_part(spec, models, part)) for part in (*models, OTHERS)) == weight(spec)
