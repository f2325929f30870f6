"""CSV in the tests that all formats pass."""

from __future__ import annotations

import csv
import io
import re
from decimal import Decimal

from gputally.base.untrusted_text import FORMULA
from tests.exports.format_cases import rows_of


def due(content: bytes) -> Decimal | None:
    costs = {row["record"]: row["cost"] for row in rows_of(content) if row["record"].endswith(" total")}
    text = costs.get("due total", costs.get("payable total"))
    return None if text is None else Decimal(text)


def cost(content: bytes) -> Decimal | None:
    (total,) = (row["cost"] for row in rows_of(content) if row["record"] == "total")
    return Decimal(total) if total else None


def assert_is_text(content: bytes, name: str) -> None:
    rows = csv.reader(io.StringIO(content.decode(), newline=""))
    assert not any(cell.startswith(FORMULA) for row in rows for cell in row if not re.fullmatch(r"-?[\d.]+", cell))


BEGINS = {"csv": b"record,"}
DUE = {"csv": due}
COST = {"csv": cost}
AS_TEXT = {"csv": assert_is_text}
