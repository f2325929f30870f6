"""Asking a Prometheus, or what speaks its HTTP API (Thanos, Mimir, VictoriaMetrics): one question, its series.

The standard library's client: it follows no redirect and reads no proxy variable. The token is read anew for each
question, as it may rotate, and is in no message. An answer is bounded before it is in memory.
"""

from __future__ import annotations

import base64
import contextlib
import http.client
import ssl
from array import array
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import unquote, urlencode, urlsplit, urlunsplit

import msgspec

from accountant.errors import AccountantError
from accountant.importing.series import Labels, Series
from accountant.remote import read_token, trusting
from agent.units import MS_PER_SECOND

MOST_POINTS = 11_000
"""That Prometheus answers for one series (promql's own limit of a range query)."""
MOST_BYTES = 512 * 2**20
_TIMEOUT_SECONDS = 120


class PrometheusFailed(AccountantError):
    """No usable answer: the address, and what it said or why it could not."""


class _Result(msgspec.Struct, gc=False):
    metric: dict[str, str]
    values: list[tuple[float, str]] = []
    value: tuple[float, str] | None = None


class _Data(msgspec.Struct):
    result: list[_Result]


class _Answer(msgspec.Struct):
    status: str
    data: _Data | None = None
    error: str = ""


_decoder = msgspec.json.Decoder(_Answer)


class Prometheus:
    """The server at `url` (http or https; a path and `user:password@` may be part of it).

    token_file: bearer token. ca_file: authorities trusted instead of the system's, PEM. headers: further ones, such as
    `X-Scope-OrgID`. Raises PrometheusFailed for an address that is none, accountant.remote.Unanswered for a file that
    cannot be read."""

    def __init__(
        self,
        url: str,
        token_file: Path | None = None,
        ca_file: Path | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise PrometheusFailed(f"not an address: {url!r} (write for example http://prometheus:9090)")
        port = "" if parts.port is None else f":{parts.port}"
        self.origin = urlunsplit((parts.scheme, f"{parts.hostname}{port}", parts.path.rstrip("/"), "", ""))
        self._parts = parts
        self._context: ssl.SSLContext | None = trusting(ca_file) if parts.scheme == "https" else None
        self._token_file = token_file
        self._headers = dict(headers or {})
        if parts.username is not None:
            pair = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
            self._headers["Authorization"] = "Basic " + base64.b64encode(pair.encode()).decode()

    def range(self, query: str, start_ms: int, end_ms: int, step_ms: int) -> list[Series]:
        """Values at start, start + step, … up to end, both included."""
        if (end_ms - start_ms) // step_ms + 1 > MOST_POINTS:
            raise ValueError(f"more than {MOST_POINTS} points were asked for")
        given = {"start": _seconds(start_ms), "end": _seconds(end_ms), "step": _seconds(step_ms)}
        found = []
        for one in self._ask("query_range", {"query": query, **given}):
            times = array("q", (round(at * MS_PER_SECOND) for at, _ in one.values))
            found.append(Series(one.metric, times, array("d", (_number(value) for _, value in one.values))))
        return found

    def instant(self, query: str, at_ms: int) -> list[tuple[Labels, float]]:
        found = self._ask("query", {"query": query, "time": _seconds(at_ms)})
        return [(one.metric, _number(one.value[1])) for one in found if one.value is not None]

    def _ask(self, endpoint: str, given: Mapping[str, str]) -> list[_Result]:
        answer = self._decoded(*self._post(f"/api/v1/{endpoint}", urlencode(given).encode()))
        if answer.status != "success" or answer.data is None:
            raise PrometheusFailed(f"{self.origin}: {answer.error or 'no result'} (asked {given['query'][:200]})")
        return answer.data.result

    def _decoded(self, status: int, body: bytes) -> _Answer:
        try:
            return _decoder.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            if status in (401, 403):
                raise PrometheusFailed(f"{self.origin}: {status}, it wants a token that it knows") from error
            what = f"answers {status}" if status != 200 else "does not answer as a Prometheus does"
            raise PrometheusFailed(f"{self.origin}: {what} (the address ends before /api/v1)") from error

    def _post(self, path: str, body: bytes) -> tuple[int, bytes]:
        headers = {**self._headers, "Content-Type": "application/x-www-form-urlencoded"}
        if self._token_file is not None:
            headers["Authorization"] = f"Bearer {read_token(self._token_file)}"
        host = self._parts.hostname or ""
        connection = (
            http.client.HTTPSConnection(host, self._parts.port, timeout=_TIMEOUT_SECONDS, context=self._context)
            if self._context is not None
            else http.client.HTTPConnection(host, self._parts.port, timeout=_TIMEOUT_SECONDS)
        )
        with contextlib.closing(connection):
            try:
                connection.request("POST", self._parts.path.rstrip("/") + path, body, headers)
                response = connection.getresponse()
                found = response.read(MOST_BYTES + 1)
            except (OSError, http.client.HTTPException) as error:
                reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
                raise PrometheusFailed(f"{self.origin}: {reason}") from error
        if len(found) > MOST_BYTES:
            raise PrometheusFailed(f"{self.origin}: an answer of more than {MOST_BYTES >> 20} MiB (shorten --chunk)")
        return response.status, found


def _seconds(at_ms: int) -> str:
    return f"{at_ms // MS_PER_SECOND}.{at_ms % MS_PER_SECOND:03d}"


def _number(text: str) -> float:
    """NaN for what is none."""
    try:
        return float(text)
    except ValueError:
        return float("nan")
