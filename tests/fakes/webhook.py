"""An incoming webhook of a chat on the loopback. It accepts JSON, and answers or hangs up as the test sets."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from tests.fakes.http_server import Handler, listening


@dataclass
class Hook:
    """answers: the statuses of the next requests, then 200. 0 reads the request and hangs up."""

    url: str = ""
    answers: list[int] = field(default_factory=list)
    bodies: list[Any] = field(default_factory=list)


@contextmanager
def webhook() -> Iterator[Hook]:
    """Run a webhook until the block ends."""
    hook = Hook()

    class Receiver(Handler):
        def do_POST(self) -> None:
            body = self.content()
            status = hook.answers.pop(0) if hook.answers else 200
            if status in (0, 200):
                hook.bodies.append(json.loads(body))
            if status == 0:
                self.close_connection = True
                return
            self.say(status, b"ok" if status == 200 else b"not\nnow")

    with listening(Receiver) as url:
        hook.url = f"{url}/services/s3cret"
        yield hook
