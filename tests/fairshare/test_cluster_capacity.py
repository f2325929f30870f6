"""GPUs of nodes and of the window: lost GPUs are subtracted once, and nodes without an agent hold the weights."""

from __future__ import annotations

from collections.abc import Mapping
from math import log
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accountant.wire.policy_models import UsageWindow
from fairshare.controller import cycle_report
from fairshare.core.scheduler_queue_objects import instant
from fairshare.explain.plan_tables import lost_words
from fairshare.usage.cluster_capacity import (
    SETTLED_MS,
    LostGpus,
    devices,
    gpus_of_window,
    last_metered_quarter,
    one_unit,
    without_lost_gpus,
)
from gputally.base.clock import VirtualClock
from gputally.base.errors import AccountantUnavailable
from gputally.kubernetes.memory_cluster import MemoryCluster
from gputally.kubernetes.objects import CONFIG_MAP, GPU, NODE, Object, gpus_of_nodes
from gputally.testing.fake_accountant import usage_window
from gputally.testing.fake_scheduler import QUEUE, SETUP, queue_object
from tests.fairshare.builders import node_object, object_of, policy_of
from tests.fairshare.conftest import NOW_MS, Accountant, Make
from tests.plugin_cases import plugin_cases

QUARTER_MS = 900_000


def _node(name: str, allocatable: Mapping[str, object], capacity: Mapping[str, object] | None = None) -> dict[str, Any]:
    status = {"conditions": [{"type": "Ready", "status": "True"}], "allocatable": dict(allocatable)}
    return object_of(NODE, name, status=status if capacity is None else {**status, "capacity": dict(capacity)})


@pytest.fixture
def window(accountant: Any, clock: VirtualClock) -> UsageWindow:
    """Return the accountant's answer to a plain policy."""
    policy = policy_of()
    return accountant.window(policy.window, policy.measure, clock.wall_ms(), policy.min_coverage)


@pytest.mark.parametrize(
    ("listed", "capacity", "lost", "left"),
    [
        (8, 8, 1, 7),
        (7, 8, 1, 7),  # the device plugin has noticed
        (7, 8, 2, 6),
        (8, None, 3, 5),
        (8, 8, 9, 0),
        (0, 8, 2, 0),
        (4, 8, 3, 4),
    ],
)
def test_a_lost_gpu_is_left_out_once(listed: int, capacity: int | None, lost: int, left: int) -> None:
    node = _node("n", {GPU: str(listed), "cpu": "96"}, None if capacity is None else {GPU: str(capacity)})
    serving = without_lost_gpus([node], {"n": lost, "elsewhere": 5})
    assert gpus_of_nodes(serving.nodes) == left
    assert serving.lost == ({"n": listed - left} if left < listed else {})
    assert serving.nodes[0]["status"]["allocatable"]["cpu"] == "96"
    assert node["status"]["allocatable"][GPU] == str(listed)


def test_a_gpu_that_mig_divides_takes_its_instances_along() -> None:
    node = _node("n", {"nvidia.com/mig-1g.10gb": "7", GPU: "1"})
    assert gpus_of_nodes(without_lost_gpus([node], {"n": 1}).nodes) == pytest.approx(1.0)


@given(
    st.lists(st.tuples(st.integers(0, 16), st.integers(0, 16)), max_size=6),
    st.lists(st.integers(0, 20), min_size=6, max_size=6),
)
def test_capacity_only_shrinks_and_by_no_more_than_is_lost(nodes: list[tuple[int, int]], lost: list[int]) -> None:
    listed = [_node(f"n{i}", {GPU: a}, {GPU: max(a, c)}) for i, (a, c) in enumerate(nodes)]
    gone = {f"n{i}": count for i, count in enumerate(lost)}
    serving = without_lost_gpus(listed, gone)
    for before, after in zip(listed, serving.nodes, strict=True):
        had, has, n = gpus_of_nodes([before]), gpus_of_nodes([after]), gone[before["metadata"]["name"]]
        assert 0 <= has <= had
        assert had - has <= n
        assert has <= max(0, before["status"]["capacity"][GPU] - n)
    assert gpus_of_nodes(serving.nodes) + sum(serving.lost.values()) == gpus_of_nodes(listed)
    assert without_lost_gpus(serving.nodes, gone).nodes == serving.nodes  # capacity stands: never twice


def test_only_a_whole_settled_quarter_is_asked_for(accountant: Any, clock: VirtualClock) -> None:
    accountant.age_ms = 7 * 60_000
    policy = policy_of()
    now = clock.wall_ms()
    window = accountant.window(policy.window, policy.measure, now, policy.min_coverage)
    begin, end = last_metered_quarter(window, now) or (0, 0)
    assert (end - begin, end % QUARTER_MS) == (QUARTER_MS, 0)
    assert window.watermark_ms - QUARTER_MS < end <= window.watermark_ms
    assert last_metered_quarter(window.model_copy(update={"watermark_ms": None}), now) is None


def test_what_the_accountant_does_not_say_changes_nothing(window: UsageWindow, clock: VirtualClock) -> None:
    asked: list[tuple[int, int]] = []

    def ask(start_ms: int, end_ms: int) -> Mapping[str, int]:
        asked.append((start_ms, end_ms))
        if len(asked) == 1:
            raise AccountantUnavailable("http://accountant:8080: connection refused")
        return {"n": 2}

    lost, node = LostGpus(ask), _node("n", {GPU: "8"})
    assert lost.serving([node], None, clock.wall_ms()).nodes == (node,)
    assert asked == []
    assert lost.serving([node], window, clock.wall_ms()).nodes == (node,)
    for _ in range(3):
        assert lost.serving([node], window, clock.wall_ms()).capacity(window) == 6
    assert len(asked) == 2  # the same records are not asked about again


@pytest.mark.parametrize(
    ("told", "asked"), [(None, True), (0, False), ("begin", False), ("inside", True), ("end", True), ("later", True)]
)
def test_lost_gpus_are_not_queried_where_the_window_reports_none(
    told: str | int | None, asked: bool, window: UsageWindow, clock: VirtualClock
) -> None:
    begin, end = last_metered_quarter(window, clock.wall_ms()) or (0, 0)
    at_ms = {"begin": begin, "inside": begin + 1, "end": end, "later": end + QUARTER_MS}
    window = window.model_copy(update={"lost_ms": at_ms[told] if isinstance(told, str) else told})
    lost = LostGpus(lambda *_: {"n": 2})
    assert lost.serving([_node("n", {GPU: "8"})], window, clock.wall_ms()).capacity(window) == (6 if asked else 8)
    # Where the window does not reach so far, it tells nothing of that.
    for short in ({"start_ms": begin + 1}, {"end_ms": end - 1}):
        window = window.model_copy(update={"lost_ms": 0, "start_ms": begin, "end_ms": end, **short})
        assert LostGpus(lambda *_: {"n": 2}).serving([_node("n", {GPU: "8"})], window, clock.wall_ms()).lost == {"n": 2}


def test_where_all_is_lost_the_past_does_not_stand_in(window: UsageWindow) -> None:
    assert without_lost_gpus([_node("n", {GPU: "8"})], {"n": 8}).capacity(window) == 0
    assert without_lost_gpus([], {"n": 8}).capacity(window) == 16


DIVIDED = {
    "fake": (QUEUE, queue_object("a")["spec"]),
    **{name: cases.DIVIDED for name, cases in plugin_cases("fairshare", "object_cases").items()},
}


@pytest.mark.parametrize("target", DIVIDED)
def test_every_target_divides_what_works(target: str, either_of: Make, controller_of: Make, accountant: Any) -> None:
    """The cycle's record contains the excluded GPUs, and replaying it gives the same result."""
    kind, spec = DIVIDED[target]
    objects = [object_of(kind, name, spec) for name in "ab"]
    queues = [{"name": name, "refs": [f"{target}:{name}"]} for name in "ab"]
    policy = policy_of(queues, targets={target: {"apply": "enforce"}})
    cluster = either_of([*objects, _node("n1", {GPU: "8"}), _node("n2", {GPU: "8"})])
    accountant.spend(a=0.75, b=0.25)
    accountant.lost = {"n1": 3, "gone": 4}
    cycle = controller_of(policy, cluster).cycle()
    (found,) = cycle.targets
    assert (found.gpus, found.lost) == (13, {"n1": 3})
    assert (cycle.gpus_by_node, cycle.free_by_node) == ({"n1": 5, "n2": 8}, {"n1": 5, "n2": 8})
    record = next(decision for decision in accountant.decisions if decision.subject == cycle_report.EVERYTHING)
    assert (record.inputs["gpus"], record.inputs["lost"]) == (13, {"n1": 3})
    assert cycle_report.replay_weights(policy, record).weights == found.weights


def test_what_was_left_out_is_said_with_its_nodes() -> None:
    assert lost_words({}) == ""
    assert lost_words({"n2": 1, "n1": 2}) == " without 3 lost on n1 (2), n2 (1)"
    assert lost_words({f"n{i}": 1 for i in range(6)}).endswith("n3 (1) and 2 more nodes")


HOUR_US = 3_600_000_000


@pytest.mark.parametrize(
    ("change", "gpus"),
    [
        ({}, 8.0),
        # a half-life of 10 min over an hour
        ({"half_life_s": 600, "capacity": round(8 * 1e6 * 600 / log(2) * (1 - 2**-6))}, 8.0),
        # books of the last quarter of an hour
        ({"since_ms": 2_700_000, "capacity": 2 * HOUR_US}, 8.0),
        ({"since_ms": 2_700_000, "half_life_s": 600, "capacity": round(8 * 1e6 * 600 / log(2) * (1 - 2**-1.5))}, 8.0),
        ({"since_ms": 3_600_000, "capacity": 0}, None),
        ({"unit": "uj"}, None),
        ({"end_ms": 0, "start_ms": 0}, None),
    ],
)
def test_gpus_of_a_window_undo_its_weighing(change: dict[str, Any], gpus: float | None) -> None:
    found = gpus_of_window(usage_window({}, **{"capacity": 8 * HOUR_US, **change}))
    assert found == (gpus if gpus is None else pytest.approx(gpus))


def _sliced(name: str, listed: Mapping[str, object], **replicas: int) -> dict[str, Any]:
    node = _node(name, listed)
    labels = {f"nvidia.com/{resource.replace('_', '-')}.replicas": str(n) for resource, n in replicas.items()}
    return {**node, "metadata": {"name": name, "labels": labels}}


def test_a_lost_gpu_takes_its_replicas_along() -> None:
    """Eight GPUs in four replicas each: a node lists 32."""
    serving = without_lost_gpus([_sliced("n", {GPU: "32"}, gpu=4)], {"n": 1})
    assert gpus_of_nodes(serving.nodes) == 28


@pytest.mark.parametrize(
    ("listed", "labels", "physical"),
    [
        ({GPU: "32", "cpu": "96"}, {"nvidia.com/gpu.replicas": "4"}, 8),
        ({GPU: "32"}, {"nvidia.com/gpu.replicas": "1"}, 32),
        ({GPU: "32"}, {}, 32),
        ({"nvidia.com/mig-1g.10gb.shared": "14"}, {"nvidia.com/mig-1g.10gb.replicas": "2"}, 1),
        ({GPU: "6"}, {"cloud.google.com/gke-max-shared-clients-per-gpu": "3"}, 2),
        ({GPU: "6"}, {"nvidia.com/gpu.replicas": "many"}, 6),
        ({GPU: "14"}, {"nvidia.com/gpu.product": "NVIDIA-A100-SXM4-80GB-MIG-1g.10gb"}, 2),
        ({GPU: "4"}, {"nvidia.com/gpu.product": "NVIDIA-A100-SXM4-80GB-MIG-3g.40gb"}, 2),
        (
            {GPU: "28"},
            {
                "nvidia.com/gpu.product": "NVIDIA-A100-SXM4-80GB-MIG-1g.10gb-SHARED",
                "nvidia.com/gpu.replicas": "2",
            },
            2,
        ),
    ],
)
def test_replicas_are_told_by_the_nodes_labels(listed: dict[str, str], labels: dict[str, str], physical: float) -> None:
    node = _node("n", listed)
    node["metadata"]["labels"] = labels
    assert devices(node) == pytest.approx(physical)


def test_nodes_on_which_a_gpu_does_not_count_alike_are_named() -> None:
    whole, sliced = _node("whole", {GPU: "8"}), _sliced("sliced", {GPU: "32"}, gpu=4)
    assert one_unit([whole, _node("other", {GPU: "4"}), _node("bare", {})]) == ()
    assert one_unit([sliced, _sliced("more", {GPU: "8"}, gpu=4)]) == ()
    (differ,) = one_unit([whole, sliced])
    assert (differ.type, differ.status, differ.reason) == ("OneUnit", "False", "ReplicasDiffer")
    assert differ.message.startswith("a GPU counts as 1 on whole; 4 on sliced: ")
    (left_out,) = one_unit([whole, _sliced("renamed", {"nvidia.com/gpu.shared": "32"}, gpu=4)])
    assert left_out.reason == "NotCounted"
    assert left_out.message.startswith("32 nvidia.com/gpu.shared (renamed) are in no share, quota or demand here")


def _aged_node(name: str, gpus: int = 8, *, age_ms: int = 30 * SETTLED_MS, ready: str = "True") -> Object:
    return node_object(name, gpus, ready=ready, creationTimestamp=instant(NOW_MS - age_ms))


@pytest.fixture
def cycles(accountant: Accountant, clock: VirtualClock, controller_of: Make) -> Make:
    """Return a function that runs this number of cycles over the nodes, a minute apart, and returns each cycle's
    hold."""

    def run(nodes: list[Object], count: int = 1) -> list[str | None]:
        cluster = MemoryCluster([QUEUE, SETUP, NODE, CONFIG_MAP], [*map(queue_object, "abc"), *nodes])
        accountant.spend(a=0.6, b=0.3, c=0.1)
        controller = controller_of(policy_of(), cluster)
        held = []
        for _ in range(count):
            hold = controller.cycle().hold
            held.append(None if hold is None else f"{hold.reason}: {hold.message}")
            clock.advance(60_000)
        return held

    return run


def test_half_of_the_nodes_without_agent_leave_the_weights_alone(cycles: Make, accountant: Accountant) -> None:
    accountant.nodes = {"n0", "n1"}
    held = cycles([_aged_node(f"n{i}") for i in range(4)])
    assert held == ["NodesUnmetered: 16 of 32 GPUs are on nodes that no agent has metered: n2; n3"]


def test_as_many_as_may_go_unmetered_are_no_reason(cycles: Make, accountant: Accountant) -> None:
    accountant.nodes = {f"n{i}" for i in range(49)}
    assert cycles([_aged_node(f"n{i}") for i in range(50)]) == [None]
    assert cycles([_aged_node(f"n{i}") for i in range(51)])[0].startswith("NodesUnmetered: 16 of 408 GPUs")


@pytest.mark.parametrize(
    "other",
    [
        _aged_node("new", age_ms=SETTLED_MS - 1),
        _aged_node("down", ready="False"),
        _aged_node("none", gpus=0),
        _aged_node("sliced", gpus=1),
    ],
)
def test_a_node_that_is_new_or_down_is_not_missed(cycles: Make, accountant: Accountant, other: Object) -> None:
    accountant.nodes = {"n0", "sliced"}
    assert cycles([_aged_node("n0", 32), other]) == [None]


def test_the_accountant_is_not_queried_once_all_nodes_are_known(cycles: Make, accountant: Accountant) -> None:
    accountant.nodes = {"n0", "n1"}
    assert cycles([_aged_node("n0"), _aged_node("n1")], 20) == [None] * 20
    assert accountant.asked_nodes == 1


def test_an_accountant_that_does_not_tell_holds(cycles: Make, accountant: Accountant) -> None:
    """The accountant answers the window, and nothing after it."""
    plain = accountant.metered_nodes
    accountant.metered_nodes = lambda *span: [setattr(accountant, "down", True), plain(*span)][1]
    assert cycles([_aged_node("n0")])[0].startswith("AccountantUnavailable: ")


@pytest.mark.parametrize(
    ("trouble", "nodes", "reason"),
    [
        ({"age_ms": None}, [_aged_node("cpu", 0)], "NothingInService"),
        ({"age_ms": None}, [_aged_node("drained", ready="False")], "NothingInService"),
        ({"capacity": 0}, [_aged_node("cpu", 0)], "NothingInService"),
        ({}, [_aged_node("cpu", 0), _aged_node("drained", ready="False")], "NothingInService"),
        ({"age_ms": None}, [_aged_node("n0")], "NoUsage"),
        ({"age_ms": None}, [], "NoUsage"),
        ({"coverage": 0.5}, [_aged_node("cpu", 0)], "LowCoverage"),
    ],
)
def test_a_cluster_without_gpus_is_told_from_a_ledger_without_any(
    cycles: Make, accountant: Accountant, trouble: dict[str, Any], nodes: list[Object], reason: str
) -> None:
    """A cluster that is scaled to nothing for the weekend raises no alert."""
    vars(accountant).update(trouble)
    assert cycles(nodes)[0].startswith(f"{reason}: ")


def test_nodes_that_never_listed_a_gpu_say_nothing_against_the_window(cycles: Make) -> None:
    assert cycles([_aged_node("cpu", 0)]) == [None]
