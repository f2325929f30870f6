"""What money is tested with, as one fixture."""

from __future__ import annotations

import json
from dataclasses import dataclass

import pytest

from accountant.bookkeeping.bookkeeper import Bookkeeper
from gputally.base.clock import VirtualClock
from tests.billing.bookkeeping_cases import BOOK
from tests.billing.october import OCTOBER, build_month
from tests.billing.rows import SAMPLE_PRICES, at, busy_month, held, price_book, quota_policy, unheld
from tests.fakes.rows import ListLedger, Row
from tests.shelf import shared


@dataclass(frozen=True)
class Books:
    """The helpers above, as one fixture."""

    ledger = ListLedger
    row = Row
    at = staticmethod(at)
    held = staticmethod(held)
    unheld = staticmethod(unheld)
    price_book = staticmethod(price_book)
    busy_month = staticmethod(busy_month)
    quota_policy = staticmethod(quota_policy)
    sample_prices = SAMPLE_PRICES


@pytest.fixture(scope="session")
def books() -> Books:
    return Books()


@pytest.fixture(scope="session")
def vectors():
    """Cost vectors read in place, never copied."""
    path = shared("vectors/cost.json")
    return {case["id"]: case for case in json.loads(path.read_text())["cases"]}


@pytest.fixture
def keep(books):
    """A bookkeeper over plain rows, on the 20th of November, with a price book."""

    def build(rows, *, now="2026-11-20", book=BOOK, timezone="UTC", refused=(), grace_days=5):
        ledger = books.ledger(rows, refused)
        keeper = Bookkeeper(ledger, VirtualClock(books.at(now)), timezone, grace_days)
        if book:
            keeper.prices.take(books.price_book(book, timezone=timezone), "file", "prices.yaml", "", books.at(now))
        return ledger, keeper

    return build


@pytest.fixture(scope="module")
def ledger(books):
    """Two busy months, with quotas."""
    kept = books.ledger(books.busy_month())
    kept.put_policy(books.quota_policy(vision=16, language=16, robotics=12, genomics=8, teaching=4), 0)
    return kept


@pytest.fixture(scope="module")
def report(books, ledger):
    """Of October."""
    return build_month(ledger, books.price_book(books.sample_prices), OCTOBER)
