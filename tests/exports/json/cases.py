"""JSON in the tests that all formats pass."""

from __future__ import annotations

import json
from decimal import Decimal


def _summary(content: bytes, name: str) -> Decimal | None:
    text = json.loads(content)["summary"][name]
    return None if text is None else Decimal(text)


def due(content: bytes) -> Decimal | None:
    return _summary(content, "due")


def cost(content: bytes) -> Decimal | None:
    return _summary(content, "cost")


def assert_is_text(content: bytes, name: str) -> None:
    assert json.loads(content)["tables"]["users"][0]["user"] == name


BEGINS = {"json": b"{"}
DUE = {"json": due}
COST = {"json": cost}
AS_TEXT = {"json": assert_is_text}
