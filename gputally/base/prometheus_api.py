"""Queries a Prometheus over its HTTP API.

The token is read from its file at each query, because it may be rotated, and appears in no message. The size of an
answer is limited before it is read into memory."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from pathlib import Path
from typing import Final
from urllib.parse import urlencode

import httpx2
import msgspec

from gputally.base import http_calls
from gputally.base.units import MS_PER_SECOND

MOST_POINTS: Final = 11_000
"""Largest number of points of one series that Prometheus returns (its own limit of a range query)."""
MOST_BYTES: Final = 512 * 2**20
Sample = tuple[float, str]
"""A sample: seconds since 1970, and the value as Prometheus writes it."""


class Result(msgspec.Struct, gc=False):
    """One element of a vector (value) or of a matrix (values); a scalar is an element without labels."""

    metric: dict[str, str] = {}
    values: list[Sample] = []
    value: Sample | None = None


class _Data(msgspec.Struct):
    result: msgspec.Raw
    type: str = msgspec.field(default="vector", name="resultType")


class _Answer(msgspec.Struct):
    status: str
    data: _Data | None = None
    error: str = ""


_answer = msgspec.json.Decoder(_Answer)
_scalar = msgspec.json.Decoder(Sample)
_results = msgspec.json.Decoder(list[Result])


class Prometheus:
    """The server at `url` (http or https; a path and `user:password@` may be part of it). Raises `fault`, also for an
    address that is none.

    token_file: bearer token.
    ca_file: authorities trusted instead of the system's, PEM.
    headers: further ones, such as `X-Scope-OrgID`.
    proxies: whether to use the proxies that environment variables name.
    transport: instead of the network."""

    def __init__(
        self,
        url: str,
        fault: type[Exception],
        *,
        token_file: Path | None = None,
        ca_file: Path | None = None,
        headers: Mapping[str, str] | None = None,
        timeout_s: float = 120,
        proxies: bool = False,
        transport: httpx2.BaseTransport | None = None,
    ) -> None:
        parsed = http_calls.address(url, "http://prometheus:9090", fault)
        self.origin = str(parsed.copy_with(userinfo=b"", query=None, fragment=None)).rstrip("/")
        self._fault = fault
        self._token_file = token_file
        self._headers = {**(headers or {}), "Accept": "application/json"}
        if parsed.userinfo:
            pair = f"{parsed.username}:{parsed.password}"
            self._headers["Authorization"] = "Basic " + base64.b64encode(pair.encode()).decode()
        self._trusted = http_calls.trusting_for(parsed, ca_file if parsed.scheme == "https" else None, fault)
        self._timeout_s = timeout_s
        self._transport = transport
        self._proxies = proxies

    def instant(self, query: str, at_ms: int) -> list[Result]:
        """Evaluate the query at one time; the elements have a `value`."""
        return self._ask("query", {"query": query, "time": _seconds(at_ms)})

    def range(self, query: str, start_ms: int, end_ms: int, step_ms: int) -> list[Result]:
        """Evaluate the query at start, start + step, … up to end, both included; the elements have `values`."""
        if (end_ms - start_ms) // step_ms + 1 > MOST_POINTS:
            raise ValueError(f"the query has more than {MOST_POINTS} points")
        span = {"start": _seconds(start_ms), "end": _seconds(end_ms), "step": _seconds(step_ms)}
        return self._ask("query_range", {"query": query, **span})

    def _ask(self, endpoint: str, given: Mapping[str, str]) -> list[Result]:
        status, body = self._post(f"/api/v1/{endpoint}", urlencode(given).encode())
        try:
            answer = _answer.decode(body)
            if answer.status == "success" and answer.data is not None:
                if answer.data.type == "scalar":
                    return [Result(value=_scalar.decode(answer.data.result))]
                return _results.decode(answer.data.result)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            if status in (401, 403):
                raise self._fault(f"{self.origin}: {status}, it wants a token that it knows") from error
            what = f"answers {status}" if status != 200 else "does not answer as a Prometheus does"
            raise self._fault(f"{self.origin}: {what} (the address ends before /api/v1)") from error
        raise self._fault(f"{self.origin}: {answer.error or 'no result'} (asked {given['query'][:200]})")

    def _post(self, path: str, body: bytes) -> tuple[int, bytes]:
        headers = {**self._headers, "Content-Type": "application/x-www-form-urlencoded"}
        if self._token_file is not None:
            headers["Authorization"] = f"Bearer {http_calls.read_token(self._token_file, self._fault)}"
        try:
            with (
                http_calls.client(
                    self._trusted, self._timeout_s, transport=self._transport, proxies=self._proxies
                ) as client,
                client.stream("POST", self.origin + path, content=body, headers=headers) as response,
            ):
                found = http_calls.read_bounded(response, MOST_BYTES)
        except httpx2.HTTPError as error:
            raise self._fault(f"{self.origin}: {http_calls.reason(error)}") from error
        if found is None:
            raise self._fault(f"{self.origin}: an answer of more than {MOST_BYTES >> 20} MiB: ask for less at a time")
        return response.status_code, found


def number(text: str) -> float:
    """Parse a value; NaN if it is not a number."""
    try:
        return float(text)
    except ValueError:
        return float("nan")


def _seconds(at_ms: int) -> str:
    return f"{at_ms // MS_PER_SECOND}.{at_ms % MS_PER_SECOND:03d}"
