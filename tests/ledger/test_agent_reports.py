"""What agents say of themselves is kept with their node, and changes no usage."""

from __future__ import annotations

import pytest

from accountant.inventory.agent_reports import LONGEST_VERSION, MOST_GPUS, MOST_KINDS, STORED_EVERY_MS, reported
from accountant.ledger.protocols import Down, Facts, GpuErrorCount, NodeFacts
from accountant.storage.duckdb_ledger import DuckLedger
from agent.wire import AgentReport, GpuError, GpuReport
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


def counted(*reports: tuple[GpuError, ...]) -> dict[str, tuple[int, int | None, int | None]]:
    """(number, since, last) by kind after these reports of one GPU, one every five minutes."""
    node = None
    for number, errors in enumerate(reports):
        told = AgentReport(gpus=(GpuReport("gpu-1", errors),))
        node = reported(node, *NODE, told, NOW_MS + number * STORED_EVERY_MS) or node
    assert node is not None
    assert node.agent is not None
    ((gpu,),) = (node.agent.gpus or (),)
    return {error.kind: (error.count, error.since_ms, error.last_ms) for error in gpu.errors}


FIRST, SECOND = START_MS, START_MS + 30 * MINUTE
"""When two agents of a node began to count, one after the other."""


def test_errors_are_added_up_over_restarts_of_the_agent_and_of_the_driver():
    xid = [GpuError("xid 79", 2, FIRST, FIRST + 1), GpuError("xid 79", 3, FIRST, FIRST + 2),
           GpuError("xid 79", 1, SECOND, SECOND + 1)]  # fmt: skip
    ecc = [GpuError("ecc uncorrected", number) for number in (5, 6, 2)]
    found = counted(*zip(xid, ecc, strict=True))
    assert found["xid 79"] == (4, FIRST, SECOND + 1)
    assert found["ecc uncorrected"] == (8, None, NOW_MS + 2 * STORED_EVERY_MS), "the driver began again with 2"
    again = counted((xid[0],), (xid[0],), (), (xid[0],))
    assert again["xid 79"] == (2, FIRST, FIRST + 1), "the same report twice, and one that does not tell it, add nothing"


def test_a_report_of_errors_is_bounded_and_printable_and_dates_nothing_after_now():
    odd = GpuError("xid\x1b " + "7" * 500, -3, NOW_MS + 10**14, 10**17)
    many = tuple(GpuError(f"xid {number}", 10**30, FIRST, FIRST + number) for number in range(100))
    found = counted((odd, *many))
    assert len(found) == MOST_KINDS
    assert all(kind.isprintable() and number == 10**15 for kind, (number, _, _) in found.items())
    late = counted((GpuError("a\nb", 1, 10**17, 10**17),))
    assert late == {"a\\x0ab": (1, NOW_MS, NOW_MS)}
    told = AgentReport(gpus=tuple(GpuReport(f"gpu-{number}") for number in range(900)))
    node = reported(None, *NODE, told, NOW_MS)
    assert node is not None
    assert node.agent is not None
    assert len(node.agent.gpus or ()) == MOST_GPUS


def test_a_node_speaks_for_its_own_gpus_and_keeps_the_errors_of_one_that_is_gone(ledger, opened, send, hand):
    send(hand.row(1))
    send(hand.row(1, gpu="gpu-2"), node="n2")
    lost = (GpuError("xid 79", 1, FIRST, FIRST + 1),)
    told = AgentReport(gpus=(GpuReport("gpu-1", lost, ("drain_node: xid 79",)), GpuReport("gpu-2", lost)))
    send(agent=told, first_seq=2)
    send(agent=AgentReport(gpus=()), first_seq=2, now_ms=LATER_MS)
    ledger.close()
    ((gpu,),) = (agent.gpus for agent in opened().status().agents.values())
    assert (gpu.gpu_uuid, gpu.needs) == ("gpu-1", ())
    assert gpu.errors == (GpuErrorCount("xid 79", 1, FIRST, FIRST + 1, 1, FIRST),)


@pytest.mark.parametrize(
    ("version", "older"),
    [("0.0.9", True), ("0.1.0rc1", True), ("0.1.0.dev3", True), (__version__, False), ("0.10.0", False),
     ("v0.0.1", True), ("", False), ("latest", False), ("0.0.9+local", True)],
)  # fmt: skip
def test_releases_have_an_order_and_what_is_no_release_is_not_older(version: str, older: bool):
    assert is_older(version, "0.1.0") == older
