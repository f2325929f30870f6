"""The lake answers every question as the ledger does."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import date

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sqlglot import exp

from accountant.core.errors import LedgerUnavailable, UnsupportedQuestion
from accountant.lake.engines.duckdb.engine import DuckDbEngine
from accountant.ledger.journal import NewAct
from accountant.ledger.usage import LENT
from accountant.prices.price_book import Billing, IdlePolicy
from accountant.wire.policy_models import IDLE, UNASSIGNED
from accountant.wire.usage_cost_and_job_models import OTHER_VALUE
from tests.hypothesis_examples import examples
from tests.lake.comparison_queries import (
    CENTRE,
    HOUR,
    PROJECT,
    QUESTIONS,
    SPAN,
    KeptLedger,
    PublishedLedger,
    differences,
    published,
)
from tests.ledger.busy_ledger import BOOK, ROWS
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


def test_every_question_has_the_answer_of_the_ledger(known, engine):
    assert differences(known, engine) == []


class OnlyRows(DuckDbEngine):
    """Answers as a client of an engine that gives rows without types: columns without values have no type."""

    def query(self, question: exp.Select, namespace: str, days: tuple[date, date] | None = None) -> pa.Table:
        found = super().query(question, namespace, days)
        return pa.table({name: found[name].to_pylist() for name in found.column_names})


def test_answers_without_rows_need_no_types(known):
    engine = OnlyRows(known.connect())
    assert differences(known, engine) == []
    engine.close()


def test_the_questions_tell_something(known):
    with known.ledger.moment(*SPAN) as moment:
        empty = [name for name, reading in QUESTIONS.items() if not reading(moment)]
    assert set(empty) == {"usage of an empty span", "what a name with quotes held"}


@pytest.mark.thorough
@given(rows=ROWS, seed=st.integers(0, 1_000), timezone=st.sampled_from(("UTC", "America/New_York", "Asia/Kathmandu")))
@settings(max_examples=examples(3, 30))
def test_any_ledger_has_the_answers_of_its_lake(rows, seed, timezone):
    """Hours of Kathmandu begin at a quarter past an hour of UTC: the lake is divided there, and so is the query."""
    span = START_MS - 45 * MINUTE, SPAN[1]
    with published(rows=rows, seed=seed, timezone=timezone) as known:
        engine = DuckDbEngine(known.connect())
        asked = known.asked(engine)
        with known.ledger.moment(*span) as moment:
            for by in (("team", "day"), ("job", "hour", "gpu"), (PROJECT, "day", CENTRE)):
                assert asked.usage(span, by, None, timezone).lines() == moment.usage(span, by, None, timezone).lines()
        engine.close()


@pytest.mark.parametrize(
    "span",
    [(SPAN[0] + MINUTE, SPAN[1]), (SPAN[0], SPAN[1] - MINUTE), (SPAN[0] + MINUTE, SPAN[0] + 2 * MINUTE)],
    ids=["begins inside an hour", "ends inside an hour", "inside one hour"],
)
def test_part_of_an_hour_is_refused_with_the_hour(known, engine, span):
    with pytest.raises(
        UnsupportedQuestion, match=r"inside an hour between 2026-10-01T0\d:00:00Z and 2026-10-01T0\d:00:00Z: query"
    ):
        known.asked(engine).usage(span, ("team",)).lines()


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


def test_lent_time_is_refused_by_name(known, engine):
    book = BOOK.model_copy(update={"billing": Billing(shared_gpus="busy", idle=IdlePolicy())})
    assert book.billing.shared_gpus == "busy"
    with pytest.raises(UnsupportedQuestion, match=r"prod: .*shared_gpus: busy.*statement_lines"):
        known.asked(engine).usage((START_MS, START_MS + HOUR), ("team",), measures=LENT)


def test_nothing_can_be_booked(known, engine):
    with pytest.raises(LedgerUnavailable, match="send this to the accountant of prod"):
        known.asked(engine).record([NewAct(SPAN[1], "closed", "2026-10", "ana", "")], 1)


def test_labels_that_the_ledger_does_not_export_are_refused_by_name(known, engine):
    asked = known.asked(engine)
    for by, where in ((("label:stage",), None), (("team",), {"label:stage": ("test",)})):
        with pytest.raises(UnsupportedQuestion, match="stage"):
            asked.usage(SPAN, by, where)


def test_projects_have_the_names_of_the_ledger(known, engine):
    """Of a value that is unknown, not set, cut, or of time that nobody holds."""
    found = {line.key[PROJECT] for line in known.asked(engine).usage(SPAN, (PROJECT,)).lines()}
    assert found == {"", "ads", "search", "ä", UNASSIGNED, IDLE, OTHER_VALUE}
