"""A proxy on the loopback in front of an HTTP server. It refuses chosen requests, lets them hang, or cuts the
connection before or after the server has processed them. Answers without a length, such as those of a watch, are passed
on as they arrive."""

from __future__ import annotations

import contextlib
import http.client
import re
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from urllib.parse import urlsplit

from gputally.testing.http_server import Handler, LoopbackServer

_HOP = {"connection", "keep-alive", "transfer-encoding", "content-length", "server", "date"}


class Fault(Enum):
    """A kind of fault."""

    REFUSED = "answered with HTTP 503, not carried out"
    CONFLICT = "answered with HTTP 409, not carried out"
    BUSY = "answered with HTTP 429, not carried out"
    FAILED = "answered with HTTP 500, not carried out"
    HANGS = "not answered until the client hangs up, not carried out"
    CUT = "the connection is cut, not carried out"
    ANSWER_LOST = "carried out, then the connection is cut without an answer"


_STATUS = {Fault.REFUSED: 503, Fault.CONFLICT: 409, Fault.BUSY: 429, Fault.FAILED: 500}


@dataclass
class FaultProxy:
    """url: the proxy's address. seen: method and path of every request, in order. spoilt: those that got a fault."""

    url: str = ""
    seen: list[str] = field(default_factory=list)
    spoilt: list[tuple[str, Fault]] = field(default_factory=list)
    _rules: list[tuple[re.Pattern[str], Fault, int]] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def spoil(self, request: str, fault: Fault, times: int = 1) -> None:
        """Apply the fault to the next `times` requests whose `METHOD /path` matches the pattern."""
        with self._lock:
            self._rules.append((re.compile(request), fault, times))

    @contextmanager
    def spoiling(self, request: str, fault: Fault, times: int = 1) -> Iterator[None]:
        """Apply the fault until the block ends. The test fails if no request matched."""
        before = len(self.spoilt)
        self.spoil(request, fault, times)
        yield
        self.heal()
        assert len(self.spoilt) > before, f"no request matches {request}"

    @property
    def waiting(self) -> bool:
        """Whether a fault waits for a request that matches."""
        with self._lock:
            return bool(self._rules)

    def heal(self) -> None:
        """Apply no faults from now on."""
        with self._lock:
            self._rules.clear()

    def judge(self, request: str) -> Fault | None:
        """Return the fault for a request that has arrived."""
        with self._lock:
            self.seen.append(request)
            for at, (pattern, fault, left) in enumerate(self._rules):
                if pattern.search(request):
                    self._rules[at : at + 1] = [(pattern, fault, left - 1)] if left > 1 else []
                    self.spoilt.append((request, fault))
                    return fault
        return None


@contextmanager
def fault_proxy(upstream: str, tls: ssl.SSLContext | None = None) -> Iterator[FaultProxy]:
    """Run a proxy, which speaks plain HTTP, in front of the server at `upstream` until the block ends. tls: for a
    server that speaks TLS."""
    parts = urlsplit(upstream)
    proxy = FaultProxy()

    class Forwarding(Handler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True  # else each answer waits 40 ms for an acknowledgement

        def _forward(self) -> None:
            fault = proxy.judge(f"{self.command} {self.path}")
            # Clients that wait for "100 Continue" have been told to go on by the handler before this.
            content = self._chunks() if self.headers.get("Transfer-Encoding") == "chunked" else self.content()
            if fault in _STATUS:
                return self.say(_STATUS[fault], b"{}", Retry_After="1")
            if fault is Fault.HANGS:
                self.connection.recv(1)  # until the client closes the connection
                return self._cut()
            if fault is Fault.CUT:
                return self._cut()
            host = parts.hostname or ""
            if tls is None:
                connection = http.client.HTTPConnection(host, parts.port, timeout=60)
            else:
                connection = http.client.HTTPSConnection(host, parts.port, timeout=60, context=tls)
            try:
                # The host stays as the client wrote it: signatures cover it.
                connection.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
                for name, value in self.headers.items():
                    if name.lower() not in ("connection", "expect"):
                        connection.putheader(name, value)
                connection.endheaders(content)
                answer = connection.getresponse()
                if "watch=true" in self.path and fault is None:
                    return self._stream(answer)
                body = answer.read()
            finally:
                connection.close()
            if fault is Fault.ANSWER_LOST:
                return self._cut()
            self.send_response_only(answer.status)
            for name, value in answer.getheaders():
                if name.lower() not in _HOP:
                    self.send_header(name, value)
            length = answer.getheader("Content-Length") if self.command == "HEAD" else str(len(body))
            self.send_header("Content-Length", length or "0")
            self.end_headers()
            self.wfile.write(body)
            return None

        def _stream(self, answer: http.client.HTTPResponse) -> None:
            self.close_connection = True
            self.send_response_only(answer.status)
            for name, value in answer.getheaders():
                if name.lower() not in _HOP:
                    self.send_header(name, value)
            self.send_header("Connection", "close")
            self.end_headers()
            with contextlib.suppress(OSError):
                while part := answer.read1():
                    self.wfile.write(part)

        def _chunks(self) -> bytes:
            """A body of unknown length, with the sizes of its chunks, as it is passed on."""
            found = b""
            while True:
                head = self.rfile.readline()
                size = int(head.partition(b";")[0], 16)
                found += head
                if size == 0:
                    break
                found += self.rfile.read(size + 2)
            while (line := self.rfile.readline()) not in (b"\r\n", b""):
                found += line
            return found + b"\r\n"

        def _cut(self) -> None:
            self.close_connection = True
            with contextlib.suppress(OSError):
                self.connection.shutdown(socket.SHUT_RDWR)

        do_GET = do_HEAD = do_PUT = do_POST = do_PATCH = do_DELETE = _forward

    server = LoopbackServer(Forwarding)
    proxy.url = server.url
    try:
        yield proxy
    finally:
        server.close()
