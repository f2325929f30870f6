"""Snapshots, the marks of spans, decisions of controllers, and SQL statements."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import replace
from typing import Any

import pytest
from msgspec import structs

from accountant.core.errors import LedgerUnavailable, TooManyViews
from accountant.ledger.journal import BooksMoved, NewAct
from accountant.ledger.protocols import (
    MOST_VIEWS,
    Down,
    EpochReport,
    Facts,
    JobKey,
    NamespaceFacts,
    NodeFacts,
    Retirement,
    SavedView,
)
from accountant.ledger.usage import START_UP, coverage
from accountant.storage import transactions
from accountant.storage.duckdb_engine import Cursor, statement
from accountant.storage.duckdb_ledger import DuckLedger
from accountant.storage.folder_or_object_store import in_folder
from accountant.wire.policy_models import Decision, Policy, QueuePolicy
from agent.wire import Holder, PodFacts
from gputally.base.units import MS_PER_DAY
from tests.empty_ledger import fresh
from tests.ledger.conftest import MINUTE, NOW_MS, START_MS, Hand, Send, booked
from tests.moments import present


def test_a_moment_is_of_the_commit_before_which_it_was_opened_though_it_is_asked_later(send, ledger, hand):
    span = hand.start_ms, hand.now_ms
    with ledger.moment() as moment:
        send(hand.row(1), hand.fact(2, created_ms=hand.start_ms))
        assert moment.usage(span, ("pod",)).lines() == []
        assert list(moment.pods(*span)) == []
        assert moment.status().extent == (0, 0) != ledger.status().extent
    assert present(ledger).usage(span, ("pod",)).lines() != []


def test_what_is_written_meanwhile_is_not_seen(send, ledger, hand):
    span = hand.start_ms, hand.now_ms
    send(hand.row(1))
    with ledger.moment() as moment:
        before = moment.usage(span, ("pod",)).lines()
        send(hand.row(2, 1, 2), hand.fact(3, created_ms=hand.start_ms))
        assert moment.usage(span, ("pod",)).lines() == before
        assert list(moment.pods(*span)) == []
        assert coverage(moment.usage(span, ())) < coverage(present(ledger).usage(span, ()))
    assert present(ledger).usage(span, ("pod",)).lines() != before
    assert len(present(ledger).pods(*span)) == 1


@pytest.mark.parametrize("written", ["row", "late row", "conflict", "node", "namespace", "pod"])
def test_whatever_is_written_while_a_moment_is_open_a_checkpoint_needs_no_reader_to_end(send, ledger, hand, written):
    send(hand.row(1), hand.row(2, 1, 2))
    ledger.observe(Facts(nodes=(NodeFacts("prod", "n1"),), namespaces=(NamespaceFacts("prod", "ml", "blue"),)), NOW_MS)
    ledger.checkpoint()
    with ledger.moment() as moment:
        before = moment.usage((hand.start_ms, hand.now_ms), ("pod",)).lines()
        if written == "conflict":  # what an older outbox says of the same time displaces the stored sets
            send(hand.row(1, 0, 2), epoch="0191-a")
        elif written == "node":
            ledger.observe(Facts(nodes=(NodeFacts("prod", "n1", pool="b"),)), NOW_MS)
        elif written == "namespace":
            ledger.observe(Facts(namespaces=(NamespaceFacts("prod", "ml", "red"),)), NOW_MS)
        elif written == "pod":
            send(hand.fact(3), hand.fact(4, queue_ref="kai:other"))
            ledger.observe(Facts(pods=(("prod", hand.fact(0, queue_ref="kai:another")),)), NOW_MS)
        else:
            send(hand.row(3, -60, -59) if written == "late row" else hand.row(3, 2, 3))
        ledger.checkpoint()
        assert ledger.wal_bytes() == 0
        assert moment.usage((hand.start_ms, hand.now_ms), ("pod",)).lines() == before


HOLDERS = 60


def refused_act(ledger: DuckLedger) -> None:
    with pytest.raises(BooksMoved):
        ledger.record([NewAct(NOW_MS, "prices", "s", "ada", "r")], seen=7)


def refused_view(ledger: DuckLedger) -> None:
    for number in range(MOST_VIEWS):
        ledger.save_view("ada", SavedView(f"view {number}", "/explore"), NOW_MS)
    with pytest.raises(TooManyViews):
        ledger.save_view("ada", SavedView("one more", "/explore"), NOW_MS)


@pytest.mark.parametrize("before", [lambda _: None, refused_act, refused_view])
def test_a_sender_waits_for_no_names_of_others(path, clock, opened, hand, monkeypatch, before):
    """Neither after a start, nor after a write that was refused."""
    pods = [Holder(kind="pod", uid=f"u{n}", namespace="ml", name="x") for n in range(HOLDERS)]
    with closing(opened(fresh(path))) as ledger:
        rows = [hand.row(n + 1, n / HOLDERS, (n + 1) / HOLDERS, f"gpu-{n}", holder=pod) for n, pod in enumerate(pods)]
        booked(ledger, NOW_MS, hand.batch(*rows))
    ledger = opened(path)
    read: defaultdict[str, int] = defaultdict(int)
    run = Cursor.run

    def counting(self: Cursor, sql: str, *given: Any, **more: Any) -> Any:
        found = run(self, sql, *given, **more)
        read[sql] = max(read[sql], len(found))
        return found

    monkeypatch.setattr(Cursor, "run", counting)
    before(ledger)
    booked(ledger, NOW_MS, hand.batch(hand.row(1, 5, 6, "gpu-new", holder=pods[0]), node="n2"))
    assert max(read.values()) < HOLDERS / 4, read


DAY = MS_PER_DAY // MINUTE
YESTERDAY, TODAY = (START_MS, START_MS + MS_PER_DAY), (START_MS + MS_PER_DAY, START_MS + 2 * MS_PER_DAY)


@pytest.fixture
def now_ms(send: Send, hand: Hand) -> int:
    """Books a row on each of two days, and returns the end of the second day."""
    send(hand.row(1, 0, 15), hand.row(2, DAY, DAY + 15), hand.fact(3), now_ms=TODAY[1])
    return TODAY[1]


def decided(cluster: str, at_ms: int = 1) -> Decision:
    return Decision(
        id=f"v/{at_ms}/kai/vision", at_ms=at_ms, kind="weight", target="kai", subject="vision", mode="dry-run",
        reason=cluster, policy_version="v", cluster=cluster,
    )  # fmt: skip


def test_time_that_is_over_keeps_its_mark_while_records_come_in(send, ledger, hand, now_ms):
    marks = ledger.status().mark(*YESTERDAY), ledger.status().mark(*TODAY)
    told = present(ledger).usage(YESTERDAY, ("gpu",)).lines()
    send(hand.row(4, DAY + 15, DAY + 30), hand.fact(5, "p2", created_ms=TODAY[0]), now_ms=now_ms)
    ledger.checkpoint()
    ledger.record_decisions([decided("prod", at_ms=now_ms)], now_ms)
    assert present(ledger).usage(YESTERDAY, ("gpu",)).lines() == told
    assert ledger.status().mark(*YESTERDAY) == marks[0]
    assert ledger.status().mark(*TODAY) != marks[1]


@pytest.mark.parametrize("what", ["pod", "node", "down", "namespace", "policy", "epoch", "known epoch", "GPU"])
def test_facts_of_later_time_leave_the_mark_of_time_that_is_over(send, ledger, hand, now_ms, what):
    first = Facts(nodes=(NodeFacts("prod", "n1", pool="a"),), namespaces=(NamespaceFacts("prod", "vision", "blue"),))
    ledger.observe(first, now_ms)
    ledger.put_policy(Policy(queues=(QueuePolicy(name="left", team="red"),)), START_MS)
    told = EpochReport(JobKey("prod", "vision", "Job/train"), 1, TODAY[0], "ada")
    if what == "known epoch":
        ledger.report_epochs([replace(told, at_ms=START_MS)], now_ms)
    before = ledger.status().mark(*YESTERDAY), ledger.status().mark(*TODAY)
    if what == "pod":
        ledger.observe(Facts(pods=(("prod", hand.fact(0, "p2", created_ms=TODAY[0])),)), now_ms)
    elif what == "node":
        ledger.observe(Facts(nodes=(NodeFacts("prod", "n1", pool="b"),)), now_ms - 1)
    elif what == "down":
        down = (Down(TODAY[0] + MINUTE, None, "NotReady"),)
        ledger.observe(Facts(nodes=(NodeFacts("prod", "n1", pool="a", down=down),)), now_ms)
    elif what == "namespace":
        ledger.observe(Facts(namespaces=(NamespaceFacts("prod", "vision", "red"),)), now_ms - 1)
    elif what == "policy":
        ledger.put_policy(Policy(queues=(QueuePolicy(name="left", team="blue"),)), now_ms - 1)
    elif what == "GPU":
        send(hand.row(4, DAY + 15, DAY + 30, "gpu-2"), now_ms=now_ms)
    else:
        assert ledger.report_epochs([told], now_ms) == (what == "epoch")
    assert ledger.status().mark(*YESTERDAY) == before[0]
    assert (ledger.status().mark(*TODAY) == before[1]) == (what == "known epoch")


@pytest.mark.parametrize("by", ["node", "API server"])
def test_a_fact_of_a_pod_changes_the_mark_of_all_days_on_which_it_held_a_gpu(send, ledger, hand, now_ms, by):
    before = ledger.status().mark(*YESTERDAY)
    late = hand.fact(4, created_ms=TODAY[0], started_ms=TODAY[0] + MINUTE, queue_ref="kai:left", observed_ms=now_ms)
    if by == "node":
        send(late, now_ms=now_ms)
    else:
        ledger.observe(Facts(pods=(("prod", late),)), now_ms)
    assert ledger.status().mark(*YESTERDAY) != before


def test_the_first_gpu_of_a_pod_changes_the_mark_of_the_days_on_which_its_gang_waited_for_it(
    send, ledger, hand, now_ms
):
    def member(seq: int, uid: str, **changes: Any) -> PodFacts:
        return hand.fact(seq, uid, name=uid, workload="PyTorchJob/train", observed_ms=now_ms, **changes)

    waits = Holder(kind="pod", uid="a", namespace="vision", name="a")
    send(
        hand.row(4, DAY - 10, DAY, "gpu-2", holder=waits),
        member(5, "a", created_ms=START_MS, started_ms=TODAY[0] - 10 * MINUTE),
        member(6, "b", created_ms=START_MS, started_ms=TODAY[0] + 20 * MINUTE),
        now_ms=now_ms,
    )
    before, told = ledger.status().mark(*YESTERDAY), gang_waiting(ledger)
    send(hand.row(7, DAY + 20, DAY + 21, "gpu-2", holder=structs.replace(waits, uid="b", name="b")), now_ms=now_ms)
    assert (told, gang_waiting(ledger)) == (0, 5 * MINUTE * 1000), "half of the ten minutes was busy"
    assert ledger.status().mark(*YESTERDAY) != before


def gang_waiting(ledger: DuckLedger) -> int:
    """GPU-µs of yesterday."""
    return int(present(ledger).usage(YESTERDAY, (), None, "UTC", START_UP).column("gang_waiting").sum())


@pytest.mark.parametrize("what", ["late row", "late fact", "namespace", "policy", "retired", "unlisted", "reread"])
def test_whatever_may_change_an_answer_changes_the_mark(send, ledger, hand, now_ms, what):
    span, before = YESTERDAY, ledger.status().mark(*YESTERDAY)
    if what == "late row":
        send(hand.row(4, 30, 45), now_ms=now_ms)
    elif what == "late fact":
        send(hand.row(4, DAY + 15, DAY + 30), hand.fact(5, created_ms=START_MS), now_ms=now_ms)
    elif what == "namespace":
        ledger.observe(Facts(namespaces=(NamespaceFacts("prod", "vision", "blue"),)), now_ms)
    elif what == "policy":
        ledger.put_policy(Policy(queues=(QueuePolicy(name="left", team="red"),)), now_ms)
    elif what == "retired":
        assert ledger.retire(Retirement(gpus=("gpu-1",)), START_MS, now_ms, "ada", "sold")
    elif what == "unlisted":
        send(hand.row(4, 60, 61, "gpu-2"), now_ms=now_ms)
        span, before, told = TODAY, ledger.status().mark(*TODAY), present(ledger).usage(TODAY, ("gpu",)).lines()
        # No record of that day: the node lists the other GPU, and not this one any more.
        send(hand.row(5, 3 * DAY, 3 * DAY + 1), now_ms=now_ms + 2 * MS_PER_DAY)
        assert present(ledger).usage(TODAY, ("gpu",)).lines() != told
    else:
        ledger._reread()
    assert ledger.status().mark(*span) != before


def test_two_controllers_may_decide_alike_in_one_millisecond(ledger):
    both = [decided("prod"), decided("staging")]
    assert ledger.record_decisions(both, NOW_MS) == 2
    assert ledger.record_decisions([*both, decided("")], NOW_MS) == 1, "those of both are known by now"
    assert {decision.cluster for decision in present(ledger).decisions(0, 2)} == {"prod", "staging", ""}
    own = present(ledger).decisions(0, 2, cluster="prod")
    assert {decision.cluster for decision in own} == {"prod", ""}, "an older controller said no name"


def test_decisions_are_recorded_once_and_read_newest_first(ledger, hand):
    def decision(number: int, **changes: object) -> Decision:
        return decided("prod", hand.start_ms + number).model_copy(update=changes)

    assert ledger.record_decisions([decision(1), decision(2), decision(2, reason="again")], hand.now_ms) == 2
    assert ledger.record_decisions([decision(2, reason="other"), decision(3)], hand.now_ms) == 1
    assert ledger.record_decisions([], hand.now_ms) == 0
    assert present(ledger).decisions(hand.start_ms, hand.now_ms, 2) == [decision(3), decision(2)]
    assert present(ledger).decisions(hand.start_ms, hand.start_ms + 2) == [decision(1)]
    told = [
        decision(4, kind="preemption", subject=subject, id=f"p{number}")
        for number, subject in enumerate(("Job/vision/train-0", "Job/vision/other", "vision/train", "train"))
    ]
    ledger.record_decisions(told, hand.now_ms)
    span = (hand.start_ms, hand.now_ms)
    assert present(ledger).decisions(*span, kind="preemption") == told[::-1]
    assert present(ledger).decisions(*span, subject="train") == [told[3]]
    assert present(ledger).decisions(*span, kind="preemption", gang=("vision/train",)) == [told[0]]
    assert present(ledger).decisions(*span, 1, gang=("train",)) == [told[2]]
    assert present(ledger).decisions(*span, kind="hold", subject="train") == []


def test_more_decisions_of_one_millisecond_than_an_answer_has_are_read_in_several(ledger, hand):
    at_ms = hand.start_ms
    made = [decided(cluster, at_ms).model_copy(update={"id": f"d{n}"}) for n in range(5) for cluster in ("", "c1")]
    ledger.record_decisions([*made, decided("c1", at_ms - 1), decided("c1", at_ms + 1)], hand.now_ms)
    found: list[Decision] = []
    before = None
    while page := present(ledger).decisions(at_ms - 1, at_ms + 1, 3, before=before):
        found += page
        before = page[-1].key
        if len(page) < 3 or page[-1].at_ms < at_ms:
            break
    assert found == [*sorted(made, key=lambda one: one.key, reverse=True), decided("c1", at_ms - 1)]


def of_day(day: int) -> Decision:
    return decided("prod", NOW_MS + day * MS_PER_DAY)


def test_a_lookup_of_known_decisions_reads_no_others_than_those_of_its_instants(ledger):
    """DuckDB counts the rows that it read from the table. It skips most groups of rows."""
    with ledger._transaction() as cursor:
        cursor.run(
            "INSERT INTO decision SELECT 'prod/v/' || i, $now + i, $now, '{}', i + 1 FROM range(500_000) t(i)",
            {"now": NOW_MS},
        )
        ledger._commit(cursor, ledger._state)
    ledger.checkpoint()
    asked = {"low": NOW_MS + 499_990, "high": NOW_MS + 499_999, "ids": ["prod/v/499995", "prod/v/1"]}
    with ledger._snapshot() as (cursor, _):
        assert cursor.rows("known_decisions", asked) == [("prod/v/499995",)]
        profile = cursor.run("EXPLAIN (ANALYZE, FORMAT json) " + statement("known_decisions"), asked)[0][1]
    scanned = [node["operator_cardinality"] for node in nodes(json.loads(profile)) if "SCAN" in node["operator_name"]]
    assert sum(scanned) <= 20


def nodes(plan: Any) -> Iterator[Any]:
    for child in plan.get("children", []):
        if "operator_name" in child:
            yield child
        yield from nodes(child)


def test_decisions_past_their_retention_leave_the_ledger_and_the_newer_stay(ledger):
    told = [of_day(day) for day in range(5)]
    ledger.record_decisions(told, NOW_MS)
    assert ledger.remove_decisions(NOW_MS + 2 * MS_PER_DAY) == 2
    assert present(ledger).decisions(0, NOW_MS + 9 * MS_PER_DAY) == told[:1:-1]
    assert ledger.remove_decisions(NOW_MS + 2 * MS_PER_DAY) == 0
    assert ledger.record_decisions(told[2:], NOW_MS) == 0


def test_only_archived_decisions_are_removed_and_new_ones_are_archived_afterwards(opened, tmp_path):
    archive = in_folder(tmp_path / "archive")
    later_ms = NOW_MS + 9 * MS_PER_DAY
    with closing(opened(archive=archive)) as ledger:
        ledger.record_decisions([of_day(0), of_day(1)], NOW_MS)
        assert ledger.remove_decisions(later_ms) == 0, "no part has them"
        ledger.archive(NOW_MS)
        assert ledger.remove_decisions(later_ms) == 2
    ledger = opened(archive=archive)  # that it once had others is known from the archive's numbers alone
    ledger.record_decisions([of_day(2)], NOW_MS)
    ledger.archive(NOW_MS)
    assert present(ledger).decisions(0, later_ms) == [of_day(2)]
    rebuilt = opened(tmp_path / "rebuilt.duckdb", archive=archive)
    assert present(rebuilt).decisions(0, later_ms) == [of_day(2), of_day(1), of_day(0)]


def test_a_given_part_replaces_the_placeholder_of_its_name():
    assert statement("take_pods", table="pod_seen").startswith("DELETE FROM pod_seen WHERE uid IN")


def test_a_placeholder_without_a_part_is_the_statement_of_its_name():
    assert statement("payers") in statement("holder_origins")
    assert statement("holder_origins", payers="SELECT 1").endswith("IN (SELECT 1)\n")


def test_braces_in_a_part_are_not_replaced():
    assert "{table}" in statement("take_pods", table="{table}")


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({}, r"sql/table.sql does not exist, and no text is given for the placeholder table"),
        ({"tables": "pod"}, r"sql/take_pods.sql has the placeholders \['table'\], given are \['tables'\]"),
        ({"table": "pod", "only": ""}, r"sql/take_pods.sql has the placeholders \['table'\], given are"),
    ],
)
def test_a_missing_or_surplus_part_is_refused(parts, message):
    with pytest.raises(ValueError, match=message):
        statement("take_pods", **parts)


def test_comments_are_not_sent_to_the_engine():
    assert "--" not in statement("keep_day", source="hour")


@pytest.mark.parametrize(
    "failing", ["load", "SELECT id, cluster, node, epoch FROM stream", "SELECT cluster, uid FROM pod UNION"]
)
def test_after_a_commit_in_doubt_that_cannot_be_read_again_nothing_is_booked_twice(ledger, hand, monkeypatch, failing):
    """The commit is durable, but the writer does not learn it, and memory is too short to read the state or the names
    again."""
    plainly, run, read, left = Cursor.plainly, Cursor.run, transactions.load, ["commit", failing]

    def short_of_memory(at: str) -> None:
        if at in left:
            left.remove(at)
            raise LedgerUnavailable("Out of Memory")

    def without_answer(self: Cursor, sql: str, parameters: Any = None) -> Any:
        found = plainly(self, sql, parameters)
        if sql == "COMMIT":
            short_of_memory("commit")
        return found

    def reading(self: Cursor, sql: str, *given: Any, **more: Any) -> Any:
        if "commit" not in left and sql.startswith(failing):
            short_of_memory(failing)
        return run(self, sql, *given, **more)

    def loading(*given: Any) -> Any:
        short_of_memory("load")
        return read(*given)

    monkeypatch.setattr(Cursor, "plainly", without_answer)
    monkeypatch.setattr(Cursor, "run", reading)
    monkeypatch.setattr(transactions, "load", loading)
    sent = hand.batch(hand.row(1), hand.row(2, 1, 2), hand.fact(3))
    with pytest.raises(LedgerUnavailable):
        ledger.append([sent], NOW_MS)
    with suppress(LedgerUnavailable):
        ledger.append([sent], NOW_MS)
    receipt = booked(ledger, NOW_MS, hand.batch(*sent.intervals, *sent.facts, hand.row(4, 2, 3)))
    assert (receipt.ack.durable_seq, receipt.stored, receipt.quarantined, left) == (4, 1, 0, [])
    lines = present(ledger).usage((hand.start_ms, hand.now_ms), ("pod",)).lines()
    assert sum(line.accounts_gpu_us.allocated for line in lines) == 3 * MINUTE * 1000
    for table, names in (("stream", "cluster, node, epoch"), ("gpu", "cluster, gpu_uuid"), ("pod", "cluster, uid")):
        with ledger._snapshot() as (cursor, _):
            assert cursor.run(f"SELECT count(*), count(DISTINCT ({names})) FROM {table}") == [(1, 1)]
