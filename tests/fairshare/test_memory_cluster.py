"""The cluster interface: field ownership and versions; the same tests in memory and on the real API server."""

from __future__ import annotations

from typing import Any

import pytest

from gputally.base.errors import ClusterRefused, Conflict, NotFound, VersionGone
from gputally.kubernetes.memory_cluster import LOG_LENGTH, MemoryCluster
from gputally.kubernetes.objects import CONFIG_MAP, Event, Kind, dotted_path, from_fields_v1, leaves, to_fields_v1
from gputally.testing.fake_scheduler import QUEUE, queue_object
from tests.fairshare.builders import cluster_of, object_of
from tests.fairshare.conftest import Make


def _weight(name: str, value: float, **metadata: Any) -> dict[str, Any]:
    return object_of(QUEUE, name, {"weight": value}, **metadata)


def _spec(obj: Any) -> dict[str, Any]:
    return obj["spec"]


def test_apply_makes_what_is_missing_and_owns_what_it_named(either_of: Make) -> None:
    cluster = either_of()
    made = cluster.apply(_weight("a", 2), field_manager="us")
    assert _spec(made) == {"weight": 2}
    (entry,) = made["metadata"]["managedFields"]
    assert (entry["manager"], entry["operation"]) == ("us", "Apply")
    assert entry["fieldsV1"] == {"f:spec": {"f:weight": {}}}
    assert made["metadata"]["generation"] == 1


def test_applying_the_same_again_changes_nothing(either_of: Make) -> None:
    cluster = either_of()
    first = cluster.apply(_weight("a", 2.5), field_manager="us")
    assert cluster.apply(_weight("a", 2.5), field_manager="us") == cluster.get(QUEUE, "a") == first
    assert _spec(first) == {"weight": 2.5}


def test_another_value_for_a_field_of_another_manager_is_a_conflict_that_names_him(either_of: Make) -> None:
    cluster = either_of()
    before = cluster.apply(_weight("a", 2), field_manager="argocd")
    with pytest.raises(Conflict) as refused:
        cluster.apply(_weight("a", 3, labels={"x": "y"}), field_manager="us")
    assert refused.value.owners == (("argocd", ".spec.weight"),)
    assert str(refused.value).endswith(': Apply failed with 1 conflict: conflict with "argocd": .spec.weight')
    assert cluster.get(QUEUE, "a") == before


def test_the_same_value_is_owned_together_and_survives_one_owner(either_of: Make) -> None:
    cluster = either_of()
    cluster.apply(_weight("a", 2), field_manager="argocd")
    cluster.apply(_weight("a", 2.0), field_manager="us")
    left = cluster.apply({**_weight("a", 0), "spec": {}}, field_manager="us")
    assert _spec(left) == {"weight": 2}
    assert {entry["manager"] for entry in left["metadata"]["managedFields"]} == {"argocd", "us"}


def test_a_field_that_its_only_owner_leaves_out_is_removed(either_of: Make) -> None:
    quota = {"f:spec": {"f:quota": {}, "f:limit": {}}}
    theirs = {"manager": "kubectl", "operation": "Update", "fieldsType": "FieldsV1", "fieldsV1": quota}
    cluster = either_of([queue_object("a", None, quota=4, managedFields=[theirs])])
    cluster.apply(_weight("a", 2, annotations={"us/x": "1"}), field_manager="us")
    left = cluster.apply(object_of(QUEUE, "a"), field_manager="us")
    assert _spec(left) == {"quota": 4, "limit": -1}
    cluster.apply(_weight("b", 2), field_manager="us")  # and here with the whole spec
    bare = cluster.apply(object_of(QUEUE, "b", labels={"kept": "yes"}), field_manager="us")
    assert "weight" not in bare.get("spec", {})
    assert bare["metadata"]["labels"] == {"kept": "yes"}
    assert "annotations" not in left["metadata"]
    assert "us" not in {entry["manager"] for entry in left["metadata"]["managedFields"]}


def test_the_status_is_written_through_its_subresource_alone(either_of: Make) -> None:
    cluster = either_of([queue_object("a", 1)])
    body = {**_weight("a", 9), "status": {"requested": {"nvidia.com/gpu": "7"}}}
    through_status = cluster.apply(body, field_manager="fake", subresource="status")
    assert _spec(through_status)["weight"] == 1
    assert through_status["status"]["requested"] == {"nvidia.com/gpu": "7"}
    through_main = cluster.apply({**body, "status": {"requested": {"nvidia.com/gpu": "0"}}}, field_manager="us")
    assert _spec(through_main)["weight"] == 9
    assert through_main["status"]["requested"] == {"nvidia.com/gpu": "7"}
    with pytest.raises(NotFound):
        cluster.apply({**body, "metadata": {"name": "b"}}, field_manager="fake", subresource="status")


def test_versions_move_with_changes_and_with_nothing_else(either_of: Make) -> None:
    cluster = either_of([queue_object("a", 1)])
    read = cluster.get(QUEUE, "a")["metadata"]
    tried = cluster.apply(_weight("a", 5), field_manager="us", dry_run=True)
    assert _spec(tried)["weight"] == 5
    assert cluster.get(QUEUE, "a")["metadata"] == read
    status = {**_weight("a", 1), "status": {"requested": {"nvidia.com/gpu": "1"}}}
    moved = cluster.apply(status, field_manager="fake", subresource="status")["metadata"]
    assert (moved["generation"], moved["resourceVersion"] != read["resourceVersion"]) == (1, True)
    assert cluster.apply(_weight("a", 5), field_manager="us")["metadata"]["generation"] == 2


def test_a_stale_version_and_a_foreign_uid_are_conflicts(either_of: Make, others_of: Make) -> None:
    cluster = either_of([queue_object("a", 1)])
    read = cluster.get(QUEUE, "a")["metadata"]
    cluster.apply(_weight("a", 2, resourceVersion=read["resourceVersion"], uid=read["uid"]), field_manager="us")
    with pytest.raises(Conflict, match="modified") as stale:
        cluster.apply(_weight("a", 3, resourceVersion=read["resourceVersion"]), field_manager="us")
    assert stale.value.owners == ()
    others_of(cluster).delete(QUEUE, "a")
    with pytest.raises(Conflict, match="uid"):
        cluster.apply(_weight("a", 3, uid=read["uid"]), field_manager="us")
    assert cluster.list(QUEUE) == []


def test_an_update_takes_the_fields_it_changes(either_of: Make, others_of: Make) -> None:
    cluster = either_of()
    cluster.apply(_weight("a", 2), field_manager="us")
    others_of(cluster).put(_weight("a", 7), field_manager="kubectl")
    with pytest.raises(Conflict) as refused:
        cluster.apply(_weight("a", 2), field_manager="us")
    assert refused.value.owners == (("kubectl", ".spec.weight"),)
    gone = others_of(cluster).put({**_weight("a", 7), "spec": {}}, field_manager="kubectl")
    assert gone["spec"] == {}
    assert _spec(cluster.apply(_weight("a", 2), field_manager="us"))["weight"] == 2


def test_ownership_is_read_from_objects_that_carry_it(either_of: Make) -> None:
    fields = {"f:spec": {"f:weight": {}, "f:gone": {}}}
    entry = {"manager": "kubectl", "operation": "Update", "fieldsType": "FieldsV1", "fieldsV1": fields}
    cluster = either_of([queue_object("owned", 1, managedFields=[entry]), queue_object("free", 1)])
    with pytest.raises(Conflict, match="kubectl"):
        cluster.apply(_weight("owned", 2), field_manager="us")
    assert _spec(cluster.apply(_weight("free", 2), field_manager="us"))["weight"] == 2


def test_a_webhook_may_refuse_even_a_dry_run() -> None:
    def admit(obj: Any) -> str | None:
        return "weight too large" if _spec(obj)["weight"] > 5 else None

    cluster = cluster_of(admit=admit)
    with pytest.raises(ClusterRefused, match="weight too large"):
        cluster.apply(_weight("a", 6), field_manager="us", dry_run=True)
    assert cluster.list(QUEUE) == []


def test_what_is_not_there_is_not_found(either_of: Make) -> None:
    cluster = either_of()
    with pytest.raises(NotFound):
        cluster.get(QUEUE, "none")
    with pytest.raises(NotFound):
        cluster.list(Kind("kueue.x-k8s.io/v9", "ClusterQueue", "clusterqueues"))


def test_kinds_that_are_not_served_are_not_found() -> None:
    cluster = MemoryCluster([CONFIG_MAP])
    for call in (
        lambda: cluster.list(QUEUE),
        lambda: cluster.get(QUEUE, "a"),
        lambda: cluster.apply(_weight("a", 1), field_manager="us"),
        lambda: cluster.load([queue_object("a")]),
        lambda: cluster.delete(QUEUE, "a"),
    ):
        with pytest.raises(NotFound):
            call()
    with pytest.raises(NotFound, match="ConfigMap ns/x not found"):
        cluster.get(CONFIG_MAP, "x", "ns")
    with pytest.raises(ClusterRefused, match="name is missing"):
        cluster.apply({"apiVersion": "v1", "kind": "ConfigMap"}, field_manager="us")


def test_lists_are_sorted_and_what_is_read_is_a_copy(either_of: Make) -> None:
    cluster = either_of([queue_object("b"), queue_object("a")])
    listed = cluster.list(QUEUE)
    assert [obj["metadata"]["name"] for obj in listed] == ["a", "b"]
    listed[0]["spec"]["weight"] = 99
    assert _spec(cluster.get(QUEUE, "a"))["weight"] == 1


def test_the_same_event_is_one() -> None:
    cluster = cluster_of()
    for at_ms in (1, 2):
        cluster.event(Event(QUEUE, "a", "", "", "Warning", "Held", "stale", at_ms))
    (event,) = cluster.events
    assert event.at_ms == 2


def test_paths() -> None:
    obj = {"apiVersion": "v1", "metadata": {"name": "x", "labels": {"a.b/c": "1"}}, "spec": {"list": [1], "empty": {}}}
    found = leaves(obj)
    assert found == {("metadata", "labels", "a.b/c"): "1", ("spec", "list"): [1], ("spec", "empty"): {}}
    assert from_fields_v1(to_fields_v1(found)) == set(found)
    assert [dotted_path(path) for path in found] == ['.metadata.labels["a.b/c"]', ".spec.list", ".spec.empty"]
    assert leaves({"metadata": {"name": "x"}}) == {}


def test_a_kind_in_namespaces_keeps_them_apart(either_of: Make) -> None:
    def config(namespace: str) -> dict[str, Any]:
        return {**object_of(CONFIG_MAP, "apart", namespace=namespace), "data": {"in": "nowhere"}}

    cluster = either_of([config("one"), config("two")])
    for namespace in ("one", "two"):
        cluster.apply({**config(namespace), "data": {"in": namespace}}, field_manager="us")
    found = [obj["data"]["in"] for obj in cluster.list(CONFIG_MAP) if obj["metadata"]["name"] == "apart"]
    assert found == ["one", "two"]


def test_changes_are_told_in_their_order_until_one_is_forgotten() -> None:
    def named(number: int) -> dict[str, Any]:
        return object_of(CONFIG_MAP, f"c{number}")

    def names(since: Any) -> list[str]:
        return [obj["metadata"]["name"] for _, obj in since]

    cluster = MemoryCluster([CONFIG_MAP])
    cluster.load(map(named, range(LOG_LENGTH)))
    newest, since = cluster.changes(CONFIG_MAP, 0)
    assert names(since) == [f"c{number}" for number in range(LOG_LENGTH)]
    cluster.load([named(LOG_LENGTH)])
    assert names(cluster.changes(CONFIG_MAP, int(newest))[1]) == [f"c{LOG_LENGTH}"]
    with pytest.raises(VersionGone):
        cluster.changes(CONFIG_MAP, 0)
