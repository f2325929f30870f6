"""Decisions of controllers that share a ledger."""

from __future__ import annotations

from accountant.store import DuckLedger
from accountant.wire import Decision
from tests.ledger.conftest import NOW_MS


def decided(cluster: str, subject: str = "vision") -> Decision:
    return Decision(
        id=f"v/1/kai/{subject}", at_ms=1, kind="weight", target="kai", subject=subject, mode="dry-run", reason=cluster,
        policy_version="v", cluster=cluster,
    )  # fmt: skip


def test_two_controllers_may_decide_alike_in_one_millisecond(ledger: DuckLedger) -> None:
    both = [decided("prod"), decided("staging")]
    assert ledger.record_decisions(both, NOW_MS) == 2
    assert ledger.record_decisions([*both, decided("")], NOW_MS) == 1, "those of both are known by now"
    assert {decision.cluster for decision in ledger.decisions(0, 2)} == {"prod", "staging", ""}
    own = ledger.decisions(0, 2, cluster="prod")
    assert {decision.cluster for decision in own} == {"prod", ""}, "an older controller said no name"
