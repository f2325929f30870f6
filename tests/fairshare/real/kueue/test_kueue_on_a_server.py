"""Kueue on an API server with its own schemas: weights published, contested, handed over and released."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fairshare.controller.weight_writer import adopt, release_weights
from fairshare.core import scheduler_queue_objects
from fairshare.schedulers.kueue import kinds as kueue
from gputally.base.errors import ClusterUnavailable, NotFound
from gputally.kubernetes.api_client import KubernetesCluster
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
