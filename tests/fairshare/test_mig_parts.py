"""MIG instances of one name are different parts of different GPUs: demand and capacity count them alike."""

from __future__ import annotations

from dataclasses import replace
from math import fsum

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fairshare.core.gpu_demand import gpus_taken, sized, with_pods
from fairshare.core.published_devices import SLICES, with_published
from fairshare.core.queues_and_weights import Gang
from fairshare.preemption.claims_and_placement import free_by_node, gpus_by_node
from fairshare.targets.pod_index import PodIndex
from fairshare.targets.weight_plan import look_at
from gputally.base.mig_profiles import compute_slices, mig_sizes
from gputally.kubernetes.memory_cluster import MemoryCluster
from gputally.kubernetes.mig_parts import MigParts
from gputally.kubernetes.objects import Object, gpus, gpus_of_node, slices_of_node
from gputally.testing.fake_scheduler import POD_GROUP
from tests.fairshare.builders import object_of, policy_of
from tests.fairshare.mig_nodes import BOTH, NVL, PRO_5000, PRO_6000, mig_pod, node
from tests.fairshare.scheduler_kinds import KINDS
from tests.plugin_cases import plugin_cases

MEMORY_GB = {
    NVL: 94, PRO_6000: 96, PRO_5000: 48, "NVIDIA-A30": 24, "NVIDIA-A100-SXM4-80GB": 80, "NVIDIA-H200": 141,
    "NVIDIA-B200": 180, "NVIDIA-RTX-PRO-4500-Blackwell": 32,
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "profile", "part"),
    [("nvl", "1g.24gb", 1 / 7), ("pro", "1g.24gb", 1 / 4), ("pro", "2g.48gb", 1 / 2), ("small", "2g.48gb", 1)],
)
def test_an_instance_is_the_part_of_the_gpu_of_its_node_in_demand_and_capacity(
    name: str, profile: str, part: float
) -> None:
    placed = sized(mig_pod("p", profile, name), MigParts.of(BOTH))
    (of_node,) = [each for each in BOTH if each["metadata"]["name"] == name]
    assert placed.gpus == gpus({f"nvidia.com/mig-{profile}": 1}, slices_of_node(of_node)) == pytest.approx(part)
    free = free_by_node(gpus_by_node([of_node]), [placed])
    assert free[name] == pytest.approx(gpus_of_node(of_node) - part)


@pytest.mark.parametrize(
    ("nodes", "profile", "part"),
    [
        (BOTH, "1g.24gb", 1 / 4),
        (BOTH[:1], "1g.24gb", 1 / 7),
        (BOTH[1:2], "1g.24gb", 1 / 4),
        (BOTH, "2g.48gb", 1),
        (BOTH[:2], "2g.48gb.me.all", 1 / 2),
        ([], "1g.24gb", 1 / 4),
        (BOTH, "1g.10gb", 1 / 7),
    ],
)
def test_a_pod_that_waits_counts_as_the_largest_part_that_a_node_offers(
    nodes: list[Object], profile: str, part: float
) -> None:
    assert sized(mig_pod("p", profile), MigParts.of(nodes)).gpus == pytest.approx(part)


def test_a_pod_that_waits_for_a_model_counts_as_its_part_of_that_model() -> None:
    assert sized(mig_pod("p", "1g.24gb", product=NVL), MigParts.of(BOTH)).gpus == pytest.approx(1 / 7)


def test_a_running_gang_waits_for_nothing_although_its_object_names_no_node() -> None:
    parts = MigParts.of(BOTH)
    stated = gpus({"nvidia.com/mig-1g.24gb": 2}, parts.anywhere)
    group = Gang("a", POD_GROUP, "ns", "g", "u", stated, stated, stated)
    gang = with_pods(group, [sized(mig_pod(name, "1g.24gb", "nvl"), parts) for name in ("p", "q")])
    assert (gang.requested, gang.allocated, gang.waits) == (pytest.approx(2 / 7), pytest.approx(2 / 7), 0)


def test_the_index_counts_pods_by_the_nodes_that_a_cycle_has_seen() -> None:
    index = PodIndex()
    index.change("before", mig_pod("before", "1g.24gb", "nvl"))
    index.count_by(MigParts.of(BOTH))
    index.change("after", mig_pod("after", "1g.24gb", "nvl"))
    index.change("waits", mig_pod("waits", "1g.24gb"))
    assert {each.name: each.gpus for each in index.pods()} == pytest.approx(
        {"before": 1 / 7, "after": 1 / 7, "waits": 1 / 4}
    )
    assert gpus_taken(index.on_node("nvl").pods) == pytest.approx(2 / 7)
    assert index.placed(mig_pod("new", "1g.24gb"), "nvl").gpus == pytest.approx(1 / 7)


@st.composite
def layouts(draw: st.DrawFn) -> tuple[str, dict[str, int]]:
    """A GPU, and instances that fit on it together: into its compute slices and into its memory."""
    product = draw(st.sampled_from(sorted(MEMORY_GB)))
    slices, memory = float(compute_slices(product)), 1.0
    whole = f"{compute_slices(product)}g.{MEMORY_GB[product]}gb"
    if draw(st.booleans()) and draw(st.booleans()):
        return product, {whole: 1}
    instances: dict[str, int] = {}
    for size in draw(st.lists(st.sampled_from(mig_sizes(product, MEMORY_GB[product])), min_size=1, max_size=8)):
        if size.compute <= slices and size.memory <= memory:
            slices, memory = slices - size.compute, memory - float(size.memory)
            instances[size.name] = instances.get(size.name, 0) + 1
    return product, instances


@settings(max_examples=60)
@given(layouts())
def test_the_instances_that_fit_on_a_gpu_are_at_most_one_gpu(layout: tuple[str, dict[str, int]]) -> None:
    product, instances = layout
    assert 0 < gpus_of_node(node("n", product, instances)) <= 1 + 1e-9


@settings(max_examples=60)
@given(st.lists(st.tuples(layouts(), st.booleans()), min_size=1, max_size=4), st.data())
def test_pods_never_hold_more_than_their_nodes_offer(
    cluster: list[tuple[tuple[str, dict[str, int]], bool]], data: st.DataObject
) -> None:
    nodes = [node(f"n{i}", product if named else "", made) for i, ((product, made), named) in enumerate(cluster)]
    pods = [
        mig_pod(f"p-{i}-{profile}", profile, f"n{i}", count=taken)
        for i, ((_, made), _) in enumerate(cluster)
        for profile, count in made.items()
        if (taken := data.draw(st.integers(0, count)))
    ]
    parts = MigParts.of(nodes)
    held = [sized(each, parts) for each in pods]
    for each in nodes:
        name = each["metadata"]["name"]
        assert fsum(one.gpus for one in held if one.node == name) <= gpus_of_node(each) + 1e-9
        # what names no node never counts less than what has one
        for profile in each["status"]["allocatable"]:
            assert gpus({profile: 1}, parts.anywhere) >= gpus({profile: 1}, slices_of_node(each)) - 1e-9


COUNTED = {name: cases.COUNTED for name, cases in plugin_cases("fairshare").items()}


@pytest.mark.parametrize("scheduler", COUNTED)
def test_a_queues_status_counts_no_more_than_its_pods_hold(scheduler: str) -> None:
    """The status names no node: two instances of an H100 NVL beside an RTX PRO 6000."""
    held = {"nvidia.com/mig-1g.24gb": "2"}
    status = {"allocated": held, "requested": held}
    kind, adapter = COUNTED[scheduler]
    policy = policy_of([{"name": "a", "refs": [f"{scheduler}:a"]}])
    parts = MigParts.of(BOTH)
    pods = [replace(sized(mig_pod(name, "1g.24gb", "nvl"), parts), ref=f"{scheduler}:a") for name in ("p", "q")]
    found = look_at(adapter, policy, MemoryCluster(KINDS, [object_of(kind, "a", {}, status)]), pods, parts)
    standing = found.standings["a"]
    assert (standing.requested, standing.allocated) == (pytest.approx(2 / 7), pytest.approx(2 / 7))


@pytest.mark.parametrize("stated", [True, False])
def test_mig_devices_that_a_driver_publishes_are_parts_of_their_gpu(stated: bool) -> None:
    attributes = {"type": "mig", "parentUUID": "GPU-0", "profile": "1g.24gb"} | (
        {"productName": "NVIDIA H100 NVL"} if stated else {}
    )
    device = {"name": "d", "attributes": {key: {"string": text} for key, text in attributes.items()}}
    spec = {"driver": "gpu.nvidia.com", "nodeName": "n", "pool": {"name": "n", "generation": 1}, "devices": [device]}
    nodes, _ = with_published([node("n", "" if stated else NVL, {})], [object_of(SLICES[0], "s", spec)])
    assert gpus_of_node(nodes[0]) == pytest.approx(1 / 7)
