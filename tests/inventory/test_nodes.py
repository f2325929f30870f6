"""Nodes by every cloud's labels, and the history of the times when they could not be used."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accountant.inventory.node_facts_and_downtime import (
    CORDONED,
    MAX_RENEWED,
    NOT_READY,
    NodeObservation,
    capacity_type,
    deleted_node,
    described,
    merge_nodes,
    seen,
)
from accountant.ledger.protocols import Down, NodeFacts

CLOUDS: dict[str, tuple[dict[str, str], dict[str, str]]] = {
    "gke": (
        {
            "cloud.google.com/gke-nodepool": "a3",
            "cloud.google.com/gke-accelerator": "nvidia-h100-80gb",
            "topology.kubernetes.io/region": "us-central1",
            "topology.kubernetes.io/zone": "us-central1-a",
            "node.kubernetes.io/instance-type": "a3-highgpu-8g",
        },
        {
            "pool": "a3",
            "region": "us-central1",
            "zone": "us-central1-a",
            "capacity_type": "on-demand",
            "instance_type": "a3-highgpu-8g",
            "gpu_model": "nvidia-h100-80gb",
        },
    ),
    "gke spot": (
        {"cloud.google.com/gke-nodepool": "s", "cloud.google.com/gke-spot": "true"},
        {"pool": "s", "capacity_type": "spot"},
    ),
    "gke preemptible": ({"cloud.google.com/gke-preemptible": "true"}, {"capacity_type": "spot"}),
    "gke reservation": ({"cloud.google.com/gke-provisioning": "reservation"}, {"capacity_type": "reserved"}),
    "eks": (
        {
            "eks.amazonaws.com/nodegroup": "p5",
            "eks.amazonaws.com/capacityType": "ON_DEMAND",
            "nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3",
        },
        {"pool": "p5", "capacity_type": "on-demand", "gpu_model": "NVIDIA-H100-80GB-HBM3"},
    ),
    "eks spot": ({"eks.amazonaws.com/capacityType": "SPOT"}, {"capacity_type": "spot"}),
    "eks capacity block": ({"eks.amazonaws.com/capacityType": "CAPACITY_BLOCK"}, {"capacity_type": "reserved"}),
    "karpenter": (
        {
            "karpenter.sh/nodepool": "gpu",
            "karpenter.sh/capacity-type": "spot",
            "karpenter.k8s.aws/instance-gpu-name": "l40s",
        },
        {"pool": "gpu", "capacity_type": "spot", "gpu_model": "l40s"},
    ),
    "karpenter reserved": ({"karpenter.sh/capacity-type": "reserved"}, {"capacity_type": "reserved"}),
    "aks": ({"kubernetes.azure.com/agentpool": "nd96"}, {"pool": "nd96", "capacity_type": "on-demand"}),
    "aks spot": (
        {"kubernetes.azure.com/agentpool": "nd96", "kubernetes.azure.com/scalesetpriority": "spot"},
        {"pool": "nd96", "capacity_type": "spot"},
    ),
    "coreweave": ({"gpu.nvidia.com/class": "H200"}, {"gpu_model": "H200"}),
    "amd": ({"amd.com/gpu.product-name": "MI300X"}, {"gpu_model": "MI300X"}),
    "old labels": (
        {
            "failure-domain.beta.kubernetes.io/region": "r",
            "failure-domain.beta.kubernetes.io/zone": "z",
            "beta.kubernetes.io/instance-type": "t",
        },
        {"region": "r", "zone": "z", "instance_type": "t"},
    ),
    "time-sliced": ({"nvidia.com/gpu.product": "NVIDIA-A10G-SHARED"}, {"gpu_model": "NVIDIA-A10G"}),
    "mig single": (
        {"nvidia.com/gpu.product": "NVIDIA-A100-SXM4-80GB-MIG-1g.10gb"},
        {"gpu_model": "NVIDIA-A100-SXM4-80GB"},
    ),
    "mig with media": ({"nvidia.com/gpu.product": "A100-MIG-1g.10gb+me"}, {"gpu_model": "A100"}),
    "on-prem, by our own labels": (
        {"gputally.dev/pool": "rack-7", "gputally.dev/capacity-type": "on-prem"},
        {"pool": "rack-7", "capacity_type": "on-prem"},
    ),
    "nothing known": ({"kubernetes.io/arch": "amd64"}, {}),
}
"""Labels of a node, and the facts they state."""


@pytest.mark.parametrize("cloud", CLOUDS, ids=str)
def test_the_labels_of_every_cloud(cloud):
    labels, expected = CLOUDS[cloud]
    assert described("c", "n", labels) == NodeFacts("c", "n", **expected)


def test_a_word_nobody_knows_is_unknown_not_on_demand():
    assert capacity_type({"karpenter.sh/capacity-type": "borrowed"}) == ""


def sight(**changes: object) -> NodeObservation:
    return replace(NodeObservation("c", "n", {}), **changes)  # type: ignore[arg-type]


def test_a_node_is_down_from_the_transition_the_cluster_tells():
    node = seen(None, sight(ready=False, ready_since_ms=700), 1_000)
    assert node.down == (Down(700, None, NOT_READY),)
    still = seen(node, sight(ready=False, ready_since_ms=700), 2_000)
    assert still == node
    back = seen(still, sight(ready_since_ms=2_500), 3_000)
    assert back.down == (Down(700, 2_500, NOT_READY),)
    assert seen(back, sight(ready_since_ms=2_500), 9_000) == back
    again = seen(back, sight(ready=False, ready_since_ms=9_500), 10_000)
    assert again.down == (Down(700, 2_500, NOT_READY), Down(9_500, None, NOT_READY))


def test_a_cordon_ends_when_it_is_seen_to_have_ended():
    node = seen(None, sight(cordoned=True), 1_000)
    assert node.down == (Down(1_000, None, CORDONED),)
    assert seen(node, sight(), 5_000).down == (Down(1_000, 5_000, CORDONED),)
    assert seen(None, sight(cordoned=True, cordoned_ms=400), 1_000).down == (Down(400, None, CORDONED),)


def test_a_cluster_whose_clock_is_ahead_does_not_make_the_future_down():
    node = seen(None, sight(ready=False, ready_since_ms=9_999), 1_000)
    assert node.down == (Down(1_000, None, NOT_READY),)
    assert seen(node, sight(ready_since_ms=99_999), 2_000).down == (Down(1_000, 2_000, NOT_READY),)


def test_a_deleted_node_ends_with_its_down_time_and_may_come_back():
    node = deleted_node(seen(None, sight(cordoned=True), 1_000), 4_000)
    assert (node.down, node.deleted_ms) == ((Down(1_000, 4_000, CORDONED),), 4_000)
    assert deleted_node(node, 9_000) == node
    assert seen(node, sight(), 9_000).deleted_ms is None


def test_of_two_inventories_the_first_names_and_both_know_the_down_time():
    yaml = NodeFacts("c", "n", pool="mine", down=(Down(5, 9, "firmware"),))
    cluster = NodeFacts("c", "n", pool="theirs", region="eu", down=(Down(1, None, CORDONED),))
    both = merge_nodes(yaml, cluster)
    assert (both.pool, both.region) == ("mine", "eu")
    assert both.down == (Down(1, None, CORDONED), Down(5, 9, "firmware"))


@given(st.lists(st.tuples(st.booleans(), st.booleans(), st.integers(1, 50), st.integers(-60, 60)), max_size=20))
def test_spans_of_one_reason_never_overlap_and_never_reach_the_future(looks):
    now, node = 1_000, None
    for ready, cordoned, step, skew in looks:
        now += step
        node = seen(node, sight(ready=ready, cordoned=cordoned, ready_since_ms=now + skew), now)
        assert {d.reason for d in node.down if d.end_ms is None} == ({NOT_READY} if not ready else set()) | (
            {CORDONED} if cordoned else set()
        )
        for reason in (NOT_READY, CORDONED):
            spans = [
                (d.start_ms, d.end_ms if d.end_ms is not None else now + 1) for d in node.down if d.reason == reason
            ]
            assert all(start < end for start, end in spans)
            assert all(end <= now + 1 for _, end in spans)


@pytest.mark.parametrize(("change", "renewed"), [
    ({}, ()),
    ({"uid": "u2", "created_ms": 8_500}, (8_500,)),
    ({"uid": "u2", "created_ms": 99_000}, (9_000,)),
    ({"uid": "u2", "created_ms": None}, (9_000,)),
    ({"provider_id": "aws:///i-2"}, (9_000,)),
    ({"boot_id": "b2"}, (9_000,)),
    ({"uid": "", "provider_id": "", "boot_id": ""}, ()),  # unknown is no change
])  # fmt: skip
def test_another_machine_or_boot_of_the_same_name_is_noticed(change: dict[str, Any], renewed: tuple[int, ...]) -> None:
    first = replace(sight(), uid="u1", provider_id="aws:///i-1", boot_id="b1", created_ms=1_000)
    node = seen(None, first, 2_000)
    assert node.renewed_ms == ()
    node = seen(node, replace(first, **change), 9_000)
    assert node.renewed_ms == renewed
    assert seen(node, replace(first, **change), 10_000).renewed_ms == renewed


def test_a_node_that_was_deleted_and_is_back_is_another_machine():
    gone = deleted_node(seen(None, sight(), 1_000), 4_000)
    assert seen(gone, replace(sight(), created_ms=8_000), 9_000).renewed_ms == (8_000,)


def test_a_node_that_boots_again_and_again_keeps_bounded_facts():
    node = seen(None, replace(sight(), boot_id="b0"), 1)
    for number in range(1, MAX_RENEWED + 50):
        node = seen(node, replace(sight(), boot_id=f"b{number}"), number * 10)
    assert len(node.renewed_ms) == MAX_RENEWED
    assert (node.renewed_ms[0], node.renewed_ms[-1]) == (10, (MAX_RENEWED + 49) * 10)
