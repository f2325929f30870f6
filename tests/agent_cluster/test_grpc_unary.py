"""The call to the kubelet: real gRPC on the other side, and servers that misbehave."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import h2.config
import h2.connection
import h2.events
import h2.exceptions
import pytest

from agent.holders import kubelet_pod_resources
from agent.holders.kubelet_client import RESOURCE_EXHAUSTED, UNIMPLEMENTED, RpcFailed, RpcUnavailable, UnaryChannel
from gputally.base.clock import VirtualClock
from tests.fakes.kubelet.server import FakeKubelet

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
    """A server of one connection after the other; each is handled by `act`."""

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
    """Speak HTTP/2 until the client hangs up; `answer` is asked once a request is complete."""
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


MISBEHAVIOUR: list[tuple[str, Callable[[socket.socket], None], str]] = [
    ("hangs up at once", lambda c: None, "closed the connection|reset|Broken pipe|brok"),
    ("is no HTTP/2", speak_nonsense, "not HTTP/2"),
    ("is no gRPC", lambda c: serve(c, plain_answer), "HTTP 404"),
    ("has no status", lambda c: serve(c, no_status), "has no status"),
    ("resets", lambda c: serve(c, lambda h, s: h.reset_stream(s, 2)), "aborted the call"),
    ("refuses", lambda c: serve(c, lambda h, s: h.reset_stream(s, 7)), "refused the call"),
    ("compresses", lambda c: serve(c, lambda h, s: respond(h, s, b"\1\0\0\0\0")), "uncompressed"),
    ("is cut off", lambda c: serve(c, lambda h, s: respond(h, s, b"\0\0\0\0\5ab")), "exactly one"),
    ("sends two", lambda c: serve(c, lambda h, s: respond(h, s, bytes(10))), "exactly one"),
    ("has an odd status", lambda c: serve(c, lambda h, s: respond(h, s, status="ok")), "has no status"),
]


@pytest.mark.parametrize(("what", "act", "reason"), MISBEHAVIOUR, ids=[what for what, _, _ in MISBEHAVIOUR])
def test_a_server_that(
    what: str, act: Callable[[socket.socket], None], reason: str, tmp_path: Path, clock: VirtualClock
) -> None:
    server = Misbehaving(tmp_path / "s", act)
    channel = UnaryChannel(tmp_path / "s", clock, timeout_s=5)
    for _ in range(2):
        with pytest.raises(RpcUnavailable, match=reason):
            channel.call(LIST)
    channel.close()
    server.close()


def test_a_server_that_says_nothing_costs_the_timeout_and_no_more(tmp_path: Path, clock: VirtualClock) -> None:
    server = Misbehaving(tmp_path / "s", lambda c: serve(c, lambda h, s: None))
    channel = UnaryChannel(tmp_path / "s", clock, timeout_s=0.05)
    with pytest.raises(RpcUnavailable, match=r"no answer within 0\.05 s"):
        channel.call(LIST)
    channel.close()
    server.close()


def test_a_server_that_trickles_costs_the_timeout_too(tmp_path: Path, clock: VirtualClock) -> None:
    """Each piece comes in time, the whole does not."""

    def trickle(h2_connection: h2.connection.H2Connection, stream: int) -> None:
        clock.advance(6_000)
        h2_connection.send_headers(stream, [(":status", "200")])

    server = Misbehaving(tmp_path / "s", lambda c: serve(c, trickle))
    channel = UnaryChannel(tmp_path / "s", clock, timeout_s=5)
    with pytest.raises(RpcUnavailable, match="no answer within 5 s"):
        channel.call(LIST)
    channel.close()
    server.close()


def test_a_server_that_goes_away_finishes_what_it_began_and_is_left_then(tmp_path: Path, clock: VirtualClock) -> None:
    def last_words(h2_connection: h2.connection.H2Connection, stream: int) -> None:
        respond(h2_connection, stream)
        h2_connection.close_connection(last_stream_id=stream)

    server = Misbehaving(tmp_path / "s", lambda c: serve(c, last_words))
    channel = UnaryChannel(tmp_path / "s", clock)
    assert [channel.call(LIST), channel.call(LIST)] == [b"", b""]
    channel.close()
    server.close()
    assert server.connections == 2


def test_a_call_the_going_server_never_saw_is_made_again(tmp_path: Path, clock: VirtualClock) -> None:
    gone: list[int] = []

    def first_goes(h2_connection: h2.connection.H2Connection, stream: int) -> None:
        if stream == 3 and not gone:
            gone.append(stream)
            h2_connection.close_connection(last_stream_id=1)
        else:
            respond(h2_connection, stream)

    server = Misbehaving(tmp_path / "s", lambda c: serve(c, first_goes))
    channel = UnaryChannel(tmp_path / "s", clock)
    assert [channel.call(LIST), channel.call(LIST)] == [b"", b""]
    assert gone == [3]
    channel.close()
    server.close()
