"""The lake answers every question as the ledger does."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import date

import pyarrow as pa
import pytest
from sqlglot import exp

from accountant.core.errors import LedgerUnavailable
from accountant.lake.duckdb_engine import DuckDbEngine
from accountant.ledger.journal import NewAct
from accountant.wire.policy_models import IDLE, UNASSIGNED
from accountant.wire.usage_cost_and_job_models import OTHER_VALUE
from tests.lake.comparison_queries import (
    PROJECT,
    SPAN,
    KeptLedger,
    PublishedLedger,
    differences,
    published,
)
from tests.ledger.busy_ledger import BOOK
from tests.ledger.conftest import MINUTE, START_MS


@pytest.fixture(scope="module")
def known(kept: KeptLedger) -> Iterator[PublishedLedger]:
    with kept.again() as found:
        yield found


@pytest.fixture(scope="module")
def engine(known: PublishedLedger) -> Iterator[DuckDbEngine]:
    found = DuckDbEngine(known.connect())
    yield found
    found.close()


class OnlyRows(DuckDbEngine):
    """Answers as a client of an engine that gives rows without types: columns without values have no type."""

    def query(self, question: exp.Select, namespace: str, days: tuple[date, date] | None = None) -> pa.Table:
        found = super().query(question, namespace, days)
        return pa.table({name: found[name].to_pylist() for name in found.column_names})


def test_answers_without_rows_need_no_types(known):
    engine = OnlyRows(known.connect())
    assert differences(known, engine) == []
    engine.close()


def test_a_stretch_ends_where_a_price_changes_inside_an_hour():
    changed = "2026-10-01T01:30:00Z"
    rows = [
        row.model_copy(update={"valid_from": changed} if row.price == BOOK.rows[0].price else {"valid_to": changed})
        if row.model == "H100" else row
        for row in BOOK.rows
    ]  # fmt: skip
    book = BOOK.model_validate({**BOOK.model_dump(by_alias=True), "rows": [row.model_dump() for row in rows]})
    at_ms = START_MS + 90 * MINUTE
    assert book.cuts(*SPAN) == (at_ms,)
    with published(book=book) as known:
        engine = DuckDbEngine(known.connect())
        asked = known.asked(engine)
        with known.ledger.moment(at_ms, SPAN[1]) as moment:
            assert asked.usage((at_ms, SPAN[1]), ("team",)).lines() == moment.usage((at_ms, SPAN[1]), ("team",)).lines()
        engine.close()


def test_nothing_can_be_booked(known, engine):
    with pytest.raises(LedgerUnavailable, match="send this to the accountant of prod"):
        known.asked(engine).record([NewAct(SPAN[1], "closed", "2026-10", "ana", "")], 1)


def test_projects_have_the_names_of_the_ledger(known, engine):
    """Of a value that is unknown, not set, cut, or of time that nobody holds."""
    found = {line.key[PROJECT] for line in known.asked(engine).usage(SPAN, (PROJECT,)).lines()}
    assert found == {"", "ads", "search", "ä", UNASSIGNED, IDLE, OTHER_VALUE}
