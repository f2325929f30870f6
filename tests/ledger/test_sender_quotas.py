"""What a sender leaves in the ledger is limited: the surplus is set aside by name and never counts."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest

from accountant.core.errors import OverQuota
from accountant.core.settings import MIB, Quotas
from accountant.ledger.usage import coverage
from accountant.storage.duckdb_ledger import DuckLedger
from accountant.storage.write.sender_quotas import SenderUse, sender_of
from agent.wire import Gap, Holder, Slice, UsageInterval
from gputally.base.units import MS_PER_DAY, MS_PER_HOUR
from tests.empty_ledger import fresh
from tests.ledger.conftest import MINUTE, START_MS, Opener, booked
from tests.moments import acks, present

SMALL = Quotas(gpus=2, parts=3, holders=4, outboxes=3, import_nodes=2)
IMPORT: dict[str, Any] = {"epoch": "import:slurm:00000000000000"}


@pytest.fixture
def ledger(opened: Opener, path) -> DuckLedger:
    return opened(fresh(path), quotas=SMALL)


def pod(number: int) -> Holder:
    return Holder(kind="pod", uid=f"pod-{number}", namespace="vision", name=f"train-{number}")


def reasons(ledger: DuckLedger) -> list[str]:
    return [one.reason for one in present(ledger).quarantined()]


def test_invented_gpus_count_in_no_capacity_and_no_window(send, ledger, hand, accounts):
    receipt = send(*(hand.row(seq, gpu=f"gpu-{seq}") for seq in range(1, 51)))
    assert (receipt.stored, receipt.quarantined, receipt.over_quota) == (2, 48, {"gpus": 48})
    assert receipt.ack.durable_seq == 50, "the node goes on"
    assert set(reasons(ledger)) == {"over-quota"}
    assert {one.gpu_uuid for one in present(ledger).gpu_owners()} == {"gpu-1", "gpu-2"}
    assert ledger.status().gpu_hours(START_MS, START_MS + MS_PER_HOUR) <= 2
    assert coverage(present(ledger).usage((START_MS, START_MS + MINUTE), ())) == 1
    assert sum(accounts(0, 1).values()) == 2 * MINUTE * 1000
    again = send(*(hand.row(seq, gpu=f"gpu-{seq}") for seq in range(1, 51)))
    assert (again.stored, again.duplicates, again.quarantined) == (0, 50, 0), "the same records have the same outcome"
    assert len(reasons(ledger)) == 48


def test_another_nodes_gpus_are_not_affected(send, hand):
    send(*(hand.row(seq, gpu=f"gpu-{seq}") for seq in range(1, 11)))
    assert send(hand.row(1, gpu="gpu-other"), node="n2").stored == 1


def test_an_allowance_fills_again_within_a_day(send, hand):
    send(*(hand.row(seq, gpu=f"gpu-{seq}") for seq in range(1, 4)))
    later = hand.now_ms + MS_PER_DAY // 2
    new = [hand.row(seq, 65, 66, gpu=f"gpu-{seq}") for seq in (4, 5)]
    assert send(*new, now_ms=later).stored == 1
    known = hand.row(6, 66, 67, gpu="gpu-1")
    assert send(known, now_ms=later).stored == 1, "what is known costs nothing"


def test_what_became_free_between_frequent_records_is_not_lost(send, hand):
    send(*(hand.fact(seq, f"pod-{seq}") for seq in range(1, 5)))
    for step in range(1, 25):  # 24/7 a day, of four
        now_ms = hand.now_ms + step * 7 * MS_PER_HOUR
        assert send(hand.fact(4 + step, f"pod-{4 + step}"), now_ms=now_ms).over_quota == {}
    burst = [hand.fact(seq, f"pod-{seq}") for seq in range(29, 33)]
    assert send(*burst, now_ms=now_ms + 6 * MS_PER_HOUR).over_quota == {}


def test_holders_beyond_the_allowance_are_set_aside_with_their_names(send, ledger, hand, accounts):
    rows = [hand.row(seq, seq, seq + 1, holder=pod(seq)) for seq in range(1, 10)]
    receipt = send(*rows)
    assert (receipt.stored, receipt.over_quota) == (4, {"holders": 5})
    assert "train-9" in present(ledger).quarantined()[0].content
    assert len(present(ledger).pods(START_MS, START_MS + MS_PER_HOUR)) == 0
    assert send(hand.row(10, 20, 21, holder=pod(4))).stored == 1
    assert accounts(5, 10) == {"unmetered": 5 * MINUTE * 1000}
    facts = [hand.fact(seq, f"new-{seq}") for seq in (11, 12)]
    assert send(*facts).over_quota == {"holders": 2}
    assert send(hand.fact(13, "pod-4", queue_ref="kai:red")).over_quota == {}, "a fact about a known pod"


def test_one_pod_named_by_row_and_fact_costs_one_name(send, hand):
    records: list[Any] = []
    for number in range(4):
        records += [
            hand.row(2 * number + 1, number, number + 1, holder=pod(number)),
            hand.fact(2 * number + 2, f"pod-{number}"),
        ]
    assert send(*records).over_quota == {}


def test_a_refused_pod_leaves_no_name_behind(send, ledger, hand):
    send(*(hand.row(seq, seq, seq + 1, holder=pod(seq)) for seq in range(1, 6)))
    assert send(hand.row(1, gpu="gpu-2", holder=pod(5)), node="n2").stored == 1
    told = hand.fact(2, "pod-5", node="n2", queue_ref="kai:red")
    assert send(told, node="n2").quarantined == 0
    assert "foreign-pod" not in reasons(ledger), "the pod is its first booked node's"
    send(hand.fact(6, "pod-5", queue_ref="kai:blue"))
    assert "foreign-pod" in reasons(ledger), "and of no other"


def test_records_that_remain_keep_the_digests_of_what_was_sent(send, ledger, hand):
    send(hand.row(1, holder=pod(1)))
    rows = [hand.row(seq, seq, seq + 1, gpu="gpu-2", holder=pod(seq)) for seq in range(1, 8)]
    receipt = send(*rows, node="n2")
    assert (receipt.stored, receipt.over_quota) == (4, {"holders": 3})
    again = send(*rows, node="n2")
    assert (again.duplicates, again.quarantined) == (7, 0)


def part(number: int) -> Slice:
    return Slice(profile="1g.10gb", gi=number, ci=0, compute=1, compute_of=7, memory_mib=9728, memory_of_mib=81559)


def test_a_gpu_has_a_limited_number_of_parts_in_its_life(send, ledger, hand):
    rows = [hand.row(seq, seq, seq + 1, slice=part(seq)) for seq in range(1, 7)]
    assert send(*rows).over_quota == {"parts": 3}
    later = hand.now_ms + 30 * MS_PER_DAY
    assert send(hand.row(7, 70, 71, slice=part(9)), now_ms=later).over_quota == {"parts": 1}
    assert send(hand.row(8, 71, 72, slice=part(3)), now_ms=later).stored == 1


@pytest.fixture
def narrow(opened: Opener, path) -> DuckLedger:
    return opened(fresh(path), quotas=Quotas(bytes=MIB))


def minutes(hand, first: int, count: int) -> list[UsageInterval]:
    second = 1 / 60
    return [hand.row(seq, seq * second, (seq + 1) * second) for seq in range(first, first + count)]


def test_beyond_its_bytes_a_sender_leaves_no_content_and_its_numbers_advance(narrow, hand):
    most = MIB // 256
    receipt = booked(narrow, hand.now_ms, hand.batch(*minutes(hand, 1, 3000)))
    assert receipt.stored == 3000
    surplus = minutes(hand, 3001, 2000)
    receipt = booked(narrow, hand.now_ms, hand.batch(*surplus))
    assert (receipt.stored, receipt.over_quota, receipt.ack.durable_seq) == (0, {"bytes": 2000}, 5000)
    assert most < 3000 + 2000
    assert present(narrow).quarantined() == []
    assert [(one.first_seq, one.last_seq, one.reason) for one in present(narrow).holes()] == [
        (3001, 5000, "over-quota")
    ]
    again = booked(narrow, hand.now_ms, hand.batch(*surplus))
    assert (again.duplicates, again.quarantined) == (2000, 0), "the same records have the same outcome"
    assert len(present(narrow).holes()) == 1
    assert booked(narrow, hand.now_ms + MS_PER_DAY, hand.batch(*minutes(hand, 5001, 10))).stored == 10


def test_a_sender_of_holes_alone_must_wait(narrow, hand):
    most = 2 * MIB // 64
    batches = [hand.batch(first_seq=seq, oldest_seq=seq) for seq in range(2, 2 * most, 2)]
    results = narrow.append(batches, hand.now_ms)
    assert isinstance(results[-1], OverQuota)
    left = len(present(narrow).holes(2 * most))
    assert left == sum(not isinstance(one, Exception) for one in results) <= most
    later = narrow.append(batches[left : left + 1], hand.now_ms + MS_PER_DAY // 2)
    assert not isinstance(later[0], Exception)


def test_contradictions_beyond_the_bytes_are_counted_and_not_kept(narrow, hand):
    booked(narrow, hand.now_ms, hand.batch(*minutes(hand, 1, 3000)))
    for number in range(3):
        changed = [
            hand.row(row.seq, row.seq / 60, (row.seq + 1) / 60, busy_us=number) for row in minutes(hand, 1, 3000)
        ]
        assert booked(narrow, hand.now_ms, hand.batch(*changed)).quarantined == 3000
    kept = len(present(narrow).quarantined(10_000))
    assert 0 < kept < 1000, "about as many as the bytes that are left"


def test_large_records_leave_little_in_the_quarantine_and_their_gaps_count(narrow, hand):
    """The quarantine is read as a whole, so one record of forty megabytes would be read at every scrape."""
    gaps = tuple(Gap(START_MS, START_MS + MINUTE, "x" * 4_000) for _ in range(200))
    refused = hand.row(1, gpu_model="m" * 100_000, gaps=gaps)
    told = hand.fact(2, "p" * 100_000, labels={f"k{number}": "v" * 4_000 for number in range(200)})
    wide = narrow.append([hand.batch(refused, told)], hand.now_ms)[0]
    assert wide.over_quota == {"bytes": 2}, "more than a megabyte"
    small = hand.row(3, gpu_model="m" * 100_000, gaps=gaps[:10])
    assert booked(narrow, hand.now_ms, hand.batch(small)).quarantined == 1
    (kept,) = present(narrow).quarantined()
    assert kept.reason == "bad-name"
    assert len(kept.content) < 10_000
    assert json.loads(kept.content)["start_ms"] == START_MS, "its time is still known"
    assert present(narrow).imbalance(0, 0).quarantined == 1


def test_new_outboxes_are_limited_and_nothing_of_the_refused_one_is_stored(ledger, hand):
    for number in range(3):
        booked(ledger, hand.now_ms, hand.batch(hand.row(1, number, number + 1), epoch=f"0192-{number}"))
    before = acks(ledger, "n1", "prod")
    (refused,) = ledger.append([hand.batch(hand.row(1, 9, 10), epoch="0192-z")], hand.now_ms)
    assert isinstance(refused, OverQuota)
    assert acks(ledger, "n1", "prod") == before
    assert booked(ledger, hand.now_ms, hand.batch(hand.row(2, 4, 5), epoch="0192-1")).stored == 1
    (answer,) = ledger.append([hand.batch(hand.row(1, 9, 10), epoch="0192-z")], hand.now_ms + MS_PER_DAY // 3 + 1)
    assert not isinstance(answer, Exception)


def test_an_import_tells_a_year_at_once_but_of_few_invented_nodes(ledger, hand):
    rows = [hand.row(seq, seq, seq + 1, holder=pod(seq), method="imported") for seq in range(1, 50)]
    assert booked(ledger, hand.now_ms, hand.batch(*rows, **IMPORT)).over_quota == {}
    for number, accepted in ((2, True), (3, False), (2, True)):
        epoch = {"epoch": f"import:slurm:0000000000000{number}"}
        batch = hand.batch(hand.row(1, gpu=f"gpu-{number}", method="imported"), node=f"n{number}", **epoch)
        (answer,) = ledger.append([batch], hand.now_ms)
        assert isinstance(answer, OverQuota) != accepted


@pytest.fixture
def few(opened: Opener, path) -> DuckLedger:
    return opened(fresh(path), quotas=Quotas(nodes=3, cluster_gpus=5))


def test_an_issuer_of_another_cluster_introduces_a_limited_number_of_nodes(few, hand):
    """It signs tokens of any node. Nothing of a refused node is stored, so a node that is there keeps its records."""
    answers = [
        few.append([hand.batch(hand.row(1, gpu=f"gpu-{number}"), cluster="edge", node=f"n{number}")], hand.now_ms)[0]
        for number in range(6)
    ]
    assert [isinstance(answer, OverQuota) for answer in answers] == [False] * 3 + [True] * 3
    assert {answer.quota for answer in answers[3:]} == {"nodes"}
    assert "'n3'" in str(answers[3])
    assert {one.gpu_uuid for one in present(few).gpu_owners()} == {"gpu-0", "gpu-1", "gpu-2"}
    assert coverage(present(few).usage((START_MS, START_MS + MINUTE), ())) == 1
    known = hand.batch(hand.row(1, 5, 6, gpu="gpu-1"), cluster="edge", node="n1", epoch="0192-new")
    assert booked(few, hand.now_ms, known).stored == 1, "a node that is known begins another outbox"
    own = hand.batch(hand.row(1, gpu="gpu-own"), cluster="prod", node="own")
    assert booked(few, hand.now_ms, own).stored == 1, "another cluster is not affected"
    later = hand.batch(hand.row(1, gpu="gpu-3"), cluster="edge", node="n3")
    assert booked(few, hand.now_ms + MS_PER_DAY // 2, later).stored == 1, "an honest node that waited"


def test_the_known_nodes_of_a_cluster_cost_nothing_after_a_restart(opened, path, hand):
    first = opened(fresh(path), quotas=Quotas(nodes=3))
    for number in range(3):
        booked(first, hand.now_ms, hand.batch(hand.row(1, gpu=f"gpu-{number}"), node=f"n{number}"))
    first.close()
    again = opened(path, quotas=Quotas(nodes=1))
    for number in range(3):
        batch = hand.batch(hand.row(1, 5, 6, gpu=f"gpu-{number}"), node=f"n{number}", epoch="0192-new")
        assert booked(again, hand.now_ms, batch).stored == 1
    new = [hand.batch(hand.row(1, gpu=f"gpu-{number}"), node=f"n{number}") for number in (3, 4)]
    assert [isinstance(answer, OverQuota) for answer in again.append(new, hand.now_ms)] == [False, True]


def test_a_restart_gives_a_node_one_more_allowance_and_no_more(opened, path, hand):
    seq, restarts = 0, 2
    for _ in range(1 + restarts):
        started = opened(fresh(path), quotas=SMALL)
        for _ in range(3):
            seq += 3
            rows = [hand.row(number, gpu=f"gpu-{number}") for number in range(seq - 2, seq + 1)]
            booked(started, hand.now_ms, hand.batch(*rows))
        known = len(present(started).gpu_owners())
        started.close()
    assert known == (1 + restarts) * SMALL.gpus


def test_the_nodes_of_a_cluster_report_a_limited_number_of_gpus_together(few, hand):
    over: Counter[str] = Counter()
    for number in range(3):
        rows = [hand.row(seq, gpu=f"gpu-{number}-{seq}") for seq in range(1, 4)]
        receipt = booked(few, hand.now_ms, hand.batch(*rows, cluster="edge", node=f"n{number}"))
        over.update(receipt.over_quota)
    assert over == {"cluster_gpus": 9 - 5}
    assert set(reasons(few)) == {"over-quota"}
    assert len(present(few).gpu_owners()) == 5
    assert coverage(present(few).usage((START_MS, START_MS + MINUTE), ())) == 1


def test_a_first_installation_of_20000_nodes_stays_below_the_default_quotas():
    """Each node with 16 GPUs, all on one day."""
    claims = SenderUse(Quotas()).claims(0, lambda _: 0)
    for number in range(20_000):
        claims.open_outbox(("prod", f"n{number}", "0192"), ())
        sender = sender_of(("prod", f"n{number}", "0192"))
        assert [claims.take_gpu(sender) for _ in range(16)] == [None] * 16


def test_a_busy_node_stays_far_below_the_default_quotas(opened, path, hand):
    """A day of 1,000 pods on 16 GPUs of 7 parts, each with a name, a container and three facts."""
    ledger = opened(fresh(path))
    seq, over = 1, {}
    for hour in range(24):
        records: list[Any] = []
        for number in range(hour * 42, hour * 42 + 42):
            place = number % 112
            start = hour * 60 - 24 * 60 + number % 42
            whole = MINUTE * 1000
            held = hand.row(
                seq, start, start + 1, gpu=f"gpu-{place // 7}", slice=part(place % 7), holder=pod(number),
                capacity_us=whole // 7, allocated_us=whole // 7, busy_us=0,
            )  # fmt: skip
            rest = hand.row(
                seq + 1, start, start + 1, gpu=f"gpu-{place // 7}", holder=None, capacity_us=whole - whole // 7,
            )  # fmt: skip
            records += [held, rest]
            records += [hand.fact(seq + 2 + at, f"pod-{number}", observed_ms=START_MS + at) for at in range(3)]
            seq += 5
        over |= booked(ledger, hand.now_ms, hand.batch(*records)).over_quota
    assert over == {}
