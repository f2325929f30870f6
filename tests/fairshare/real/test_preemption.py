"""Pods above their quota are preempted for a guaranteed queue on a real control plane: API server, scheduler, and the
controller-manager's disruption budgets, owner references and Jobs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from accountant.wire.policy_models import Policy
from accountant.wire.usage_cost_and_job_models import Accounts
from fairshare.controller.control_loop import Controller
from fairshare.core.gpu_demand import QUEUE_LABEL, SPOT_LABEL, read_pod
from fairshare.core.queues_and_weights import Gang
from fairshare.preemption.eviction import EvictionCheck, stop_victim
from fairshare.preemption.idle_reclaim import WARNING
from fairshare.preemption.preemption_types import Victim
from fairshare.preemption.service_latency_objectives import LatencyUnknown, prometheus_latency
from fairshare.targets.whole_stop import REASON
from gputally.base.clock import SystemClock, VirtualClock
from gputally.kubernetes.api_client import KubernetesCluster
from gputally.kubernetes.objects import BUDGET, GPU, NODE, POD, Object
from tests.deadlines import patience_s, until
from tests.fairshare.conftest import Accountant
from tests.fairshare.observations import pods_of
from tests.fairshare.real_api_server import MERGE
from tests.real.controlplane import ApiServer, controller_manager, scheduler
from tests.real.prometheus import backfill, prometheus

pytestmark = pytest.mark.real
Request = Callable[..., Any]
HOUR_MS = 3_600_000


@pytest.fixture
def space(server: ApiServer, real: KubernetesCluster, ask: Request, tmp_path: Path, name: str) -> Iterator[str]:
    """A namespace and a node of eight GPUs, with the real scheduler and controller-manager."""
    ask("POST", "/api/v1/namespaces", {"metadata": {"name": name}})
    ask("POST", "/api/v1/nodes", {"metadata": {"name": "gpu-0"}})
    amounts = {GPU: "8", "cpu": "64", "memory": "64Gi", "pods": "110"}
    ready = [{"type": "Ready", "status": "True"}]
    status = {"status": {"capacity": amounts, "allocatable": amounts, "conditions": ready}}
    ask("PATCH", "/api/v1/nodes/gpu-0/status", status, content_type=MERGE)
    ask("PATCH", "/api/v1/nodes/gpu-0", {"spec": {"taints": []}}, content_type=MERGE)
    try:
        with scheduler(server, tmp_path), controller_manager(server, tmp_path):
            yield name
            ask("DELETE", f"/apis/batch/v1/namespaces/{name}/jobs?propagationPolicy=Background")
            ask("DELETE", f"/api/v1/namespaces/{name}/pods?gracePeriodSeconds=0")
            until(lambda: not _pods(real, name), "pods stay")
    finally:
        ask("DELETE", "/api/v1/nodes/gpu-0")
        assert real.list(NODE) == []


def _pods(real: KubernetesCluster, space: str, job: str = "") -> list[Object]:
    def belongs(metadata: Any) -> bool:
        return metadata["namespace"] == space and (not job or (metadata.get("labels") or {}).get("job-name") == job)

    return [pod for pod in real.list(POD) if belongs(pod["metadata"])]


def _template(queue: str, gpus: int, **labels: str) -> dict[str, Any]:
    container = {"name": "c", "image": "none", "resources": {"limits": {GPU: str(gpus)}}}
    spec = {"containers": [container], "restartPolicy": "Never", "terminationGracePeriodSeconds": 0}
    return {"metadata": {"labels": {QUEUE_LABEL: queue, **labels}}, "spec": spec}


def _job(ask: Request, space: str, name: str, count: int, template: dict[str, Any]) -> None:
    spec = {"parallelism": count, "completions": count, "template": template}
    ask("POST", f"/apis/batch/v1/namespaces/{space}/jobs", {"metadata": {"name": name}, "spec": spec})


def _run(real: KubernetesCluster, ask: Request, space: str, job: str, count: int) -> list[Object]:
    """Report the job's pods as running once they are bound, as a kubelet would."""

    def all_bound() -> list[Object] | None:
        found = [pod for pod in _pods(real, space, job) if pod["spec"].get("nodeName")]
        return found if len(found) == count else None

    bound = until(all_bound, f"the pods of {job} are not bound")
    for pod in bound:
        at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        ready = [{"type": "Ready", "status": "True", "lastTransitionTime": at}]
        status = {"status": {"phase": "Running", "startTime": at, "conditions": ready}}
        path = f"/api/v1/namespaces/{space}/pods/{pod['metadata']['name']}/status"
        ask("PATCH", path, status, content_type=MERGE)
    return list(bound)


def test_borrowed_pods_give_way(space: str, real: KubernetesCluster, ask: Request, accountant: Accountant) -> None:
    """a has a quota of 4 of 8 GPUs and holds all; b has 4 and gets them. The pod with a disruption budget stays, and so
    does the oldest."""
    _job(ask, space, "kept", 1, _template("a", 4, app="kept", **{SPOT_LABEL: "true"}))
    _job(ask, space, "borrows", 2, _template("a", 2))
    budget = {"metadata": {"name": "kept"}, "spec": {"minAvailable": 1, "selector": {"matchLabels": {"app": "kept"}}}}
    ask("POST", f"/apis/policy/v1/namespaces/{space}/poddisruptionbudgets", budget)
    (kept,) = _run(real, ask, space, "kept", 1)
    borrowed = {pod["metadata"]["uid"] for pod in _run(real, ask, space, "borrows", 2)}
    until(
        lambda: (real.get(BUDGET, "kept", space).get("status") or {}).get("currentHealthy") == 1,
        "the budget sees no pod",
    )
    claimant = {"metadata": {"name": "b0", **_template("b", 4)["metadata"]}, "spec": _template("b", 4)["spec"]}
    ask("POST", f"/api/v1/namespaces/{space}/pods", claimant)
    started = time.monotonic()
    queues = [{"name": name, "deserved": 4, "refs": [f"policy:{name}"]} for name in "ab"]
    rules = {"mode": "enforce", "wait": 0, "min_runtime": 0}
    policy = Policy.model_validate({"queues": queues, "preemption": rules})
    controller = Controller(policy, accountant, real, SystemClock(), pods=lambda: pods_of(real))
    (target,) = controller.cycle().targets
    assert {stop.victim.gang.name for stop in target.preemption.stops} == {"borrows"}
    assert {stop.effect.result for stop in target.preemption.stops} == {"stopped"}
    (verdict,) = target.preemption.verdicts
    spared = {each.key: each.reason for each in verdict.spared}
    assert "is protected by the disruption budget kept, which allows 0 disruptions now" in spared[f"Job/{space}/kept"]
    until(lambda: real.get(POD, "b0", space)["spec"].get("nodeName"), "b0 is not bound")
    assert time.monotonic() - started < patience_s(60)

    # The Job makes its pods anew, as it owns them, and they wait: their queue has its quota.
    def remade() -> list[Object] | None:
        found = [pod for pod in _pods(real, space, "borrows") if pod["metadata"]["uid"] not in borrowed]
        return found if len(found) == 2 else None

    again = until(remade, "the Job makes no pods")
    assert {owner["kind"] for pod in again for owner in pod["metadata"]["ownerReferences"]} == {"Job"}
    assert real.get(POD, kept["metadata"]["name"], space)["metadata"]["uid"] == kept["metadata"]["uid"]
    (target,) = controller.cycle().targets
    assert target.preemption.stops == ()
    told = ask("GET", f"/apis/events.k8s.io/v1/namespaces/{space}/events")["items"]
    assert len([event for event in told if event["reason"] == "Preempted"]) == 2
    made = [each for each in accountant.decisions if each.kind == "preemption" and each.inputs.get("result")]
    assert {each.inputs["result"] for each in made} == {"stopped"}


def test_the_budget_is_asked_before_and_counts(space: str, real: KubernetesCluster, ask: Request) -> None:
    """Two pods under a budget of one: neither is evicted together; one alone is, with the reason in an event."""
    _job(ask, space, "pair", 2, _template("a", 4, app="pair"))
    budget = {"metadata": {"name": "pair"}, "spec": {"minAvailable": 1, "selector": {"matchLabels": {"app": "pair"}}}}
    ask("POST", f"/apis/policy/v1/namespaces/{space}/poddisruptionbudgets", budget)
    _run(real, ask, space, "pair", 2)
    until(
        lambda: (real.get(BUDGET, "pair", space).get("status") or {}).get("disruptionsAllowed") == 1,
        "the budget allows none",
    )
    pods = tuple(pod for obj in _pods(real, space, "pair") if (pod := read_pod(obj)) is not None)
    gang = Gang("a", POD, space, "pair", "", 8.0, 8.0, 8.0, pods=pods)
    both = Victim(gang, pods, 8.0, 0.0, True, "within quota", "a", "two")
    veto = EvictionCheck(real).refusal(both)
    assert veto.kind == "budget"
    assert "allows 1 disruptions now" in veto.reason
    one = Victim(gang, pods[:1], 4.0, 0.0, False, "within quota", "a", "one")
    assert EvictionCheck(real).refusal(one) is None
    seen = []
    real_evict = real.evict

    def noting(name: str, namespace: str, uid: str, **options: Any) -> None:
        seen.append(real.get(POD, name, namespace)["metadata"]["annotations"][REASON])
        real_evict(name, namespace, uid, **options)

    real.evict = noting  # type: ignore[method-assign]
    assert stop_victim(real, one, "d1", 0).result == "stopped"
    assert seen == ["one"]
    other = Victim(gang, pods[1:], 4.0, 0.0, False, "within quota", "a", "x")
    assert stop_victim(real, other, "d2", 0).result == "blocked"


def test_an_idle_notebook_is_reclaimed(
    space: str, real: KubernetesCluster, ask: Request, accountant: Accountant
) -> None:
    """The hours pass on the controller's clock; warning, eviction, Events and the Job are the cluster's own."""
    for job in ("sleeps", "works", "wakes"):
        _job(ask, space, job, 1, _template("a", 2))
    pods = {job: _run(real, ask, space, job, 1)[0] for job in ("sleeps", "works", "wakes")}
    names = {pod["metadata"]["name"]: job for job, pod in pods.items()}
    clock = VirtualClock(round(time.time() * 1000) + 3 * HOUR_MS)
    busy = {"works": 0.5}

    def used(start_ms: int, end_ms: int) -> dict[tuple[str, str], Accounts]:
        held = 2 * (end_ms - start_ms) * 1000
        parts = {name: round(held * busy.get(job, 0.0)) for name, job in names.items()}
        return {(space, name): Accounts(busy=part, allocated_idle=held - part) for name, part in parts.items()}

    accountant.used = used
    accountant.nodes = {node["metadata"]["name"] for node in real.list(NODE)}
    rule = {"mode": "enforce", "below": 0.05, "sustained": "2h", "grace": "30m"}
    rules = {"mode": "enforce", "min_runtime": 0, "idle": rule}
    queues = [{"name": "a", "deserved": 8, "refs": ["policy:a"]}]
    policy = Policy.model_validate({"queues": queues, "preemption": rules})
    controller = Controller(policy, accountant, real, clock, pods=lambda: pods_of(real))
    controller.cycle()
    warned = {job for job, pod in pods.items() if WARNING in (_of(real, pod)["metadata"].get("annotations") or {})}
    assert warned == {"sleeps", "wakes"}
    busy["wakes"] = 0.3
    clock.advance(15 * 60_000)
    controller.cycle()
    assert WARNING not in (_of(real, pods["wakes"])["metadata"].get("annotations") or {})
    busy["wakes"] = 0.0  # idle again: warned anew
    clock.advance(15 * 60_000)
    (target,) = controller.cycle().targets
    assert [(s.victim.gang.name, s.effect.result) for s in target.preemption.stops] == [("sleeps", "stopped")]
    gone = pods["sleeps"]["metadata"]["uid"]
    until(lambda: [p for p in _pods(real, space, "sleeps") if p["metadata"]["uid"] != gone], "the Job makes no pod")
    assert {_of(real, pods[job])["metadata"]["uid"] for job in ("works", "wakes")} == {
        pods[job]["metadata"]["uid"] for job in ("works", "wakes")
    }
    told = ask("GET", f"/apis/events.k8s.io/v1/namespaces/{space}/events")["items"]
    reasons = {(names[e["regarding"]["name"]], e["reason"]) for e in told if e["regarding"]["name"] in names}
    ours = {each for each in reasons if each[1] in ("Idle", "IdleNoMore", "Preempted")}
    assert ours == {("sleeps", "Idle"), ("sleeps", "Preempted"), ("wakes", "Idle"), ("wakes", "IdleNoMore")}


def _of(real: KubernetesCluster, pod: Object) -> Object:
    return real.get(POD, pod["metadata"]["name"], pod["metadata"]["namespace"])


AT_S = 1_790_812_800
HISTORY = f"""# TYPE latency_seconds gauge
latency_seconds{{pod="a"}} 0.02 {AT_S}
latency_seconds{{pod="b"}} 0.08 {AT_S}
# EOF
"""


def test_a_query_is_one_number(tmp_path: Path) -> None:
    backfill(HISTORY, tmp_path)
    with prometheus(tmp_path) as server:
        latency = prometheus_latency(server.url)
        assert latency("latency_seconds", AT_S * 1000) == 0.08
        assert latency("scalar(min(latency_seconds))", AT_S * 1000) == 0.02
        with pytest.raises(LatencyUnknown, match="no value"):
            latency("absent_metric", AT_S * 1000)
        with pytest.raises(LatencyUnknown, match="parse error"):
            latency("latency_seconds{", AT_S * 1000)
