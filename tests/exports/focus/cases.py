"""FOCUS in the tests that all formats pass."""

from __future__ import annotations

from decimal import Decimal

from accountant.exports.zip_archive import unpack
from gputally.base.money import exact_sum
from tests.exports.format_cases import rows_of


def due(content: bytes) -> Decimal:
    return exact_sum(Decimal(row["BilledCost"]) for row in rows_of(content))


def cost(content: bytes) -> Decimal | None:
    costs = [Decimal(row["BilledCost"]) for row in rows_of(content)]
    return exact_sum(costs) if costs else None


def charges(content: bytes) -> bytes:
    return unpack(content)["cost_and_usage.csv"]


BEGINS = {"focus": b"PK", "focus-1.2": b"AvailabilityZone,"}
DUE = {"focus": lambda content: due(charges(content)), "focus-1.2": due}
COST = {"focus": lambda content: cost(charges(content)), "focus-1.2": cost}
AS_TEXT: dict[str, object] = {}
