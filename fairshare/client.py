"""The accountant over HTTP, as `fairshare.ports.AccountantPort`.

The bearer token is read from its file at every request, for tokens rotate. Whatever keeps an answer
from being one becomes AccountantUnavailable with one clear line; the caller holds and tries again.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx2
from pydantic import ValidationError

from accountant.wire import Decision, Measure, Policy, PolicyVersion, UsageWindow, WindowSpec
from fairshare.errors import AccountantUnavailable

MOST_DECISIONS_PER_POST = 1_000


class AccountantClient:
    """Talks to one accountant. Close it, or use it as a context manager."""

    def __init__(
        self,
        url: str,
        *,
        token_file: Path | None = None,
        timeout_s: float = 30.0,
        transport: httpx2.BaseTransport | None = None,
    ) -> None:
        """Raises AccountantUnavailable for an address that is none. transport: instead of the network."""
        try:
            parsed = httpx2.URL(url)
        except httpx2.InvalidURL as error:
            raise AccountantUnavailable(f"not an address: {url!r}: {error}") from error
        if parsed.scheme not in ("http", "https") or not parsed.host:
            raise AccountantUnavailable(f"not an address: {url!r} (write for example http://accountant:8080)")
        self._url = url.rstrip("/")
        self._token_file = token_file
        self._http = httpx2.Client(timeout=timeout_s, transport=transport, follow_redirects=False)

    def __enter__(self) -> AccountantClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._http.close()

    def window(self, spec: WindowSpec, measure: Measure, at_ms: int, min_coverage: float) -> UsageWindow:
        query: dict[str, str] = {
            "kind": spec.kind,
            "size": f"{spec.size}s",
            "measure": measure,
            "by": "queue",
            "at": str(at_ms),
            "min_coverage": repr(min_coverage),
        }
        if spec.half_life is not None:
            query["half_life"] = f"{spec.half_life}s"
        if spec.start is not None:
            query["start"] = spec.start.isoformat()
        if spec.cron is not None:
            query["cron"] = spec.cron
        answer = self._send("GET", "/v1/windows", params=query)
        try:
            return UsageWindow.model_validate_json(answer)
        except ValidationError as error:
            raise self._foreign("/v1/windows") from error

    def put_policy(self, policy: Policy) -> PolicyVersion:
        answer = self._send("PUT", "/v1/policy", content=policy.model_dump_json(by_alias=True))
        try:
            return PolicyVersion.model_validate_json(answer)
        except ValidationError as error:
            raise self._foreign("/v1/policy") from error

    def post_decisions(self, decisions: Sequence[Decision]) -> None:
        for start in range(0, len(decisions), MOST_DECISIONS_PER_POST):
            part = decisions[start : start + MOST_DECISIONS_PER_POST]
            content = "[" + ",".join(decision.model_dump_json() for decision in part) + "]"
            self._send("POST", "/v1/decisions", content=content)

    def _send(
        self, method: str, path: str, *, params: dict[str, str] | None = None, content: str | None = None
    ) -> bytes:
        headers = {"Accept": "application/json"}
        if content is not None:
            headers["Content-Type"] = "application/json"
        if self._token_file is not None:
            headers["Authorization"] = f"Bearer {self._token(self._token_file)}"
        try:
            response = self._http.request(method, self._url + path, params=params, content=content, headers=headers)
        except httpx2.HTTPError as error:
            raise AccountantUnavailable(f"{self._url}: {str(error) or type(error).__name__}") from error
        if not response.is_success:
            raise AccountantUnavailable(f"{self._url}{path}: {response.status_code} {_reason(response)}")
        return response.content

    def _foreign(self, path: str) -> AccountantUnavailable:
        return AccountantUnavailable(f"{self._url}{path}: not the answer of an accountant of this release")

    @staticmethod
    def _token(path: Path) -> str:
        try:
            return path.read_text(encoding="ascii").strip()
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "not text"
            raise AccountantUnavailable(f"token file {path}: {reason}") from error


def _reason(response: httpx2.Response) -> str:
    """The problem's own words, where it is one."""
    try:
        problem: Any = json.loads(response.content)
        return f"{problem['title']}: {problem['detail']}"
    except (ValueError, KeyError, TypeError):
        return response.reason_phrase
