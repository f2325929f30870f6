"""Opaque pages over sorted answers.

A cursor names its answer and how many of its lines were shown. It pins the span and the instant of the first page, so
that "until now" means the same on every page, and carries a digest of the question, so that it cannot be used with
another one. What pages promise about each other is kept by accountant.api.keeping.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
from dataclasses import dataclass
from typing import Annotated

import msgspec

from accountant.api.problems import Refusal
from agent.units import MS_PER_DAY

_MOST = 2**53
"""Of any number in a cursor: whoever makes one up finds no number that something below cannot hold."""
_Ms = Annotated[int, msgspec.Meta(ge=-_MOST, le=_MOST)]


class Cursor(msgspec.Struct, frozen=True, array_like=True):
    """Where the next page begins. answer: digest of what all pages together say. shown: lines of it so far."""

    question: str
    start_ms: _Ms
    end_ms: _Ms
    at_ms: _Ms
    answer: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{32}$")]
    shown: Annotated[int, msgspec.Meta(ge=1, le=_MOST)]


_cursor = msgspec.json.Decoder(Cursor)


@dataclass(frozen=True, slots=True)
class Page:
    """One question's paging: its digest, its pinned span and instant, and of which answer how much was shown; "": the
    first page, of which nobody knows the answer yet."""

    question: str
    start_ms: int
    end_ms: int
    at_ms: int
    answer: str = ""
    shown: int = 0

    def cursor(self, answer: str, shown: int) -> str:
        """Of the page after `shown` lines of that answer."""
        cursor = Cursor(self.question, self.start_ms, self.end_ms, self.at_ms, answer, shown)
        return base64.urlsafe_b64encode(msgspec.json.encode(cursor)).decode().rstrip("=")


def open_page(question: object, start_ms: int, end_ms: int, now_ms: int, page: str | None, *, span_days: int) -> Page:
    """question: everything (as JSON) that makes the answer what it is, except span and limit. span_days: the longest
    span of a question.

    Raises Refusal for a page that this question's answers never gave."""
    digest = hashlib.sha256(msgspec.json.encode(question, order="sorted")).hexdigest()[:32]
    if page is None:
        return Page(digest, start_ms, end_ms, now_ms)
    try:
        raw = base64.b64decode(page + "=" * (-len(page) % 4), altchars=b"-_", validate=True)
        cursor = _cursor.decode(raw)
    except (binascii.Error, ValueError, msgspec.DecodeError) as error:
        raise Refusal("bad-page", "the page is not one that this service gave out") from error
    if cursor.question != digest:
        raise Refusal("bad-page", "the page belongs to another question: repeat every parameter unchanged")
    if not 0 < cursor.end_ms - cursor.start_ms <= span_days * MS_PER_DAY:
        raise Refusal("bad-page", "the page is not one that this service gave out")
    return Page(digest, cursor.start_ms, cursor.end_ms, cursor.at_ms, cursor.answer, cursor.shown)
