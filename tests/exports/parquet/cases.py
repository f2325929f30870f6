"""Parquet in the tests that all formats pass."""

from __future__ import annotations

import io
from decimal import Decimal

import pyarrow.parquet as pq

from gputally.base.money import exact_sum


def due(content: bytes) -> Decimal | None:
    rows = pq.read_table(io.BytesIO(content)).to_pylist()
    owed = [row["cost"] for row in rows if row["record"] == "due"]
    return exact_sum(owed or [row["cost"] for row in rows if row["record"] == "payable"])


def assert_is_text(content: bytes, name: str) -> None:
    assert {row["team"] for row in pq.read_table(io.BytesIO(content)).to_pylist()} == {name}


BEGINS = {"parquet": b"PAR1"}
DUE = {"parquet": due}
COST: dict[str, object] = {}
AS_TEXT = {"parquet": assert_is_text}
