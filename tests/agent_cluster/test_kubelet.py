"""The kubelet polled: what is remembered while it is away, and for how long."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import grpc
import pytest

from agent.holders.kubelet_client import OFFER_MS, VALID_MS, Kubelet, UnaryChannel
from gputally.base.background_tasks import BackgroundTasks
from gputally.base.clock import SystemClock, VirtualClock
from tests.fakes.kubelet.server import FakeKubelet


@pytest.fixture
def polled(kubelet: FakeKubelet, clock: VirtualClock) -> Iterator[Kubelet]:
    kubelet.give("vision", "train-0", {"main": {"nvidia.com/gpu": ["GPU-1::0"]}, "sidecar": {}})
    kubelet.offer("nvidia.com/gpu", ["GPU-1::0", "GPU-1::1"])
    channel = UnaryChannel(kubelet.path, clock)
    yield Kubelet(kubelet.path, clock, channel)
    channel.close()


def test_before_the_first_answer_nobody_knows(polled: Kubelet) -> None:
    assert polled.unknown_reason() == "kubelet: not polled yet"
    given = polled.poll()
    assert polled.unknown_reason() == ""
    assert [pod.name for pod in given.pods] == ["train-0"]
    assert given.offered[0].ids == ("GPU-1::0", "GPU-1::1")


def test_the_last_answer_counts_for_a_while(polled: Kubelet, kubelet: FakeKubelet, clock: VirtualClock) -> None:
    polled.poll()
    kubelet.stop()
    clock.advance(VALID_MS)
    given = polled.poll()
    assert polled.unknown_reason() == ""
    assert [pod.name for pod in given.pods] == ["train-0"]
    clock.advance(1)
    assert "No such file" in polled.unknown_reason()
    kubelet.start()
    polled.poll()
    assert polled.unknown_reason() == ""


def test_rate_limiting_is_no_answer_and_no_crash(polled: Kubelet, kubelet: FakeKubelet) -> None:
    kubelet.fail = grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "rate limit" in polled.poll().failure
    kubelet.fail = None
    assert polled.poll().failure == ""


def test_what_can_be_given_is_asked_once_a_minute(polled: Kubelet, kubelet: FakeKubelet, clock: VirtualClock) -> None:
    for _ in range(3):
        polled.poll()
        clock.advance(OFFER_MS // 2)
    assert kubelet.calls == ["List", "GetAllocatableResources", "List", "List", "GetAllocatableResources"]


def test_nonsense_is_a_failure_with_its_reason(polled: Kubelet, kubelet: FakeKubelet) -> None:
    kubelet.raw = b"\x0b\x0b"
    assert polled.poll().failure == "unknown wire type 3"


def test_fields_of_a_newer_kubelet_do_no_harm(polled: Kubelet, kubelet: FakeKubelet) -> None:
    kubelet.tail = b"\x92\x03\x03new"
    assert [pod.name for pod in polled.poll().pods] == ["train-0"]


def test_its_thread_asks_again_when_it_is_told_to(polled: Kubelet, kubelet: FakeKubelet) -> None:
    running = Kubelet(kubelet.path, SystemClock())
    asked = threading.Event()
    poll = running.poll

    def counted() -> object:
        given = poll()
        asked.set()
        return given

    running.poll = counted  # type: ignore[method-assign,assignment]
    stop = threading.Event()
    thread = BackgroundTasks(SystemClock()).start("kubelet", running.run, stop, list[Exception]().append)
    for _ in range(3):
        assert asked.wait(10)
        asked.clear()
        running.poll_soon()
    stop.set()
    running.close()
    thread.join(10)
    assert not thread.is_alive()
    assert kubelet.calls.count("List") >= 3
