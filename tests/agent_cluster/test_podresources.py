"""The messages of the kubelet, decoded by hand, against the bytes protobuf makes of them."""

from __future__ import annotations

import contextlib
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.holders import kubelet_pod_resources
from agent.holders.kubelet_pod_resources import ClaimedDevice, ContainerResources, Devices, Malformed, PodResources
from tests.effort import examples

texts = st.text(max_size=12)
devices = st.builds(Devices, texts, st.lists(texts, max_size=3).map(tuple))
claimed = st.builds(ClaimedDevice, *[texts] * 5)
containers = st.builds(
    ContainerResources, texts, st.lists(devices, max_size=3).map(tuple), st.lists(claimed, max_size=3).map(tuple)
)
pods = st.builds(PodResources, texts, texts, st.lists(containers, max_size=3).map(tuple))


def to_message(pb: Any, pod: PodResources) -> Any:
    message = pb.PodResources(name=pod.name, namespace=pod.namespace, cpu_ids=[1, 300, -1])
    for container in pod.containers:
        inner = message.containers.add(name=container.name, cpu_ids=[2, 70_000])
        for device in container.devices:
            inner.devices.add(resource_name=device.resource, device_ids=device.ids).topology.nodes.add(ID=1)
        for claim in container.claimed:
            dynamic = inner.dynamic_resources.add(claim_name=claim.claim, claim_namespace=claim.claim_namespace)
            resource = dynamic.claim_resources.add(
                driver_name=claim.driver, pool_name=claim.pool, device_name=claim.device
            )
            resource.share_id = "not read"
            resource.cdi_devices.add(name="not read")
    return message


@settings(max_examples=examples(20, 120), deadline=None)
@given(st.lists(pods, max_size=4))
def test_what_protobuf_writes_is_read(messages: ModuleType, listed: list[PodResources]) -> None:
    pb: Any = messages
    sent = pb.ListPodResourcesResponse(pod_resources=[to_message(pb, pod) for pod in listed])
    assert kubelet_pod_resources.decode_list(sent.SerializeToString()) == tuple(listed)


@settings(max_examples=examples(20, 120), deadline=None)
@given(st.lists(devices, max_size=5))
def test_allocatable_devices_are_read(messages: ModuleType, offered: list[Devices]) -> None:
    pb: Any = messages
    sent = pb.AllocatableResourcesResponse(cpu_ids=[0, 1])
    for device in offered:
        sent.devices.add(resource_name=device.resource, device_ids=device.ids)
    assert kubelet_pod_resources.decode_allocatable(sent.SerializeToString()) == tuple(offered)


@pytest.mark.parametrize("unknown", [
    b"\x78\x01",                      # 15: varint
    b"\x7d" + bytes(4),               # 15: 32 bits
    b"\x79" + bytes(8),               # 15: 64 bits
    b"\x7a\x03abc",                   # 15: bytes
    b"\x80\x80\x80\x80\x78\x05",      # a very large field number
])  # fmt: skip
def test_fields_of_a_newer_kubelet_are_stepped_over(messages: ModuleType, unknown: bytes) -> None:
    pb: Any = messages
    pod = PodResources("a", "b", (ContainerResources("c", (Devices("nvidia.com/gpu", ("GPU-1",)),)),))
    message = to_message(pb, pod).SerializeToString() + unknown
    sent = b"\x0a" + bytes([len(message)]) + message + unknown
    assert kubelet_pod_resources.decode_list(sent) == (pod,)


@pytest.mark.parametrize("message", [
    b"\x0a", b"\x0a\x05ab", b"\x0b", b"\x0f", b"\x02\x00", b"\x08\x01", b"\x0a\x03\x0a\x01\xff",
    b"\x80" * 11, b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01", b"\x0a\x02\x0d\x00",
])  # fmt: skip
def test_what_is_no_message_is_said_to_be_none(message: bytes) -> None:
    with pytest.raises(Malformed):
        kubelet_pod_resources.decode_list(message)


@settings(max_examples=examples(20, 120), deadline=None)
@given(st.one_of(st.binary(max_size=200), st.builds(lambda p: b"\x0a" + bytes([len(p)]) + p, st.binary(max_size=100))))
def test_no_bytes_make_it_fail_in_another_way(message: bytes) -> None:
    for decode in (kubelet_pod_resources.decode_list, kubelet_pod_resources.decode_allocatable):
        with contextlib.suppress(Malformed):
            decode(message)
