"""Opaque pages over sorted answers.

A cursor names the last key shown, not a number of lines, so that lines appearing or vanishing
between two requests shift nothing; it pins the span, so that "until now" means the same now on every
page; and it carries a digest of the question, so that it cannot be used with another one.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from accountant.api.problems import Refusal

Line = TypeVar("Line")
Key = tuple[str, ...]


class Cursor(msgspec.Struct, frozen=True, array_like=True):
    """Where the next page begins."""

    question: str
    start_ms: int
    end_ms: int
    after: Key


_cursor = msgspec.json.Decoder(Cursor)


@dataclass(frozen=True, slots=True)
class Page:
    """One question's paging: its digest, its pinned span, and after which key to go on (None: from the first)."""

    question: str
    start_ms: int
    end_ms: int
    after: Key | None

    def cut(self, lines: Sequence[Line], key: Callable[[Line], Key], limit: int) -> tuple[tuple[Line, ...], str | None]:
        """The lines of this page, which `key` sorts, and the cursor of the next (None: this is the last)."""
        rest = [line for line in lines if self.after is None or key(line) > self.after]
        shown = tuple(rest[:limit])
        if len(rest) <= limit:
            return shown, None
        cursor = Cursor(self.question, self.start_ms, self.end_ms, key(shown[-1]))
        return shown, base64.urlsafe_b64encode(msgspec.json.encode(cursor)).decode().rstrip("=")


def open_page(question: object, start_ms: int, end_ms: int, page: str | None) -> Page:
    """question: everything (as JSON) that makes the answer what it is, except span and limit.

    Raises Refusal for a page that this question's answers never gave."""
    digest = hashlib.sha256(msgspec.json.encode(question, order="sorted")).hexdigest()[:16]
    if page is None:
        return Page(digest, start_ms, end_ms, None)
    try:
        raw = base64.b64decode(page + "=" * (-len(page) % 4), altchars=b"-_", validate=True)
        cursor = _cursor.decode(raw)
    except (binascii.Error, ValueError, msgspec.DecodeError) as error:
        raise Refusal("bad-page", "the page is not one that this service gave out") from error
    if cursor.question != digest:
        raise Refusal("bad-page", "the page belongs to another question: repeat every parameter unchanged")
    return Page(digest, cursor.start_ms, cursor.end_ms, cursor.after)
