"""Defines the request and response of the controller's page server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from urllib.parse import quote, urlencode

from gputally.server.page_layout import HTML

Fields = Mapping[str, Sequence[str]]
MARK = "form_token"
"""Name of the field that carries a form's mark."""


@dataclass(frozen=True, slots=True)
class Request:
    """headers: names in lower case. query, form: every value of every field, as sent."""

    method: str
    path: str
    query: Fields = field(default_factory=dict)
    form: Fields = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)

    def asked(self, name: str, default: str = "") -> str:
        """The first value of a query's field."""
        return (self.query.get(name) or (default,))[0]

    def sent(self, name: str) -> str:
        """The first value of a form's field, as it was sent."""
        return (self.form.get(name) or ("",))[0]

    @property
    def address(self) -> str:
        """Path and query, to come back to."""
        return quote(self.path) + (f"?{urlencode(self.query, doseq=True)}" if self.query else "")

    @property
    def cookies(self) -> Mapping[str, str]:
        """Those the browser sent along, by name."""
        found = {}
        for part in self.headers.get("cookie", "").split(";"):
            name, equals, value = part.strip().partition("=")
            if equals:
                found[name] = value
        return found


@dataclass(frozen=True, slots=True)
class Answer:
    """cookies: as `Set-Cookie` carries them."""

    body: bytes
    type: str = HTML
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    cookies: tuple[str, ...] = ()


class Refusal(Exception):
    """A request is refused. The message says why and is sent to the caller."""

    def __init__(self, status: int, title: str, detail: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(f"{status} {title}: {detail}")
        self.status = status
        self.title = title
        self.detail = detail
        self.headers = dict(headers or {})
