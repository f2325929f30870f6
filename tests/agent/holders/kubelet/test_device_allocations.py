"""Holders of devices: device names, the kubelet's list joined with the pods, claims, reservations."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.core.readings import Allocation
from agent.holders.kubelet.device_allocations import (
    CLAIMS_PATH,
    HOLDS_MS,
    SLICES_PATHS,
    DeviceNames,
    DeviceRef,
    NodeAllocations,
    PublishedDevice,
    ResourceClaims,
    SliceStore,
    like_a_gpu,
)
from agent.holders.kubelet.kubelet_pod_resources import (
    ClaimedDevice,
    ContainerResources,
    PodResources,
)
from agent.holders.kubelet.kubernetes_api_objects import ClaimResult, PodView
from agent.holders.kubelet.lean_list_watch import ApiServer, LeanReflector
from agent.holders.reserved_gpus import declared_ppm, replace_reservations
from agent.wire import Holder
from gputally.base.clock import SystemClock, VirtualClock
from tests.agent.holders.kubelet.kubelet_lists import (
    FAKE,
    FORGED,
    GPUS,
    MEMORY_MIB,
    A,
    B,
    box,
    given_pod,
    join,
    offered,
)
from tests.agent.holders.kubelet.pods import Following, view
from tests.agent.sample_values import UID, gpu, pod, uuid
from tests.deadlines import until
from tests.fakes.apiserver.server import FakeApiServer
from tests.hypothesis_examples import examples

B1, B2, B3 = (uuid(16 + i, "MIG") for i in (1, 2, 3))
NAMED = [gpu(0), gpu(1, "1g.18gb", "1g.18gb", "3g.71gb")]
NAMES = DeviceNames(NAMED)
CONTAINER = "nvidia.com/container.main.gpu-memory"


@pytest.mark.parametrize(("name", "place"), [
    (A, DeviceRef(A)),
    (f"{A}::0", DeviceRef(A, replica="0")),
    (f"{A}::12", DeviceRef(A, replica="12")),
    (B1, DeviceRef(B, B1)),
    (f"{B1}::3", DeviceRef(B, B1, "3")),
    (f"MIG-{B}/2/0", DeviceRef(B, B2)),
    (f"MIG-{B}/2/0::1", DeviceRef(B, B2, "1")),
    ("nvidia0", DeviceRef(A)),
    ("nvidia0/vgpu2", DeviceRef(A, replica="2")),
    ("nvidia1/gi3", DeviceRef(B, B3)),
    ("nvidia1/gi3/vgpu1", DeviceRef(B, B3, "1")),
])  # fmt: skip
def test_a_device_plugins_id_points_to_its_device(name: str, place: DeviceRef) -> None:
    assert NAMES.find(name) == place
    assert like_a_gpu(name)


@pytest.mark.parametrize(
    "name",
    ["", "::1", "GPU-", uuid(9), f"{uuid(9)}::1", f"MIG-{B}/9/0", f"MIG-{A}/1/0", f"MIG-{uuid(9)}/1/0", "nvidia7",
     "nvidia0/gi1", "nvidia1/gi9/vgpu0", "nvidiactl", "mlx5_0", f"{A}::", f"{A}::x", f"{A}-x", f" {A}", f"{A}\n"],
)  # fmt: skip
def test_what_names_no_device_of_this_node_points_nowhere(name: str) -> None:
    assert NAMES.find(name) is None


@pytest.mark.parametrize(("name", "place"), [
    ("gpu-0", DeviceRef(A)),
    ("gpu-1-mig-3g71gb-9-4", DeviceRef(B, B3)),
    ("gpu-1-mig-3g.71gb-9-4", DeviceRef(B, B3)),
    ("gpu-1-mig-1g18gb-19-0", None),   # two of that profile, whose placements are unknown
    ("gpu-1-mig-7g141gb-0-0", None),
    ("gpu-5", None),
    ("gpu-x", None),
    ("", None),
])  # fmt: skip
def test_a_device_of_the_dra_driver(name: str, place: DeviceRef | None) -> None:
    assert NAMES.find_claimed("node-1", name) == place


def test_a_published_uuid_comes_before_what_the_name_says() -> None:
    uuids = {"gpu-1-mig-9-0-4": B3, "gpu-0": B, "gpu-7": uuid(9), "gpu-1": uuid(9)}
    claimable = {("node-1", name): PublishedDevice(own, {}) for name, own in uuids.items()}
    names = DeviceNames(NAMED, claimable)
    assert names.find_claimed("node-1", "gpu-1-mig-9-0-4") == DeviceRef(B, B3)
    assert names.find_claimed("node-1", "gpu-0") == DeviceRef(B)
    assert names.find_claimed("node-2", "gpu-0") == DeviceRef(A)
    assert names.find_claimed("node-1", "gpu-7") is None
    assert names.find_claimed("node-1", "gpu-1") is None, "the GPU with this minor number is another one"


@pytest.mark.parametrize(("minors", "found"), [
    ((None,), (A, None)),
    ((1, None), (B, A)),  # the index is no minor number
    ((None, None), (None, None)),  # reported, not guessed
    ((1, 0), (B, A)),
])  # fmt: skip
def test_a_minor_number_that_was_not_read_is_the_only_one_left_or_unknown(
    minors: tuple[int | None, ...], found: tuple[str | None, ...]
) -> None:
    names = DeviceNames([replace(gpu(index), minor=minor) for index, minor in enumerate(minors)])
    refs = [names.find("nvidia0"), names.find("nvidia1")]
    assert refs == [DeviceRef(uuid) if uuid else None for uuid in found]


def test_other_plugins_devices_are_not_taken_for_gpus() -> None:
    assert not any(like_a_gpu(name) for name in ("mlx5_0", "rdma-1", "/dev/fuse", "0000:1a:00.0", ""))


@given(st.one_of(st.text(), st.from_regex(r"(MIG-|GPU-|nvidia|gpu-)[0-9a-z:/.+-]{0,40}", fullmatch=True)))
def test_no_name_makes_it_fail(name: str) -> None:
    for place in (NAMES.find(name), NAMES.find_claimed("node-1", name)):
        assert place is None or place.gpu_uuid in (A, B)
    like_a_gpu(name)


# --- the kubelet's list and the pods of the API server ---------------------------------------------


def claiming(*devices: str, claim: str = "c", driver: str = "gpu.nvidia.com") -> ContainerResources:
    claimed = tuple(ClaimedDevice("vision", claim, driver, "node-1", device) for device in devices)
    return ContainerResources("main", claimed=claimed)


def held(holding: NodeAllocations) -> list[tuple[str, str, str, str]]:
    return [(a.gpu_uuid, a.mig_uuid, a.holder.name, a.holder.container) for a in holding.allocations]


def shares(found: Iterable[Allocation]) -> list[tuple[str, str | None, int | None]]:
    return [(a.holder.name, a.sharing, a.fraction_ppm) for a in found]


def test_a_whole_gpu_is_held_under_the_name_of_the_api_server() -> None:
    holding = join([given_pod("train-0", box("main", A))], [view()])
    holder = Holder("pod", UID, "vision", "train-0", "main")
    assert holding == NodeAllocations((Allocation(A, holder),))


def test_without_the_api_server_the_log_folder_knows_the_uid_and_else_the_name_stands_for_it() -> None:
    pods = [given_pod("train-0", box("main", A)), given_pod("train-1", box("main", B))]
    found = join(pods, uids={("vision", "train-0"): "uid-0"})
    assert [a.holder.uid for a in found.allocations] == ["uid-0", "vision/train-1"]


def test_a_pod_that_ended_holds_nothing_though_an_old_kubelet_lists_it() -> None:
    assert join([given_pod("train-0", box("main", A))], [view(phase="Succeeded")]) == NodeAllocations(())


@pytest.mark.parametrize(("containers", "expected"), [
    # The init container's device is given on to the main one; a sidecar has none.
    ((box("init", A), box("main", A), box("sidecar", resource="cpu")), [(A, "init")]),
    ((box("a", A), box("b", B)), [(A, "a"), (B, "b")]),
    ((box("a", A, B),), [(A, "a"), (B, "a")]),
], ids=["handed on", "two containers", "one container"])  # fmt: skip
def test_a_device_counts_once_per_pod(
    containers: tuple[ContainerResources, ...], expected: list[tuple[str, str]]
) -> None:
    found = held(join([given_pod("train-0", *containers)]))
    assert found == [(uuid, "", "train-0", container) for uuid, container in expected]


def test_replicas_are_parts_of_what_the_kubelet_offers() -> None:
    ids = [f"{A}::{k}" for k in range(4)]
    pods = [
        given_pod("p0", box("main", ids[0], ids[1], resource="nvidia.com/gpu.shared")),
        given_pod("p1", box("m", ids[3])),
    ]
    found = join(pods, offered=offered(*ids, *ids, B)).allocations
    assert [(a.sharing, a.sharing_replicas, a.replicas) for a in found] == [
        ("time-slicing", 4, 2),
        ("time-slicing", 4, 1),
    ]
    mps = join(pods, offered=offered(*ids), replica_mode="mps").allocations
    assert {a.sharing for a in mps} == {"mps"}
    assert {a.sharing_replicas for a in join(pods).allocations} == {0}


def test_instances_and_their_replicas() -> None:
    one, three = (m.uuid for m in GPUS[2].mig)
    pods = [
        given_pod("p0", box("main", one, resource="nvidia.com/mig-1g.18gb")),
        given_pod("p1", box("main", f"{three}::0")),
        given_pod("p2", box("main", f"MIG-{uuid(2)}/2/0::1")),
    ]
    found = join(pods, offered=offered(f"{three}::0", f"{three}::1")).allocations
    assert [(a.mig_uuid, a.sharing_replicas) for a in found] == [(one, 0), (three, 2), (three, 2)]


def test_an_id_for_a_gpu_that_is_not_here_is_reported_and_other_devices_are_not() -> None:
    holding = join([given_pod("p0", box("main", uuid(9), A), box("net", "mlx5_0", resource="rdma/hca"))])
    assert (held(holding), holding.unresolved) == ([(A, "", "p0", "main")], (uuid(9),))


def test_claimed_devices_are_shared_where_several_pods_name_them() -> None:
    def claimed(*devices: str) -> NodeAllocations:
        return join([given_pod(f"p{number}", claiming(device)) for number, device in enumerate(devices)])

    assert [(a.gpu_uuid, a.sharing) for a in claimed("gpu-0").allocations] == [(A, None)]
    several = claimed("gpu-0", "gpu-0", "gpu-1").allocations
    assert [(a.gpu_uuid, a.sharing) for a in several] == [(A, "dra"), (A, "dra"), (B, None)]
    mig = claimed("gpu-2-mig-3g71gb-9-4", "gpu-9")
    assert [a.mig_uuid for a in mig.allocations] == [GPUS[2].mig[1].uuid]
    assert mig.unresolved == ("gpu-9",)
    assert join([given_pod("p0", claiming("dev-0", driver="net.example"))]) == NodeAllocations(())


# --- reservations and virtual devices -------------------------------------------------------------


def reservation() -> PodView:
    """The pod that holds a GPU for those that share it."""
    labels = {"fake.gputally.dev/gpu-group": "g1"}
    return view(namespace="fake-reservations", name="gpu-reservation-1", uid="r", labels=labels)


STAND_IN = Allocation(A, Holder("pod", uid="r", namespace="fake-reservations", name="x"))
RESERVED = given_pod("gpu-reservation-1", box("main", A), namespace="fake-reservations")


def sharer(name: str, fraction: str = "", **more: object) -> PodView:
    annotations = {"fake.gputally.dev/fraction": fraction} if fraction else {}
    fields: dict[str, object] = {"labels": {"fake.gputally.dev/gpu-group": "g1"}, "annotations": annotations, **more}
    return view(name=name, uid=name, gpus=0, **fields)


def reserved(*views: PodView, **node: object) -> NodeAllocations:
    return join([RESERVED], [reservation(), *views], **node)


def test_the_pods_that_share_a_gpu_hold_it_and_not_the_one_that_reserves_it() -> None:
    found = reserved(sharer("half", "0.5"), sharer("quarter", "0.25"), sharer("over", "0.5", phase="Failed"))
    assert shares(found.allocations) == [("half", "fraction", 500_000), ("quarter", "fraction", 250_000)]
    assert {a.gpu_uuid for a in found.allocations} == {A}


def test_a_part_declared_in_memory_is_a_fraction_of_the_memory() -> None:
    (found,) = reserved(sharer("p", annotations={"fake.gputally.dev/memory": str(MEMORY_MIB // 2)})).allocations
    assert found.fraction_ppm == 499_996  # 71885 of 143771 MiB
    (odd,) = reserved(sharer("p", "much")).allocations
    assert odd.fraction_ppm is None


@pytest.mark.parametrize(("annotations", "ppm"), [
    ({f"{CONTAINER}.request": f"{MEMORY_MIB // 2}Mi"}, 499_996),
    ({f"{CONTAINER}.limit": f"{MEMORY_MIB // 2}Mi"}, 499_996),
    ({f"{CONTAINER}.request": f"{MEMORY_MIB // 4}Mi", f"{CONTAINER}.limit": f"{MEMORY_MIB}Mi"}, 249_994),
    ({f"{CONTAINER}.request": "1Mi", "fake.gputally.dev/fraction": "0.5"}, 500_000),
    ({f"{CONTAINER}.request": f"{MEMORY_MIB // 2}Mi", "fake.gputally.dev/fraction": "0.01"}, 499_996),
    ({f"{CONTAINER}.request": "1Mi", "fake.gputally.dev/memory": str(MEMORY_MIB // 2)}, 499_996),
    ({f"{CONTAINER}.request": "half"}, None),
], ids=["request", "limit", "request below limit", "a larger part", "a smaller part", "more", "no size"])  # fmt: skip
def test_memory_requested_for_a_container_is_a_part_of_the_gpu(annotations: dict[str, str], ppm: int | None) -> None:
    """Whichever of a pod's declarations the scheduler's version reads, the pod gets no smaller part by the other."""
    (found,) = reserved(sharer("p", annotations=annotations)).allocations
    assert (found.sharing, found.fraction_ppm) == ("fraction", ppm)


def test_a_reservation_without_its_pods_still_keeps_the_gpu() -> None:
    assert held(reserved()) == [(A, "", "gpu-reservation-1", "main")]


def test_a_pod_on_several_shared_gpus() -> None:
    other = view(namespace="fake-old-reservations", name="r2", uid="r2", labels={"fake.gputally.dev/gpu-group": "g2"})
    second = given_pod("r2", box("main", B), namespace="fake-old-reservations")
    both = sharer("p", "0.5", labels={"fake.gputally.dev/gpu-group/g1": "g1", "fake.gputally.dev/gpu-group/g2": "g2"})
    found = join([RESERVED, second], [reservation(), other, both]).allocations
    assert [(a.gpu_uuid, a.holder.name) for a in found] == [(A, "p"), (B, "p")]


@pytest.mark.parametrize(("namespaces", "listed"), [
    (("fake-reservations",), [Allocation(A, pod("a"), sharing="fraction", fraction_ppm=500_000)]),
    (("fake-reservations", "fake-old-reservations"), []),
], ids=["listed by the kubelet too", "two reservations of one GPU"])  # fmt: skip
def test_a_pod_behind_reservations_counts_once(namespaces: tuple[str, ...], listed: list[Allocation]) -> None:
    stand_ins = [Allocation(A, Holder("pod", uid=name, namespace=name, name="x")) for name in namespaces]
    found = replace_reservations([*stand_ins, *listed], [(A, "", pod("a"))], {}, {A: GPUS[0]}, FAKE)
    assert shares(found) == [("a", "fraction", 500_000 if listed else None)]


@pytest.mark.parametrize(
    "systems", [frozenset(), frozenset({"fake"}), frozenset({"hami"}), frozenset({"fake", "hami"})]
)
@pytest.mark.parametrize("device", [A, f"{A}::1", GPUS[2].mig[0].uuid])
def test_annotations_take_nothing_off_what_the_kubelet_gave(systems: set[str], device: str) -> None:
    pods = [given_pod("train-0", box("main", device))]
    parts = offered(f"{A}::0", f"{A}::1")
    plain = join(pods, [view()], offered=parts, systems=systems)
    assert join(pods, [view(annotations=FORGED)], offered=parts, systems=systems) == plain
    assert len(plain.allocations) == 1


def test_a_part_declared_of_a_size_that_was_not_read_is_unknown() -> None:
    requests = {"a": {"fake.gputally.dev/memory": "20390"}}
    unsized = {A: replace(GPUS[0], memory_mib=None)}
    found = replace_reservations([STAND_IN], [(A, "", pod("a"))], requests, unsized, FAKE)
    assert shares(found) == [("a", "fraction", None)]


def test_where_it_is_not_switched_on_the_reservation_pod_holds_what_the_kubelet_gave_it() -> None:
    found = reserved(sharer("half", "0.5"), systems=frozenset())
    assert held(found) == [(A, "", "gpu-reservation-1", "main")]
    assert found.unnamed == {"fake"}


def test_where_it_is_not_switched_on_no_running_process_takes_a_reservations_place() -> None:
    found = replace_reservations([STAND_IN], [(A, "", pod("a"))], {}, {A: GPUS[0]}, frozenset())
    assert found == (STAND_IN,)


def test_a_pod_that_the_scheduler_did_not_place_joins_none_of_its_groups() -> None:
    stranger = sharer("stranger", "0.5", spec={"schedulerName": "default-scheduler"})
    found = reserved(sharer("half", "0.5"), stranger).allocations
    assert [a.holder.name for a in found] == ["half"]


request_keys = st.sampled_from(["fake.gputally.dev/fraction", "fake.gputally.dev/memory", "nvidia.com/gpucores"])


@pytest.mark.parametrize(("text", "ppm"), [
    ("0." + "3" * 40, 333_333),
    ("0" * 40 + ".5", 500_000),
    ("0.5" + " " * 40, 500_000),
    ("0.5" + " " * 40 + "x", None),
    ("0." + "5" * 40 + "x", None),
])  # fmt: skip
def test_a_long_text_is_read_to_its_end(text: str, ppm: int | None) -> None:
    assert declared_ppm(text, "", MEMORY_MIB) == ppm


@given(st.dictionaries(request_keys, st.text(max_size=12)))
def test_no_request_text_is_too_strange(requests: dict[str, str]) -> None:
    for known in ({A: GPUS[0]}, {}):
        replace_reservations([STAND_IN], [(A, "", pod("a"))], {"a": requests}, known, FAKE)


names = st.sampled_from([A, f"{A}::0", f"{A}::1", GPUS[2].mig[0].uuid, "nvidia0/vgpu1", uuid(9), "mlx5_0", f"{A}-1"])
boxes = st.builds(lambda n, ids: box(n, *ids), st.sampled_from("abc"), st.lists(names, max_size=4))
given_pods = st.lists(
    st.builds(lambda n, c: given_pod(n, *c), st.sampled_from(["p0", "p1"]), st.lists(boxes)), max_size=3
)
fraction_texts = st.sampled_from(["", "0.5", "-1", "2", "NaN", "Infinity", "1e-30", "x" * 40, "1E+400000000"])
hami_texts = st.one_of(
    st.text(max_size=40), st.from_regex(r"(GPU-[0-9a-f]{2},NVIDIA,\d+,\d+[:;]){1,3}", fullmatch=True)
)


@settings(max_examples=examples(50, 300))
@given(given_pods, fraction_texts, fraction_texts, hami_texts)
def test_whatever_is_said_nobody_holds_what_is_not_there(
    pods: list[PodResources], fraction: str, memory: str, hami: str
) -> None:
    annotations = {
        "fake.gputally.dev/fraction": fraction,
        "fake.gputally.dev/memory": memory,
        "hami.io/vgpu-devices-allocated": hami,
    }
    views = [reservation(), view(name="p0", annotations=annotations), sharer("s", annotations=annotations)]
    for allocation in join([*pods, RESERVED], views).allocations:
        assert allocation.gpu_uuid in {g.uuid for g in GPUS}
        assert allocation.fraction_ppm is None or 0 < allocation.fraction_ppm <= 1_000_000
        assert allocation.replicas >= 1


# --- ResourceClaims with admin access -------------------------------------------------------------


def claim_object(name: str, *results: dict[str, Any]) -> dict[str, Any]:
    status = {"allocation": {"devices": {"results": list(results)}}}
    return {"kind": "ResourceClaim", "metadata": {"namespace": "vision", "name": name}, "status": status}


def result(device: str, admin: bool | None) -> dict[str, Any]:
    return {"request": "gpus", "driver": "gpu.nvidia.com", "pool": "node-1", "device": device, "adminAccess": admin}


@pytest.fixture
def claims(api_server: FakeApiServer, clock: VirtualClock, token: Path) -> ResourceClaims:
    return ResourceClaims(ApiServer(api_server.url, None, token), clock)


def holders(claims: ResourceClaims, *pods: PodResources) -> list[tuple[str, str, str | None]]:
    found = join(pods, claims=claims.read(pods))
    assert found.unresolved == ()
    return [(a.gpu_uuid, a.holder.name, a.sharing) for a in found.allocations]


EXPORTER = given_pod("exporter", claiming("gpu-0", claim="all"))


def test_a_monitor_holds_nothing_of_what_it_looks_at(api_server: FakeApiServer, claims: ResourceClaims) -> None:
    api_server.put(claim_object("all", result("gpu-0", True), result("gpu-1", True)))
    api_server.put(claim_object("one", result("gpu-0", None)))
    exporter = given_pod("exporter", claiming("gpu-0", "gpu-1", claim="all"))
    pods = exporter, given_pod("train", claiming("gpu-0", claim="one"))
    assert len(holders(claims, *pods)) == 3, "nothing is known of the claims yet"
    claims.step()
    assert holders(claims, *pods) == [(A, "train", None)]
    assert claims.failure == ""


def test_each_claim_is_asked_for_once_and_now_and_then(
    api_server: FakeApiServer, claims: ResourceClaims, clock: VirtualClock
) -> None:
    api_server.put(claim_object("all", result("gpu-0", True)))
    for _ in range(3):
        holders(claims, EXPORTER)
        claims.step()
    assert [path.rstrip("?") for path in api_server.requests] == [CLAIMS_PATH.format("v1", "vision", "all")]
    clock.advance(HOLDS_MS)
    api_server.refuse = 503, {}
    claims.step()
    assert "503" in claims.failure
    assert holders(claims, EXPORTER) == [], "what was known stays known"
    assert len(api_server.requests) == 2
    holders(claims)
    claims.step()
    assert (claims.failure, len(api_server.requests)) == ("", 2), "nobody names it any more"


@pytest.mark.parametrize("status", [403, 404])
def test_a_claim_that_may_not_be_read_counts_as_held_and_it_is_said(
    api_server: FakeApiServer, claims: ResourceClaims, status: int
) -> None:
    api_server.refuse = status, {}
    for _ in range(3):
        assert holders(claims, EXPORTER) == [(A, "exporter", None)]
        claims.step()
    assert len(api_server.requests) == (1 if status == 403 else 3), "once, in each version of the API that may exist"


@pytest.mark.parametrize("version", ["v1", "v1beta2", "v1beta1"])
def test_every_version_of_the_api_tells_admin_access(
    api_server: FakeApiServer, claims: ResourceClaims, version: str
) -> None:
    api_server.dra_versions = {version}
    api_server.put(claim_object("all", result("gpu-0", True), result("gpu-1", True)))
    api_server.put(claim_object("one", result("gpu-0", None)))
    pods = (
        given_pod("exporter", claiming("gpu-0", "gpu-1", claim="all")),
        given_pod("p", claiming("gpu-0", claim="one")),
    )
    claims.read(pods)
    claims.step()
    assert holders(claims, *pods) == [(A, "p", None)]
    asked = len(api_server.requests)
    claims.read(pods[:1])
    claims.read(pods)
    claims.step()
    assert len(api_server.requests) == asked, "the version is known"


@pytest.mark.parametrize("version", ["v1", "v1beta2", "v1beta1"])
def test_every_version_of_the_api_tells_the_devices(api_server: FakeApiServer, token: Path, version: str) -> None:
    api_server.dra_versions = {version}
    device: dict[str, Any] = {
        "attributes": {"uuid": {"string": A}, "driverVersion": {"version": "580.1.0"}},
        "capacity": {"memory": {"value": "80Gi"}},
    }
    described = {"name": "gpu-0", **({"basic": device} if version == "v1beta1" else device)}
    spec = {"driver": "gpu.nvidia.com", "nodeName": "node-1", "pool": {"name": "node-1"}, "devices": [described]}
    api_server.put({"kind": "ResourceSlice", "metadata": {"name": "s"}, "spec": spec})
    store = SliceStore()
    api = ApiServer(api_server.url, None, token)
    following = Following(LeanReflector(api, SLICES_PATHS, "spec.nodeName=node-1", store, SystemClock(), optional=True))
    until(lambda: following.reflector.synced, "the slices are not listed")
    api.close()
    following.end()
    assert store.devices() == {("node-1", "gpu-0"): PublishedDevice(A, {"memory": "80Gi"})}


def test_the_holders_of_a_device_are_unknown_until_its_claim_has_been_read(
    api_server: FakeApiServer, claims: ResourceClaims
) -> None:
    api_server.put(claim_object("all", result("gpu-0", True)))
    claims.read([EXPORTER])
    assert set(join([EXPORTER], claims=claims.read([EXPORTER])).unknown) == {A}
    claims.step()
    assert join([EXPORTER], claims=claims.read([EXPORTER])) == NodeAllocations(())


# --- parts of devices, by what a claim consumes ---------------------------------------------------


def consuming(pod: str, claim: str, share: str, device: str = "gpu-0") -> PodResources:
    claimed = ClaimedDevice("vision", claim, "gpu.nvidia.com", "node-1", device, share)
    return given_pod(pod, ContainerResources("main", claimed=(claimed,)))


def consumes(share: str, device: str = "gpu-0", **capacity: str | int) -> ClaimResult:
    return ClaimResult("node-1", device, share=share, consumed_capacity=capacity)


MEMORY_80 = {("node-1", "gpu-0"): PublishedDevice(A, {"memory": "80Gi", "shares": "4"})}


def parts(pods: list[PodResources], **claims: list[ClaimResult]) -> list[tuple[str, int | None]]:
    results = {("vision", name): tuple(given) for name, given in claims.items()}
    found = join(pods, claims=results, claimable=MEMORY_80)
    assert (found.unresolved, found.unknown) == ((), {})
    return sorted((a.holder.name, a.fraction_ppm) for a in found.allocations if a.sharing == "dra")


def test_a_lone_pod_with_10_of_80_gib_has_an_eighth() -> None:
    assert parts([consuming("a", "c", "s1")], c=[consumes("s1", memory="10Gi")]) == [("a", 125_000)]


def test_each_claim_has_its_part() -> None:
    pods = [consuming("a", "c", "s1"), consuming("b", "d", "s2"), consuming("c", "e", "s3")]
    results = {"c": [consumes("s1", memory="10Gi", shares=1)], "d": [consumes("s2", memory="40Gi")]}
    assert parts(pods, **results, e=[consumes("s3", memory=0, shares="1")]) == [
        ("a", 250_000), ("b", 500_000), ("c", 250_000),
    ]  # fmt: skip


def test_the_pods_of_one_claim_have_equal_parts_of_what_it_consumes() -> None:
    both = [consuming("a", "c", "s1"), consuming("b", "c", "s1")]
    assert parts(both, c=[consumes("s1", memory="20Gi")]) == [("a", 125_000), ("b", 125_000)]


def test_two_shares_of_one_pod_add_up() -> None:
    claims = (ClaimedDevice("vision", name, "gpu.nvidia.com", "node-1", "gpu-0", name) for name in ("c", "d"))
    pod = given_pod("a", ContainerResources("main", claimed=tuple(claims)))
    found = parts([pod], c=[consumes("c", memory="10Gi")], d=[consumes("d", memory="30Gi")])
    assert sum(part or 0 for _, part in found) == 500_000


def test_a_claim_that_consumes_nothing_measurable_shares_equally() -> None:
    pods = [consuming("a", "c", "s1"), consuming("b", "d", "s2")]
    assert parts(pods, c=[consumes("s1", memory="0")], d=[consumes("s2", memory="0")]) == [("a", None), ("b", None)]


def test_without_a_published_capacity_the_drivers_memory_is_the_whole() -> None:
    claims = {("vision", "c"): (consumes("s1", memory=f"{MEMORY_MIB}Mi"),)}
    assert [a.fraction_ppm for a in join([consuming("a", "c", "s1")], claims=claims).allocations] == [1_000_000]


# --- what cannot be placed ------------------------------------------------------------------------

PLACED = replace(GPUS[2], mig=tuple(
    replace(m, profile="1g.10gb", profile_id=19, start=start) for start, m in enumerate(GPUS[2].mig)
))  # fmt: skip


@pytest.mark.parametrize(("name", "instance"), [
    ("gpu-2-mig-1g10gb-19-0", 0), ("gpu-2-mig-1g10gb-19-1", 1),
    ("gpu-2-mig-19-0-1", 0), ("gpu-2-mig-19-1-1", 1),
    ("gpu-2-mig-1g10gb-me-20-0", None), ("gpu-2-mig-1g10gb-19-5", None),
])  # fmt: skip
def test_several_instances_of_one_profile_are_told_apart_by_their_placement(name: str, instance: int | None) -> None:
    ref = DeviceNames([*GPUS[:2], PLACED]).find_claimed("node-1", name)
    assert ref == (None if instance is None else DeviceRef(PLACED.uuid, PLACED.mig[instance].uuid))


C = GPUS[2].uuid


@pytest.mark.parametrize(("container", "unknown"), [
    (box("main", "nvidia2/gi9"), {C}),
    (box("main", f"{C}-_-0"), {C}),
    (box("main", f"MIG-{C}/9/0"), {C}),
    (box("main", "MIG-unknown"), {C}),  # the only GPU with instances
    (box("main", "nvidia9"), set()),  # a GPU that the driver does not list
    (box("main", uuid(9)), set()),
    (box("main", "card-0"), {A, B, C}),
    (box("main", "7", resource="nvidia.com/mig-1g.10gb"), {A, B, C}),
    (box("main", "7", resource="example.org/nic"), set()),
])  # fmt: skip
def test_the_holders_of_every_gpu_that_a_strange_name_may_mean_are_unknown(
    container: ContainerResources, unknown: set[str]
) -> None:
    assert set(join([given_pod("p", container)]).unknown) == unknown


@pytest.mark.parametrize(("device", "unknown"), [
    ("gpu-2-mig-1g18gb-19-6", set()),  # resolved: the only one of its profile
    ("gpu-2-mig-1g10gb-19-6", {C}), ("gpu-2-mig-19-6-1", {C}), ("gpu-9", set()), ("gpu-vfio-0", set()),
    ("something", {A, B, C}),
])  # fmt: skip
def test_the_holders_of_every_gpu_that_a_strange_claim_may_mean_are_unknown(device: str, unknown: set[str]) -> None:
    assert set(join([given_pod("p", claiming(device))]).unknown) == unknown
