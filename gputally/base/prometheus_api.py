"""Queries a Prometheus server over its HTTP API.

The client reads the token from its file at each query, because tokens rotate. No message contains the token. The client
stops reading an answer that exceeds `MOST_BYTES`."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from math import nan
from pathlib import Path
from typing import Final
from urllib.parse import urlencode

import httpx2
import msgspec

from gputally.base import http_calls
from gputally.base.units import MS_PER_SECOND
from gputally.base.untrusted_text import UNDECODABLE

MOST_POINTS: Final = 11_000
"""Largest number of points per series in a range query, which is Prometheus's own limit."""
MOST_BYTES: Final = 512 * 2**20
Sample = tuple[float, str]
"""A sample: seconds since 1970, and the value as Prometheus writes it."""


class Result(msgspec.Struct, gc=False):
    """One series of a query result: a vector's series has `value`, a matrix's `values`. A scalar is a `value` without
    labels."""

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
    """A client of the server at `url` (http or https), which can have a path and `user:password@`. Every method raises
    `fault`, and so does the constructor for an invalid address.

    token_file: file with the bearer token.
    ca_file: PEM file of the CAs to trust instead of the system's.
    headers: further headers, such as `X-Scope-OrgID`.
    proxies: True to use the proxies that environment variables name.
    transport: replaces the network."""

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
            credentials = f"{parsed.username}:{parsed.password}"
            self._headers["Authorization"] = "Basic " + base64.b64encode(credentials.encode()).decode()
        self._tls = http_calls.tls_context_for(parsed, ca_file if parsed.scheme == "https" else None, fault)
        self._timeout_s = timeout_s
        self._transport = transport
        self._proxies = proxies

    def instant(self, query: str, at_ms: int) -> list[Result]:
        """Evaluate the query at one time. The results have a `value`."""
        return self._query("query", {"query": query, "time": _seconds(at_ms)})

    def range(self, query: str, start_ms: int, end_ms: int, step_ms: int) -> list[Result]:
        """Evaluate the query at start, start + step, … up to end, both included. The results have `values`. Raises
        ValueError for more than `MOST_POINTS` points."""
        if (end_ms - start_ms) // step_ms + 1 > MOST_POINTS:
            raise ValueError(f"the query has more than {MOST_POINTS} points")
        span = {"start": _seconds(start_ms), "end": _seconds(end_ms), "step": _seconds(step_ms)}
        return self._query("query_range", {"query": query, **span})

    def _query(self, endpoint: str, parameters: Mapping[str, str]) -> list[Result]:
        status, body = self._post(f"/api/v1/{endpoint}", urlencode(parameters).encode())
        try:
            answer = _answer.decode(body)
            if answer.status == "success" and answer.data is not None:
                if answer.data.type == "scalar":
                    return [Result(value=_scalar.decode(answer.data.result))]
                return _results.decode(answer.data.result)
        except UNDECODABLE as error:
            if status in (401, 403):
                raise self._fault(f"{self.origin}: {status}: the bearer token is missing or not accepted") from error
            reason = f"status {status}" if status != 200 else "the answer is not that of a Prometheus server"
            raise self._fault(f"{self.origin}: {reason} (give the address without /api/v1)") from error
        raise self._fault(f"{self.origin}: {answer.error or 'no result'} (query: {parameters['query'][:200]})")

    def _post(self, path: str, body: bytes) -> tuple[int, bytes]:
        headers = {**self._headers, "Content-Type": "application/x-www-form-urlencoded"}
        if self._token_file is not None:
            headers["Authorization"] = f"Bearer {http_calls.read_token(self._token_file, self._fault)}"
        try:
            with (
                http_calls.client(
                    self._tls, self._timeout_s, transport=self._transport, proxies=self._proxies
                ) as client,
                client.stream("POST", self.origin + path, content=body, headers=headers) as response,
            ):
                content = http_calls.read_bounded(response, MOST_BYTES, http_calls.PATIENCE * self._timeout_s)
        except httpx2.HTTPError as error:
            raise self._fault(f"{self.origin}: {http_calls.reason(error)}") from error
        if content is None:
            raise self._fault(
                f"{self.origin}: the answer is larger than {MOST_BYTES >> 20} MiB: query a shorter time span"
            )
        return response.status_code, content


def number(text: str, most: float = 2.0**53) -> float:
    """Parse a sample's value. Return NaN for text that is not a number from 0 to `most`: nothing that is measured here
    is negative or infinite."""
    try:
        value = float(text)
    except ValueError:
        return nan
    return value if 0 <= value <= most else nan


def _seconds(at_ms: int) -> str:
    return f"{at_ms // MS_PER_SECOND}.{at_ms % MS_PER_SECOND:03d}"
