"""The page in the tests that all formats pass."""

from __future__ import annotations

import re
from decimal import Decimal


def due(content: bytes) -> Decimal | None:
    """Return the amount due in all, which the page states if anything is due beside the month's own time."""
    found = re.search(r"Due in all</th><td[^>]*>(?:<a [^>]*>)?([^<]+)", content.decode())
    return Decimal(found[1].replace("\N{MINUS SIGN}", "-").replace(",", "")) if found else None


def assert_is_text(content: bytes, name: str) -> None:
    assert b"<script" not in content


BEGINS = {"html": b"<!doctype html>"}
DUE = {"html": due}
COST: dict[str, object] = {}
AS_TEXT = {"html": assert_is_text}
