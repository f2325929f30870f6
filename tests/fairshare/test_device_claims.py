"""GPUs that pods have by ResourceClaims count, in every version of the API and in whatever order objects arrive."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fairshare.controller.claimed_pods import ClaimedPods
from fairshare.controller.kube_scheduler_extender import Extender, ExtenderView
from fairshare.controller.pod_index import PodIndex
from fairshare.core.device_claims import CLAIMS, CLASSES, TEMPLATES, VERSIONS, read_claim, read_class, read_template
from fairshare.core.gpu_demand import read_claiming
from gputally.base.clock import VirtualClock
from gputally.base.errors import NotFound
from gputally.kubernetes.objects import Object
from tests.fairshare.builders import object_of, pod_object
from tests.fairshare.conftest import NOW_MS
from tests.hypothesis_examples import examples

GPU_CLASS = "gpu.nvidia.com"


def _request(version: str, count: int = 1, *, of: str = GPU_CLASS, **more: Any) -> dict[str, Any]:
    """A request in the form of a version of the API."""
    wanted = {"deviceClassName": of, "allocationMode": "ExactCount", "count": count, **more}
    return {"name": "r", **wanted} if version == "v1beta1" else {"name": "r", "exactly": wanted}


def _claim(name: str, *requests: Any, on: str = "", devices: tuple[str, ...] = (), version: str = "v1") -> Object:
    """A claim, which has these devices of a node if one is given."""
    kind = next(kind for kind in CLAIMS if kind.api_version.endswith(f"/{version}"))
    term = {"matchFields": [{"key": "metadata.name", "operator": "In", "values": [on]}]}
    results = [{"request": "r", "driver": GPU_CLASS, "pool": on, "device": device} for device in devices]
    allocation = {"devices": {"results": results}, "nodeSelector": {"nodeSelectorTerms": [term]}}
    spec = {"devices": {"requests": list(requests) or [_request(version)]}}
    return object_of(kind, name, spec, {"allocation": allocation} if on else {}, uid=f"claim-{name}")


def _template(name: str, *requests: Any, version: str = "v1") -> Object:
    kind = next(kind for kind in TEMPLATES if kind.api_version.endswith(f"/{version}"))
    return object_of(kind, name, {"spec": {"devices": {"requests": list(requests)}}}, uid=f"template-{name}")


def _pod(name: str, *, claim: str = "", template: str = "", made: str = "", node: str = "") -> Object:
    pod = pod_object(name, gpus=0, node=node)
    named = {"resourceClaimName": claim} if claim else {"resourceClaimTemplateName": template}
    pod["spec"]["resourceClaims"] = [{"name": "gpus", **named}]
    if made:
        pod["status"]["resourceClaimStatuses"] = [{"name": "gpus", "resourceClaimName": made}]
    return pod


class Fed:
    """The pods of a cluster as the index has them, after objects have arrived."""

    def __init__(self, *objects: Object) -> None:
        self.index = PodIndex()
        self.pods = ClaimedPods(self.index.change)
        for obj in objects:
            self.put(obj)

    def put(self, obj: Object, *, gone: bool = False) -> None:
        feed: dict[str, tuple[Callable[[str, Any], None], Callable[[Object], Any]]] = {
            "Pod": (self.pods.pod_changed, read_claiming),
            "ResourceClaim": (self.pods.claim_changed, read_claim),
            "ResourceClaimTemplate": (self.pods.template_changed, read_template),
            "DeviceClass": (self.pods.class_changed, read_class),
        }
        changed, read = feed[obj["kind"]]
        changed(obj["metadata"]["uid"], None if gone else read(obj))

    def held(self) -> dict[str, tuple[float, str, bool]]:
        return {pod.name: (pod.gpus, pod.node, pod.held) for pod in self.index.pods()}


@pytest.mark.parametrize("version", VERSIONS)
def test_requests_count_before_the_allocation_and_devices_after_it(version: str) -> None:
    named, template = (
        _claim("c", _request(version, 2), version=version),
        _template("t", _request(version, 3), version=version),
    )
    fed = Fed(named, template, _pod("a", claim="c"), _pod("b", template="t"))
    assert fed.held() == {"a": (2.0, "", False), "b": (3.0, "", False)}
    fed.put(_claim("c", _request(version, 2), on="n1", devices=("gpu-0", "gpu-1"), version=version))
    made = _claim("b-made", _request(version, 3), on="n1", devices=("gpu-2", "gpu-3", "gpu-4"), version=version)
    fed.put(made)
    fed.put(_pod("b", template="t", made="b-made"))
    assert fed.held() == {"a": (2.0, "n1", True), "b": (3.0, "n1", True)}
    assert len(fed.index.on_node("n1").pods) == 2
    fed.put(_pod("b", template="t", made="b-made"), gone=True)
    assert fed.held() == {"a": (2.0, "n1", True)}


@pytest.mark.parametrize("version", VERSIONS)
def test_alternatives_monitors_and_other_devices(version: str) -> None:
    several = {"name": "r", "firstAvailable": [{"name": "x", "deviceClassName": GPU_CLASS, "count": 4}, {"name": "y"}]}
    requests = {
        "alternatives": several,
        "all": _request(version, allocationMode="All"),
        "monitor": _request(version, adminAccess=True),
        "network": _request(version, 2, of="nic.example.com"),
        "instance": _request(version, 2, of="mig.nvidia.com"),
    }
    claims = [_claim(name, request, version=version) for name, request in requests.items()]
    pods = [_pod(name, claim=name) for name in requests]
    found = {name: gpus for name, (gpus, _, _) in Fed(*claims, *pods).held().items()}
    assert found == {"alternatives": 4.0, "all": 1.0, "monitor": 0.0, "network": 0.0, "instance": 2.0}


@pytest.mark.parametrize(
    ("spec", "counts"),
    [
        ({"selectors": [{"cel": {"expression": "device.driver == 'gpu.nvidia.com' && device.x"}}]}, 1.0),
        ({"selectors": [{"cel": {"expression": 'device.driver == "nic.example.com"'}}]}, 0.0),
        ({"extendedResourceName": "nvidia.com/gpu"}, 1.0),
        ({}, 0.0),
    ],
)
def test_a_class_is_one_of_gpus_by_its_driver_or_its_extended_resource(spec: dict[str, Any], counts: float) -> None:
    own = object_of(CLASSES[0], "fast", spec, uid="class")
    claim, pod = _claim("c", _request("v1", of="fast")), _pod("a", claim="c")
    fed = Fed(own, claim, pod)
    assert fed.held()["a"][0] == counts
    fed.put(own, gone=True)
    assert fed.held()["a"][0] == 0.0


def test_what_is_shared_counts_in_equal_parts() -> None:
    """Two pods have one claim; two claims have one device."""
    whole = _claim("one", on="n1", devices=("gpu-0",))
    parts = [_claim(name, on="n1", devices=("gpu-1",)) for name in ("left", "right")]
    fed = Fed(whole, *parts, *(_pod(name, claim="one", node="n1") for name in "ab"))
    fed.put(_pod("c", claim="left", node="n1"))
    assert {name: gpus for name, (gpus, _, _) in fed.held().items()} == {"a": 0.5, "b": 0.5, "c": 0.5}
    fed.put(_pod("b", claim="one", node="n1"), gone=True)
    fed.put(parts[1], gone=True)
    assert {name: gpus for name, (gpus, _, _) in fed.held().items()} == {"a": 1.0, "c": 1.0}


OF_DRIVER = "device.driver == 'gpu.nvidia.com'"
OBJECTS = (
    object_of(CLASSES[0], GPU_CLASS, {"selectors": [{"cel": {"expression": OF_DRIVER}}]}, uid="class"),
    _claim("one", on="n1", devices=("gpu-0", "gpu-1")), _claim("two", on="n2", devices=("gpu-0",)),
    _claim("half", on="n1", devices=("gpu-1",)), _template("t", _request("v1", 2)),
    _pod("a", claim="one"), _pod("b", claim="one", node="n1"), _pod("c", template="t"),
    _pod("d", template="t", made="two"), _pod("e", claim="half"),
)  # fmt: skip


@given(st.permutations(OBJECTS), st.lists(st.sampled_from(OBJECTS), max_size=6))
@settings(max_examples=examples(30, 1000), deadline=None)
def test_the_order_in_which_objects_arrive_does_not_matter(order: list[Object], leave: list[Object]) -> None:
    """Objects that leave and return leave nothing behind."""
    fed = Fed(*order)
    for obj in leave:
        fed.put(obj, gone=True)
    for obj in leave:
        fed.put(obj)
    assert fed.held() == Fed(*OBJECTS).held()


def test_the_extender_places_a_pod_with_a_claim_and_counts_those_that_run() -> None:
    """n1 has one of four GPUs left, n2 all of them: best fit is n1."""
    claims = [_claim(f"c{n}", on="n1", devices=(f"gpu-{n}",)) for n in range(3)]
    running = [_pod(f"p{n}", claim=f"c{n}", node="n1") for n in range(3)]
    asking = _pod("new", claim="free")
    fed = Fed(*claims, *running, _claim("free"), asking)
    view = ExtenderView({"n1": 4.0, "n2": 4.0}, fed.index)
    extender = Extender(lambda: view, VirtualClock(NOW_MS), with_claims=fed.pods.with_claims)
    body = json.dumps({"Pod": asking, "NodeNames": ["n1", "n2"]}).encode()
    scores = {each.host: each.score for each in extender.prioritize(body).body}
    assert scores["n1"] > scores["n2"] > 0


class OneVersion:
    """An API server that serves one version of the group."""

    def __init__(self, version: str, objects: tuple[Object, ...]) -> None:
        self._version = version
        self._objects = objects

    def get(self, path: str, *_: object, **__: object) -> bytes:
        if f"/{self._version}/" not in path:
            raise NotFound(f"GET {path}: 404")
        plural = path.rpartition("/")[2]
        kinds = {kind.kind for kinds in (CLAIMS, TEMPLATES, CLASSES) for kind in kinds if kind.plural == plural}
        items = [obj for obj in self._objects if obj["kind"] in kinds]
        return json.dumps({"metadata": {"resourceVersion": "1"}, "items": items}).encode()

    def watch(self, *_: object, **__: object) -> Iterator[bytes]:
        return iter(())


@pytest.mark.parametrize("version", VERSIONS)
def test_the_version_that_the_server_has_is_found(version: str) -> None:
    index = PodIndex()
    pods = ClaimedPods(index.change)
    api = OneVersion(version, (_claim("c", _request(version, 2), version=version),))
    for each in pods.reflectors(api, lambda: 0):  # type: ignore[arg-type]
        each.prime()
        assert each.behind() is None
    pods.pod_changed("uid-a", read_claiming(_pod("a", claim="c")))
    assert [pod.gpus for pod in index.pods()] == [2.0]


def test_a_hostile_claim_stops_itself_alone() -> None:
    """Whoever may create claims writes their names and counts; the API server checks neither more than its schema."""
    hostile = _claim("bad", {"name": "r", "exactly": {"deviceClassName": GPU_CLASS, "count": 10**30}})
    fed = Fed(hostile, _claim("good"), _pod("a", claim="bad"), _pod("b", claim="good"), _pod("c", claim="missing"))
    assert {name: gpus for name, (gpus, _, _) in fed.held().items()} == {"a": 32.0, "b": 1.0, "c": 0.0}


def test_a_claim_counts_for_pods_of_its_own_namespace_alone() -> None:
    elsewhere = _claim("c", on="n1", devices=("gpu-0", "gpu-1"))
    elsewhere["metadata"]["namespace"] = "other"
    assert Fed(elsewhere, _pod("a", claim="c")).held() == {"a": (0.0, "", False)}
