"""A chat's incoming webhook on loopback: takes JSON, answers what it is told to, or hangs up."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from tests.fakes.http_server import Handler, listening


@dataclass
class Hook:
    """answers: status of each request in turn, 0 for hanging up after it was read; then 200."""

    url: str = ""
    answers: list[int] = field(default_factory=list)
    bodies: list[Any] = field(default_factory=list)


@contextmanager
def webhook() -> Iterator[Hook]:
    """Running until the end of the block."""
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
