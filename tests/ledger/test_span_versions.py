"""The mark of a span stays equal while no answer about the span changes, and differs after any change."""

from __future__ import annotations

import pytest

from accountant.ledger.protocols import Facts, NamespaceFacts, Retirement
from accountant.storage.duckdb_ledger import DuckLedger
from accountant.wire.policy_models import Decision, Policy, QueuePolicy
from gputally.base.units import MS_PER_DAY
from tests.ledger.conftest import MINUTE, START_MS, Hand

DAY = MS_PER_DAY // MINUTE
YESTERDAY, TODAY = (START_MS, START_MS + MS_PER_DAY), (START_MS + MS_PER_DAY, START_MS + 2 * MS_PER_DAY)


@pytest.fixture
def now_ms(ledger: DuckLedger, hand: Hand) -> int:
    """The marks of a ledger with a row on each of two days."""
    now = TODAY[1]
    ledger.append([hand.batch(hand.row(1, 0, 15), hand.row(2, DAY, DAY + 15), hand.fact(3))], now)
    return now


def test_time_that_is_over_keeps_its_mark_while_records_come_in(ledger: DuckLedger, hand: Hand, now_ms: int) -> None:
    marks = ledger.mark(*YESTERDAY), ledger.mark(*TODAY)
    told = ledger.usage(*YESTERDAY, ("gpu",))
    ledger.append([hand.batch(hand.row(4, DAY + 15, DAY + 30), hand.fact(5, "p2", created_ms=TODAY[0]))], now_ms)
    ledger.checkpoint()
    ledger.record_decisions(
        [
            Decision(
                id="d",
                at_ms=now_ms,
                kind="weight",
                target="kai",
                subject="q",
                mode="dry-run",
                reason="r",
                policy_version="p",
            )
        ],
        now_ms,
    )
    assert ledger.usage(*YESTERDAY, ("gpu",)) == told
    assert ledger.mark(*YESTERDAY) == marks[0]
    assert ledger.mark(*TODAY) != marks[1]


@pytest.mark.parametrize("what", ["late row", "late fact", "namespace", "policy", "retired", "unlisted", "reread"])
def test_whatever_may_change_an_answer_changes_the_mark(ledger: DuckLedger, hand: Hand, now_ms: int, what: str) -> None:
    span, before = YESTERDAY, ledger.mark(*YESTERDAY)
    if what == "late row":
        ledger.append([hand.batch(hand.row(4, 30, 45))], now_ms)
    elif what == "late fact":
        ledger.append([hand.batch(hand.row(4, DAY + 15, DAY + 30), hand.fact(5, created_ms=START_MS))], now_ms)
    elif what == "namespace":
        ledger.observe(Facts(namespaces=(NamespaceFacts("prod", "vision", "blue"),)), now_ms)
    elif what == "policy":
        ledger.put_policy(Policy(queues=(QueuePolicy(name="left", team="red"),)), now_ms)
    elif what == "retired":
        assert ledger.retire(Retirement(gpus=("gpu-1",)), START_MS, now_ms, "ada", "sold")
    elif what == "unlisted":
        ledger.append([hand.batch(hand.row(4, 60, 61, "gpu-2"))], now_ms)
        span, before, told = TODAY, ledger.mark(*TODAY), ledger.usage(*TODAY, ("gpu",))
        # No record of that day: the node lists the other GPU, and not this one any more.
        ledger.append([hand.batch(hand.row(5, 3 * DAY, 3 * DAY + 1))], now_ms + 2 * MS_PER_DAY)
        assert ledger.usage(*TODAY, ("gpu",)) != told
    else:
        ledger._reread()
    assert ledger.mark(*span) != before
