"""What is done to a victim, and what comes of every answer the API server is known to give."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from agent.clock import VirtualClock
from fairshare.adapters.kueue import WORKLOADS
from fairshare.adapters.volcano import JOB
from fairshare.cluster.answers import error_of
from fairshare.errors import NotFound
from fairshare.kube.disruption import BUDGET
from fairshare.kube.kinds import NODE, POD, Kind
from fairshare.kube.memory import MemoryCluster
from fairshare.kube.pods import CHECKPOINT, read_pod
from fairshare.kube.ports import CONFIG_MAP, Cluster
from fairshare.loop import Controller
from fairshare.metrics import Metrics
from fairshare.model import Gang, Pod
from fairshare.preempting import intents
from fairshare.preempting.effectors import OPT_OUT, Effect, Veto, Vetting, act
from fairshare.preempting.intents import COMMAND, MOST_ATTEMPTS, PREEMPTION, REASON, REISSUE_MS
from fairshare.preempting.preempter import replay
from fairshare.preempting.preemptions import FORGOTTEN_MS
from fairshare.preempting.rulings import Victim
from fairshare.status import StatusObject
from tests.fairshare.conftest import Accountant
from tests.fairshare.preempting import NOW_MS
from tests.shelf import shared

Make = Callable[..., Any]
WORKLOAD = WORKLOADS[0]
ANSWERS = {
    "no_pdb": "stopped",
    "pdb_unobserved": "blocked",
    "pdb_zero": "blocked",
    "pdb_one": "blocked",
    "two_pdbs": "refused",
    "uid_precondition_mismatch": "another",
    "not_found": "gone",
    "name_mismatch": "refused",
    "pending_pod_bypasses_pdb": "stopped",
}


class Answering(MemoryCluster):
    """An API server whose eviction answers what a real one was recorded to answer."""

    answer: dict[str, Any] | None = None

    def evict(self, name: str, namespace: str, uid: str, *, grace_s: int | None = None, dry_run: bool = False) -> None:
        if self.answer is not None and self.answer["status"] >= 300:
            path = f"/api/v1/namespaces/{namespace}/pods/{name}/eviction"
            after = self.answer["retry_after"]
            headers = {"Retry-After": after} if after else {}
            raise error_of("POST", path, self.answer["status"], json.dumps(self.answer["body"]).encode(), headers)
        super().evict(name, namespace, uid, grace_s=grace_s, dry_run=dry_run)


def _pod(name: str, queue: str = "a", *, node: str = "n0", gpus: int = 4, **metadata: Any) -> dict[str, Any]:
    spec: dict[str, Any] = {"containers": [{"name": "c", "resources": {"limits": {"nvidia.com/gpu": str(gpus)}}}]}
    if node:
        spec["nodeName"] = node
    labels = {"gputally.dev/queue": queue, **metadata.pop("labels", {})}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": "ns", "uid": f"uid-{name}", "labels": labels,
                     "creationTimestamp": "2026-09-30T00:00:00Z", **metadata},
        "spec": spec,
        "status": {"phase": "Running", "startTime": "2026-09-30T12:00:00Z"} if node else {"phase": "Pending"},
    }  # fmt: skip


def _budget(name: str, allowed: int, labels: dict[str, str]) -> dict[str, Any]:
    return {
        "apiVersion": BUDGET.api_version,
        "kind": BUDGET.kind,
        "metadata": {"name": name, "namespace": "ns"},
        "spec": {"selector": {"matchLabels": labels}},
        "status": {"disruptionsAllowed": allowed},
    }


def _cluster(*objects: dict[str, Any]) -> Answering:
    return Answering([NODE, POD, CONFIG_MAP, BUDGET, *WORKLOADS, JOB, COMMAND], objects)


def _kept(vetting: Vetting, victim: Victim) -> str | None:
    """Why one stays that is not what was decided about."""
    veto = vetting.refusal(victim)
    assert veto is None or veto.kind == "changed"
    return veto.reason if veto is not None else None


def _victim(*names: str, kind: Kind = POD, uid: str = "uid-x") -> Victim:
    pods = tuple(Pod(f"uid-{name}", "ns", name, 4.0, "n0", held=True) for name in names)
    gang = Gang("a", kind, "ns", "x", uid, 4.0 * len(pods), 4.0 * len(pods), 4.0, pods=pods)
    return Victim(gang, pods, gang.allocated, 1.0, True, "within quota", "a", "because")


@pytest.mark.parametrize(("case", "result"), sorted(ANSWERS.items()))
def test_every_recorded_answer_of_an_eviction(case: str, result: str) -> None:
    cluster = _cluster(_pod("p"))
    cluster.answer = json.loads(shared("vectors/eviction_responses.json").read_text())[case]
    effect = act(cluster, _victim("p"), "d1", NOW_MS)
    assert effect.result == result
    assert (effect.detail == "") == (result == "stopped")


def test_whoever_goes_carries_the_reason() -> None:
    cluster = _cluster(_pod("p"))
    cluster.answer = json.loads(shared("vectors/eviction_responses.json").read_text())["pdb_zero"]
    act(cluster, _victim("p"), "d1", NOW_MS)
    noted = cluster.get(POD, "p", "ns")["metadata"]["annotations"]
    assert (noted[REASON], noted[PREEMPTION]) == ("because", "d1")


def test_another_pod_of_the_same_name_is_never_touched() -> None:
    cluster = _cluster(_pod("p", uid="uid-new"))
    assert _kept(Vetting(cluster), _victim("p")) == "its pod p is another one by now"
    assert act(cluster, _victim("p"), "d1", NOW_MS).result == "another"
    assert "annotations" not in cluster.get(POD, "p", "ns")["metadata"]


def test_a_budget_that_allows_one_keeps_a_gang_of_two() -> None:
    """Each pod alone would be allowed: the API server's own dry run sees only one at a time."""
    cluster = _cluster(*(_pod(name, labels={"app": "x"}) for name in "pqr"), _budget("b", 1, {"app": "x"}))
    assert Vetting(cluster).refusal(_victim("p")) is None
    held = "its pod q is held by the disruption budget b, which allows 1 at a time"
    assert Vetting(cluster).refusal(_victim("p", "q")) == Veto("budget", held)
    vetting = Vetting(cluster)
    assert vetting.refusal(_victim("p")) is None
    assert vetting.refusal(_victim("q")) == Veto("budget", held)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"deletionTimestamp": "2026-10-01T00:00:00Z"}, "its pod p is stopping already"),
        ({"annotations": {OPT_OUT: "never"}}, "its pod p was opted out of preemption by its owner"),
    ],
)
def test_looking_again_cancels(change: dict[str, Any], reason: str) -> None:
    assert _kept(Vetting(_cluster(_pod("p", **change))), _victim("p")) == reason
    assert _kept(Vetting(_cluster()), _victim("p")) == "its pod p is gone already"


def test_a_gang_of_which_some_had_ended_goes_on_going() -> None:
    cluster = _cluster(_pod("q"))
    assert act(cluster, _victim("p", "q"), "d1", NOW_MS) == Effect("stopped")
    with pytest.raises(NotFound):
        cluster.get(POD, "q", "ns")


_TEMPLATE = {"spec": {"containers": [{"name": "c", "image": "x"}], "restartPolicy": "Never"}}


def _workload(reserved: bool = True, **spec: Any) -> dict[str, Any]:
    return {
        "apiVersion": WORKLOAD.api_version,
        "kind": "Workload",
        "metadata": {"name": "x", "namespace": "ns", "uid": "uid-x"},
        "spec": {"queueName": "q", "podSets": [{"name": "main", "count": 1, "template": _TEMPLATE}], **spec},
        "status": {"conditions": [_reserved("True" if reserved else "False")]},
    }


def _reserved(status: str) -> dict[str, str]:
    at = "2026-10-01T00:00:00Z"
    return {"type": "QuotaReserved", "status": status, "reason": "R", "message": "m", "lastTransitionTime": at}


def _uid(cluster: Cluster, kind: Kind) -> str:
    """Of the object x: a real API server gives it."""
    return str(cluster.get(kind, "x", "ns")["metadata"]["uid"])


def test_a_workload_is_switched_off_and_on_again_after_its_quota_is_back(either_of: Make, others_of: Make) -> None:
    cluster = either_of([_workload()])
    victim = _victim(kind=WORKLOAD, uid=_uid(cluster, WORKLOAD))
    assert Vetting(cluster).refusal(victim) is None
    assert act(cluster, victim, "d1", NOW_MS).result == "stopped"
    off = cluster.get(WORKLOAD, "x", "ns")
    assert off["spec"]["active"] is False
    assert intents.read(off) == intents.Intent("d1", NOW_MS)
    assert _kept(Vetting(cluster), victim) == "it is switched off already"
    assert list(intents.resume(cluster, WORKLOAD, [off], (), NOW_MS)) == []
    gone = {**off, "status": {"conditions": [_reserved("False")]}}
    others_of(cluster).put(gone, field_manager="kueue", subresource="status")
    (done,) = intents.resume(cluster, WORKLOAD, cluster.list(WORKLOAD), (), NOW_MS)
    on = cluster.get(WORKLOAD, "x", "ns")
    assert done.action == "switched on again"
    assert on["spec"]["active"] is True
    assert PREEMPTION not in on["metadata"]["annotations"]
    assert on["metadata"]["annotations"][REASON] == "because"


def test_a_workload_that_somebody_else_switched_off_stays_off(either_of: Make) -> None:
    cluster = either_of([_workload(reserved=False, active=False)])
    assert list(intents.resume(cluster, WORKLOAD, cluster.list(WORKLOAD), (), NOW_MS)) == []


def test_a_lost_command_is_issued_again_a_few_times(either_of: Make, others_of: Make) -> None:
    job = {
        "apiVersion": JOB.api_version, "kind": "Job",
        "metadata": {"name": "x", "namespace": "ns", "uid": "uid-x"},
        "spec": {}, "status": {"state": {"phase": "Running", "lastTransitionTime": "2026-09-30T00:00:00Z"}},
    }  # fmt: skip
    cluster = either_of([job])
    victim = _victim(kind=JOB, uid=_uid(cluster, JOB))
    assert act(cluster, victim, "d1", NOW_MS).result == "stopped"
    (order,) = cluster.list(COMMAND)
    assert (order["action"], order["target"]["uid"]) == ("RestartJob", _uid(cluster, JOB))

    def go_on(after_ms: int) -> list[str]:
        found = intents.resume(cluster, JOB, cluster.list(JOB), cluster.list(COMMAND), NOW_MS + after_ms)
        return [each.action for each in found]

    assert go_on(10 * REISSUE_MS) == []  # the Command is still there
    seen = []
    for n in range(1, MOST_ATTEMPTS + 2):
        for each in cluster.list(COMMAND):
            others_of(cluster).delete(COMMAND, each["metadata"]["name"], "ns")
        assert go_on(REISSUE_MS // 2) == []
        seen += go_on(n * REISSUE_MS)
    assert seen == ["asked again"] * (MOST_ATTEMPTS - 1) + ["given up"]


def test_a_job_that_restarted_is_done(either_of: Make) -> None:
    job = {
        "apiVersion": JOB.api_version, "kind": "Job",
        "metadata": {"name": "x", "namespace": "ns", "uid": "uid-x",
                     "annotations": {PREEMPTION: intents.Intent("d1", NOW_MS).text()}},
        "spec": {}, "status": {"state": {"phase": "Restarting"}},
    }  # fmt: skip
    cluster = either_of([job])
    assert [each.action for each in intents.resume(cluster, JOB, cluster.list(JOB), (), NOW_MS)] == ["restarted"]


def _node(name: str, gpus: int) -> dict[str, Any]:
    return {
        "apiVersion": "v1", "kind": "Node", "metadata": {"name": name},
        "status": {"allocatable": {"nvidia.com/gpu": str(gpus)}, "conditions": [{"type": "Ready", "status": "True"}]},
    }  # fmt: skip


@pytest.fixture
def controller(accountant: Accountant, clock: VirtualClock, policy_of: Make) -> Make:
    """A controller of pods by label: a holds 8 of n0's GPUs with a quota of 4, b with a quota of 4 waits."""

    def make(cluster: MemoryCluster, **rules: Any) -> Controller:
        queues = [
            {"name": "a", "deserved": 4, "refs": ["policy:a"]},
            {"name": "b", "deserved": 4, "refs": ["policy:b"]},
        ]
        wanted = policy_of(queues, preemption={"mode": "enforce", "min_runtime": 0, **rules})
        return Controller(
            wanted, accountant, cluster, clock, status_object=StatusObject(),
            pods=lambda: tuple(pod for obj in cluster.list(POD) if (pod := read_pod(obj)) is not None),
        )  # fmt: skip

    return make


def _borrowing(*more: dict[str, Any]) -> Answering:
    waits = _pod("b0", "b", node="")
    return _cluster(_node("n0", 8), _pod("a0"), _pod("a1"), waits, *more)


def test_a_cycle_reclaims_records_and_remembers(controller: Make, accountant: Accountant, clock: VirtualClock) -> None:
    cluster = _borrowing()
    loop = controller(cluster)
    report = loop.cycle()
    assert sorted(pod["metadata"]["name"] for pod in cluster.list(POD)) == ["a1", "b0"]
    (target,) = report.targets
    assert [stop.effect.result for stop in target.preemption.stops] == ["stopped"]
    assert {event.reason for event in cluster.events if event.kind == POD} == {"Preempted"}
    made = {each.subject: each for each in accountant.decisions if each.kind == "preemption"}
    assert set(made) == {"*", "Pod/ns/b0", "Pod/ns/a0"}
    assert made["Pod/ns/a0"].inputs["result"] == "stopped"
    assert replay(loop.policy, made["*"]) == target.preemption.verdicts
    clock.advance(60_000)
    assert loop.cycle().targets[0].preemption.verdicts[0].outcome == "room"
    again = controller(cluster)
    again.cycle()
    assert len(json.loads(cluster.get(CONFIG_MAP, "gputally-fairshare", "gputally-system")["data"]["preempted"])) == 1


def test_a_dry_run_says_the_same_once_and_stops_nobody(controller: Make, accountant: Accountant) -> None:
    cluster = _borrowing()
    loop = controller(cluster, mode="dry-run")
    loop.cycle()
    loop.cycle()
    assert len(cluster.list(POD)) == 3
    made = [each for each in accountant.decisions if each.kind == "preemption"]
    assert [(each.subject, each.mode) for each in made] == [
        ("*", "dry-run"), ("Pod/ns/b0", "dry-run"), ("Pod/ns/a0", "dry-run"),
    ]  # fmt: skip
    assert {event.reason for event in cluster.events if event.kind == POD} == {"WouldBePreempted"}


def test_off_decides_nothing(controller: Make) -> None:
    assert controller(_borrowing(), targets={"kube_scheduler": "off"}).cycle().targets[0].preemption is None


def test_old_usage_preempts_nobody(controller: Make, accountant: Accountant) -> None:
    accountant.coverage = 0.5
    cluster = _borrowing()
    controller(cluster).cycle()
    assert len(cluster.list(POD)) == 3


def test_whom_the_cluster_keeps_is_replaced_by_the_next(controller: Make) -> None:
    cluster = _borrowing(_budget("b", 0, {"app": "kept"}))
    kept = cluster.get(POD, "a0", "ns")
    cluster.put(
        {**kept, "metadata": {**kept["metadata"], "labels": {**kept["metadata"]["labels"], "app": "kept"}}},
        field_manager="tests",
    )
    (target,) = controller(cluster).cycle().targets
    assert [stop.victim.gang.name for stop in target.preemption.stops] == ["a1"]
    assert "disruption budget b" in next(s.reason for s in target.preemption.verdicts[0].spared if s.key == "Pod/ns/a0")


def _condition(cluster: MemoryCluster) -> tuple[str, str, str]:
    standing = cluster.get(CONFIG_MAP, "gputally-fairshare", "gputally-system")["data"]["kube-scheduler.Preemption"]
    found = json.loads(standing)
    return found["status"], found["reason"], found["message"]


@pytest.mark.parametrize(
    ("answer", "rules", "reason", "words"),
    [
        ("403", {}, "Refused", "pods/eviction is forbidden"),
        ("webhook", {}, "Refused", 'admission webhook "policy.example" denied the request'),
        ("pdb_zero", {}, "HeldByBudgets", "would violate the pod's disruption budget"),
        (None, {"per_cluster": 0}, "RateLimitReached", "0 workloads of the cluster were stopped within the hour"),
        (None, {"per_team": 0}, "RateLimitReached", "0 workloads of team a were stopped within the hour"),
        (None, {"lost_gpu_hours": 1}, "LostWorkLimitReached", "more than the 1 allowed"),
        ("503", {}, "Unavailable", "503"),
    ],
)
def test_what_stands_in_the_way_is_a_condition_an_event_and_a_metric(
    answer: str | None, rules: dict[str, Any], reason: str, words: str, controller: Make, clock: VirtualClock
) -> None:
    """And all of it ends where the cause does."""
    own = {
        "403": {"status": 403, "body": {"message": 'pods "a0" is forbidden: pods/eviction is forbidden'}},
        "webhook": {"status": 403, "body": {"message": 'admission webhook "policy.example" denied the request'}},
        "503": {"status": 503, "body": {"message": "the server is currently unable to handle the request"}},
    }
    cluster = _borrowing()
    recorded = json.loads(shared("vectors/eviction_responses.json").read_text())
    cluster.answer = None if answer is None else {"retry_after": None, **(own.get(answer) or recorded[answer])}
    metrics = Metrics(clock)
    loop = controller(cluster, **rules)
    metrics.observe(loop.cycle())
    status, found, message = _condition(cluster)
    assert (status, found) == ("False", reason)
    assert words in message
    assert [e.reason for e in cluster.events if e.name == "gputally-fairshare" and e.type == "Warning"] == [reason]
    series = f'gputally_fairshare_preemption_blocked{{reason="{reason}",target="kube-scheduler"}}'
    degraded = 'gputally_fairshare_target_degraded{reason="PreemptionFailed",target="kube-scheduler"} 1.0'
    assert (degraded if answer == "503" else series) in metrics.render().decode()
    assert len(cluster.list(POD)) == 3
    cluster.answer = None
    if not rules:
        metrics.observe(loop.cycle())
        assert _condition(cluster)[:2] == ("True", "AsDecided")
        assert series not in metrics.render().decode()
        assert len(cluster.list(POD)) == 2


def test_a_claim_that_finds_somebody_else_is_no_trouble(controller: Make) -> None:
    cluster = _borrowing(_budget("b", 0, {"app": "kept"}))
    kept = cluster.get(POD, "a0", "ns")
    labels = {**kept["metadata"]["labels"], "app": "kept"}
    cluster.put({**kept, "metadata": {**kept["metadata"], "labels": labels}}, field_manager="tests")
    controller(cluster).cycle()
    assert _condition(cluster)[:2] == ("True", "AsDecided")


def test_many_whom_budgets_keep_only_delay_the_one_who_may_go(controller: Make, clock: VirtualClock) -> None:
    """Each looks cheaper than the one who may go, and has a budget of its own."""
    kept = [
        _pod(f"k{i}", gpus=1, labels={"app": f"k{i}"}, annotations={CHECKPOINT: "2026-09-30T23:59:00Z"})
        for i in range(12)
    ]
    budgets = [_budget(f"k{i}", 0, {"app": f"k{i}"}) for i in range(12)]
    goes = _pod("last", gpus=1)
    cluster = _cluster(_node("n0", 13), *kept, *budgets, goes, _pod("b0", "b", node="", gpus=1))
    loop = controller(cluster)
    seen = []
    for _ in range(4):
        (target,) = loop.cycle().targets
        seen.append(target.degraded.get("PreemptionFailed", "decided"))
        clock.advance(60_000)
    assert [text == "decided" for text in seen] == [False, False, True, True]
    assert "12" not in seen[0]
    assert "last" not in {pod["metadata"]["name"] for pod in cluster.list(POD)}
    open_now = {**cluster.get(BUDGET, "k3", "ns"), "status": {"disruptionsAllowed": 1}}
    cluster.put(open_now, field_manager="x", subresource="status")
    cluster.load([_pod("b1", "b", node="", gpus=1)])
    for _ in range(3):
        clock.advance(FORGOTTEN_MS // 2)
        loop.cycle()
    assert "k3" not in {pod["metadata"]["name"] for pod in cluster.list(POD)}
