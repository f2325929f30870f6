"""An HTTP server on the loopback that takes what a plug-in sends, refuses it, or hangs up without an answer."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from gputally.testing.http_server import Handler, listening

ACCEPTS, HANGS_UP, TALKS_ON = 200, 0, -1
"""TALKS_ON refuses, and its answer has 64 MiB, which nobody needs."""
_MIB = 1024 * 1024


@dataclass
class HttpReceiver:
    """url: the server's address, without a path.

    answer: the status of all further requests. HANGS_UP reads the request and closes the connection; TALKS_ON refuses
        it with more than a client should read.
    said_mib: how much of such an answer was read.
    paths, bodies: of the requests that were accepted or read before the server hung up."""

    url: str = ""
    answer: int = ACCEPTS
    paths: list[str] = field(default_factory=list)
    bodies: list[bytes] = field(default_factory=list)
    said_mib: int = 0


@contextmanager
def http_receiver() -> Iterator[HttpReceiver]:
    """Run a receiver until the block ends."""
    receiver = HttpReceiver()

    class Takes(Handler):
        def do_POST(self) -> None:  # noqa: N802 - a name that the standard library calls
            content = self.content()
            status = receiver.answer
            if status == TALKS_ON:
                self.talk_on()
                return
            if status in (ACCEPTS, HANGS_UP):
                receiver.paths.append(self.path)
                receiver.bodies.append(content)
            if status == HANGS_UP:
                self.close_connection = True
                return
            self.say(status, b"ok" if status == ACCEPTS else b"not\nnow")

        do_PUT = do_POST  # noqa: N815

        def talk_on(self) -> None:
            self.send_response(503)
            self.send_header("Content-Length", str(64 * _MIB))
            self.end_headers()
            self.close_connection = True
            with contextlib.suppress(OSError):
                for _ in range(64):
                    self.wfile.write(b"x" * _MIB)
                    receiver.said_mib += 1

    with listening(Takes) as receiver.url:
        yield receiver
