"""Who holds which device: the kubelet's list joined with the pods of the API server."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.core.readings import Allocation
from agent.holders.device_allocations import Node, NodeAllocations, find_holders
from agent.holders.kubelet_pod_resources import ClaimedDevice, ContainerResources, Devices, PodResources
from agent.holders.kubernetes_api_objects import PodView
from agent.wire import Holder
from tests.agent_cluster.conftest import gpu, uuid
from tests.agent_cluster.objects import UID, view
from tests.effort import examples

A, B = uuid(0), uuid(1)
GPUS = (gpu(0), gpu(1), gpu(2, "1g.18gb", "3g.71gb"))


def given_pod(name: str, *containers: ContainerResources, namespace: str = "vision") -> PodResources:
    return PodResources(namespace, name, containers)


def box(name: str, *ids: str, resource: str = "nvidia.com/gpu") -> ContainerResources:
    return ContainerResources(name, (Devices(resource, ids),))


def offered(*ids: str) -> tuple[Devices, ...]:
    return (Devices("nvidia.com/gpu", ids),)


def join(pods: Iterable[PodResources], views: Iterable[PodView] = (), **node: object) -> NodeAllocations:
    return find_holders(pods, {v.key: v for v in views}, Node(GPUS, **node))  # type: ignore[arg-type]


def held(holding: NodeAllocations) -> list[tuple[str, str, str, str]]:
    return [(a.gpu_uuid, a.mig_uuid, a.holder.name, a.holder.container) for a in holding.allocations]


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


def test_a_device_counts_once_per_pod() -> None:
    """The init container's device is given on to the main one; a sidecar has none."""
    pod = given_pod("train-0", box("init", A), box("main", A), box("sidecar", resource="cpu"))
    assert held(join([pod])) == [(A, "", "train-0", "init")]


def test_two_containers_and_two_gpus() -> None:
    pod = given_pod("train-0", box("a", A), box("b", B))
    assert held(join([pod])) == [(A, "", "train-0", "a"), (B, "", "train-0", "b")]
    assert held(join([given_pod("train-0", box("a", A, B))])) == [(A, "", "train-0", "a"), (B, "", "train-0", "a")]


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
    pod = given_pod("p0", box("main", uuid(9), A), box("net", "mlx5_0", resource="rdma/hca"))
    holding = join([pod])
    assert (held(holding), holding.unresolved) == ([(A, "", "p0", "main")], (uuid(9),))


def claim(device: str, driver: str = "gpu.nvidia.com") -> ContainerResources:
    return ContainerResources("main", claimed=(ClaimedDevice("vision", "c", driver, "node-1", device),))


def test_claimed_devices_are_shared_where_several_pods_name_them() -> None:
    found = join([given_pod("p0", claim("gpu-0"))]).allocations
    assert [(a.gpu_uuid, a.sharing) for a in found] == [(A, None)]
    two = join([given_pod("p0", claim("gpu-0")), given_pod("p1", claim("gpu-0")), given_pod("p2", claim("gpu-1"))])
    assert [(a.gpu_uuid, a.sharing) for a in two.allocations] == [(A, "dra"), (A, "dra"), (B, None)]
    mig = join([given_pod("p0", claim("gpu-2-mig-3g71gb-9-4")), given_pod("p1", claim("gpu-9"))])
    assert [a.mig_uuid for a in mig.allocations] == [GPUS[2].mig[1].uuid]
    assert mig.unresolved == ("gpu-9",)
    assert join([given_pod("p0", claim("dev-0", "net.example"))]) == NodeAllocations(())


RESERVATION = view(
    namespace="kai-resource-reservation", name="gpu-reservation-1", uid="r", labels={"runai-gpu-group": "g1"}
)
RESERVED = given_pod("gpu-reservation-1", box("main", A), namespace="kai-resource-reservation")


def sharer(name: str, fraction: str = "", **more: object) -> PodView:
    annotations = {"gpu-fraction": fraction} if fraction else {}
    fields: dict[str, object] = {"labels": {"runai-gpu-group": "g1"}, "annotations": annotations, **more}
    return view(name=name, uid=name, gpus=0, **fields)


def test_the_pods_that_share_a_gpu_hold_it_and_not_the_one_that_reserves_it() -> None:
    views = [RESERVATION, sharer("half", "0.5"), sharer("quarter", "0.25"), sharer("over", "0.5", phase="Failed")]
    found = join([RESERVED], views).allocations
    assert [(a.holder.name, a.gpu_uuid, a.sharing, a.fraction_ppm) for a in found] == [
        ("half", A, "fraction", 500_000),
        ("quarter", A, "fraction", 250_000),
    ]


def test_a_part_declared_in_memory_is_a_fraction_of_the_memory() -> None:
    by_memory = sharer("p", annotations={"gpu-memory": str(GPUS[0].memory_mib // 2)})
    (found,) = join([RESERVED], [RESERVATION, by_memory]).allocations
    assert found.fraction_ppm == 499_996  # 71885 of 143771 MiB
    (odd,) = join([RESERVED], [RESERVATION, sharer("p", "much")]).allocations
    assert odd.fraction_ppm is None


def test_a_reservation_without_its_pods_still_keeps_the_gpu() -> None:
    assert held(join([RESERVED], [RESERVATION])) == [(A, "", "gpu-reservation-1", "main")]


def test_a_pod_on_several_shared_gpus() -> None:
    other = view(namespace="runai-reservation", name="r2", uid="r2", labels={"runai-gpu-group": "g2"})
    second = given_pod("r2", box("main", B), namespace="runai-reservation")
    both = sharer("p", "0.5", labels={"runai-gpu-group/g1": "g1", "runai-gpu-group/g2": "g2"})
    found = join([RESERVED, second], [RESERVATION, other, both]).allocations
    assert [(a.gpu_uuid, a.holder.name) for a in found] == [(A, "p"), (B, "p")]


FORGED = {"hami.io/vgpu-devices-allocated": f"{B},NVIDIA,1438,1:;", "gpu-fraction": "0.01", "gpu-memory": "1"}
"""What the owner of a pod can write into it at any time."""


@pytest.mark.parametrize("systems", [frozenset(), frozenset({"kai"}), frozenset({"hami"}), frozenset({"kai", "hami"})])
@pytest.mark.parametrize("device", [A, f"{A}::1", GPUS[2].mig[0].uuid])
def test_annotations_take_nothing_off_what_the_kubelet_gave(systems: frozenset[str], device: str) -> None:
    pod = given_pod("train-0", box("main", device))
    parts = offered(f"{A}::0", f"{A}::1")
    plain = join([pod], [view()], offered=parts, systems=systems)
    forged = join([pod], [view(annotations=FORGED)], offered=parts, systems=systems)
    assert forged == plain
    assert len(plain.allocations) == 1


def limited(**limits: object) -> dict[str, object]:
    named = {f"nvidia.com/{key.replace('_', '-')}": str(value) for key, value in limits.items()}
    return {"containers": [{"name": "main", "resources": {"limits": {"nvidia.com/gpu": "1", **named}}}]}


@pytest.mark.parametrize(
    ("limits", "ppm"),
    [
        ({"gpucores": 30, "gpumem": GPUS[0].memory_mib // 5}, 300_000),
        ({"gpucores": 10, "gpumem": GPUS[0].memory_mib}, 1_000_000),  # nobody else can have the memory
        ({"gpucores": 1}, 1_000_000),  # memory without a limit is all of it
        ({"gpumem_percentage": 25}, 250_000),
        ({"gpucores": "nan", "gpumem": "much"}, 1_000_000),
    ],
)
def test_a_virtual_device_of_hami_is_the_part_that_its_limits_leave(limits: dict[str, object], ppm: int) -> None:
    """The limits of a container cannot be changed once its pod is bound; its annotations can."""
    pod = given_pod("train-0", box("main", f"{A}-3"))
    told = view(spec=limited(**limits), annotations=FORGED)
    (found,) = join([pod], [told], systems=frozenset({"hami"})).allocations
    assert (found.gpu_uuid, found.sharing, found.fraction_ppm) == (A, "fraction", ppm)


def test_where_hami_is_not_switched_on_its_devices_are_equal_parts_and_said_to_be_unread() -> None:
    pod = given_pod("train-0", box("main", f"{A}-3"))
    ids = [f"{A}-{k}" for k in range(10)]
    found = join([pod], [view(spec=limited(gpucores=1, gpumem=1))], offered=offered(*ids))
    (held,) = found.allocations
    assert (held.sharing, held.replicas, held.sharing_replicas, held.fraction_ppm) == ("time-slicing", 1, 10, None)
    assert found.unnamed == {"hami"}


def test_where_kai_is_not_switched_on_the_reservation_pod_holds_what_the_kubelet_gave_it() -> None:
    found = join([RESERVED], [RESERVATION, sharer("half", "0.5")], systems=frozenset())
    assert held(found) == [(A, "", "gpu-reservation-1", "main")]
    assert found.unnamed == {"kai"}


def test_a_pod_that_kai_did_not_place_joins_none_of_its_groups() -> None:
    stranger = sharer("stranger", "0.5", spec={"schedulerName": "default-scheduler"})
    found = join([RESERVED], [RESERVATION, sharer("half", "0.5"), stranger]).allocations
    assert [a.holder.name for a in found] == ["half"]


names = st.sampled_from([A, f"{A}::0", f"{A}::1", GPUS[2].mig[0].uuid, "nvidia0/vgpu1", uuid(9), "mlx5_0", f"{A}-1"])
boxes = st.builds(lambda n, ids: box(n, *ids), st.sampled_from("abc"), st.lists(names, max_size=4))
given_pods = st.lists(
    st.builds(lambda n, c: given_pod(n, *c), st.sampled_from(["p0", "p1"]), st.lists(boxes)), max_size=3
)
fraction_texts = st.sampled_from(["", "0.5", "-1", "2", "NaN", "Infinity", "1e-30", "x" * 40, "1E+400000000"])
hami_texts = st.one_of(
    st.text(max_size=40), st.from_regex(r"(GPU-[0-9a-f]{2},NVIDIA,\d+,\d+[:;]){1,3}", fullmatch=True)
)


@settings(max_examples=examples(50, 300), deadline=None)
@given(given_pods, fraction_texts, fraction_texts, hami_texts)
def test_whatever_is_said_nobody_holds_what_is_not_there(
    pods: list[PodResources], fraction: str, memory: str, hami: str
) -> None:
    annotations = {"gpu-fraction": fraction, "gpu-memory": memory, "hami.io/vgpu-devices-allocated": hami}
    views = [RESERVATION, view(name="p0", annotations=annotations), sharer("s", annotations=annotations)]
    for allocation in join([*pods, RESERVED], views).allocations:
        assert allocation.gpu_uuid in {g.uuid for g in GPUS}
        assert allocation.fraction_ppm is None or 0 < allocation.fraction_ppm <= 1_000_000
        assert allocation.replicas >= 1
