"""Calls the accountant's HTTP API with a token file and a CA bundle; errors are one line.

It follows no redirects and never prints the token."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.parse import quote

import httpx2

from gputally.base import atomic_file, http_calls
from gputally.base.errors import AccountantError

_TIMEOUT_SECONDS = 120
Query = Mapping[str, str | Sequence[str] | None]


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """The server's answer to a probe.

    status: HTTP status.
    reason: the server's message unless the status is 200.
    date_ms: the server's time, in whole seconds; None if it sends none."""

    status: int
    reason: str
    date_ms: int | None


class Unanswered(AccountantError):
    """There was no usable answer; the message has the address and the reason. status: HTTP status, None without an
    answer."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class AccountantConnection:
    """The accountant at `url` (http or https). As a context manager it reuses connections; otherwise each call opens
    its own. Every method raises Unanswered, also for an invalid URL or certificate file.

    token_file: read at each call, because tokens rotate.
    ca_file: PEM file of the CAs to trust instead of the system's; read again when it changes, and CAs trusted before
        remain trusted.
    proxies: whether to use the proxies named in environment variables.
    transport: replaces the network."""

    def __init__(
        self,
        url: str,
        token: str | None = None,
        ca_file: Path | None = None,
        *,
        token_file: Path | None = None,
        timeout_s: float = _TIMEOUT_SECONDS,
        proxies: bool = False,
        transport: httpx2.BaseTransport | None = None,
    ) -> None:
        parsed = http_calls.address(url, "http://127.0.0.1:8080", Unanswered)
        self._ca_file = ca_file if parsed.scheme == "https" else None
        self._trusted = http_calls.trusting_for(parsed, self._ca_file, Unanswered)
        self._ca_seen = self._ca_stamp()
        self.url = url.rstrip("/")
        self._token = token
        self._token_file = token_file
        self._timeout_s, self._proxies, self._transport = timeout_s, proxies, transport
        self._reused: httpx2.Client | None = None

    def __enter__(self) -> Self:
        self._reused = self._connection()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Closes reused connections."""
        if self._reused is not None:
            self._reused.close()
            self._reused = None

    def get(self, path: str, query: Query | None = None) -> bytes:
        """The body of a 200 answer; parameters that are None are left out."""
        given = [
            (name, value)
            for name, values in (query or {}).items()
            if values is not None
            for value in ([values] if isinstance(values, str) else values)
        ]
        with self._answered("GET", path, params=given) as response:
            return response.read()

    def send_body(
        self, method: str, path: str, body: bytes, media_type: str, query: Query | None = None, encoding: str = ""
    ) -> bytes:
        """The body of the answer to POST or PUT."""
        given = {name: value for name, value in (query or {}).items() if isinstance(value, str)}
        headers = {"Content-Type": media_type, **({"Content-Encoding": encoding} if encoding else {})}
        with self._answered(method, path, params=given, content=body, headers=headers) as response:
            return response.read()

    def knock(self, path: str) -> ProbeResult:
        """The answer to a GET, including error statuses. Raises Unanswered without an answer."""
        with self._opened("GET", path) as response:
            response.read()
            words = "" if response.status_code == 200 else problem(response)
            return ProbeResult(response.status_code, words, _date_ms(response.headers.get("Date", "")))

    def save(self, path: str, to: Path) -> None:
        """Writes the body of a 200 answer of any size to a file."""
        try:
            to.parent.mkdir(parents=True, exist_ok=True)
            with atomic_file.replacing(to) as file, self._answered("GET", path) as response:
                for part in response.iter_bytes():
                    file.write(part)
        except OSError as error:
            raise Unanswered(f"{to}: {error.strerror or error}") from error

    @contextlib.contextmanager
    def _answered(self, method: str, path: str, **request: Any) -> Iterator[httpx2.Response]:
        """An open successful response."""
        with self._opened(method, path, **request) as response:
            if not response.is_success:
                response.read()
                text = f"{self.url}{path}: {response.status_code} {problem(response)}"
                raise Unanswered(text, response.status_code)
            yield response

    @contextlib.contextmanager
    def _opened(
        self, method: str, path: str, headers: Mapping[str, str] | None = None, **request: Any
    ) -> Iterator[httpx2.Response]:
        """An open response with any status."""
        headers = {**self._authorization(), **(headers or {})}
        self._trust_renewed()
        try:
            with contextlib.ExitStack() as open_:
                client = self._reused or open_.enter_context(self._connection())
                yield open_.enter_context(client.stream(method, self.url + quote(path), headers=headers, **request))
        except httpx2.HTTPError as error:
            raise Unanswered(f"{self.url}: {http_calls.reason(error)}") from error

    def _connection(self) -> httpx2.Client:
        return http_calls.client(self._trusted, self._timeout_s, transport=self._transport, proxies=self._proxies)

    def _authorization(self) -> dict[str, str]:
        token = self._token if self._token_file is None else http_calls.read_token(self._token_file, Unanswered)
        return {"Authorization": f"Bearer {token}"} if token else {}

    def _ca_stamp(self) -> atomic_file.Stamp | None:
        return atomic_file.stamp(self._ca_file) if self._ca_file is not None else None

    def _trust_renewed(self) -> None:
        """Reads the CA file again if it changed; an incomplete file changes nothing."""
        seen = self._ca_stamp()
        if seen != self._ca_seen:
            with contextlib.suppress(OSError):
                self._trusted.load_verify_locations(self._ca_file)
                self._ca_seen = seen


def _date_ms(text: str) -> int | None:
    try:
        return round(parsedate_to_datetime(text).timestamp() * 1000)
    except ValueError:
        return None


def problem(response: httpx2.Response) -> str:
    """Why a response is an error, in the accountant's words if it has any."""
    try:
        found = json.loads(response.content)
        return f"{found['title']}: {found['detail']}"
    except (ValueError, KeyError, TypeError):
        return response.reason_phrase
