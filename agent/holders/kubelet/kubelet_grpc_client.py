"""Polls the kubelet's gRPC socket for its device assignments on a thread of its own.

A kubelet that is slow, restarting or rate limiting never delays sampling, because `Kubelet.answer` returns the last
answer with its time. Running containers keep their devices while a kubelet restarts. The last answer therefore stays
valid for half a minute while polls fail; then the holders are unknown.

The kubelet's socket is the agent's only use of gRPC, and grpcio would cost every node about 20 MiB. `UnaryChannel` is
therefore a minimal gRPC client. It sends an HTTP/2 POST whose body has the five-byte prefix of gRPC, and reads the
status from the trailers. It reopens the flow control windows as data arrives, limits the size of answers, and supports
no compression. If a restarted server has closed the connection, it connects and sends the call once more, which is safe
because all calls are reads. Only one thread at a time may use it. Source: gRPC over HTTP2 (grpc.io, PROTOCOL-HTTP2),
RFC 9113."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import unquote

import h2.config
import h2.connection
import h2.errors
import h2.events
import h2.exceptions

from agent.holders.kubelet import kubelet_pod_resources
from agent.holders.kubelet.kubelet_pod_resources import ContainerDevices, Malformed, PodResources
from gputally.base.background_tasks import BackgroundTask
from gputally.base.clock import Clock
from gputally.base.errors import AgentError
from gputally.base.units import MS_PER_MINUTE, MS_PER_SECOND

MAX_MESSAGE_BYTES = 16 * 1024 * 1024
"""Largest message that the kubelet's own client accepts."""
RESOURCE_EXHAUSTED, UNIMPLEMENTED = 8, 12
"""Status codes of gRPC."""
_PREFIX_BYTES = 5
_READ_BYTES = 64 * 1024
_MAX_STREAM_ID = 2**31 - 1


class RpcUnavailable(AgentError):
    """There is no complete answer: the socket is missing, the connection was refused or reset or timed out, or the
    server does not use gRPC."""


class RpcFailed(AgentError):
    """The server answered with a status other than OK. code: the status code of gRPC."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(f"gRPC status {code}: {message}" if message else f"gRPC status {code}")
        self.code = code


class _ConnectionEnded(Exception):
    """The connection ended before the answer was complete. A new connection may succeed."""


@dataclass(slots=True)
class _Response:
    """The response so far.

    status, message: gRPC's status and message from the trailers; status is None until they arrive.
    going_away: True if the server accepts no further call on this connection."""

    data: bytearray
    status: str | None = None
    message: str = ""
    http_status: str = "200"
    going_away: bool = False


class UnaryChannel:
    """Calls methods of the server at the unix socket `path`. timeout_s: time limit of a whole call."""

    def __init__(self, path: Path, clock: Clock, timeout_s: float = 5.0) -> None:
        self._path = path
        self._clock = clock
        self._timeout_s = timeout_s
        self._socket: socket.socket | None = None
        self._h2: h2.connection.H2Connection | None = None
        self._deadline_ms = 0

    def call(self, method: str, message: bytes = b"") -> bytes:
        """Call a method and return the message of the response. Raises RpcUnavailable, RpcFailed.

        method: `/package.Service/Method`."""
        self._deadline_ms = self._clock.monotonic_ms() + round(self._timeout_s * MS_PER_SECOND)
        reused = self._h2 is not None
        try:
            try:
                return self._call(method, message)
            except _ConnectionEnded:
                if not reused:
                    raise
                return self._call(method, message)
        except _ConnectionEnded as error:
            raise RpcUnavailable(f"{self._path}: {error}") from error

    def close(self) -> None:
        """Close the connection. Idempotent; the next call connects again."""
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.close()
        self._socket = self._h2 = None

    def _call(self, method: str, message: bytes) -> bytes:
        done = False
        try:
            connection, stream = self._send(method, message)
            response = self._receive(connection, stream)
            done = not response.going_away and stream < _MAX_STREAM_ID - 2
        except TimeoutError as error:
            raise RpcUnavailable(f"{self._path}: no answer within {self._timeout_s:g} s") from error
        except OSError as error:
            raise _ConnectionEnded(error.strerror or type(error).__name__) from error
        except h2.exceptions.H2Error as error:
            # A server that shuts down also causes this error: after its GOAWAY the library accepts no further frame.
            raise _ConnectionEnded(
                f"the server is shutting down, or its answer is not valid HTTP/2 ({type(error).__name__})"
            ) from error
        finally:
            if not done:
                self.close()
        return self._message(response)

    def _connect(self) -> h2.connection.H2Connection:
        if self._h2 is None:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
            self._socket.settimeout(self._timeout_s)
            try:
                self._socket.connect(str(self._path))
            except OSError as error:
                raise RpcUnavailable(f"{self._path}: {error.strerror or error}") from error
            config = h2.config.H2Configuration(client_side=True, header_encoding=None)
            self._h2 = h2.connection.H2Connection(config)
            self._h2.initiate_connection()
        return self._h2

    def _send(self, method: str, message: bytes) -> tuple[h2.connection.H2Connection, int]:
        connection = self._connect()
        stream = connection.get_next_available_stream_id()
        headers = [
            (":method", "POST"),
            (":scheme", "http"),
            (":path", method),
            (":authority", "localhost"),
            ("te", "trailers"),
            ("content-type", "application/grpc"),
            ("grpc-timeout", f"{round(self._timeout_s * MS_PER_SECOND)}m"),
        ]
        connection.send_headers(stream, headers)
        connection.send_data(stream, b"\0" + len(message).to_bytes(4, "big") + message, end_stream=True)
        self._flush(connection)
        return connection, stream

    def _flush(self, connection: h2.connection.H2Connection) -> None:
        assert self._socket is not None
        out = connection.data_to_send()
        if out:
            self._socket.sendall(out)

    def _receive(self, connection: h2.connection.H2Connection, stream: int) -> _Response:
        assert self._socket is not None
        response = _Response(bytearray())
        while True:
            if self._clock.monotonic_ms() > self._deadline_ms:
                raise TimeoutError
            data = self._socket.recv(_READ_BYTES)
            if not data:
                raise _ConnectionEnded("the server closed the connection")
            ended = False
            for event in connection.receive_data(data):
                ended = self._add_event(connection, stream, event, response) or ended
            self._flush(connection)
            if ended:
                return response

    def _add_event(
        self, connection: h2.connection.H2Connection, stream: int, event: h2.events.Event, response: _Response
    ) -> bool:
        """Add one event to the response. Return True if the response is complete."""
        if isinstance(event, h2.events.ConnectionTerminated):
            # The server finishes calls that it has begun, and accepts no others.
            response.going_away = True
            if event.last_stream_id is not None and event.last_stream_id < stream:
                raise _ConnectionEnded("the server is going away")
        elif getattr(event, "stream_id", None) != stream:
            return False
        elif isinstance(event, h2.events.DataReceived):
            response.data += event.data or b""
            if len(response.data) > MAX_MESSAGE_BYTES + _PREFIX_BYTES:
                raise RpcUnavailable(f"{self._path}: the response is larger than {MAX_MESSAGE_BYTES} bytes")
            connection.acknowledge_received_data(event.flow_controlled_length or 0, stream)
        elif isinstance(event, h2.events.ResponseReceived | h2.events.TrailersReceived):
            for name, value in event.headers or ():
                text = value.decode("utf-8", "replace")
                if name == b"grpc-status":
                    response.status = text
                elif name == b"grpc-message":
                    response.message = unquote(text)[:200]
                elif name == b":status":
                    response.http_status = text
        elif isinstance(event, h2.events.StreamReset):
            code = event.error_code
            if code == h2.errors.ErrorCodes.REFUSED_STREAM:
                raise _ConnectionEnded("the server refused the call")
            raise RpcUnavailable(f"{self._path}: the server aborted the call ({code})")
        return isinstance(event, h2.events.StreamEnded)

    def _message(self, response: _Response) -> bytes:
        if response.http_status != "200":
            raise RpcUnavailable(f"{self._path}: HTTP {response.http_status}")
        if response.status is None or not response.status.isascii() or not response.status.isdigit():
            raise RpcUnavailable(f"{self._path}: the response has no status")
        if response.status != "0":
            raise RpcFailed(int(response.status[:9]), response.message)
        data = bytes(response.data)
        if len(data) < _PREFIX_BYTES or data[0] != 0 or int.from_bytes(data[1:5], "big") != len(data) - _PREFIX_BYTES:
            raise RpcUnavailable(f"{self._path}: the response is not exactly one uncompressed message")
        return data[_PREFIX_BYTES:]


log = logging.getLogger("agent.holders.kubelet.kubelet_grpc_client")

POLL_MS = 5 * MS_PER_SECOND
"""Time between two polls. Source: the kubelet answers 100 calls a second to all its clients together, burst 10."""
MAX_BACKOFF_MS = MS_PER_MINUTE
VALID_MS = 30 * MS_PER_SECOND
"""How long an answer stays valid if later polls fail."""
OFFER_MS = MS_PER_MINUTE
"""Time between two reads of the allocatable devices, which change only with the device plugin."""


@dataclass(frozen=True, slots=True)
class KubeletAnswer:
    """The kubelet's last answer.

    pods: the devices of each pod.
    offered: the allocatable devices; empty if an old kubelet does not report them.
    at_ms: monotonic time of the answer; None before the first answer.
    failure: why the latest poll failed; "" if it succeeded.
    took_ms: duration of the poll that gave the answer."""

    pods: tuple[PodResources, ...] = ()
    offered: tuple[ContainerDevices, ...] = ()
    at_ms: int | None = None
    failure: str = "not polled yet"
    took_ms: int = 0


class Kubelet:
    """Polls the kubelet at `socket`. `poll` polls once, and `run` repeats it on a thread."""

    def __init__(self, socket: Path, clock: Clock, channel: UnaryChannel | None = None) -> None:
        self._channel = channel or UnaryChannel(socket, clock)
        self._clock = clock
        self._answer = KubeletAnswer()
        self._failures = 0
        self._offer_due_ms = 0
        self._wake = threading.Event()

    def answer(self) -> KubeletAnswer:
        """Return the last answer. Any thread may call this."""
        return self._answer

    def unknown_reason(self) -> str:
        """Return why the holders are unknown; "" while the last answer is valid."""
        answer = self._answer
        if answer.at_ms is not None and self._clock.monotonic_ms() - answer.at_ms <= VALID_MS:
            return ""
        return f"kubelet: {answer.failure}" if answer.failure else "kubelet: no recent answer"

    def poll_soon(self) -> None:
        """Let `run` poll at once, because a pod changed. Any thread may call this."""
        self._wake.set()

    def poll(self) -> KubeletAnswer:
        """Poll the kubelet once and return the answer. After a failure, return the earlier answer with the reason of
        the failure."""
        now_ms = self._clock.monotonic_ms()
        try:
            pods = kubelet_pod_resources.decode_list(self._channel.call(kubelet_pod_resources.SERVICE + "List"))
            offered = self._answer.offered
            if now_ms >= self._offer_due_ms:
                offered = self._allocatable()
                self._offer_due_ms = now_ms + OFFER_MS
        except (RpcUnavailable, RpcFailed) as error:
            self._record_failure(str(error))
        except Malformed as error:
            self._record_failure(f"its list of devices cannot be decoded: {error}")
        else:
            if self._failures:
                log.info("the kubelet answers again", extra={"pods": len(pods)})
            self._failures = 0
            self._answer = KubeletAnswer(pods, offered, now_ms, "", self._clock.monotonic_ms() - now_ms)
        return self._answer

    def run(self, stop: threading.Event, task: BackgroundTask) -> None:
        """Poll until `stop` is set. `close` wakes this loop."""
        while not stop.is_set():
            self._wake.clear()
            task.begin()
            self.poll()
            task.succeed()
            self._clock.wait(self._pause_ms() / MS_PER_SECOND, self._wake)
        self._channel.close()

    def close(self) -> None:
        """Wake `run`, so that it checks whether `stop` is set."""
        self._wake.set()

    def _pause_ms(self) -> int:
        return min(POLL_MS << min(self._failures, 8), MAX_BACKOFF_MS) if self._failures > 3 else POLL_MS

    def _allocatable(self) -> tuple[ContainerDevices, ...]:
        """Return the allocatable devices. Kubelets before 1.23 do not support the call. Then the result is empty, and
        the number of replicas of a device is unknown."""
        try:
            return kubelet_pod_resources.decode_allocatable(
                self._channel.call(kubelet_pod_resources.SERVICE + "GetAllocatableResources")
            )
        except RpcFailed as error:
            if error.code == RESOURCE_EXHAUSTED:
                raise
            return ()

    def _record_failure(self, reason: str) -> None:
        self._failures += 1
        if self._failures == 1:
            log.warning("the kubelet does not list the devices of pods: trying again", extra={"reason": reason})
        self._answer = replace(self._answer, failure=reason)
