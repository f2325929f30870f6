"""GPUs that pods have by ResourceClaims count, in every version of the API and in whatever order objects arrive."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fairshare.controller.claimed_pods import ClaimedPods
from fairshare.core.device_claims import CLAIMS, CLASSES, TEMPLATES, VERSIONS
from fairshare.core.gpu_demand import read_claiming
from fairshare.targets.pod_index import PodIndex
from gputally.base.errors import NotFound
from gputally.kubernetes.objects import Object
from tests.fairshare.builders import object_of
from tests.fairshare.claiming_pods import GPU_CLASS, Fed, claim_object, claim_template, claiming_pod, device_request
from tests.hypothesis_examples import examples


@pytest.mark.parametrize("version", VERSIONS)
def test_requests_count_before_the_allocation_and_devices_after_it(version: str) -> None:
    named, template = (
        claim_object("c", device_request(version, 2), version=version),
        claim_template("t", device_request(version, 3), version=version),
    )
    fed = Fed(named, template, claiming_pod("a", claim="c"), claiming_pod("b", template="t"))
    assert fed.held() == {"a": (2.0, "", False), "b": (3.0, "", False)}
    fed.put(claim_object("c", device_request(version, 2), on="n1", devices=("gpu-0", "gpu-1"), version=version))
    made = claim_object(
        "b-made", device_request(version, 3), on="n1", devices=("gpu-2", "gpu-3", "gpu-4"), version=version
    )
    fed.put(made)
    fed.put(claiming_pod("b", template="t", made="b-made"))
    assert fed.held() == {"a": (2.0, "n1", True), "b": (3.0, "n1", True)}
    assert len(fed.index.on_node("n1").pods) == 2
    fed.put(claiming_pod("b", template="t", made="b-made"), gone=True)
    assert fed.held() == {"a": (2.0, "n1", True)}


@pytest.mark.parametrize("version", VERSIONS)
def test_alternatives_monitors_and_other_devices(version: str) -> None:
    several = {"name": "r", "firstAvailable": [{"name": "x", "deviceClassName": GPU_CLASS, "count": 4}, {"name": "y"}]}
    requests = {
        "alternatives": several,
        "all": device_request(version, allocationMode="All"),
        "monitor": device_request(version, adminAccess=True),
        "network": device_request(version, 2, of="nic.example.com"),
        "instance": device_request(version, 2, of="mig.nvidia.com"),
    }
    claims = [claim_object(name, request, version=version) for name, request in requests.items()]
    pods = [claiming_pod(name, claim=name) for name in requests]
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
    claim, pod = claim_object("c", device_request("v1", of="fast")), claiming_pod("a", claim="c")
    fed = Fed(own, claim, pod)
    assert fed.held()["a"][0] == counts
    fed.put(own, gone=True)
    assert fed.held()["a"][0] == 0.0


def test_what_is_shared_counts_in_equal_parts() -> None:
    """Two pods have one claim; two claims have one device."""
    whole = claim_object("one", on="n1", devices=("gpu-0",))
    parts = [claim_object(name, on="n1", devices=("gpu-1",)) for name in ("left", "right")]
    fed = Fed(whole, *parts, *(claiming_pod(name, claim="one", node="n1") for name in "ab"))
    fed.put(claiming_pod("c", claim="left", node="n1"))
    assert {name: gpus for name, (gpus, _, _) in fed.held().items()} == {"a": 0.5, "b": 0.5, "c": 0.5}
    fed.put(claiming_pod("b", claim="one", node="n1"), gone=True)
    fed.put(parts[1], gone=True)
    assert {name: gpus for name, (gpus, _, _) in fed.held().items()} == {"a": 1.0, "c": 1.0}


OF_DRIVER = "device.driver == 'gpu.nvidia.com'"
OBJECTS = (
    object_of(CLASSES[0], GPU_CLASS, {"selectors": [{"cel": {"expression": OF_DRIVER}}]}, uid="class"),
    claim_object("one", on="n1", devices=("gpu-0", "gpu-1")), claim_object("two", on="n2", devices=("gpu-0",)),
    claim_object("half", on="n1", devices=("gpu-1",)), claim_template("t", device_request("v1", 2)),
    claiming_pod("a", claim="one"), claiming_pod("b", claim="one", node="n1"), claiming_pod("c", template="t"),
    claiming_pod("d", template="t", made="two"), claiming_pod("e", claim="half"),
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
    api = OneVersion(version, (claim_object("c", device_request(version, 2), version=version),))
    for each in pods.reflectors(api, lambda: 0):  # type: ignore[arg-type]
        each.prime()
        assert each.behind() is None
    pods.pod_changed("uid-a", read_claiming(claiming_pod("a", claim="c")))
    assert [pod.gpus for pod in index.pods()] == [2.0]


def test_a_hostile_claim_stops_itself_alone() -> None:
    """Whoever may create claims writes their names and counts; the API server checks neither more than its schema."""
    hostile = claim_object("bad", {"name": "r", "exactly": {"deviceClassName": GPU_CLASS, "count": 10**30}})
    fed = Fed(
        hostile,
        claim_object("good"),
        claiming_pod("a", claim="bad"),
        claiming_pod("b", claim="good"),
        claiming_pod("c", claim="missing"),
    )
    assert {name: gpus for name, (gpus, _, _) in fed.held().items()} == {"a": 32.0, "b": 1.0, "c": 0.0}


def test_a_claim_counts_for_pods_of_its_own_namespace_alone() -> None:
    elsewhere = claim_object("c", on="n1", devices=("gpu-0", "gpu-1"))
    elsewhere["metadata"]["namespace"] = "other"
    assert Fed(elsewhere, claiming_pod("a", claim="c")).held() == {"a": (0.0, "", False)}
