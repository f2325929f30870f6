"""Calls Run:ai's HTTP API.

Authenticated as a service account: its client id and secret are files of a mounted Secret, read whenever a token is
asked for and never logged; the token is kept until shortly before it ends. HTTPS alone, but for this machine. A
server that says 429 or 503 with Retry-After gets no request for so long.

Source: Run:ai REST API v2.2x and v3.0; `/api/v2/token` is OAuth 2.0's client credentials grant, `/api/v1/token` its
older form.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import quote

import httpx2

from gputally.base import http_calls
from gputally.base.clock import Clock
from gputally.base.errors import NotFound, Refused, Unavailable
from gputally.base.units import MS_PER_SECOND
from gputally.kubernetes.objects import Kind

PROJECT = Kind("run.ai/v1", "Project", "projects", status=False)


DEPARTMENT = Kind("run.ai/v1", "Department", "departments", status=False)


PAGE = 500
MOST_ROWS = 100_000
MOST_BYTES = 64 * 1024 * 1024
LONGEST_QUIET_S = 600.0
CLIENT_ID, CLIENT_SECRET = "client-id", "client-secret"
"""Files of the credentials' folder: keys of the Secret."""
_LISTS = {PROJECT: "resources", DEPARTMENT: "nodePoolResources"}
_EARLY_MS = 60 * MS_PER_SECOND
_LOCAL = frozenset({"localhost", "127.0.0.1", "::1"})


class RunaiApi:
    """Talks to one control plane. Close it, or use it as a context manager. Raises ClusterError's kinds."""

    def __init__(
        self,
        url: str,
        credentials: Path,
        clock: Clock,
        *,
        cluster: str | None = None,
        ca_file: Path | None = None,
        timeout_s: float = 10.0,
        transport: httpx2.BaseTransport | None = None,
    ) -> None:
        """credentials: a folder with `client-id` and `client-secret`. cluster: only units of this one, by id.
        ca_file: authorities (PEM) trusted instead of the system's. Raises Refused for an address or authorities
        that cannot be."""
        try:
            parsed = httpx2.URL(url)
        except httpx2.InvalidURL as error:
            raise Refused(f"not an address: {url!r}: {error}") from error
        if parsed.scheme != "https" and not (parsed.scheme == "http" and parsed.host in _LOCAL):
            raise Refused(f"{url}: Run:ai is asked over https alone")
        self._url = url.rstrip("/")
        self._credentials = credentials
        self._clock = clock
        self._cluster = cluster
        trusted = http_calls.trusting_for(parsed, ca_file, Refused)
        self._http = http_calls.client(trusted, timeout_s, transport=transport)
        self._token = ""
        self._token_until_ms = 0
        self._quiet_until_ms = 0

    def __enter__(self) -> RunaiApi:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._http.close()

    def units(self, kind: Kind) -> Iterator[dict[str, Any]]:
        """Every unit's resources in every node pool: orgUnitId, orgUnitName, nodePoolId, nodePoolName, resources,
        quotaStatus."""
        query = {"limit": str(PAGE), **({"filterBy": f"clusterId=={self._cluster}"} if self._cluster else {})}
        path = f"/api/v1/org-unit/{kind.plural}/node-pool-resources"
        for offset in range(0, MOST_ROWS, PAGE):
            answer = self._ask("GET", path, query={**query, "offset": str(offset)})
            rows = answer.get(_LISTS[kind]) if isinstance(answer, dict) else None
            if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
                raise Unavailable(f"{self._url}{path}: not the answer of Run:ai")
            yield from rows
            if len(rows) < PAGE:
                return

    def weight(self, kind: Kind, unit: str, pool: str) -> float | None:
        """The over-quota weight as it stands now. Raises NotFound for a unit without this node pool."""
        path = f"/api/v1/org-unit/{kind.plural}/{quote(unit, safe='')}"
        answer = self._ask("GET", path)
        for each in (answer.get("resources") or ()) if isinstance(answer, dict) else ():
            if str((each.get("nodePool") or {}).get("id")) == pool:
                found = (each.get("gpu") or {}).get("overQuotaWeight")
                return None if found is None else float(found)
        raise NotFound(f"{self._url}{path}: it has no node pool {pool}")

    def set_weight(self, kind: Kind, unit: str, pool: str, weight: float) -> None:
        """Change this one field, as a partial update."""
        path = f"/api/v1/org-unit/{kind.plural}/{quote(unit, safe='')}/resources"
        self._ask("PATCH", path, body=[{"nodePool": {"id": pool}, "gpu": {"overQuotaWeight": weight}}])

    def node_pools(self) -> list[dict[str, Any]]:
        answer = self._ask("GET", "/api/v1/node-pools", query={"limit": str(PAGE)})
        return list(answer.get("nodepools") or ()) if isinstance(answer, dict) else []

    def _ask(self, method: str, path: str, *, query: Mapping[str, str] | None = None, body: object = None) -> Any:
        response = self._send(method, path, query=query, body=body, token=self._bearer())
        if response.status_code == 401:
            self._token_until_ms = 0  # revoked before its time: once more with a new one
            response = self._send(method, path, query=query, body=body, token=self._bearer())
        return self._read(method, path, response)

    def _bearer(self) -> str:
        now_ms = self._clock.monotonic_ms()
        if now_ms < self._token_until_ms:
            return self._token
        client, secret = self._secret(CLIENT_ID), self._secret(CLIENT_SECRET)
        form = {"grant_type": "client_credentials", "client_id": client, "client_secret": secret}
        path = "/api/v2/token"
        response = self._send("POST", path, form=form)
        if response.status_code == 404:
            path = "/api/v1/token"
            older = {"grantType": "client_credentials", "clientId": client, "clientSecret": secret}
            response = self._send("POST", path, body=older)
        answer = self._read("POST", path, response)
        token = (answer.get("access_token") or answer.get("accessToken")) if isinstance(answer, dict) else None
        if not isinstance(token, str) or not token:
            raise Unavailable(f"{self._url}{path}: no token in the answer")
        lasts = answer.get("expires_in") or answer.get("expiresIn")
        lasts_ms = int(lasts) * MS_PER_SECOND if isinstance(lasts, int | float) else 0
        self._token, self._token_until_ms = token, now_ms + max(0, lasts_ms - _EARLY_MS)
        return token

    def _secret(self, name: str) -> str:
        path = self._credentials / name
        try:
            return path.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise Refused(f"credentials {path}: {getattr(error, 'strerror', None) or 'not text'}") from error

    def _send(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        body: object = None,
        form: Mapping[str, str] | None = None,
        token: str = "",
    ) -> httpx2.Response:
        if self._clock.monotonic_ms() < self._quiet_until_ms:
            raise Unavailable(f"{self._url}: it asked to be left alone for a while")
        headers = {"Accept": "application/json", **({"Authorization": f"Bearer {token}"} if token else {})}
        content = None if body is None else json.dumps(body)
        if content is not None:
            headers["Content-Type"] = "application/json"
        try:
            return self._http.request(
                method, self._url + path, params=query, content=content, data=form, headers=headers
            )
        except httpx2.HTTPError as error:
            raise Unavailable(f"{self._url}: {http_calls.reason(error)}") from error

    def _read(self, method: str, path: str, response: httpx2.Response) -> Any:
        status = response.status_code
        if status == 429 or status >= 500:
            self._be_quiet(response.headers.get("Retry-After"))
        if not response.is_success:
            kinds = {404: NotFound} if status == 404 else {}
            kind = kinds.get(status, Unavailable if status == 429 or status >= 500 else Refused)
            raise kind(f"{method} {self._url}{path}: {status} {_words(response)}")
        if len(response.content) > MOST_BYTES:
            raise Unavailable(f"{method} {self._url}{path}: the answer is larger than {MOST_BYTES} bytes")
        try:
            return json.loads(response.content) if response.content else None
        except ValueError as error:
            raise Unavailable(f"{method} {self._url}{path}: the answer is not JSON") from error

    def _be_quiet(self, retry_after: str | None) -> None:
        if retry_after is not None and retry_after.isascii() and retry_after.isdigit():
            wait_s = min(float(retry_after), LONGEST_QUIET_S)
            self._quiet_until_ms = self._clock.monotonic_ms() + round(wait_s * MS_PER_SECOND)


def _words(response: httpx2.Response) -> str:
    """Run:ai's own words, where they are such."""
    try:
        return str(json.loads(response.content)["message"])[:500]
    except (ValueError, KeyError, TypeError):
        return response.reason_phrase
