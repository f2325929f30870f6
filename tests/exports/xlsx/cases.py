"""The workbook in the tests that all formats pass."""

from __future__ import annotations

import io
from decimal import Decimal
from typing import Any

from openpyxl import load_workbook

from gputally.base.untrusted_text import escaped
from tests.http.page_parser import steering


def _summary(content: bytes) -> dict[str, Any]:
    head, values = load_workbook(io.BytesIO(content))["Summary"].iter_rows(values_only=True)
    return {str(name): value for name, value in zip(head, values, strict=True)}


def _amount(value: Any) -> Decimal | None:
    return None if value is None else Decimal(str(value))


def due(content: bytes) -> Decimal | None:
    return _amount(_summary(content).get("due EUR"))


def cost(content: bytes) -> Decimal | None:
    return _amount(_summary(content)["cost EUR"])


def assert_is_text(content: bytes, name: str) -> None:
    book = load_workbook(io.BytesIO(content))
    cells = [cell for sheet in book for row in sheet.iter_rows() for cell in row if cell.value is not None]
    assert {cell.data_type for cell in cells} <= {"s", "n", "d", "inlineStr"}, "no formula"
    named = [cell for cell in cells if str(cell.value).strip() == escaped(name).strip()]
    assert any(cell.quotePrefix for cell in named)
    assert {cell.data_type for cell in named} == {"s"}, "text, of which no program makes a formula"
    assert steering("".join(str(cell.value) for cell in cells)) == set()


BEGINS = {"xlsx": b"PK"}
DUE = {"xlsx": due}
COST = {"xlsx": cost}
AS_TEXT = {"xlsx": assert_is_text}
