"""An accountant on the loopback that gives commands fixed answers in the form of the HTTP API."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from urllib.parse import parse_qs, urlsplit

from gputally.testing.fake_accountant import usage_window
from gputally.testing.http_server import Handler, listening

Answer = Callable[[Mapping[str, str]], Any]


@contextmanager
def serving(
    routes: Mapping[str, Answer],
    taking: Mapping[str, Answer] | None = None,
    asked: list[tuple[str, str]] | None = None,
) -> Iterator[str]:
    """Answer GET with `routes`, and PUT and POST of `taking` without reading their body. Another method gets 405, an
    unknown path 404, both without a body. asked: receives the verb and path of each answered request. Yields the
    address."""

    class Served(Handler):
        def do_GET(self) -> None:
            url = urlsplit(self.path)
            answer = routes.get(url.path)
            if answer is None:
                self.send_error(404)
                return
            query = {key: values[0] for key, values in parse_qs(url.query).items()}
            self._answer(answer(query))

        def _answer(self, document: Any) -> None:
            if asked is not None:
                asked.append((self.command, urlsplit(self.path).path))
            self.say(200, json.dumps(document).encode())

        def do_PUT(self) -> None:
            answer = (taking or {}).get(urlsplit(self.path).path)
            if answer is None:
                self.send_error(405)
                return
            self.content()
            self._answer(answer({}))

        do_POST = do_PUT

    with listening(Served) as url:
        yield url


def window_of(usage: Mapping[str, float], capacity: int, version: str | None = None) -> Answer:
    """Build the answer of GET /v1/windows for the last hour. usage: shares of the capacity."""

    def answer(query: Mapping[str, str]) -> dict[str, Any]:
        used = {queue: round(part * capacity) for queue, part in usage.items()}
        return usage_window(used, capacity, end_ms=int(query["at"]), policy_version=version).model_dump(mode="json")

    return answer
