"""Tests of the cluster interface that tests.fairshare.test_memory_cluster does not have, on a real API server and in
memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fairshare.controller.weight_writer import adopt, advice
from fairshare.core import scheduler_queue_objects
from fairshare.schedulers.kai.kinds import QUEUE
from fairshare.targets.status_config_map import StatusObject
from fairshare.targets.weight_plan import FIELD_MANAGER
from gputally.base.errors import Blocked, ClusterError, ClusterRefused, Conflict, NotFound, VersionGone
from gputally.kubernetes.api_client import KubernetesCluster
from gputally.kubernetes.list_watch import Reflector
from gputally.kubernetes.memory_cluster import MemoryCluster
from gputally.kubernetes.objects import BUDGET, CONFIG_MAP, EVENT, POD, Cluster, Event
from tests.deadlines import until
from tests.fairshare.builders import object_of
from tests.fairshare.conftest import Make
from tests.fairshare.kai.objects import kai_policy, shard_object
from tests.fairshare.kai.on_a_server import add_queues
from tests.fairshare.real.conftest import Request
from tests.fairshare.scheduler_kinds import KINDS
from tests.real.controlplane import PLAIN_TOKEN, ApiServer, controller_manager

pytestmark = pytest.mark.real


def _gpu(obj: Any) -> dict[str, Any]:
    return obj["spec"]["resources"]["gpu"]


def test_an_event_on_the_full_second_is_taken(cluster: Cluster, name: str) -> None:
    made = cluster.apply(_queue(name, 2), field_manager="us")
    event = Event(QUEUE, name, "", made["metadata"].get("uid", ""), "Normal", "Weight", "2 -> 3", 1_790_812_800_000)
    cluster.event(event)
    cluster.event(event)


def test_the_schema_of_the_real_server_refuses_a_weight_that_is_text(server: ApiServer, name: str) -> None:
    """The server answers 500, not 422, for a patch that its schema cannot type; its message is the useful part."""
    cluster = KubernetesCluster.connect(KINDS, server.kubeconfig)
    with pytest.raises(ClusterError, match="overQuotaWeight: expected numeric"):
        cluster.apply(_queue(name, "much"), field_manager="us")


def test_a_user_without_rights_is_refused_in_the_servers_words(server: ApiServer, tmp_path: Path) -> None:
    plain = KubernetesCluster.connect(KINDS, server.kubeconfig_for(PLAIN_TOKEN, tmp_path))
    with pytest.raises(ClusterRefused, match='User "plain" cannot list'):
        plain.list(QUEUE)


def test_a_cycle_publishes_weights_on_the_real_server(server: ApiServer, accountant: Any, controller_of: Make) -> None:
    """History in, `overQuotaWeight` out, by server-side apply; a field of another manager stays."""
    cluster = KubernetesCluster.connect(KINDS, server.kubeconfig)
    add_queues(cluster, *"abc", weight=1)
    cluster.apply(shard_object(kValue=0), field_manager="gitops")
    accountant.spend(a=0.7, b=0.2, c=0.1)
    controller = controller_of(kai_policy(k=1.0), cluster, status_object=StatusObject("default", "gputally-fairshare"))
    blocked = controller.cycle()
    assert {o.result for t in blocked.targets for o in t.outcomes} == {"contested"}
    assert {_gpu(cluster.get(QUEUE, queue))["overQuotaWeight"] for queue in "abc"} == {1}

    add_queues(cluster, *"abc")  # the operator hands the field over
    for _ in range(6):
        controller.later()
    objects = {queue: cluster.get(QUEUE, queue) for queue in "abc"}
    weights = {queue: _gpu(obj)["overQuotaWeight"] for queue, obj in objects.items()}
    assert weights["a"] < weights["b"] < weights["c"]
    assert all(FIELD_MANAGER in _owners(obj) for obj in objects.values())
    assert all(scheduler_queue_objects.BASE in obj["metadata"]["annotations"] for obj in objects.values())


def _config(name: str, **data: str) -> dict[str, Any]:
    return {**object_of(CONFIG_MAP, name, namespace="default"), "data": data}


def _queue(name: str, weight: object, **metadata: Any) -> dict[str, Any]:
    return object_of(QUEUE, name, {"resources": {"gpu": {"overQuotaWeight": weight}}}, **metadata)


def _owners(obj: Any) -> set[str]:
    return {entry["manager"] for entry in obj["metadata"].get("managedFields", ())}


def test_made_once(cluster: Cluster, name: str) -> None:
    made = cluster.create(_config(name, a="1"), field_manager="us")
    assert made["metadata"]["uid"]
    with pytest.raises(Conflict, match="already exists"):
        cluster.create(_config(name), field_manager="us")
    body = _config("", a="1")
    body["metadata"] = {"generateName": f"{name[:40]}-", "namespace": "default"}
    assert cluster.create(body, field_manager="us")["metadata"]["name"].startswith(name[:40])
    cluster.create(_config(f"{name}-try"), field_manager="us", dry_run=True)
    with pytest.raises(NotFound):
        cluster.get(CONFIG_MAP, f"{name}-try", "default")


def test_merged_in_turn(cluster: Cluster, name: str) -> None:
    made = cluster.create(_config(name, a="1", b="2"), field_manager="them")
    version = made["metadata"]["resourceVersion"]
    change = {"metadata": {"resourceVersion": version}, "data": {"a": "3", "b": None, "c": "4"}}
    assert cluster.patch(CONFIG_MAP, name, "default", change, field_manager="us")["data"] == {"a": "3", "c": "4"}
    with pytest.raises(Conflict):
        cluster.patch(CONFIG_MAP, name, "default", change, field_manager="us")
    with pytest.raises(NotFound):
        cluster.patch(CONFIG_MAP, f"{name}-none", "default", {"data": {}}, field_manager="us")


def test_a_field_is_taken_over_as_it_stands_and_no_other_way(cluster: Cluster, name: str) -> None:
    theirs = cluster.apply(_queue(name, 2), field_manager="argocd")
    version = theirs["metadata"]["resourceVersion"]
    with pytest.raises(Conflict, match="overQuotaWeight changed meanwhile"):
        cluster.transfer(_queue(name, 3, resourceVersion=version), field_manager="us")
    cluster.transfer(_queue(name, 2, resourceVersion=version), field_manager="us", dry_run=True)
    assert _owners(cluster.get(QUEUE, name)) == {"argocd"}
    taken = cluster.transfer(_queue(name, 2, resourceVersion=version), field_manager="us")
    with pytest.raises(Conflict):
        cluster.apply(_queue(name, 1), field_manager="argocd")
    assert cluster.apply(_queue(name, 5), field_manager="us")["metadata"]["uid"] == taken["metadata"]["uid"]
    with pytest.raises(ValueError, match="resourceVersion"):
        cluster.transfer(_queue(name, 5), field_manager="us")


def test_adopting_makes_a_contested_weight_ours(cluster: Cluster, name: str) -> None:
    cluster.apply(_queue(name, 2), field_manager="argocd-controller")
    policy = kai_policy([{"name": "a", "refs": [f"kai:{name}"]}])
    (tried,) = adopt(policy, cluster, dry_run=True)
    (taken,) = adopt(policy, cluster, queue="a")
    assert (tried.result, taken.result) == ("would-apply", "applied")
    assert (taken.owners, taken.field) == (("argocd-controller",), ".spec.resources.gpu.overQuotaWeight")
    assert "managedFieldsManagers: [gputally-fairshare]" in advice(taken)[0]
    assert "group: scheduling.run.ai, kind: Queue" in advice(taken)[0]
    ours = cluster.apply(_queue(name, 7), field_manager=FIELD_MANAGER)
    assert ours["spec"]["resources"]["gpu"]["overQuotaWeight"] == 7
    assert adopt(policy, cluster) == ()


def test_changes_are_followed(cluster: Cluster, name: str) -> None:
    values = _following(cluster)
    cluster.create(_config(name, mine="1"), field_manager="us")
    values.sync()
    assert list(values.values().values()) == ["1"]
    assert values.synced
    version = cluster.scan(CONFIG_MAP, lambda obj: None)
    cluster.patch(CONFIG_MAP, name, "default", {"data": {"mine": "2"}}, field_manager="us")
    cluster.create(_config(f"{name}-2", mine="3"), field_manager="us")
    seen = []
    for line in cluster.api().watch(CONFIG_MAP.path(), {"resourceVersion": version, "timeoutSeconds": "5"}):
        change = json.loads(line)
        if change["object"]["metadata"].get("name", "").startswith(name):
            seen.append((change["type"], _value(change["object"])))
        if len(seen) == 2:
            break
    assert seen == [("MODIFIED", "2"), ("ADDED", "3")]
    cluster.patch(CONFIG_MAP, f"{name}-2", "default", {"data": {"mine": None}}, field_manager="us")
    cluster.patch(CONFIG_MAP, name, "default", {"data": {"mine": None}}, field_manager="us")


def _following(cluster: Cluster) -> Reflector[dict[str, Any], str]:
    return Reflector(cluster.api(), CONFIG_MAP.path(), dict, _value)


def _value(obj: Any) -> str | None:
    return (obj.get("data") or {}).get("mine")


def test_a_version_too_old_is_gone() -> None:
    memory = MemoryCluster([CONFIG_MAP], [_config("a", mine="1")])
    values = _following(memory)
    values.sync()
    memory.put(_config("a", mine="2"), field_manager="x")
    memory.forget()
    with pytest.raises(VersionGone):
        list(memory.api().watch(CONFIG_MAP.path(), {"resourceVersion": "1"}))
    with pytest.raises(VersionGone):
        values.follow()
    values.sync()  # and reads everything again
    assert list(values.values().values()) == ["2"]
    memory.delete(CONFIG_MAP, "a", "default")
    values.follow()
    assert not values.values()


def _pod(name: str, **labels: str) -> dict[str, Any]:
    return object_of(POD, name, {"containers": [{"name": "c", "image": "x"}]}, namespace="default", labels=labels)


def _run(cluster: Cluster, name: str) -> str:
    """Create a pod that is bound, running and ready; return its uid."""
    status = {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}
    pod = cluster.apply({**_pod(name), "status": status}, field_manager="kubelet", subresource="status")
    return str(pod["metadata"]["uid"])


def test_evictions_as_the_server_answers_them(cluster: Cluster, name: str) -> None:
    app = name[-50:].strip("-")
    for i in range(2):
        cluster.create(_pod(f"{app}-{i}", app=app), field_manager="us")
    first, second = (_run(cluster, f"{app}-{i}") for i in range(2))
    with pytest.raises(NotFound):
        cluster.evict(f"{app}-none", "default", first)
    with pytest.raises(Conflict):
        cluster.evict(f"{app}-0", "default", second)
    cluster.evict(f"{app}-0", "default", first, dry_run=True)
    assert cluster.get(POD, f"{app}-0", "default")["metadata"]["uid"] == first
    selector = {"selector": {"matchLabels": {"app": app}}, "minAvailable": 1}
    budget = object_of(BUDGET, app, selector, namespace="default")
    made = cluster.create(budget, field_manager="us")
    status = {
        "disruptionsAllowed": 1, "currentHealthy": 2, "desiredHealthy": 1, "expectedPods": 2,
        "observedGeneration": made["metadata"]["generation"],
    }  # fmt: skip
    cluster.apply({**budget, "status": status}, field_manager="disruption", subresource="status")
    cluster.evict(f"{app}-0", "default", first, grace_s=0)
    with pytest.raises(Blocked):
        cluster.evict(f"{app}-1", "default", second, grace_s=0)
    other = {**budget, "metadata": {"name": f"{app}-b", "namespace": "default"}}
    cluster.create(other, field_manager="us")
    with pytest.raises(ClusterRefused, match="more than one PodDisruptionBudget"):
        cluster.evict(f"{app}-1", "default", second)


def test_a_budget_refills_and_jobs_come_back(
    server: ApiServer, real: KubernetesCluster, ask: Request, tmp_path: Any
) -> None:
    """A Job replaces its evicted pod; the budget, spent by the first eviction, then allows the next."""
    template = {"metadata": {"labels": {"app": "again"}}, "spec": {"containers": [{"name": "c", "image": "x"}]}}
    template["spec"]["restartPolicy"] = "Never"
    job = {"metadata": {"name": "again"}, "spec": {"parallelism": 2, "completions": 2, "template": template}}
    with controller_manager(server, tmp_path):
        ask("POST", "/apis/batch/v1/namespaces/default/jobs", job)
        spec = {"selector": {"matchLabels": {"app": "again"}}, "minAvailable": 1}
        budgets = "/apis/policy/v1/namespaces/default/poddisruptionbudgets"
        ask("POST", budgets, {"metadata": {"name": "again"}, "spec": spec})

        def pods() -> dict[str, str]:
            listed = ask("GET", "/api/v1/namespaces/default/pods?labelSelector=app%3Dagain")["items"]
            there = [pod["metadata"] for pod in listed if not pod["metadata"].get("deletionTimestamp")]
            return {pod["name"]: pod["uid"] for pod in there}

        before = until(lambda: found if len(found := pods()) == 2 else None, "the Job has no pods")
        for name in before:
            _run(real, name)

        def allowed() -> bool:
            return bool(real.get(BUDGET, "again", "default").get("status", {}).get("disruptionsAllowed") == 1)

        until(allowed, f"the budget allows nothing: {real.get(BUDGET, 'again', 'default')}")
        victim, kept = sorted(before)
        real.evict(victim, "default", before[victim], grace_s=0)
        with pytest.raises(Blocked):
            real.evict(kept, "default", before[kept], grace_s=0)
        after = until(lambda: found if len(found := pods()) == 2 and victim not in found else None, "no new pod")
        (fresh,) = after.keys() - before.keys()
        made = ask("GET", "/apis/batch/v1/namespaces/default/jobs/again")["metadata"]["uid"]
        for each in (kept, fresh):  # what was evicted leaves nothing behind; what came has the same owner
            (owner,) = real.get(POD, each, "default")["metadata"]["ownerReferences"]
            assert (owner["kind"], owner["uid"], owner["controller"]) == ("Job", made, True)
        _run(real, fresh)
        until(allowed, "the budget does not refill")
        ask("DELETE", "/apis/batch/v1/namespaces/default/jobs/again?propagationPolicy=Background")
        until(lambda: not pods(), "the pods outlive their owner")


def test_events_are_listed_by_what_they_say(cluster: Cluster, name: str) -> None:
    """In KAI's form: on a PodGroup, one for each evicted pod."""
    for number, reason in enumerate(("Evict", "Evict", "Scheduled")):
        told = {"reason": reason, "note": "Pod default/a was preempted by workload default/pg-b."}
        told |= {"type": "Normal", "action": reason, "eventTime": "2026-10-01T00:00:00.000001Z"}
        by = {"reportingController": "kai-scheduler", "reportingInstance": "kai-scheduler-0"}
        regarding = {"kind": "PodGroup", "namespace": "default", "name": name}
        event = object_of(EVENT, f"{name}-{number}", namespace="default") | told | by | {"regarding": regarding}
        cluster.create(event, field_manager="kai")
    found = [each for each in cluster.list(EVENT, fields="reason=Evict") if each["regarding"]["name"] == name]
    assert [each["metadata"]["name"] for each in found] == [f"{name}-0", f"{name}-1"]
    assert all(each["note"] and each["metadata"]["uid"] for each in found)
