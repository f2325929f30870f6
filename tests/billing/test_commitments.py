"""GPUs paid for in advance: the committed rate up to the commitment, hour by hour, and the bill of the unused rest."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from decimal import Decimal
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from rich.console import Console

from accountant.billing.cost_allocation import bills, statement, unused_commitments
from accountant.billing.statements import canonical, from_canonical
from accountant.billing.usage_pricing import charge_table, cost
from accountant.bookkeeping.bookkeeper import Bookkeeper
from accountant.bookkeeping.invoice_reconciliation import Invoice, InvoiceLine
from accountant.bookkeeping.price_book_versions import difference
from accountant.cli import terminal_tables
from accountant.core.periods import Month
from accountant.prices.price_book import PriceBook, commitment_cover, commitment_use, load
from accountant.storage.duckdb_ledger import DuckLedger, open_ledger
from accountant.wire.policy_models import IDLE
from agent.wire import Batch
from gputally.base.clock import VirtualClock
from gputally.base.yaml_file import FileFault
from tests.billing.usage_rows import (
    OCT,
    SAMPLE_PRICES,
    SEP,
    at,
    busy_month,
    held,
    ledger_of,
    price_book,
    time_by,
    unheld,
)
from tests.empty_ledger import fresh
from tests.fakes.list_ledger import ListLedger
from tests.usage_records import batch, deliver, interval, pod_holder

HOUR_US = 3_600_000_000
ROWS = """
  - {id: list, model: H100, price: "7", per: gpu-hour, valid_from: 2026-01-01,
     source: a test, as_of: 2026-01-01, basis: gpu-only}
  - {id: rate, model: H100, price: "3", commitment: h100-2026, per: gpu-hour, valid_from: 2026-01-01,
     valid_to: 2027-01-01, source: contract 4711, as_of: 2026-01-01, basis: gpu-only}
"""


def book(
    tmp_path: Path, commitments: str = "- {id: h100-2026, gpus: 8, owner: platform}", rows: str = ROWS
) -> PriceBook:
    path = tmp_path / "book.yaml"
    path.write_text(f"schema: 1\ncurrency: EUR\ncommitments:\n  {commitments}\nrows:{rows}")
    return load(path)


def by_row(found) -> dict[tuple[str, str], Decimal]:
    """Return GPU-hours by the first part of the key and by price row."""
    sums = time_by(found, lambda charge: (charge.key[0], charge.row.id))
    return {key: Decimal(gpu_us) / HOUR_US for key, gpu_us in sums.items()}


def test_an_hour_below_and_an_hour_above(tmp_path):
    """6 of 8 in the first hour, 12 in the second: the unused commitment of the first does not help the second."""
    ledger = ledger_of(
        held("2026-10-01T00:00", "2026-10-01T01:00", 6, team="vision"),
        held("2026-10-01T01:00", "2026-10-01T02:00", 9, team="vision"),
        held("2026-10-01T01:00", "2026-10-01T02:00", 3, team="speech"),
    )
    priced = book(tmp_path)
    span = at("2026-10-01T00:00"), at("2026-10-01T02:00")
    assert by_row(charge_table(ledger, priced, *span, ("team",)).charges()) == {
        ("vision", "rate"): 6 + 6, ("vision", "list"): 3, ("speech", "rate"): 2, ("speech", "list"): 1,
    }  # fmt: skip
    (unused,) = unused_commitments(ledger, priced, *span)
    assert (unused.key, unused.gpu_us, unused.row.price) == (("platform",), 2 * HOUR_US, Decimal(3))
    stated = statement(ledger, priced, *span)
    assert {line.team: line.cost for line in stated.commitments} == {"platform": Decimal(6)}
    assert stated.gpu_us == 18 * HOUR_US  # the capacity, and no more
    assert stated.payable == {"speech": Decimal(13), "vision": Decimal(57)}
    assert stated.due == {"platform": Decimal(6), "speech": Decimal(13), "vision": Decimal(57)}
    # What is paid is the commitment, and the list price beyond it.
    assert stated.due_total == 2 * 8 * 3 + 4 * 7


def test_an_invoice_shows_what_was_paid_for_in_advance_and_not_used(tmp_path):
    """The invoice is the sum of teams, idle time, unused commitments and unmatched amounts, for every owner."""
    rows = [
        held("2026-10-01T00:00", "2026-10-01T10:00", 5, capacity_type="reserved"),
        unheld("2026-10-01T00:00", "2026-10-01T10:00", gpus=1, capacity_type="reserved"),
    ]
    keeper = Bookkeeper(ListLedger(rows), VirtualClock(at("2026-10-01T10:00")))
    for owner in (", owner: platform", ""):
        priced = book(tmp_path, "- {id: h100-2026, gpus: 8" + owner + "}")
        keeper.prices.take(priced, "put", "ada", "contract", 0)
        line = InvoiceLine(item="reserved", gpu_model="H100", amount=Decimal(250), currency="EUR")
        found = keeper.invoices.reconcile(OCT, Invoice(source="october.csv", lines=(line,)))
        (one,) = found.lines
        shown = (one.teams, one.idle, one.unused_commitments, one.unmatched)
        assert shown == (5 * 10 * 3, 1 * 10 * 3, 2 * 10 * 3, 250 - 8 * 10 * 3), owner
        assert found.invoice == found.teams + found.idle + found.unused_commitments + found.unmatched == 250


def test_idle_machines_take_the_commitment_up_and_missing_ones_do_not(tmp_path):
    ledger = ledger_of(
        unheld("2026-10-01T00:00", "2026-10-01T01:00", gpus=3),
        unheld("2026-10-01T00:00", "2026-10-01T01:00", "down", gpus=2),
        unheld("2026-10-01T00:00", "2026-10-01T01:00", "unmetered", gpus=1),
    )
    span = at("2026-10-01T00:00"), at("2026-10-01T01:00")
    priced = book(tmp_path, "- {id: h100-2026, gpus: 8}")
    assert by_row(c for c in bills(ledger, priced, *span, ("team",)) if c.billed) == {(IDLE, "rate"): 3}
    assert by_row(unused_commitments(ledger, priced, *span)) == {(IDLE, "rate"): 5}


def test_time_before_the_first_record_leaves_no_commitment_unused(tmp_path):
    """Also of an hour and of a span that begin before it."""
    ledger = ledger_of(held("2026-10-16T10:30", "2026-10-16T12:00", 1, team="vision"))
    span = at("2026-10-01T00:00"), at("2026-10-16T12:00")
    assert by_row(unused_commitments(ledger, book(tmp_path), *span)) == {("platform", "rate"): Decimal("10.5")}
    assert statement(ledger, book(tmp_path), *span).due == {"platform": Decimal("31.5"), "vision": Decimal("4.5")}
    assert unused_commitments(ledger, book(tmp_path), span[0], at("2026-10-16T10:00")) == []


def test_a_question_about_one_team_has_the_whole_clusters_shares(tmp_path):
    ledger = ListLedger(busy_month("2026-10-01", "2026-10-08"))
    span = at("2026-10-01T00:30"), at("2026-10-07T10:10")
    priced = book(tmp_path, "- {id: h100-2026, gpus: 13}")
    whole = {c for c in charge_table(ledger, priced, *span, ("team",)).charges() if c.key == ("vision",)}
    assert whole == set(charge_table(ledger, priced, *span, ("team",), {"team": ["vision"]}).charges())
    finer = cost(ledger, priced, *span, ("team", "job")).lines
    # Hours have nine decimals: what is told apart more finely is rounded more often.
    (coarse,) = [line for line in cost(ledger, priced, *span, ("team",)).lines if line.key == {"team": "vision"}]
    assert sum(line.gpu_us for line in finer if line.key["team"] == "vision") == coarse.gpu_us
    plain = price_book(SAMPLE_PRICES)
    for account in {c.account for c in charge_table(ledger, plain, *span, ()).charges()}:
        amounts = [
            sum(c.gpu_us for c in charge_table(ledger, which, *span, ()).charges() if c.account == account)
            for which in (plain, priced)
        ]
        assert amounts[0] == amounts[1]


def test_used_and_unused_are_the_commitment_in_every_hour_also_a_repeated_one(tmp_path):
    """In Berlin the night on which summer time ends has one hour twice."""
    ledger = ListLedger(busy_month("2026-10-20", "2026-10-30"))
    priced = book(tmp_path, "- {id: h100-2026, gpus: 20}")
    span = at("2026-10-24T22:00"), at("2026-10-25T23:00")
    used = sum(
        c.gpu_us
        for c in charge_table(ledger, priced, *span, (), None, "Europe/Berlin").charges()
        if c.row and c.row.id == "rate"
    )
    unused = sum(c.gpu_us for c in unused_commitments(ledger, priced, *span, "Europe/Berlin"))
    assert used + unused == 25 * 20 * HOUR_US


def test_a_rate_holds_in_its_time_alone(tmp_path):
    ledger = ledger_of(held("2026-12-31T23:00", "2027-01-01T01:00", 1))
    span = at("2026-12-31T23:00"), at("2027-01-01T01:00")
    assert by_row(charge_table(ledger, book(tmp_path), *span, ("team",)).charges()) == {
        ("vision", "rate"): 1,
        ("vision", "list"): 1,
    }
    assert by_row(unused_commitments(ledger, book(tmp_path), *span)) == {("platform", "rate"): 7}


def test_late_facts_correct_the_unused_part_too(tmp_path):
    ledger = ledger_of(held("2026-09-01", "2026-10-01", 6))
    clock = VirtualClock(at("2026-10-10"))
    keeper = Bookkeeper(ledger, clock)
    keeper.prices.take(book(tmp_path), "put", "ada", "contract", clock.wall_ms())
    closed = keeper.close(SEP, "ada")
    stated = from_canonical(closed.content.encode())
    assert [(line.team, line.gpu_hours) for line in stated.commitments] == [("platform", Decimal(2 * 720))]
    ledger.add(held("2026-09-02T00:00", "2026-09-02T01:00", 1, gpu="GPU-9"))
    found = {(c.line.team, c.line.account): c.amount for c in keeper.correct("ada")}
    assert found == {("platform", "unused_commitment"): Decimal(-3), ("vision", "busy"): Decimal(3)}
    assert keeper.correct("ada") == []


@pytest.mark.parametrize(("currency", "shown"), [("EUR", "+5,760.00"), ("KWD", "+5,760.000"), ("JPY", "+5,760")])
def test_a_preview_shows_what_would_be_corrected_of_the_unused_part_too(tmp_path, currency, shown):
    ledger = ledger_of(held("2026-09-01", "2026-10-01", 6))
    clock = VirtualClock(at("2026-10-10"))
    keeper = Bookkeeper(ledger, clock)
    old, new = (book(tmp_path, rows=rows).model_copy(update={"currency": currency})
                for rows in (ROWS, ROWS.replace('"3"', '"4"')))  # fmt: skip
    keeper.prices.take(old, "put", "ada", "contract", clock.wall_ms())
    keeper.close(SEP, "ada")
    found = difference("2026-09", *keeper.preview(SEP, new))
    booked = keeper.reprice(SEP, new, "ada", "signed late")
    assert found.total_after - found.total_before == sum(one.amount for one in booked) == 8 * 720
    assert {one.team for one in found.changes} == {"platform", "vision"}
    console = Console(width=160, file=StringIO())
    console.print(terminal_tables.price_diff(found))
    assert shown in console.file.getvalue()


def test_statements_without_commitments_keep_their_bytes():
    ledger = ledger_of(held("2026-10-01T00:00", "2026-10-01T01:00"))
    priced = price_book("id: a, model: H100, price: 2, valid_from: 2026-01-01")
    content = canonical(statement(ledger, priced, at("2026-10-01T00:00"), at("2026-10-01T01:00")))
    assert b"commitments" not in content
    assert canonical(from_canonical(content)) == content


@pytest.mark.parametrize(
    ("commitments", "rows", "message"),
    [
        ("- {id: other, gpus: 8}", ROWS, "no row has the rate of commitment 'other'"),
        ("- {id: h100-2026, gpus: 0}", ROWS, r"commitments.0.gpus"),
        ("- {id: h100-2026, gpus: 8}\n  - {id: h100-2026, gpus: 8}", ROWS, "the same id"),
        (
            "- {id: h100-2026, gpus: 8}",
            ROWS + "\n".join(ROWS.splitlines()[3:]).replace("id: rate", "id: twice"),
            "both the rate",
        ),
    ],
)
def test_commitments_that_say_nothing_clear_are_refused(tmp_path, commitments, rows, message):
    with pytest.raises((FileFault, ValidationError), match=message):
        book(tmp_path, commitments, rows)


@given(st.integers(0, 10**13), st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 10**12)), min_size=1))
def test_what_is_covered(commitment, usages):
    """Never more than was used or committed, and a group's part does not depend on how its time is split."""
    usages = sorted(usages)
    found = commitment_cover(commitment, usages)
    assert sum(found) == min(commitment, sum(used for _, used in usages))
    assert all(0 <= part <= used for part, (_, used) in zip(found, usages, strict=True))
    groups = sorted({group for group, _ in usages})
    whole = commitment_cover(commitment, [(g, sum(used for group, used in usages if group == g)) for g in groups])
    assert whole == [sum(p for p, (group, _) in zip(found, usages, strict=True) if group == g) for g in groups]


@pytest.mark.parametrize(("commitment", "usage"), [(-1, 0), (0, -1)])
def test_nothing_is_negative(commitment, usage):
    with pytest.raises(ValueError, match="not negative"):
        commitment_use(commitment, usage)


class Arriving:
    """A ledger that commits another hour of another GPU before it answers a question."""

    def __init__(self, answering: Any, ledger: DuckLedger, number: list[int]) -> None:
        self._answering, self._ledger, self._number = answering, ledger, number

    @contextmanager
    def moment(self, start_ms: int = 0, end_ms: int = 0) -> Iterator[Arriving]:
        with self._ledger.moment(start_ms, end_ms) as moment:
            yield Arriving(moment, self._ledger, self._number)

    def __getattr__(self, name: str) -> Any:
        answer = getattr(self._answering, name)
        if name not in ("usage", "policies"):
            return answer

        def asked(*arguments: Any, **options: Any) -> Any:
            self._number[0] += 1
            deliver(self._ledger, END_MS, hour_of(self._number[0]))
            return answer(*arguments, **options)

        return asked


START_MS = at("2026-10-01")
END_MS = at("2026-10-02")


def hour_of(number: int) -> Batch:
    """Return an hour of a GPU, held by a pod."""
    rows = [interval(START_MS, f"GPU-{number}", pod_holder(f"train-{number}", "vision"), span_ms=3_600_000)]
    return batch(rows, node=f"n{number}", epoch=f"e{number}")


def test_a_statement_is_of_one_state_whatever_arrives_while_it_is_computed(tmp_path):
    """Its lines, and what was not used of a commitment, add up to the commitment."""
    with closing(open_ledger(fresh(tmp_path / "ledger.duckdb"), VirtualClock(END_MS))) as ledger:
        deliver(ledger, END_MS, hour_of(0))
        keeper = Bookkeeper(Arriving(ledger, ledger, number := [0]), VirtualClock(END_MS))
        keeper.prices.take(book(tmp_path), "file", "book.yaml", "", 0)
        stated = keeper.month(Month(2026, 10))
        assert number[0] > 1, "several questions were put"
        used = sum(line.gpu_us for line in stated.lines if line.price_row == "rate")
        assert used + sum(line.gpu_us for line in stated.commitments) == 8 * 24 * HOUR_US
        invoiced = keeper.invoices._bills(Month(2026, 10), book(tmp_path))
        committed = [charge.gpu_us for charge in invoiced if charge.row is not None and charge.row.id == "rate"]
        assert sum(committed) == 8 * 24 * HOUR_US
