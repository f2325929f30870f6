"""Parts of GPUs that KAI gives out: reservations, groups and declarations, as its pods have them."""

from __future__ import annotations

from typing import Any

import pytest

from agent.holders.kubelet.kubernetes_api_objects import PodView
from tests.agent.holders.kubelet.kubelet_lists import GPUS, MEMORY_MIB, A, B, box, given_pod, join
from tests.agent.holders.kubelet.pods import view

RESERVED = given_pod("gpu-reservation-1", box("main", A), namespace="kai-resource-reservation")
KAI = frozenset({"kai"})


def of_kai(name: str, group: str = "g1", **more: Any) -> PodView:
    fields = {"labels": {"runai-gpu-group": group}, "spec": {"schedulerName": "kai-scheduler"}, **more}
    return view(name=name, uid=name, gpus=0, **fields)


def reservation() -> PodView:
    labels = {"runai-gpu-group": "g1"}
    return view(namespace="kai-resource-reservation", name="gpu-reservation-1", uid="r", labels=labels)


def test_the_pods_that_share_a_gpu_hold_it_and_not_the_one_that_reserves_it() -> None:
    views = [reservation(), *(of_kai(name, annotations={"gpu-fraction": part}) for name, part in (("half", "0.5"),))]
    found = join([RESERVED], views, systems=KAI)
    assert [(a.holder.name, a.sharing, a.fraction_ppm) for a in found.allocations] == [("half", "fraction", 500_000)]


@pytest.mark.parametrize(
    "annotations",
    [
        {"gpu-memory": str(MEMORY_MIB // 2)},
        {"nvidia.com/container.main.gpu-memory.request": f"{MEMORY_MIB // 2}Mi"},
    ],
    ids=["of the pod", "of a container"],
)
def test_a_part_declared_in_memory_is_a_fraction_of_the_memory(annotations: dict[str, str]) -> None:
    (found,) = join([RESERVED], [reservation(), of_kai("p", annotations=annotations)], systems=KAI).allocations
    assert found.fraction_ppm == 499_996


def test_a_pod_on_several_gpus_is_in_the_group_of_each() -> None:
    second = given_pod("gpu-reservation-2", box("main", B), namespace="runai-reservation")
    other = view(namespace="runai-reservation", name="gpu-reservation-2", uid="r2", labels={"runai-gpu-group": "g2"})
    labels = {"runai-gpu-group/g1": "g1", "runai-gpu-group/g2": "g2"}
    annotations = {"gpu-fraction": "0.5", "gpu-fraction-num-devices": "2"}
    both = of_kai("both", labels=labels, annotations=annotations)
    found = join([RESERVED, second], [reservation(), other, both], systems=KAI).allocations
    assert sorted((a.gpu_uuid, a.fraction_ppm) for a in found) == sorted((gpu.uuid, 500_000) for gpu in GPUS[:2])


def test_where_kai_is_not_switched_on_the_reservation_pod_holds_what_the_kubelet_gave_it() -> None:
    found = join([RESERVED], [reservation(), of_kai("half", annotations={"gpu-fraction": "0.5"})], systems=frozenset())
    assert [a.holder.name for a in found.allocations] == ["gpu-reservation-1"]
    assert found.unnamed == {"kai"}
