"""Kueue and Volcano on an API server with their own schemas: weights published, contested, handed over and released."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fairshare.controller.weight_writer import adopt, release_weights
from fairshare.core import scheduler_queue_objects
from fairshare.schedulers.kueue import kinds as kueue
from fairshare.schedulers.volcano import kinds as volcano
from fairshare.targets.weight_plan import FIELD_MANAGER
from gputally.base.errors import ClusterUnavailable, NotFound
from gputally.kubernetes.api_client import KubernetesCluster
from gputally.kubernetes.memory_cluster import MemoryCluster
from gputally.kubernetes.objects import GPU, Cluster
from tests.deadlines import until
from tests.fairshare.builders import object_of, policy_of
from tests.fairshare.conftest import Make
from tests.fairshare.observations import reasons_of, results_of
from tests.fairshare.real_api_server import MERGE, definitions
from tests.fairshare.scheduler_kinds import KINDS
from tests.real.controlplane import api_server

pytestmark = pytest.mark.real
CQ, COHORT, LQ, WORKLOAD = (k[0] for k in (kueue.CLUSTER_QUEUES, kueue.COHORTS, kueue.LOCAL_QUEUES, kueue.WORKLOADS))


def test_kueue_from_the_operators_750m_to_ours_and_back(cluster: Cluster, accountant: Any, controller_of: Make) -> None:
    flavors = [{"name": "h200", "resources": [{"name": GPU, "nominalQuota": "8"}]}]
    for name in ("kq-a", "kq-b"):
        groups = [{"coveredResources": [GPU], "flavors": flavors}]
        spec = {"cohortName": "kq", "resourceGroups": groups, "fairSharing": {"weight": "750m"}}
        cluster.apply(object_of(CQ, name, spec), field_manager="gitops")
    cluster.apply(
        object_of(COHORT, "kq", {"parentName": "root", "fairSharing": {"weight": "2"}}), field_manager="gitops"
    )
    for name, queue in (("kq-l", "kq-a"), ("kq-m", "kq-b")):
        cluster.apply(object_of(LQ, name, {"clusterQueue": queue}, namespace="default"), field_manager="gitops")
    container = {"name": "c", "image": "x", "resources": {"limits": {GPU: "4"}, "requests": {GPU: "4"}}}
    pods = {"name": "main", "count": 2, "template": {"spec": {"restartPolicy": "Never", "containers": [container]}}}
    for name in ("kq-l", "kq-m"):
        wanted = {"queueName": name, "podSets": [pods]}
        cluster.apply(object_of(WORKLOAD, f"{name}-job", wanted, namespace="default"), field_manager="job")
    policy = policy_of(
        [
            {"name": "dept", "refs": ["kueue-cohort:kq"], "weight": 2},
            {"name": "a", "parent": "dept", "refs": ["kueue:kq-a", "kueue:default/kq-l"]},
            {"name": "b", "parent": "dept", "refs": ["kueue:kq-b"]},
        ],
        targets={"kueue": {"apply": "enforce"}},
    )
    accountant.spend(a=0.9, b=0.1, dept=1.0)
    controller = controller_of(policy, cluster)
    report = controller.cycle()
    assert results_of(report) == {"a": "contested", "b": "contested"}
    (target,) = report.targets
    assert reasons_of(target)["Effective"][1] == "FieldNotOurs"
    assert (target.standings["a"].requested, target.standings["a"].gang) == (8.0, 8.0)
    taken = adopt(policy, cluster)
    assert {(each.kind, each.name, each.result) for each in taken} == {
        ("Cohort", "kq", "applied"), ("ClusterQueue", "kq-a", "applied"), ("ClusterQueue", "kq-b", "applied"),
    }  # fmt: skip
    assert results_of(controller.later()) == {"a": "applied", "b": "applied"}
    ours = cluster.get(CQ, "kq-a")
    assert ours["spec"]["fairSharing"]["weight"] == "0.2"
    assert ours["spec"]["resourceGroups"][0]["flavors"] == flavors
    assert ours["metadata"]["annotations"][scheduler_queue_objects.BASE] == "0.75"
    for _ in range(10):
        last = results_of(controller.later())
    assert last == {}  # settled: what the server gives back is compared as a number
    assert {outcome.result for outcome in release_weights(policy, cluster)} == {"applied"}
    released = cluster.get(CQ, "kq-a")
    assert released["spec"]["fairSharing"]["weight"] == "0.75"
    assert scheduler_queue_objects.BASE not in (released["metadata"].get("annotations") or {})


@pytest.mark.parametrize(("mode", "field"), [("weight", "weight"), ("deserved", "deserved")])
def test_volcano_takes_either_field(
    cluster: Cluster, accountant: Any, mode: str, field: str, controller_of: Make
) -> None:
    names = [f"vq-{mode}-{letter}" for letter in "ab"]
    for name in names:
        cluster.apply(object_of(volcano.QUEUE, name, {"reclaimable": True}), field_manager="gitops")
    policy = policy_of(
        [{"name": name, "refs": [f"volcano:{name}"]} for name in names],
        targets={"volcano": {"mode": mode, "apply": "enforce"}},
    )
    accountant.spend(**{names[0]: 0.75, names[1]: 0.25})
    results = results_of(controller_of(policy, cluster).cycle())
    assert results == dict.fromkeys(names, "applied")
    first, second = (cluster.get(volcano.QUEUE, name)["spec"][field] for name in names)
    if mode == "weight":
        assert first < second
        assert first + second == 10_000
    else:
        assert (int(first[GPU]) < int(second[GPU]), int(first[GPU]) + int(second[GPU])) == (True, 16)
    assert FIELD_MANAGER in {e["manager"] for e in cluster.get(volcano.QUEUE, names[0])["metadata"]["managedFields"]}
    assert {outcome.result for outcome in release_weights(policy, cluster)} == {"applied"}
    released = cluster.get(volcano.QUEUE, names[0])
    assert scheduler_queue_objects.BASE not in (released["metadata"].get("annotations") or {})
    if mode == "weight" and not isinstance(cluster, MemoryCluster):
        assert released["spec"]["weight"] == 1  # the schema's default is back


def test_a_volcano_weight_is_contested_until_it_is_adopted(
    cluster: Cluster, accountant: Any, controller_of: Make
) -> None:
    names = ["vo-a", "vo-b"]
    for name, weight in zip(names, (3, 1), strict=True):
        cluster.apply(object_of(volcano.QUEUE, name, {"weight": weight}), field_manager="gitops")
    policy = policy_of(
        [{"name": name, "refs": [f"volcano:{name}"]} for name in names],
        targets={"volcano": {"mode": "weight", "apply": "enforce"}},
    )
    accountant.spend(**{"vo-a": 0.75, "vo-b": 0.25})
    controller = controller_of(policy, cluster)
    report = controller.cycle()
    assert results_of(report) == dict.fromkeys(names, "contested")
    assert reasons_of(report.targets[0])["Effective"][1] == "FieldNotOurs"
    assert [cluster.get(volcano.QUEUE, name)["spec"]["weight"] for name in names] == [3, 1]
    taken = {(each.name, each.owners, each.result) for each in adopt(policy, cluster)}
    assert taken == {(name, ("gitops",), "applied") for name in names}
    assert results_of(controller.later()) == dict.fromkeys(names, "applied")
    first, second = (cluster.get(volcano.QUEUE, name)["spec"]["weight"] for name in names)
    assert (first < second, first + second) == (True, 10_000)
    release_weights(policy, cluster)
    assert [cluster.get(volcano.QUEUE, name)["spec"]["weight"] for name in names] == [3, 1]


def test_a_kueue_that_serves_v1beta1_alone(accountant: Any, tmp_path: Path, controller_of: Make) -> None:
    """Before 0.15: its objects' older fields are read, and weights are written in that version."""
    old = {kinds[1].kind: kinds[1] for kinds in (kueue.CLUSTER_QUEUES, kueue.LOCAL_QUEUES, kueue.WORKLOADS)}
    with api_server(tmp_path) as running:
        for document in definitions():
            if document["spec"]["group"] == "kueue.x-k8s.io":
                versions = [version for version in document["spec"]["versions"] if version["name"] == "v1beta1"]
                document["spec"]["versions"] = [{**version, "storage": True} for version in versions]
                running.request("POST", "/apis/apiextensions.k8s.io/v1/customresourcedefinitions", document)
        cluster = KubernetesCluster.connect(KINDS, running.kubeconfig)

        def all_served() -> bool:
            try:
                return all(cluster.list(kind) is not None for kind in old.values())
            except (NotFound, ClusterUnavailable):
                return False

        until(all_served, "v1beta1 is not served")
        group = "/apis/kueue.x-k8s.io/v1beta1"
        resources = [{"name": GPU, "nominalQuota": "8"}]
        groups = [{"coveredResources": [GPU], "flavors": [{"name": "h200", "resources": resources}]}]
        for name in "ab":
            spec = {"cohort": "ml", "resourceGroups": groups}
            running.request("POST", f"{group}/clusterqueues", object_of(old["ClusterQueue"], name, spec))
            shown = {"status": {"fairSharing": {"weightedShare": 0}}}
            running.request("PATCH", f"{group}/clusterqueues/{name}/status", shown, MERGE)
        local = object_of(old["LocalQueue"], "a", {"clusterQueue": "a"}, namespace="default")
        running.request("POST", f"{group}/namespaces/default/localqueues", local)
        container = {"name": "c", "image": "none", "resources": {"limits": {GPU: "4"}}}
        template = {"spec": {"containers": [container], "restartPolicy": "Never"}}
        sets = [{"name": "main", "count": 2, "template": template}]
        waits = object_of(old["Workload"], "waits", {"queueName": "a", "podSets": sets}, namespace="default")
        running.request("POST", f"{group}/namespaces/default/workloads", waits)

        queues = [{"name": name, "deserved": 8, "refs": [f"kueue:{name}"]} for name in "ab"]
        policy = policy_of(queues, targets={"kueue": {"apply": "enforce"}})
        accountant.spend(a=0.9, b=0.1)
        (target,) = controller_of(policy, cluster).cycle().targets
        assert target.gpus == 16.0
        assert target.standings["a"].requested == 8.0
        assert {outcome.result for outcome in target.outcomes} == {"applied"}
        assert reasons_of(target)["Effective"] == ("True", "FairSharing")
        assert reasons_of(target)["InSync"] == ("True", "AsPolicy")
        written = cluster.get(old["ClusterQueue"], "a")["spec"]
        assert written["cohort"] == "ml"
        assert float(written["fairSharing"]["weight"]) < 1
        release_weights(policy, cluster)
        assert "weight" not in (cluster.get(old["ClusterQueue"], "a")["spec"].get("fairSharing") or {})
