"""The cluster port on a real kube-apiserver with KAI's CRDs, and the in-memory one beside it: one suite for both.

What holds on the real server and not on the fake would be a lie the rest of the tests believe."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fairshare.controller.control_loop import Controller
from fairshare.core import scheduler_queue_objects
from fairshare.targets import KINDS
from fairshare.targets.kai import QUEUE, SHARD
from fairshare.targets.status_config_map import StatusObject
from fairshare.targets.weight_plan import FIELD_MANAGER
from gputally.base.clock import VirtualClock
from gputally.base.errors import ClusterError, Conflict, NotFound, Refused
from gputally.kubernetes.api_client import KubernetesCluster
from gputally.kubernetes.objects import Cluster, Event, Kind
from tests.fairshare.builders import policy_of, queue_object
from tests.real.controlplane import PLAIN_TOKEN, ApiServer

pytestmark = pytest.mark.real


def _weight(name: str, value: float | None, **metadata: Any) -> dict[str, Any]:
    """None leaves the whole `spec` out: an emptied map would be stored as null, which the schema refuses."""
    obj = {"apiVersion": QUEUE.api_version, "kind": QUEUE.kind, "metadata": {"name": name, **metadata}}
    return obj if value is None else {**obj, "spec": {"resources": {"gpu": {"overQuotaWeight": value}}}}


def _gpu(obj: Any) -> dict[str, Any]:
    found: dict[str, Any] = obj["spec"]["resources"]["gpu"]
    return found


def _managers(obj: Any) -> set[str]:
    return {entry["manager"] for entry in obj["metadata"]["managedFields"]}


def test_apply_creates_and_is_idempotent(cluster: Cluster, name: str) -> None:
    made = cluster.apply(_weight(name, 2.5), field_manager="us")
    again = cluster.apply(_weight(name, 2.5), field_manager="us")
    assert _gpu(made)["overQuotaWeight"] == 2.5
    assert again["metadata"]["resourceVersion"] == made["metadata"]["resourceVersion"]
    assert _gpu(cluster.get(QUEUE, name)) == _gpu(made)
    assert name in [obj["metadata"]["name"] for obj in cluster.list(QUEUE)]


def test_a_foreign_field_is_a_conflict_that_names_its_owner(cluster: Cluster, name: str) -> None:
    before = cluster.apply(_weight(name, 2), field_manager="argocd")
    with pytest.raises(Conflict) as refused:
        cluster.apply(_weight(name, 3), field_manager="us")
    assert refused.value.owners == (("argocd", ".spec.resources.gpu.overQuotaWeight"),)
    after = cluster.get(QUEUE, name)
    assert _gpu(after) == _gpu(before)
    assert after["metadata"]["resourceVersion"] == before["metadata"]["resourceVersion"]


def test_the_same_value_is_owned_together(cluster: Cluster, name: str) -> None:
    cluster.apply(_weight(name, 2), field_manager="argocd")
    both = cluster.apply(_weight(name, 2), field_manager="us")
    assert _managers(both) == {"argocd", "us"}


def test_a_field_left_out_by_its_only_owner_goes(cluster: Cluster, name: str) -> None:
    cluster.apply(_weight(name, 2), field_manager="us")
    labelled = _weight(name, None, labels={"kept": "yes"})
    left = cluster.apply(labelled, field_manager="us")
    assert "overQuotaWeight" not in left.get("spec", {}).get("resources", {}).get("gpu", {})
    assert left["metadata"]["labels"] == {"kept": "yes"}


def test_a_dry_run_answers_and_keeps_nothing(cluster: Cluster, name: str) -> None:
    kept = cluster.apply(_weight(name, 2), field_manager="us")
    shown = cluster.apply(_weight(name, 7), field_manager="us", dry_run=True)
    assert _gpu(shown)["overQuotaWeight"] == 7
    assert _gpu(cluster.get(QUEUE, name)) == _gpu(kept)


def test_a_stale_version_is_a_conflict_without_owners(cluster: Cluster, name: str) -> None:
    old = cluster.apply(_weight(name, 2), field_manager="us")["metadata"]["resourceVersion"]
    cluster.apply(_weight(name, 3), field_manager="us")
    with pytest.raises(Conflict) as refused:
        cluster.apply(_weight(name, 4, resourceVersion=old), field_manager="us")
    assert refused.value.owners == ()


def test_the_status_is_a_subresource(cluster: Cluster, name: str) -> None:
    cluster.apply(_weight(name, 2), field_manager="us")
    status = {**_weight(name, 9), "status": {"requested": {"nvidia.com/gpu": "12"}}}
    cluster.apply(status, field_manager="scheduler", subresource="status")
    found = cluster.get(QUEUE, name)
    assert found["status"]["requested"] == {"nvidia.com/gpu": "12"}
    assert _gpu(found)["overQuotaWeight"] == 2


def test_what_is_not_there_is_not_found(cluster: Cluster, name: str) -> None:
    with pytest.raises(NotFound):
        cluster.get(QUEUE, name)
    with pytest.raises(NotFound):
        cluster.list(Kind("kueue.x-k8s.io/v9", "ClusterQueue", "clusterqueues"))


def test_an_event_on_the_full_second_is_taken(cluster: Cluster, name: str) -> None:
    made = cluster.apply(_weight(name, 2), field_manager="us")
    event = Event(QUEUE, name, "", made["metadata"].get("uid", ""), "Normal", "Weight", "2 -> 3", 1_790_812_800_000)
    cluster.event(event)
    cluster.event(event)


def test_the_schema_of_the_real_server_refuses_a_weight_that_is_text(server: ApiServer, name: str) -> None:
    """It answers 500, not 422, for a patch its schema cannot type; its own words are what helps."""
    cluster = KubernetesCluster.connect(KINDS, server.kubeconfig)
    with pytest.raises(ClusterError, match="overQuotaWeight: expected numeric"):
        cluster.apply(_weight(name, "much"), field_manager="us")  # type: ignore[arg-type]


def test_a_user_without_rights_is_refused_in_the_servers_words(server: ApiServer, tmp_path: Path) -> None:
    plain = KubernetesCluster.connect(KINDS, server.kubeconfig_for(PLAIN_TOKEN, tmp_path))
    with pytest.raises(Refused, match='User "plain" cannot list'):
        plain.list(QUEUE)


def test_a_cycle_publishes_weights_on_the_real_server(server: ApiServer, accountant: Any, clock: VirtualClock) -> None:
    """History in, `overQuotaWeight` out, by server-side apply; a field of another manager is left alone."""
    cluster = KubernetesCluster.connect(KINDS, server.kubeconfig)
    for queue in "abc":
        wanted = queue_object(queue)
        status = {**wanted, "spec": {"resources": {"gpu": {}}}}
        cluster.apply({k: v for k, v in wanted.items() if k != "status"}, field_manager="gitops")
        cluster.apply(status, field_manager="kai", subresource="status")
    shard = {
        "apiVersion": SHARD.api_version,
        "kind": SHARD.kind,
        "metadata": {"name": "default"},
        "spec": {"kValue": 0},
    }
    cluster.apply(shard, field_manager="gitops")
    accountant.spend(a=0.7, b=0.2, c=0.1)
    controller = Controller(
        policy_of(k=1.0), accountant, cluster, clock, status_object=StatusObject("default", "gputally-fairshare")
    )
    blocked = controller.cycle()
    assert {o.result for t in blocked.targets for o in t.outcomes} == {"contested"}
    assert {_gpu(cluster.get(QUEUE, queue))["overQuotaWeight"] for queue in "abc"} == {1}

    for queue in "abc":  # the operator hands the field over
        handed = queue_object(queue, weight=None)
        cluster.apply({k: v for k, v in handed.items() if k != "status"}, field_manager="gitops")
    for _ in range(6):
        clock.advance(60_000)
        controller.cycle()
    objects = {queue: cluster.get(QUEUE, queue) for queue in "abc"}
    weights = {queue: _gpu(obj)["overQuotaWeight"] for queue, obj in objects.items()}
    assert weights["a"] < weights["b"] < weights["c"]
    assert all(FIELD_MANAGER in _managers(obj) for obj in objects.values())
    assert all(scheduler_queue_objects.BASE in obj["metadata"]["annotations"] for obj in objects.values())
