"""The kubelet client: gRPC calls, messages, the state kept while the kubelet is away, and access to its socket."""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import grpc
import h2.config
import h2.connection
import h2.events
import h2.exceptions
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.holders.kubelet import kubelet_pod_resources
from agent.holders.kubelet.kubelet_grpc_client import (
    OFFER_MS,
    RESOURCE_EXHAUSTED,
    UNIMPLEMENTED,
    VALID_MS,
    Kubelet,
    RpcFailed,
    RpcUnavailable,
    UnaryChannel,
)
from agent.holders.kubelet.kubelet_pod_resources import (
    ClaimedDevice,
    ContainerDevices,
    ContainerResources,
    Malformed,
    PodResources,
)
from gputally.base.background_tasks import BackgroundTasks
from gputally.base.clock import SystemClock, VirtualClock
from tests.fakes.kubelet.server import FakeKubelet, compile_messages
from tests.hypothesis_examples import examples

LIST = kubelet_pod_resources.SERVICE + "List"


@pytest.fixture
def channel(kubelet: FakeKubelet, clock: VirtualClock) -> Iterator[UnaryChannel]:
    made = UnaryChannel(kubelet.path, clock)
    yield made
    made.close()


def pods_of(channel: UnaryChannel) -> list[str]:
    return [pod.name for pod in kubelet_pod_resources.decode_list(channel.call(LIST))]


def test_a_call_is_answered_again_and_again_on_one_connection(kubelet: FakeKubelet, channel: UnaryChannel) -> None:
    assert pods_of(channel) == []
    kubelet.give("vision", "train-0", {"main": {"nvidia.com/gpu": ["GPU-1"]}})
    for _ in range(100):
        assert pods_of(channel) == ["train-0"]


def test_an_answer_larger_than_every_window_arrives_whole(kubelet: FakeKubelet, channel: UnaryChannel) -> None:
    ids = [f"GPU-{i:036d}" for i in range(1000)]
    for number in range(60):
        kubelet.give("vision", f"pod-{number}", {"main": {"nvidia.com/gpu": ids}})
    answer = channel.call(LIST)
    assert len(answer) > 2_000_000
    assert len(kubelet_pod_resources.decode_list(answer)) == 60
    assert len(channel.call(LIST)) == len(answer)


def test_a_refusal_has_its_code(kubelet: FakeKubelet, channel: UnaryChannel) -> None:
    kubelet.fail = grpc.StatusCode.RESOURCE_EXHAUSTED
    with pytest.raises(RpcFailed, match="rejected by rate limit") as failed:
        channel.call(LIST)
    assert failed.value.code == RESOURCE_EXHAUSTED
    kubelet.fail = None
    assert pods_of(channel) == []
    with pytest.raises(RpcFailed) as unknown:
        channel.call("/v1.PodResourcesLister/Nothing")
    assert unknown.value.code == UNIMPLEMENTED


def test_a_kubelet_that_restarted_is_found_again_within_the_call(kubelet: FakeKubelet, channel: UnaryChannel) -> None:
    kubelet.give("vision", "train-0", {"main": {"nvidia.com/gpu": ["GPU-1"]}})
    for _ in range(3):
        assert pods_of(channel) == ["train-0"]
        kubelet.stop()
        kubelet.start()
    assert pods_of(channel) == ["train-0"]


def test_a_kubelet_that_is_gone_is_said_in_one_line(kubelet: FakeKubelet, channel: UnaryChannel) -> None:
    kubelet.stop()
    with pytest.raises(RpcUnavailable, match=r"kubelet\.sock: No such file"):
        channel.call(LIST)
    kubelet.start()
    assert pods_of(channel) == []


class Misbehaving:
    """A server of one connection at a time; `act` handles each."""

    def __init__(self, path: Path, act: Callable[[socket.socket], None]) -> None:
        self.connections = 0
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen()
        self._act = act
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            with connection:
                connection.settimeout(10)
                self._act(connection)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()


def serve(connection: socket.socket, answer: Callable[[h2.connection.H2Connection, int], None]) -> None:
    """Speak HTTP/2 until the client hangs up. `answer` is called for each complete request."""
    server = h2.connection.H2Connection(h2.config.H2Configuration(client_side=False))
    server.initiate_connection()
    try:
        connection.sendall(server.data_to_send())
        while data := connection.recv(65_536):
            for event in server.receive_data(data):
                if isinstance(event, h2.events.StreamEnded):
                    assert event.stream_id is not None
                    answer(server, event.stream_id)
            connection.sendall(server.data_to_send())
    except (OSError, h2.exceptions.H2Error):
        return


def respond(server: h2.connection.H2Connection, stream: int, body: bytes = b"\0\0\0\0\0", status: str = "0") -> None:
    server.send_headers(stream, [(":status", "200"), ("content-type", "application/grpc")])
    server.send_data(stream, body)
    server.send_headers(stream, [("grpc-status", status)], end_stream=True)


def speak_nonsense(connection: socket.socket) -> None:
    connection.sendall(bytes.fromhex("000001040000000000") + b"x")  # SETTINGS of one byte: they come in sixes
    while connection.recv(65_536):
        pass


def plain_answer(server: h2.connection.H2Connection, stream: int) -> None:
    server.send_headers(stream, [(":status", "404")], end_stream=True)


def no_status(server: h2.connection.H2Connection, stream: int) -> None:
    server.send_headers(stream, [(":status", "200")], end_stream=True)


Answer = Callable[[h2.connection.H2Connection, int], None]
Misbehave = Callable[..., tuple[Misbehaving, UnaryChannel]]


def speaking(answer: Answer) -> Callable[[socket.socket], None]:
    return lambda connection: serve(connection, answer)


@pytest.fixture
def misbehave(tmp_path: Path, clock: VirtualClock) -> Iterator[Misbehave]:
    """Return a function that starts a server with the behaviour `act` and returns a channel to it."""
    with contextlib.ExitStack() as after:

        def start(act: Callable[[socket.socket], None], timeout_s: float = 5) -> tuple[Misbehaving, UnaryChannel]:
            server = Misbehaving(tmp_path / "s", act)
            after.callback(server.close)
            channel = UnaryChannel(tmp_path / "s", clock, timeout_s=timeout_s)
            after.callback(channel.close)
            return server, channel

        yield start


MISBEHAVIOUR: list[tuple[str, Callable[[socket.socket], None], str]] = [
    ("hangs up at once", lambda c: None, "closed the connection|reset|Broken pipe|brok"),
    ("is no HTTP/2", speak_nonsense, "not valid HTTP/2"),
    ("is no gRPC", speaking(plain_answer), "HTTP 404"),
    ("has no status", speaking(no_status), "has no status"),
    ("resets", speaking(lambda h, s: h.reset_stream(s, 2)), "aborted the call"),
    ("refuses", speaking(lambda h, s: h.reset_stream(s, 7)), "refused the call"),
    ("compresses", speaking(lambda h, s: respond(h, s, b"\1\0\0\0\0")), "uncompressed"),
    ("is cut off", speaking(lambda h, s: respond(h, s, b"\0\0\0\0\5ab")), "exactly one"),
    ("sends two", speaking(lambda h, s: respond(h, s, bytes(10))), "exactly one"),
    ("has an odd status", speaking(lambda h, s: respond(h, s, status="ok")), "has no status"),
]


@pytest.mark.parametrize(("act", "reason"), [pytest.param(*case, id=what) for what, *case in MISBEHAVIOUR])
def test_a_server_that(misbehave: Misbehave, act: Callable[[socket.socket], None], reason: str) -> None:
    _, channel = misbehave(act)
    for _ in range(2):
        with pytest.raises(RpcUnavailable, match=reason):
            channel.call(LIST)


def test_a_server_that_says_nothing_costs_the_timeout_and_no_more(misbehave: Misbehave) -> None:
    _, channel = misbehave(speaking(lambda h, s: None), timeout_s=0.05)
    with pytest.raises(RpcUnavailable, match=r"no answer within 0\.05 s"):
        channel.call(LIST)


def test_a_server_that_trickles_costs_the_timeout_too(misbehave: Misbehave, clock: VirtualClock) -> None:
    """Each part arrives in time, but the whole does not."""

    def trickle(server: h2.connection.H2Connection, stream: int) -> None:
        clock.advance(6_000)
        server.send_headers(stream, [(":status", "200")])

    _, channel = misbehave(speaking(trickle))
    with pytest.raises(RpcUnavailable, match="no answer within 5 s"):
        channel.call(LIST)


def test_a_server_that_goes_away_finishes_what_it_began_and_is_left_then(misbehave: Misbehave) -> None:
    def last_words(server: h2.connection.H2Connection, stream: int) -> None:
        respond(server, stream)
        server.close_connection(last_stream_id=stream)

    server, channel = misbehave(speaking(last_words))
    assert [channel.call(LIST), channel.call(LIST)] == [b"", b""]
    assert server.connections == 2


def test_a_call_the_going_server_never_saw_is_made_again(misbehave: Misbehave) -> None:
    gone: list[int] = []

    def first_goes(server: h2.connection.H2Connection, stream: int) -> None:
        if stream == 3 and not gone:
            gone.append(stream)
            server.close_connection(last_stream_id=1)
        else:
            respond(server, stream)

    _, channel = misbehave(speaking(first_goes))
    assert [channel.call(LIST), channel.call(LIST)] == [b"", b""]
    assert gone == [3]


texts = st.text(max_size=12)
devices = st.builds(ContainerDevices, texts, st.lists(texts, max_size=3).map(tuple))
claimed = st.builds(ClaimedDevice, *[texts] * 6)
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
                driver_name=claim.driver, pool_name=claim.pool, device_name=claim.device, share_id=claim.share
            )
            resource.cdi_devices.add(name="not read")
    return message


@settings(max_examples=examples(20, 120))
@given(st.lists(pods, max_size=4))
def test_what_protobuf_writes_is_read(messages: ModuleType, listed: list[PodResources]) -> None:
    pb: Any = messages
    sent = pb.ListPodResourcesResponse(pod_resources=[to_message(pb, pod) for pod in listed])
    assert kubelet_pod_resources.decode_list(sent.SerializeToString()) == tuple(listed)


@settings(max_examples=examples(20, 120))
@given(st.lists(devices, max_size=5))
def test_allocatable_devices_are_read(messages: ModuleType, offered: list[ContainerDevices]) -> None:
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
    pod = PodResources("a", "b", (ContainerResources("c", (ContainerDevices("nvidia.com/gpu", ("GPU-1",)),)),))
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


@settings(max_examples=examples(20, 120))
@given(st.one_of(st.binary(max_size=200), st.builds(lambda p: b"\x0a" + bytes([len(p)]) + p, st.binary(max_size=100))))
def test_no_bytes_make_it_fail_in_another_way(message: bytes) -> None:
    for decode in (kubelet_pod_resources.decode_list, kubelet_pod_resources.decode_allocatable):
        with contextlib.suppress(Malformed):
            decode(message)


@pytest.fixture
def polled(kubelet: FakeKubelet, channel: UnaryChannel, clock: VirtualClock) -> Kubelet:
    kubelet.give("vision", "train-0", {"main": {"nvidia.com/gpu": ["GPU-1::0"]}, "sidecar": {}})
    kubelet.offer("nvidia.com/gpu", ["GPU-1::0", "GPU-1::1"])
    return Kubelet(kubelet.path, clock, channel)


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
    assert polled.poll().failure == "its list of devices cannot be decoded: a field has the unknown wire type 3"
    kubelet.raw = b"\x0a\x03\x0a\x01\xff"
    polled.poll()
    assert polled.unknown_reason() == "kubelet: its list of devices cannot be decoded: a text is not UTF-8"


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


_VERSION = 0x20080522
"""_LINUX_CAPABILITY_VERSION_3: two words of each set."""


@pytest.fixture
def restricted(tmp_path: Path) -> Iterator[FakeKubelet]:
    """A socket with the modes of a kubelet's: root and root's group may enter the folder, and only root may write to
    the socket."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        inner = Path(folder) / "pod-resources"
        inner.mkdir()
        fake = FakeKubelet(compile_messages(tmp_path), inner / "kubelet.sock")
        with fake.running():
            inner.chmod(0o750)
            fake.path.chmod(0o755)
            yield fake


def failure_as(user: int, group: int, path: Path) -> str:
    """Return why a poll as this user without capabilities fails; "" if the kubelet answers."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        told = "the child failed"
        try:
            os.setgroups([])
            os.setresgid(group, group, group)
            os.setresuid(user, user, user)
            header = (ctypes.c_uint32 * 2)(_VERSION, 0)
            if ctypes.CDLL(None, use_errno=True).capset(header, (ctypes.c_uint32 * 6)()) == 0:
                clock = SystemClock()
                told = Kubelet(path, clock, UnaryChannel(path, clock)).poll().failure
        finally:
            os.write(writing, told.encode())
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as answer:
        found = answer.read()
    os.waitpid(child, 0)
    return found


@pytest.mark.skipif(os.geteuid() != 0, reason="another user can be taken on by root alone")
@pytest.mark.parametrize(
    ("user", "group", "mode", "said"),
    [
        (0, 0, 0o755, ""),
        (65532, 65532, 0o755, "kubelet.sock: Permission denied"),
        (65532, 0, 0o755, "kubelet.sock: Permission denied"),
        (65532, 0, 0o775, ""),
    ],
    ids=["root without a capability", "another user", "of root's group", "socket open to the group"],
)
def test_who_may_ask_the_kubelet(restricted: FakeKubelet, user: int, group: int, mode: int, said: str) -> None:
    restricted.path.chmod(mode)
    failure = failure_as(user, group, restricted.path)
    assert said in failure
    assert bool(failure) == bool(said)
