"""The ledger books, drops, refuses or quarantines records: their numbers, names, times, and what imports bring."""

from __future__ import annotations

import itertools
import json
import sys
import tempfile
from collections.abc import Callable
from contextlib import closing, suppress
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from accountant.core.errors import BadBatch, LedgerUnavailable, SequenceGap
from accountant.core.import_epochs import epoch as import_epoch
from accountant.core.settings import Quotas
from accountant.history_import.import_run import first_seq
from accountant.ledger.protocols import Receipt
from accountant.runtime.ingest import Ingest, decode
from accountant.storage.duckdb_ledger import DuckLedger, open_ledger
from accountant.storage.folder_or_object_store import in_folder
from agent.wire import UNATTRIBUTED, Ack, Gap, Holder, PodFacts, Sharing, Skipped, Slice, UsageInterval
from gputally.base.clock import VirtualClock
from gputally.base.units import MS_PER_DAY, MS_PER_HOUR
from tests.empty_ledger import fresh
from tests.hypothesis_examples import examples
from tests.ledger.conftest import MINUTE, NOW_MS, START_MS, Hand, booked
from tests.moments import acks, present
from tests.shared_files import shared

MINUTE_US = 60_000_000


def test_a_batch_is_stored_once_and_acknowledged(ledger, send, hand, accounts):
    records = hand.row(1, 0, 1), hand.row(2, 1, 2), hand.fact(3)
    ack = Ack(epoch="0192-a", durable_seq=3, checkpointed_seq=0, clock_ms=hand.now_ms)
    assert [send(*records), send(*records)] == [Receipt(ack, 2, 0, 0), Receipt(ack, 0, 2, 0)]
    assert accounts(0, 2) == {"busy": MINUTE_US, "allocated_idle": MINUTE_US}
    ledger.checkpoint()
    assert acks(ledger, "n1", "prod") == {"0192-a": Ack(epoch="0192-a", durable_seq=3, checkpointed_seq=3)}
    assert acks(ledger, "n1", "elsewhere") == {}


def test_batches_of_one_group_follow_each_other_and_the_same_batch_counts_once(ledger, hand):
    sent = [hand.batch(hand.row(1)), hand.batch(hand.row(1)), hand.batch(hand.row(2, 1, 2)), hand.batch(hand.row(9))]
    *receipts, refusal = ledger.append(sent, hand.now_ms)
    assert [(receipt.stored, receipt.duplicates) for receipt in receipts] == [(1, 0), (0, 1), (1, 0)]
    assert isinstance(refusal, SequenceGap)
    assert refusal.ack.durable_seq == 2


def test_the_work_for_overlapping_intervals_grows_with_their_number_alone(tmp_path, hand):
    """The writer has one thread: a batch that took more would let the batches of all nodes wait."""

    def calls(sets: int) -> int:
        found = 0

        def count(_: object, event: str, __: object) -> None:
            nonlocal found
            found += event in ("call", "c_call")

        spans = [(seq, seq / 300, (seq + 0.5) / 300) for seq in range(1, sets + 1)]
        with closing(open_ledger(fresh(tmp_path / f"{sets}.duckdb"), VirtualClock(hand.now_ms))) as ledger:
            booked(ledger, hand.now_ms, hand.batch(*(hand.row(*span) for span in spans)))
            again = hand.batch(*(hand.row(*span) for span in spans), epoch="0192-b")
            sys.setprofile(count)
            try:
                booked(ledger, hand.now_ms, again)
            finally:
                sys.setprofile(None)
        return found

    assert calls(600) < 2.5 * calls(300)


def of_one_second(hand: Hand, seq: int, **changes: Any) -> UsageInterval:
    return hand.row(seq, seq / 60, (seq + 1) / 60, **changes)


HOSTILE: dict[str, Callable[[Hand, int], UsageInterval | PodFacts | Skipped]] = {
    "parts": lambda hand, seq: of_one_second(hand, seq, slice=_slice(gi=seq)),
    "gpus": lambda hand, seq: hand.row(seq, gpu=f"gpu-{seq}"),
    "holders": lambda hand, seq: of_one_second(hand, seq, holder=Holder(kind="pod", uid=f"{seq}", namespace="a")),
    "old hours": lambda hand, seq: hand.row(seq, -60 * seq, -60 * seq + 1),
    "impossible": lambda hand, seq: of_one_second(hand, seq, capacity_us=0),
    "gaps": lambda hand, seq: of_one_second(hand, seq, gaps=(Gap(0, 1, "a"),) * 100),
    "facts": lambda hand, seq: hand.fact(seq, f"uid-{seq}"),
    "skipped": lambda _, seq: Skipped(seq, "x"),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_the_work_for_a_hostile_batch_grows_with_its_records_alone(opened, tmp_path, hand, kind):
    """A batch may have twenty thousand records, and the batches of all nodes wait for it."""
    few = Quotas(gpus=5, parts=5, holders=5)

    def lines(records: int) -> int:
        found = 0

        def count(_: object, event: str, __: object) -> Any:
            nonlocal found
            found += event == "line"
            return count

        sent = hand.batch(*(HOSTILE[kind](hand, seq) for seq in range(1, records + 1)))
        ledger = opened(fresh(tmp_path / f"{records}.duckdb"), quotas=few)
        sys.settrace(count)
        try:
            booked(ledger, hand.now_ms, sent)
        finally:
            sys.settrace(None)
        return found

    lines(1)  # what is done once in a process
    assert lines(640) < 6 * lines(160)


def test_a_hole_is_refused_with_the_place_to_rewind_to(ledger, send, hand):
    send(hand.row(1))
    (refusal,) = ledger.append([hand.batch(hand.row(5, 5, 6))], hand.now_ms)
    assert isinstance(refusal, SequenceGap)
    assert refusal.ack.durable_seq == 1


def test_numbers_that_nobody_has_any_more_are_lost_and_stay_unmetered(send, ledger, hand, accounts):
    send(hand.row(1))
    receipt = send(hand.row(5, 5, 6), oldest_seq=5)
    assert receipt.ack.durable_seq == 5
    assert accounts(0, 6)["unmetered"] == 4 * MINUTE_US
    # A lost number that turns up after all is set aside, not booked behind everybody's back.
    late = send(hand.row(3, 2, 3))
    assert (late.stored, late.quarantined) == (0, 1)
    assert present(ledger).quarantined()[0].detail == "the record with number 3 was declared lost before"


def test_a_skipped_number_advances_the_mark(send, hand):
    receipt = send(hand.row(1), Skipped(seq=2, reason="undecodable"), hand.row(3, 2, 3))
    assert (receipt.ack.durable_seq, receipt.stored) == (3, 2)


def test_a_skipped_number_that_is_sent_again_is_one_hole(ledger, send, hand):
    known = hand.row(1), Skipped(seq=2, reason="undecodable")
    send(*known)
    send(*known, hand.row(3, 2, 3))
    assert [(hole.first_seq, hole.last_seq, hole.reason) for hole in present(ledger).holes()] == [(2, 2, "undecodable")]


@pytest.mark.parametrize(
    ("seqs", "changes"),
    [
        pytest.param((1, 3), {}, id="a hole"),
        pytest.param((1, 1), {}, id="a number twice"),
        pytest.param((1, 1, 3), {}, id="a number twice and a hole"),
        pytest.param((2,), {"first_seq": 1}, id="not from first_seq on"),
        pytest.param((0,), {}, id="number 0"),
        pytest.param((1,), {"oldest_seq": 2}, id="oldest above first"),
        pytest.param((1,), {"node": ""}, id="no node"),
        pytest.param((1,), {"epoch": "x" * 2000}, id="endless epoch"),
    ],
)
def test_a_batch_that_is_not_one_is_refused_and_the_others_go_on(ledger, hand, seqs, changes):
    wrong = hand.batch(*(hand.row(seq, minute, minute + 1) for minute, seq in enumerate(seqs)), **changes)
    bad, good = ledger.append([wrong, hand.batch(hand.row(1, 3, 4), epoch="0192-b")], hand.now_ms)
    assert isinstance(bad, BadBatch)
    assert bad.type == "invalid-batch"
    assert isinstance(good, Receipt)


def _slice(**changes: int) -> Slice:
    given = {"gi": 1, "ci": 0, "compute": 3, "compute_of": 7, "memory_mib": 40_000, "memory_of_mib": 80_000}
    return Slice(profile="3g.40gb", **{**given, **changes})


@pytest.mark.parametrize(
    ("reason", "span", "changes"),
    [
        ("future-dated", (64, 66), {}),
        ("impossible-span", (1, 1), {}),
        ("impossible-span", (2, 1), {"capacity_us": 1, "allocated_us": 1}),
        ("too-long", (-61, 0), {}),
        ("before-2020", (-START_MS / MINUTE, 1 - START_MS / MINUTE), {}),
        ("negative", (0, 1), {"busy_us": -1}),
        ("negative", (0, 1), {"energy_uj": -5}),
        ("out-of-range", (0, 1), {"memory_mib_s": 10**30}),
        ("out-of-range", (0, 1), {"sharing": Sharing(mode="mps", replicas=2**40)}),
        ("out-of-range", (0, 1), {"slice": _slice(gi=2**31)}),
        ("over-allocated", (0, 1), {"allocated_us": MINUTE_US + 1}),
        ("no-holder", (0, 1), {"holder": None, "allocated_us": 5}),
        ("unattributed-capacity", (0, 1), {"holder": UNATTRIBUTED}),
        ("over-capacity", (0, 1), {}),
        ("incomplete-set", (0, 1), {"capacity_us": 7, "allocated_us": 7}),
        ("bad-name", (0, 1), {"gpu": ""}),
        ("bad-name", (0, 1), {"gpu_model": "x" * 2000}),
    ],
)
def test_what_cannot_be_true_is_quarantined_and_the_rest_booked(send, ledger, hand, accounts, reason, span, changes):
    count = 2 if reason == "over-capacity" else 1  # two rows of a whole GPU are more than it has
    bad = [hand.row(seq, *span, **changes) for seq in range(1, count + 1)]
    good = hand.row(len(bad) + 1, 10, 11, gpu="gpu-2")
    receipt = send(*bad, good)
    assert (receipt.stored, receipt.quarantined, receipt.ack.durable_seq) == (1, len(bad), len(bad) + 1)
    assert {item.reason for item in present(ledger).quarantined()} == {reason}
    assert accounts(-120, 60, gpu="gpu-1") == {}
    assert accounts(10, 11, gpu="gpu-2") == {"busy": MINUTE_US // 2, "allocated_idle": MINUTE_US // 2}
    # Sent again, it is known already.
    again = send(*bad, good)
    assert (again.duplicates, again.quarantined) == (len(bad) + 1, 0)


def test_a_carried_set_may_be_short_and_the_rest_is_unmetered(send, hand, accounts):
    send(hand.row(1, method="carried", capacity_us=20_000_000, allocated_us=20_000_000, busy_us=None))
    assert accounts(0, 1) == {"allocated_unknown": 20_000_000, "unmetered": 40_000_000}
    assert accounts(0, 0.5) == {"allocated_unknown": 10_000_000, "unmetered": 20_000_000}


def test_a_batch_without_records_brings_the_newest_marks_and_changes_nothing(ledger, hand):
    (receipt,) = ledger.append([hand.batch(hand.row(1, 0, 1), hand.row(2, 1, 2))], hand.now_ms)
    assert (receipt.ack.durable_seq, receipt.ack.checkpointed_seq) == (2, 0)
    question = msgspec.structs.replace(hand.batch(hand.row(3, 2, 3)), first_seq=3, oldest_seq=1, intervals=())
    (receipt,) = ledger.append([question], hand.now_ms)
    assert (receipt.ack.durable_seq, receipt.ack.checkpointed_seq) == (2, 0)
    with ledger._database.cursor() as cursor:
        cursor.run("CHECKPOINT")  # as the engine does by itself after a very large commit
    ledger.checkpoint()
    (receipt,) = ledger.append([question], hand.now_ms)
    assert (receipt.ack.durable_seq, receipt.ack.checkpointed_seq) == (2, 2)
    unknown = msgspec.structs.replace(question, epoch="0192-other")
    (refused,) = ledger.append([unknown], hand.now_ms)
    assert isinstance(refused, SequenceGap)
    assert refused.ack.durable_seq == 0
    assert set(acks(ledger, "n1", "prod")) == {"0192-a"}


def test_other_content_under_a_known_number_is_set_aside(send, ledger, hand, accounts):
    send(hand.row(1), hand.fact(2))
    before = accounts(0, 1)
    for duplicates, quarantined in ((0, 1), (1, 0)):
        receipt = send(hand.row(1, busy_us=7), hand.fact(2, queue_ref="kai:mine"))
        assert (receipt.stored, receipt.duplicates, receipt.quarantined) == (0, duplicates, quarantined)
    assert accounts(0, 1) == before
    found = present(ledger).quarantined()
    assert [(item.seq, item.reason) for item in found] == [(2, "contradicts"), (1, "contradicts")]
    assert '"busy_us":7' in found[1].content


def test_a_node_whose_clock_ran_ahead_recovers_by_itself(send, hand, accounts):
    ahead = MS_PER_DAY // 60_000
    skewed = send(hand.row(1, ahead, ahead + 1), hand.fact(2, observed_ms=10**15))
    assert (skewed.quarantined, skewed.ack.durable_seq) == (1, 2)
    assert send(hand.row(3, 59, 60)).stored == 1
    assert accounts(0, ahead + 1, gpu="gpu-1")["busy"] == MINUTE_US // 2


def test_a_clock_a_little_ahead_does_not_stop_the_others(send, hand):
    send(hand.row(1, 62, 64))
    assert send(hand.row(1, 58, 60, gpu="gpu-2"), epoch="0192-b").stored == 1


def test_while_the_own_clock_is_behind_nothing_is_taken(send, ledger, hand):
    send(hand.row(1, 59, 60))
    with pytest.raises(LedgerUnavailable, match="clock is 3600000 ms behind"):
        send(hand.row(2, 0, 1), now_ms=hand.now_ms - MS_PER_HOUR)
    assert acks(ledger, "n1", "prod")["0192-a"].durable_seq == 1


def test_gaps_are_unknown_not_idle_and_busy_beyond_the_slice_is_a_memo(send, ledger, hand):
    begin = hand.start_ms
    send(
        hand.row(1, capacity_us=20_000_000, allocated_us=20_000_000, busy_us=30_000_000, slice=_slice()),
        hand.row(
            2, capacity_us=40_000_000, allocated_us=40_000_000, busy_us=35_000_000, slice=_slice(gi=2),
            gaps=(Gap(begin, begin + 12_000, "timeout"), Gap(begin + 6_000, begin + 15_000, "timeout")),
        ),
        hand.row(3, capacity_us=0, allocated_us=0, busy_us=9, holder=UNATTRIBUTED),
    )  # fmt: skip
    (line,) = present(ledger).usage((begin, begin + 60_000), (), {"pod": {"train-0"}}).lines()
    assert line.accounts_gpu_us.allocated_unknown == 10_000_000
    assert line.accounts_gpu_us.busy == 20_000_000 + 30_000_000
    assert line.borrowed_busy_us == 10_000_000 + 5_000_000
    assert sum(found.unattributed_busy_us for found in present(ledger).usage((begin, begin + 60_000), ()).lines()) == 9


def test_it_refuses_when_the_disk_is_nearly_full_and_answers_questions(path, clock, hand):
    free = [2**40]
    with closing(DuckLedger(path, clock, free_bytes=lambda: free[0])) as ledger:
        booked(ledger, hand.now_ms, hand.batch(hand.row(1)))
        free[0] = 2**20
        with pytest.raises(LedgerUnavailable, match="only 1 MiB of disk are free"):
            ledger.append([hand.batch(hand.row(2, 1, 2))], hand.now_ms)
        assert present(ledger).usage((hand.start_ms, hand.now_ms), ("pod",)).lines()
        free[0] = 2**40
        booked(ledger, hand.now_ms, hand.batch(hand.row(2, 1, 2)))


NUL = "0193\0'); DROP TABLE received; --"
ANY = st.text(max_size=30)  # of whole characters; half a surrogate pair is no text and has a test of its own


def body(batch: object, **changes: object) -> bytes:
    return json.dumps(msgspec.to_builtins(batch) | changes).encode()


@pytest.mark.parametrize("field", ["cluster", "node", "epoch", "boot_id"])
@pytest.mark.parametrize("text", [NUL, "a\nb", "a\n", "\x1b[2J", "a\x9bb", "x" * 2000])
def test_an_envelope_with_control_characters_is_refused(hand, field, text):
    with pytest.raises(BadBatch) as found:
        decode(body(hand.batch(hand.row(1)), **{field: text}))
    assert found.value.type == "invalid-batch"
    assert field in str(found.value)


@pytest.mark.parametrize("half", ["\ud800", "a\udfff"])
@pytest.mark.parametrize("place", ["node", "gpu", "holder", "label"])
def test_half_a_surrogate_pair_is_no_text(hand, place, half):
    holder = Holder(kind="pod", uid="u", namespace="n", name=half if place == "holder" else "p")
    row = hand.row(2, gpu=half if place == "gpu" else "gpu-1", holder=holder)
    batch = hand.batch(hand.fact(1, labels={"a": half if place == "label" else "b"}), row)
    with pytest.raises(BadBatch) as found:
        decode(body(batch, **({"node": half} if place == "node" else {})))
    assert found.value.type == "malformed-batch"
    assert "surrogate" in str(found.value)


@pytest.mark.parametrize("field", ["cluster", "node", "epoch"])
def test_it_is_refused_by_the_ledger_too(ledger, hand, field):
    (result,) = ledger.append([hand.batch(hand.row(1), **{field: NUL})], NOW_MS)
    assert isinstance(result, BadBatch)
    assert field in str(result)


@pytest.mark.parametrize("epoch", ["0199a3c0-7c00-7abc-8def-0123456789ab", "import:prometheus:01790812800000", "e"])
def test_an_epoch_is_a_uuid_or_what_an_import_writes(hand, epoch):
    assert decode(body(hand.batch(hand.row(1)), epoch=epoch)).epoch == epoch


@pytest.mark.parametrize("epoch", ["", "a'b", "a b", "-a", "é", '"'])
def test_any_other_epoch_is_refused(hand, epoch):
    with pytest.raises(BadBatch):
        decode(body(hand.batch(hand.row(1)), epoch=epoch))


@pytest.mark.parametrize(
    ("make", "odd"),
    [
        (Hand.row, {"gpu": NUL}),
        (Hand.row, {"gpu_model": NUL}),
        (Hand.row, {"holder": Holder(kind="pod", uid=NUL)}),
        (Hand.row, {"holder": Holder(kind="pod", uid="u", name=NUL)}),
        (Hand.row, {"holder": Holder(kind="process", uid="u", container=NUL)}),
        (Hand.fact, {"uid": NUL}),
        (Hand.fact, {"node": NUL}),
        (Hand.fact, {"workload": NUL}),
        (Hand.fact, {"labels": {"a": NUL}}),
        (Hand.fact, {"labels": {NUL: "a"}}),
    ],
)
def test_a_record_with_an_odd_name_is_set_aside_and_its_neighbours_are_not(send, ledger, hand, make, odd):
    assert send(make(hand, 1, **odd), hand.row(2, 1, 2, gpu="gpu-2")).stored == 1
    assert [record.reason for record in present(ledger).quarantined()] == ["bad-name"]


def test_an_annotation_with_control_characters_is_left_out_and_the_facts_stay(hand):
    """The owner of an outbox must not prevent the node's facts about the pod from being stored."""
    fact = hand.fact(1, labels={"team": "red", "note": NUL, NUL: "a", "text": "two\nlines"}, requests={"gpu": "1\x1b"})
    (found,) = decode(body(hand.batch(fact))).facts
    assert (found.labels, found.requests) == ({"team": "red", "text": "two\nlines"}, {})


def figures(ledger: DuckLedger) -> object:
    by = ("cluster", "node", "namespace", "pod", "job", "user", "gpu_model")
    return present(ledger).usage((START_MS, NOW_MS), by).lines(), present(ledger).quarantined(), present(ledger).holes()


ODD_NAMES = st.lists(st.tuples(ANY, ANY, ANY, ANY, ANY), min_size=4, max_size=6)
"""Node, epoch, GPU, name and label of several senders. They share a ledger: opening one takes longer than a sender."""


@given(senders=ODD_NAMES)
@settings(max_examples=examples(4, 50))
def test_whatever_is_accepted_is_archived_and_restored(senders):
    hand, clock = Hand(), VirtualClock(NOW_MS)
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        archive = in_folder(place / "it's an archive")
        ledger = open_ledger(fresh(place / "a.duckdb"), clock, archive=archive)
        ingest = Ingest(ledger, clock, linger_ms=0)
        for number, (node, epoch, gpu, name, label) in enumerate(senders):
            uid = f"u{number}"
            holder = Holder(kind="pod", uid=uid, namespace=name, name=name)
            labels = {"a": label, "gputally.dev/user": label}
            fact = hand.fact(1, uid=uid, namespace=name, name=name, workload=f"Job/{name}", labels=labels)
            row = hand.row(2, gpu=gpu, gpu_model=name, holder=holder)
            plain = hand.batch(fact, row, node=f"n{number}", epoch=f"0192-{number}")
            for changes in ({"node": node}, {"epoch": epoch}):
                with suppress(BadBatch):
                    ingest.submit(body(plain, **changes)).result(30)
            ingest.submit(body(plain)).result(30)  # the envelope alone is refused
        ingest.close()
        assert ledger.archive(NOW_MS) is not None
        truth = figures(ledger)
        ledger.close()
        with closing(open_ledger(fresh(place / "b.duckdb"), clock, archive=archive)) as restored:
            assert figures(restored) == truth


def test_a_replay_counts_once_and_an_overlap_is_clipped(send, hand, clock, ledger):
    cases = json.loads(shared("vectors/cost.json").read_text())["cases"]
    (case,) = [case for case in cases if case["id"] == "derived-duplicate-and-overlap"]
    events = case["input"]["events"]
    spans = [[datetime.fromisoformat(event[edge]).timestamp() * 1000 for edge in ("start", "end")] for event in events]
    hand.start_ms = round(spans[0][0])
    for event, span in zip(events, spans, strict=True):
        minutes = ((edge - hand.start_ms) / MINUTE for edge in span)
        row = hand.row(int(event["id"].removeprefix("e")), *minutes, gpu=event["gpu"])
        send(row, now_ms=hand.start_ms + MS_PER_HOUR)
    whole = hand.start_ms, round(spans[-1][1])
    (line,) = present(ledger).usage(whole, ("gpu",)).lines()
    assert line.accounts_gpu_us.allocated == case["expect"]["gpu_seconds"] * 1_000_000
    assert present(ledger).imbalance(*whole).total_us == 0


SEQ = first_seq(START_MS)
EPOCH = import_epoch("prometheus", START_MS)


def imports(hand, *rows, seq=SEQ, **changes):
    """Return a batch of imported rows, each given as (start, end, GPU)."""
    made = [hand.row(seq + n, *row, method="imported", busy_us=None) for n, row in enumerate(rows)]
    return hand.batch(*made, epoch=EPOCH, oldest_seq=made[0].seq, **changes)


@pytest.mark.parametrize("order", list(itertools.permutations(["imported", "measured", "carried"])), ids="-".join)
def test_what_an_agent_measured_or_carried_wins_whatever_came_first(opened, ledger, hand, accounts, order):
    batches = {
        "imported": imports(hand, (0, 10, "gpu-1")),
        "measured": hand.batch(hand.row(1, 2, 5, busy_us=60_000_000), epoch="0192-a"),
        "carried": hand.batch(hand.row(1, 5, 7, method="carried"), epoch="0192-b"),
    }
    for name in order:
        booked(ledger, NOW_MS, batches[name])
    assert present(ledger).imbalance(START_MS, NOW_MS).total_us == 0
    told = accounts(0, 10)
    assert (told["busy"], told["allocated_unknown"], sum(told.values())) == (
        2 * MINUTE_US, 5 * MINUTE_US, 10 * MINUTE_US,
    )  # fmt: skip
    metered = {"n1": (START_MS + 2 * MINUTE, START_MS + 7 * MINUTE)}
    assert ledger.imports("prod").metered == metered
    ledger.close()
    assert opened().imports("prod").metered == metered


def test_an_imported_gpu_is_capacity_up_to_its_last_record_alone(send, ledger, hand, accounts):
    ledger.append([imports(hand, (0, 10, "imported:n1/0"))], NOW_MS)
    assert accounts(0, 60) == {"allocated_unknown": 600_000_000}
    assert ledger.imports("prod").metered == {}
    # Once an agent meters the GPU it goes on, and what lies between is known to be unmetered.
    ledger.append([imports(hand, (10, 20, "gpu-1"), seq=SEQ + 1)], NOW_MS)
    assert accounts(10, 60) == {"allocated_unknown": 600_000_000}
    send(hand.row(1, 30, 31))
    assert accounts(10, 40)["unmetered"] == 19 * 60_000_000
    assert ledger.imports("prod").metered == {"n1": (START_MS + 30 * MINUTE, START_MS + 31 * MINUTE)}


def test_numbers_between_chunks_are_no_loss_and_resending_stores_nothing(ledger, hand):
    first, later = imports(hand, (0, 10, "gpu-1")), imports(hand, (10, 20, "gpu-1"), seq=SEQ + 10 * 1_000_000)
    receipts = [booked(ledger, NOW_MS, batch) for batch in (first, later, first, later)]
    assert [(receipt.stored, receipt.duplicates, receipt.quarantined) for receipt in receipts] == [
        (1, 0, 0), (1, 0, 0), (0, 1, 0), (0, 1, 0),
    ]  # fmt: skip
    assert present(ledger).holes() == []
    assert ledger.imports("prod").marks == {"n1": {EPOCH: SEQ + 10 * 1_000_000}}


def test_what_agents_and_imports_told_stays_apart_over_a_restart_and_a_checkpoint(ledger, send, opened, hand):
    send(hand.row(1, 30, 31))
    booked(ledger, NOW_MS, imports(hand, (0, 10, "gpu-1"), (0, 10, "gpu-2"), node="n2"))
    send(hand.row(2, 31, 40))
    ledger.checkpoint()
    before = ledger.imports("prod"), present(ledger).usage((START_MS, NOW_MS), ("node",)).lines()
    ledger.close()
    again = opened()
    assert (again.imports("prod"), present(again).usage((START_MS, NOW_MS), ("node",)).lines()) == before
    assert before[0].metered == {"n1": (START_MS + 30 * MINUTE, START_MS + 40 * MINUTE)}
