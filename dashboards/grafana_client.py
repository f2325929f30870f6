"""Pushes dashboards into a Grafana through its HTTP API.

Idempotent: a dashboard that is there as we would write it is left alone, so that a second push changes nothing and
makes no version. Only our own folder and our own uids are written. The token is never shown.

Source of the calls: Grafana's HTTP API reference (`/api/folders`, `/api/dashboards`), which Grafana 9 to 13 answer.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote

import httpx2

from gputally.base import http_calls

TIMEOUT_S = 30.0
MOST_BYTES = 16 << 20
"""Of an answer."""
_REASONS = {
    401: "the token is not known there, or has expired",
    403: "the token may not do this; a service account with the role Editor may",
    412: "somebody else changed it meanwhile",
}
_SERVERS_OWN = ("id", "version")
"""What Grafana adds to a dashboard."""

Change = Literal["created", "replaced", "unchanged"]


class GrafanaError(Exception):
    """Grafana did not do as it was asked: one line with what, and why."""


@dataclass(frozen=True, slots=True)
class PushResult:
    """What became of one dashboard."""

    title: str
    change: Change
    url: str


class Grafana:
    """One server. url: its root, a path below included. token: of a service account."""

    def __init__(self, url: str, token: str, ca_file: Path | None = None) -> None:
        """Raises GrafanaError for an address that is none, or an authority file that cannot be read."""
        parsed = http_calls.address(url, "https://grafana.example", GrafanaError)
        self._url = url.rstrip("/")
        self._token = token
        self._trusted = http_calls.trusting_for(parsed, ca_file, GrafanaError)

    def push(self, dashboards: Iterable[dict[str, Any]], folder: str) -> list[PushResult]:
        """Have every dashboard stand in `folder` (its title). Raises GrafanaError at the first that cannot be."""
        uid = self._folder(folder)
        return [self._push(dashboard, uid) for dashboard in dashboards]

    def _folder(self, title: str) -> str:
        """The uid of the folder, made if there is none of this title."""
        for known in self._ask("GET", "/api/folders?limit=1000"):
            if known.get("title") == title:
                return str(known["uid"])
        return str(self._ask("POST", "/api/folders", {"title": title})["uid"])

    def _push(self, dashboard: dict[str, Any], folder: str) -> PushResult:
        path = f"/api/dashboards/uid/{quote(dashboard['uid'], safe='')}"
        known = self._ask("GET", path, missing_is_none=True)
        title = str(dashboard["title"])
        if known is not None:
            meta = known.get("meta", {})
            if meta.get("provisioned"):
                raise GrafanaError(f"{title}: it comes from a file of that server, which alone can change it")
            if _plain(known["dashboard"]) == _plain(dashboard) and meta.get("folderUid", "") == folder:
                return PushResult(title, "unchanged", self._url + str(meta.get("url", "")))
        body = {"dashboard": dashboard, "folderUid": folder, "overwrite": True, "message": "gputally dashboards push"}
        done = self._ask("POST", "/api/dashboards/db", body)
        return PushResult(title, "replaced" if known is not None else "created", self._url + str(done.get("url", "")))

    def _ask(self, method: str, path: str, body: object = None, *, missing_is_none: bool = False) -> Any:
        headers = {"Authorization": f"Bearer {self._token}", "Content-Type": "application/json"}
        place = f"{method} {self._url}{path}"
        content = None if body is None else json.dumps(body)
        try:
            with (
                http_calls.client(self._trusted, TIMEOUT_S) as client,
                client.stream(method, self._url + path, content=content, headers=headers) as answer,
            ):
                found = http_calls.read_bounded(answer, MOST_BYTES)
            if answer.status_code == 404 and missing_is_none:
                return None
            if not answer.is_success:
                why = _REASONS.get(answer.status_code) or _words(found or b"", answer.reason_phrase)
                raise GrafanaError(f"{place}: {answer.status_code}, {why}")
            return json.loads(found or b"")
        except httpx2.HTTPError as error:
            raise GrafanaError(f"{place}: {http_calls.reason(error)}") from error
        except ValueError as error:
            raise GrafanaError(f"{place}: {error}") from error


def _plain(dashboard: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in dashboard.items() if key not in _SERVERS_OWN}


def _words(body: bytes, phrase: str) -> str:
    """Grafana's own words, as one line."""
    try:
        message = json.loads(body)["message"]
    except (ValueError, KeyError, TypeError):
        message = phrase
    return " ".join(str(message).split())[:300]
