"""A bill that nobody waits for any more ends within each of its loops, however many charges one grouping has."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from accountant.billing.charge import Charge, add_equal_charges, quantify
from accountant.billing.charge_table import ChargeTable, numbered
from accountant.billing.cost_allocation import spread_idle, weights
from accountant.prices.price_book import Billing
from accountant.prices.unit_prices import Place
from gputally.base.called_off import CalledOff, Work, make_current

MANY, LEFT = 1_000, 10
PLACE = Place("H100", "", "", "")


class Left(Sequence[Any]):
    """Items whose reader's caller goes when it has read LEFT of them. read: how many were read."""

    def __init__(self, items: Sequence[Any]) -> None:
        self.items, self.read, self.work = items, 0, Work()

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, at: Any) -> Any:
        self.read += 1
        if self.read == LEFT:
            self.work.call_off()
        return self.items[at]

    def __iter__(self) -> Iterator[Any]:
        return (self[at] for at in range(len(self.items)))


def charge(number: int) -> Charge:
    return Charge((f"team-{number:04}", "c"), PLACE, "unallocated", 1, None)


CHARGES = [charge(number) for number in range(MANY)]
KEYS = [one.key for one in CHARGES]


def table(keys: Sequence[tuple[str, ...]]) -> ChargeTable:
    cells = np.array([(number, 0, 3, 0, 0, 1) for number in range(MANY)], dtype=np.int64)
    return ChargeTable(keys, [PLACE], [None], cells)


@pytest.mark.parametrize(
    ("items", "bill"),
    [
        (CHARGES, lambda items: quantify((one.key, one) for one in items)),
        (CHARGES, add_equal_charges),
        (CHARGES, lambda items: weights(items, ("team", "cluster"))),
        (CHARGES, lambda items: spread_idle(items, Billing(), ("team", "cluster"), {})),
        (KEYS, lambda keys: table(keys).charges()),
        (KEYS, lambda keys: table(keys).regrouped([1])),
        (KEYS, lambda keys: table(keys).paid_by(np.array([0]), {0: ("other", "c")})),
    ],
    ids=["quantities", "sums", "weights of teams", "idle time", "charges", "grouping", "payers"],
)
def test_a_bill_ends_within_one_grouping(items: Sequence[Any], bill: Callable[[Any], object]) -> None:
    left = Left(items)
    make_current(left.work)
    try:
        with pytest.raises(CalledOff):
            bill(left)
    finally:
        make_current(None)
    assert left.read <= LEFT + 1


def test_without_work_that_can_be_called_off_everything_is_billed() -> None:
    left = Left(CHARGES)
    assert len(quantify((one.key, one) for one in left)) == left.read == MANY
    assert numbered(KEYS)[0] == KEYS
