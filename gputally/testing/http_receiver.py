"""An HTTP server on the loopback that takes what a plug-in sends, refuses it, or hangs up without an answer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from gputally.testing.http_server import Handler, listening

ACCEPTS, HANGS_UP = 200, 0


@dataclass
class HttpReceiver:
    """url: the server's address, without a path.

    answer: the status of all further requests. HANGS_UP reads the request and closes the connection.
    paths, bodies: of the requests that were accepted or read before the server hung up."""

    url: str = ""
    answer: int = ACCEPTS
    paths: list[str] = field(default_factory=list)
    bodies: list[bytes] = field(default_factory=list)


@contextmanager
def http_receiver() -> Iterator[HttpReceiver]:
    """Run a receiver until the block ends."""
    receiver = HttpReceiver()

    class Takes(Handler):
        def do_POST(self) -> None:  # noqa: N802 - a name that the standard library calls
            content = self.content()
            status = receiver.answer
            if status in (ACCEPTS, HANGS_UP):
                receiver.paths.append(self.path)
                receiver.bodies.append(content)
            if status == HANGS_UP:
                self.close_connection = True
                return
            self.say(status, b"ok" if status == ACCEPTS else b"not\nnow")

        do_PUT = do_POST  # noqa: N815

    with listening(Takes) as receiver.url:
        yield receiver
