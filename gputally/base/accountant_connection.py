"""Calls the accountant's HTTP API, with a bearer token and a CA file if they are given.

The client follows no redirects. Its errors have one line, which never contains the token."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any, Self
from urllib.parse import quote

import httpx2

from gputally.base import atomic_file, called_off, http_calls
from gputally.base.errors import AccountantError

_TIMEOUT_SECONDS = 120
_MOST_BYTES = 512 * 2**20
LONGEST_WAIT_S = 600
"""A longer Retry-After counts as this many seconds."""
Query = Mapping[str, str | Sequence[str] | None]


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """The server's answer to a probe.

    reason: the server's message; "" for status 200.
    date_ms: the Date header in milliseconds since 1970, exact to a second; None without a valid header."""

    status: int
    reason: str
    date_ms: int | None


class Unanswered(AccountantError):
    """The accountant gave no valid answer. The message has one line: the address and the reason.

    status: the HTTP status; None without an answer.
    retry_after_s: how many seconds the accountant asks to wait (Retry-After); 0 if it does not ask.
    unreached: whether no server answers at the address."""

    def __init__(
        self, message: str, status: int | None = None, retry_after_s: int = 0, *, unreached: bool = False
    ) -> None:
        super().__init__(message)
        self.status, self.retry_after_s, self.unreached = status, retry_after_s, unreached


class AccountantConnection:
    """A client of the accountant at `url` (http or https). As a context manager it reuses connections; otherwise each
    call opens its own. Every method raises Unanswered, and so does the constructor for an invalid URL or CA file.

    token_file: is read at each call, because tokens rotate; it replaces `token`.
    ca_file: PEM file of the CAs to trust instead of the system's. It is read again when it changes; CAs that were
        trusted before remain trusted.
    proxies: True to use the proxies that environment variables name.
    transport: replaces the network.
    most_bytes: size of the largest answer, except in `save`."""

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
        most_bytes: int = _MOST_BYTES,
    ) -> None:
        parsed = http_calls.address(url, "http://127.0.0.1:8080", Unanswered)
        self._ca_file = ca_file if parsed.scheme == "https" else None
        self._tls = http_calls.tls_context_for(parsed, self._ca_file, Unanswered)
        self._loaded_ca_stamp = self._ca_stamp()
        self.url = url.rstrip("/")
        self.public_url = self.url
        """The address of its pages, for links."""
        self._token = token
        self._token_file = token_file
        self._timeout_s, self._proxies, self._transport = timeout_s, proxies, transport
        self._most_bytes = most_bytes
        self._reused: http_calls.DeadlineClient | None = None

    def __enter__(self) -> Self:
        self._reused = self._connection()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close reused connections."""
        if self._reused is not None:
            self._reused.close()
            self._reused = None

    def get(self, path: str, query: Query | None = None) -> bytes:
        """Return the body of the answer to a GET. A parameter that is None is left out."""
        parameters = [
            (name, value)
            for name, values in (query or {}).items()
            if values is not None
            for value in ([values] if isinstance(values, str) else values)
        ]
        with self._success("GET", path, params=parameters) as response:
            return self._content(response)

    def send_body(
        self, method: str, path: str, body: bytes, media_type: str, query: Query | None = None, encoding: str = ""
    ) -> bytes:
        """Send a body with POST or PUT, and return the body of the answer. encoding: the Content-Encoding."""
        parameters = {name: value for name, value in (query or {}).items() if isinstance(value, str)}
        headers = {"Content-Type": media_type, **({"Content-Encoding": encoding} if encoding else {})}
        with self._success(method, path, params=parameters, content=body, headers=headers) as response:
            return self._content(response)

    def probe(self, path: str) -> ProbeResult:
        """Send a GET and return the answer, also if its status is an error. Raises Unanswered without an answer."""
        with self._response("GET", path) as response:
            content = self._content(response)
            reason = "" if response.status_code == 200 else problem(response, content)
            return ProbeResult(response.status_code, reason, _date_ms(response.headers.get("Date", "")))

    def save(self, path: str, to: Path) -> None:
        """Write the body of the answer to a GET to a file, in parts, so that it can be of any size."""
        try:
            to.parent.mkdir(parents=True, exist_ok=True)
            with atomic_file.replacing(to) as file, self._success("GET", path) as response:
                for part in http_calls.parts_of(response, http_calls.PATIENCE * self._timeout_s):
                    file.write(part)
        except OSError as error:
            raise Unanswered(f"{to}: {error.strerror or error}") from error

    @contextlib.contextmanager
    def _success(self, method: str, path: str, **request: Any) -> Iterator[httpx2.Response]:
        """Send a request and yield the open response. Raises Unanswered for an error status."""
        with self._response(method, path, **request) as response:
            if not response.is_success:
                text = f"{self.url}{path}: {response.status_code} {problem(response, self._content(response))}"
                raise Unanswered(text, response.status_code, _retry_after_s(response.headers.get("Retry-After", "")))
            yield response

    @contextlib.contextmanager
    def _response(
        self, method: str, path: str, headers: Mapping[str, str] | None = None, **request: Any
    ) -> Iterator[httpx2.Response]:
        """Send a request and yield the open response, also if its status is an error. The request of work that can be
        called off (`gputally.base.called_off`) has a connection of its own, which ends with that work. Raises
        CalledOff."""
        headers = {**self._authorization(), **(headers or {})}
        self._reload_ca_file()
        try:
            with contextlib.ExitStack() as stack:
                shared = self._reused if called_off.current() is None else None
                client = shared or stack.enter_context(self._connection())
                stack.enter_context(called_off.stoppable(client.abort))
                yield stack.enter_context(client.stream(method, self.url + quote(path), headers=headers, **request))
        except httpx2.HTTPError as error:
            unreached = isinstance(error, httpx2.ConnectError | httpx2.ConnectTimeout)
            raise Unanswered(f"{self.url}: {http_calls.reason(error)}", unreached=unreached) from error

    def _content(self, response: httpx2.Response) -> bytes:
        """Read the whole body, within limits of size and time."""
        content = http_calls.read_bounded(response, self._most_bytes, http_calls.PATIENCE * self._timeout_s)
        if content is None:
            raise Unanswered(f"{self.url}: the answer is larger than {self._most_bytes} bytes")
        return content

    def _connection(self) -> http_calls.DeadlineClient:
        return http_calls.client(self._tls, self._timeout_s, transport=self._transport, proxies=self._proxies)

    def _authorization(self) -> dict[str, str]:
        token = self._token if self._token_file is None else http_calls.read_token(self._token_file, Unanswered)
        return {"Authorization": f"Bearer {token}"} if token else {}

    def _ca_stamp(self) -> atomic_file.Stamp | None:
        return atomic_file.stamp(self._ca_file) if self._ca_file is not None else None

    def _reload_ca_file(self) -> None:
        """Read the CA file again if it has changed. A file that cannot be read changes nothing."""
        stamp = self._ca_stamp()
        if stamp != self._loaded_ca_stamp:
            with contextlib.suppress(OSError):
                self._tls.load_verify_locations(self._ca_file)
                self._loaded_ca_stamp = stamp


def _date_ms(text: str) -> int | None:
    try:
        return round(parsedate_to_datetime(text).timestamp() * 1000)
    except ValueError:
        return None


def _retry_after_s(text: str) -> int:
    """Return the seconds of a Retry-After, at most LONGEST_WAIT_S; 0 for a date or anything else."""
    return min(int(text[:9]), LONGEST_WAIT_S) if text.isascii() and text.isdigit() else 0


def problem(response: httpx2.Response, content: bytes) -> str:
    """Return the reason of an error response: title and detail of its problem document, or else the HTTP reason."""
    try:
        document = json.loads(content)
        return f"{document['title']}: {document['detail']}"
    except (ValueError, KeyError, TypeError):
        return response.reason_phrase
