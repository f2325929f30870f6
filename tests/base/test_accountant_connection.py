"""The client of the accountant reads an answer within limits of size and time."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import httpx2
import pytest

from gputally.base.accountant_connection import AccountantConnection, Unanswered


class Endless(httpx2.SyncByteStream):
    """A body that never ends."""

    def __iter__(self) -> Iterator[bytes]:
        return itertools.repeat(b"x" * 1024)


@pytest.mark.parametrize("status", [200, 503])
@pytest.mark.parametrize("limits", [{"most_bytes": 10_000}, {"timeout_s": 0.001}])
def test_an_endless_answer_is_given_up(status: int, limits: dict[str, float]) -> None:
    transport = httpx2.MockTransport(lambda _: httpx2.Response(status, stream=Endless()))
    connection = AccountantConnection("http://127.0.0.1:1", transport=transport, **limits)  # type: ignore[arg-type]
    with pytest.raises(Unanswered):
        connection.get("/v1/usage")
    with pytest.raises(Unanswered):
        connection.probe("/readyz")
