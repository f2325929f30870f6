"""Published cost cases, and a bookkeeper over plain rows."""

from __future__ import annotations

import json

import pytest

from accountant.bookkeeping.bookkeeper import Bookkeeper
from gputally.base.clock import VirtualClock
from tests.billing.month_reports import OCTOBER, build_month, busy_ledger
from tests.billing.usage_rows import BOOK, SAMPLE_PRICES, at, busy_month, price_book
from tests.fakes.list_ledger import ListLedger
from tests.shared_files import shared


@pytest.fixture(scope="session")
def vectors():
    """The published cost cases, read from the shared folder."""
    path = shared("vectors/cost.json")
    return {case["id"]: case for case in json.loads(path.read_text())["cases"]}


@pytest.fixture
def keep():
    """A bookkeeper over plain rows, on 20 November, with a price book."""

    def build(rows, *, now="2026-11-20", book=BOOK, timezone="UTC", refused=(), grace_days=5):
        ledger = ListLedger(rows, refused)
        keeper = Bookkeeper(ledger, VirtualClock(at(now)), timezone, grace_days)
        if book:
            keeper.prices.take(price_book(book, timezone=timezone), "file", "prices.yaml", "", at(now))
        return ledger, keeper

    return build


@pytest.fixture(scope="module")
def ledger():
    """Two busy months with quotas."""
    return busy_ledger(busy_month())


@pytest.fixture(scope="module")
def report(ledger):
    """The report of October."""
    return build_month(ledger, price_book(SAMPLE_PRICES), OCTOBER)
