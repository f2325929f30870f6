"""What agents say of themselves is kept with their node, and changes no usage."""

from __future__ import annotations

import pytest

from accountant.inventory.node_facts_and_downtime import LONGEST_VERSION, STORED_EVERY_MS
from accountant.ledger.protocols import Down, Facts, NodeFacts
from accountant.storage.duckdb_ledger import DuckLedger
from agent.wire import AgentReport
from gputally.base.version import __version__, is_older
from tests.ledger.conftest import MINUTE, NOW_MS, START_MS, Hand, Opener, Send

NODE = ("prod", "n1")
LATER_MS = NOW_MS + STORED_EVERY_MS


def versions(ledger: DuckLedger) -> dict[tuple[str, str], str]:
    return {node: agent.version for node, agent in ledger.status().agents.items()}


def test_the_newest_report_of_a_node_counts_also_after_a_restart(ledger, opened: Opener, send: Send, hand: Hand):
    send(hand.row(1), agent=AgentReport(version="0.1.0"))
    send(hand.row(1), node="n2", agent=AgentReport(version="0.2.0"))
    send(agent=AgentReport(version="0.3.0"), now_ms=LATER_MS, first_seq=2)
    expected = {NODE: "0.3.0", ("prod", "n2"): "0.2.0"}
    assert versions(ledger) == expected
    ledger.close()
    assert versions(opened()) == expected


def test_an_agent_that_says_nothing_of_itself_is_unknown(ledger: DuckLedger, send: Send, hand: Hand):
    send(hand.row(1))
    assert versions(ledger) == {}
    send(hand.row(2, 1, 2), agent=AgentReport(version="0.1.0"))
    send(hand.row(3, 2, 3), now_ms=LATER_MS)  # an agent of an earlier release took over
    assert versions(ledger) == {NODE: ""}


def test_reports_that_change_all_the_time_are_stored_now_and_then(ledger: DuckLedger, send: Send, hand: Hand):
    for number in range(10):
        send(agent=AgentReport(version=f"0.1.{number}"), now_ms=NOW_MS + number * MINUTE)
    assert versions(ledger) == {NODE: "0.1.5"}


def test_a_text_of_a_report_is_cut_and_printable_and_refuses_no_batch(ledger: DuckLedger, send: Send, hand: Hand):
    assert send(hand.row(1), agent=AgentReport(version="\x1b[31m" + "9" * 1_000)).stored == 1
    (version,) = versions(ledger).values()
    assert len(version) == LONGEST_VERSION
    assert version.isprintable()


def test_a_refused_batch_says_nothing(ledger: DuckLedger, hand: Hand):
    gap = hand.batch(hand.row(7), agent=AgentReport(version="0.1.0"))
    (answer,) = ledger.append([gap], NOW_MS)
    assert isinstance(answer, Exception)
    assert versions(ledger) == {}


def test_an_inventory_keeps_the_report_and_the_report_changes_no_label(ledger: DuckLedger, send: Send, hand: Hand):
    send(hand.row(1))
    before = ledger.status().mark(START_MS, NOW_MS)
    send(agent=AgentReport(version="0.1.0"), first_seq=2)
    assert ledger.status().mark(START_MS, NOW_MS) == before
    assert ledger.status().nodes == (), "no inventory names it"
    for down in ((), (Down(START_MS, None, "NotReady"),)):
        ledger.observe(Facts(nodes=(NodeFacts(*NODE, pool="a", down=down),)), NOW_MS)
    assert versions(ledger) == {NODE: "0.1.0"}
    send(hand.row(2, 1, 2), agent=AgentReport(version="0.2.0"), now_ms=LATER_MS)
    (node,) = ledger.status().nodes
    assert (node.pool, len(node.down), versions(ledger)) == ("a", 1, {NODE: "0.2.0"})
    with ledger.moment() as moment:
        assert moment.usage((START_MS, NOW_MS), ("pool",)).lines()[0].key["pool"] == "a"


@pytest.mark.parametrize(
    ("version", "older"),
    [("0.0.9", True), ("0.1.0rc1", True), ("0.1.0.dev3", True), (__version__, False), ("0.10.0", False),
     ("v0.0.1", True), ("", False), ("latest", False), ("0.0.9+local", True)],
)  # fmt: skip
def test_releases_have_an_order_and_what_is_no_release_is_not_older(version: str, older: bool):
    assert is_older(version, "0.1.0") == older
