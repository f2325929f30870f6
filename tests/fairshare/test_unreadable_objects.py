"""An object that cannot be read stops itself alone: never the list of its kind, its target, or another target."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import pytest
import structlog
from hypothesis import given, settings
from hypothesis import strategies as st

from fairshare.controller.weight_writer import release_weights
from fairshare.core.gpu_demand import PodReducer, read_pod
from fairshare.core.queues_and_weights import Pod
from fairshare.preemption.unfinished_preemptions import finish_all
from fairshare.targets.installed import adapters
from fairshare.targets.status_config_map import StatusObject
from fairshare.targets.weight_plan import look_at
from fairshare.targets.whole_stop import PREEMPTION
from gputally.base.clock import VirtualClock
from gputally.base.errors import NotFound
from gputally.kubernetes.list_watch import Reflector
from gputally.kubernetes.memory_cluster import MemoryCluster
from gputally.kubernetes.objects import EVENT, POD, POD_GROUPS, PRIORITY_CLASS, Kind, Object, quantity
from gputally.testing.fake_scheduler import POD_GROUP, QUEUE, pod_group, queue_object
from tests.fairshare.builders import fake_pod, node_object, object_of, pod_object, policy_of
from tests.fairshare.conftest import Accountant, Make
from tests.fairshare.observations import condition, conditions_of, weights_in
from tests.fairshare.scheduler_kinds import KINDS
from tests.hypothesis_examples import examples
from tests.plugin_cases import plugin_cases


@pytest.mark.parametrize("text", ["1ki", "1mi", "٣", "1e308", "1e999", "9" * 400, "nan", "0x10", "1_000", " 1", ""])
def test_a_text_that_is_no_quantity_is_none(text: str) -> None:
    assert quantity(text) is None


class Lists:
    """An API server of pods, whose watches yield the lines given."""

    def __init__(self, *objects: Object) -> None:
        self.objects = objects
        self.lines: list[bytes] = []

    def get(self, *_: object, **__: object) -> bytes:
        return json.dumps({"metadata": {"resourceVersion": "1"}, "items": self.objects}).encode()

    def watch(self, *_: object, **__: object) -> Iterator[bytes]:
        return iter(self.lines)


def _line(change: str, obj: Object, version: str = "2") -> bytes:
    versioned = {**obj, "metadata": {**obj["metadata"], "resourceVersion": version}}
    return json.dumps({"type": change, "object": versioned}).encode()


def test_a_pod_that_cannot_be_read_leaves_the_others_and_its_last_value() -> None:
    good, bad, late = pod_object("good"), pod_object("bad"), pod_object("late")
    api, clock = Lists(good, bad), VirtualClock(0)

    def read(obj: Object) -> Any:
        if obj["spec"].get("hostile"):
            raise ValueError("1ki")
        return read_pod(obj)

    pods: Reflector[Any, Any] = Reflector(
        api,
        POD.path(),
        dict,
        PodReducer(clock, read),
        now_ms=clock.monotonic_ms,  # type: ignore[arg-type]
    )
    pods.sync()
    hostile = [{**each, "spec": {**each["spec"], "hostile": True}} for each in (bad, late)]
    api.lines = [_line("MODIFIED", hostile[0]), _line("ADDED", hostile[1]), _line("MODIFIED", good)]
    with structlog.testing.capture_logs() as logs:
        pods.follow()
    names = lambda: sorted(pod.name for pod in pods.values().values())  # noqa: E731
    assert (names(), sorted(pods.unreadable()), pods.behind()) == (["bad", "good"], ["uid-bad", "uid-late"], None)
    assert [log["object"].partition(":")[0] for log in logs] == ["ns/bad", "ns/late"]
    api.objects, pods._version = (good, *hostile), ""  # a list that begins again
    pods.sync()
    assert (names(), sorted(pods.unreadable())) == (["bad", "good"], ["uid-bad", "uid-late"])
    api.lines = [_line("DELETED", hostile[0]), _line("MODIFIED", late)]
    pods.follow()
    assert (names(), pods.unreadable()) == (["good", "late"], {})


@pytest.mark.parametrize("listed", [False, True])
def test_a_change_that_could_not_be_processed_is_tried_again(listed: bool) -> None:
    pod = pod_object("p")
    api, processed, broken = Lists(pod), [], [True]

    def changed(uid: str, value: Any) -> None:
        if broken:
            raise ValueError("a defect")
        processed.append((uid, value.name))

    clock = VirtualClock(0)
    pods: Reflector[Any, Any] = Reflector(
        api,
        POD.path(),
        dict,
        PodReducer(clock, read_pod),
        changed,
        now_ms=clock.monotonic_ms,  # type: ignore[arg-type]
    )
    pods.sync()
    api.lines = [_line("MODIFIED", pod)]
    pods.follow()
    assert list(pods.unreadable()) == ["uid-p"], "not processed, though nothing changed since"
    broken.clear()
    if listed:
        pods._version = ""  # the list begins again
        pods.sync()
    else:
        pods.follow()
    assert (processed, pods.unreadable()) == ([("uid-p", "p")], {})


def test_an_answer_counts_as_heard_only_once_it_is_kept() -> None:
    clock = VirtualClock(0)
    api = Lists(pod_object("p"))
    pods: Reflector[Any, Any] = Reflector(api, POD.path(), dict, read_pod, now_ms=clock.monotonic_ms)  # type: ignore[arg-type]
    api.get = lambda *_, **__: b'{"metadata": {}, "items": 3}'  # type: ignore[method-assign]
    pods.prime()
    assert pods.behind() is not None


CASES = plugin_cases("fairshare", "object_cases")
POLICY = policy_of(
    [
        {"name": "a", "refs": ["fake:a"]},
        *(queue for cases in CASES.values() for queue in cases.REFS),
        {"name": "p", "refs": ["policy:p", "fake-pods:p"]},
    ],
    targets={name: {"apply": "enforce"} for name in ("fake", "fake_pods", *CASES)},
)
TENANTS: Mapping[Kind, Object] = {
    POD_GROUP: pod_group("g", requested=1),
    **{kind: obj for cases in CASES.values() for kind, obj in cases.TENANTS.items()},
    POD_GROUPS[0]: object_of(
        POD_GROUPS[0],
        "g",
        {
            "schedulingPolicy": {"gang": {"minCount": 1}},
            "disruptionMode": {"all": {}},
            "schedulingConstraints": {"topology": [{"key": "rack"}]},
        },
    ),
    POD: pod_object(
        "q", labels={"fake.scheduler/subgroup-name": "s1"}, annotations={"fake.gputally.dev/pod-group": "g"}
    ),
}
"""One object of each kind that users write."""
GOOD = (pod_object("good", "p"), fake_pod("good", "p", uid="uid-of-another", namespace="another"))
GROUPED = pod_object("grouped", "p", node="")
GROUPED["spec"]["schedulingGroup"] = {"podGroupName": "g"}
OWN: tuple[Object, ...] = (
    queue_object("a"), node_object(),
    pod_group("good", requested=2),
    *(obj for cases in CASES.values() for obj in cases.OWN),
    pod_object("good", "p"), object_of(PRIORITY_CLASS, "high"), object_of(EVENT, "e", note="", reason="Evict"),
)  # fmt: skip


class Reader:
    """Lists the given objects as an API server would that checks no schema."""

    def __init__(self, objects: Iterable[Object]) -> None:
        self.objects = tuple(objects)

    def list(self, kind: Kind, *, fields: str = "") -> Sequence[Object]:
        return [obj for obj in self.objects if (obj["apiVersion"], obj["kind"]) == (kind.api_version, kind.kind)]

    def get(self, kind: Kind, name: str, namespace: str = "") -> Object:
        raise NotFound(f"GET: 404: {kind.plural} {name!r} not found")


def _gangs_seen(objects: Iterable[Object], pods: Sequence[Pod]) -> dict[str, set[str]]:
    return {
        adapter.name: {gang.name for gang in look_at(adapter, POLICY, Reader(objects), pods).gangs}
        for adapter in adapters()
        if adapter.name != "runai"
    }


@pytest.mark.parametrize(
    ("target", "bad"),
    [
        ("fake", pod_group("bad", least="many", requested=1)),
        *((name, cases.UNREADABLE) for name, cases in CASES.items()),
    ],
    ids=("fake", *CASES),
)
def test_a_workload_that_cannot_be_read_is_named_and_the_others_count(target: str, bad: Object) -> None:
    (adapter,) = (each for each in adapters() if each.name == target)
    found = look_at(adapter, POLICY, MemoryCluster(KINDS, [*OWN, bad]))
    assert [gang.name for gang in found.gangs] == ["good"]
    read = condition(found, "Readable")
    assert (read.status, read.reason) == ("False", "ObjectsLeftOut")
    assert "ns/bad" in read.message


@pytest.mark.parametrize("bad", [obj for cases in CASES.values() for obj in cases.HUGE])
def test_deep_and_huge_objects_end_no_cycle(accountant: Accountant, controller_of: Make, bad: Object) -> None:
    accountant.spend(a=1.0)
    cluster = MemoryCluster(KINDS, [*OWN, bad])
    report = controller_of(POLICY, cluster, pods=tuple).cycle()
    assert {target.target: dict(target.degraded) for target in report.targets if "Defect" in target.degraded} == {}
    assert weights_in(cluster)["a"] is not None


def test_a_defect_at_one_target_stops_no_other(accountant: Accountant, controller_of: Make) -> None:
    class Broken(MemoryCluster):
        def list(self, kind: Kind, *, fields: str = "") -> Any:
            return [{}] if kind == QUEUE else super().list(kind, fields=fields)

    accountant.spend(a=1.0)
    report = controller_of(POLICY, Broken(KINDS, OWN)).cycle()
    found = conditions_of(report)
    assert found["fake.Available"] == ("False", "Defect")
    assert {found[f"{target}.Available"][0] for target in ("fake-pods", *CASES)} == {"True"}


def test_pods_that_cannot_be_read_are_a_condition(accountant: Accountant, controller_of: Make) -> None:
    accountant.spend(a=1.0)
    texts: list[str] = ["ns/p: ValueError: 1ki"]
    controller = controller_of(POLICY, MemoryCluster(KINDS, OWN), unreadable=lambda: texts)
    assert conditions_of(controller.cycle())["PodsRead"] == ("False", "PodsUnreadable")
    texts.clear()
    assert "PodsRead" not in conditions_of(controller.cycle())


class Unchecked(MemoryCluster):
    """A cluster that lists these objects too, whatever their form."""

    bad: Sequence[Object] = ()

    def list(self, kind: Kind, *, fields: str = "") -> Any:
        of_kind = (kind.api_version, kind.kind)
        return [*super().list(kind, fields=fields), *(o for o in self.bad if (o["apiVersion"], o["kind"]) == of_kind)]


def _malformed(field: str, value: Any) -> list[Object]:
    """Return an object of each kind that has this value in a field of its metadata."""
    first = {(obj["apiVersion"], obj["kind"]): obj for obj in (*TENANTS.values(), *OWN) if obj["kind"] != "Pod"}
    bad = [copy.deepcopy(obj) for obj in first.values()]
    for obj in bad:
        obj["metadata"] |= {"name": "bad", "uid": "uid-bad", field: value}
    return bad


@pytest.mark.parametrize("field", ["annotations", "labels", "ownerReferences", "creationTimestamp", "managedFields"])
@pytest.mark.parametrize("value", [[], "x", 3, [{}], {"k": 3}, {PREEMPTION: {}}], ids=str)
def test_metadata_without_its_form_stops_nothing(
    field: str, value: Any, accountant: Accountant, controller_of: Make
) -> None:
    accountant.spend(a=1.0)
    cluster = Unchecked(KINDS, OWN)
    cluster.bad = _malformed(field, value)
    report = controller_of(POLICY, cluster, status_object=StatusObject("gputally", "gputally-fairshare")).cycle()
    assert [target.target for target in report.targets if "Defect" in target.degraded] == []
    assert finish_all(cluster, 0).faults == ()
    assert [each.detail for each in release_weights(POLICY, cluster) if each.result == "failed"] == []


TEXTS = st.sampled_from(["", "1ki", "1e308", "٣", "-1", "ns/good", "good", "a", "9" * 5000, "\x00\u202e", "\ud7ff"])
LEAVES = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.floats(), TEXTS, st.text(max_size=8)
)  # fmt: skip
JSON = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)  # fmt: skip


def _of_its_type(value: Any) -> st.SearchStrategy[Any]:
    """Return other values of the type that the API server's schema lets a user write into a pod."""
    if isinstance(value, str):
        return TEXTS | st.text(max_size=8)
    if isinstance(value, int):
        return st.integers(-(2**31), 2**31 - 1)
    return st.sampled_from(([], value * 3) if isinstance(value, list) else ({}, value))


def _places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Return the path of every part of an object that its owner writes."""
    if path and path[0] not in ("apiVersion", "kind") and path not in (("metadata",), *IDENTITY):
        yield path
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in children:
        yield from _places(child, (*path, key))


IDENTITY = (("metadata", "name"), ("metadata", "namespace"), ("metadata", "uid"))


@settings(max_examples=examples(100, 1000))
@given(st.data())
def test_whatever_a_user_writes_no_reading_ends_and_all_others_count(data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from(list(TENANTS)))
    hostile = copy.deepcopy(TENANTS[kind])
    for _ in range(data.draw(st.integers(1, 3))):
        path = data.draw(st.sampled_from(list(_places(hostile))))
        at = hostile
        for key in path[:-1]:
            at = at[key]
        at[path[-1]] = data.draw(_of_its_type(at[path[-1]]) if kind == POD else JSON)
    pods: Reflector[Any, Any] = Reflector(
        Lists(*([hostile] if kind == POD else ()), *GOOD, GROUPED),  # type: ignore[arg-type]
        POD.path(), dict, PodReducer(VirtualClock(0)), now_ms=lambda: 0,
    )  # fmt: skip
    pods.sync()
    objects = OWN if kind == POD else (*OWN, hostile)
    names = _gangs_seen(objects, tuple(pods.values().values()))
    assert all("good" in found for found in names.values()), names


@pytest.mark.parametrize("text", ["9" * 5000, "٣", "-1", "1ki", ""])
def test_a_label_of_a_node_that_is_no_amount_of_memory_stops_no_scheduler(
    text: str, accountant: Accountant, controller_of: Make
) -> None:
    accountant.spend(a=1.0)
    labelled = node_object("n1", labels={"nvidia.com/gpu.product": "H100", "nvidia.com/gpu.memory": text})
    report = controller_of(POLICY, MemoryCluster(KINDS, [*OWN, labelled])).cycle()
    assert not [target.target for target in report.targets if "Defect" in target.degraded]
