"""Usage by every dimension, down and unmetered time, and the breakdown of idle time."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import Any

import numpy as np
import pytest
from msgspec import json

from accountant.billing.idle_time_causes import broken_down
from accountant.inventory.pod_facts import PodObject, pod_sighting
from accountant.ledger.journal import NewAct
from accountant.ledger.protocols import Down, Facts, NamespaceFacts, NodeFacts
from accountant.ledger.team_assignment import labels_count
from accountant.ledger.usage import ACCOUNTS, LENT, MEASURES, START_UP, Usage, UsageLines, coverage, names_of
from accountant.storage.duckdb_ledger import DuckLedger, open_ledger
from accountant.storage.query.group_by_dimensions import ResultCache, UsageQuestion
from accountant.wire.policy_models import IDLE, UNASSIGNED, Policy, QueuePolicy, WindowSpec
from accountant.wire.usage_cost_and_job_models import Dimension, UsageLine
from agent.wire import Holder
from gputally.base.units import MS_PER_DAY, MS_PER_HOUR
from tests.inventory.memory_api_server import pod
from tests.ledger.conftest import MINUTE, START_MS
from tests.moments import present
from tests.usage_records import batch, deliver, interval, pod_holder
from tests.usage_relation import figures_of

MINUTE_US = MINUTE * 1000


def policy(**teams: str) -> Policy:
    return Policy(
        queues=(
            QueuePolicy(name="research", team=teams.get("research", "research")),
            QueuePolicy(name="vision", parent="research", refs=("kai:vision",)),
            QueuePolicy(name="speech", parent="research", refs=("kai:speech",), team="speech"),
        )
    )


def books(ledger: DuckLedger, hand: Any, end: float, *by: Any, start: float = 0, **options: Any) -> dict[Any, Any]:
    lines = (
        present(ledger)
        .usage((hand.start_ms + round(start * MINUTE), hand.start_ms + round(end * MINUTE)), by, **options)
        .lines()
    )
    return {
        tuple(line.key.values()): {k: v // MINUTE_US for k, v in line.accounts_gpu_us.model_dump().items() if v}
        for line in lines
    }


def test_the_queue_gives_the_team_then_its_ancestors_then_the_namespace(send, ledger, hand):
    uids = {"a": "kai:vision", "b": "policy:speech", "c": "kai:unheard-of", "d": ""}
    rows = [hand.row(i + 1, i, i + 1, holder=pod_holder(uid, f"ns-{uid}")) for i, uid in enumerate(uids)]
    facts = [
        hand.fact(i + 5, uid, queue_ref=ref, workload="Job/train" if uid == "a" else "")
        for i, (uid, ref) in enumerate(uids.items())
    ]
    send(*rows, *facts, hand.row(9, 4, 5, holder=None))
    ledger.observe(Facts(namespaces=(NamespaceFacts("prod", "ns-c", "ops"),)), hand.now_ms)
    assert set(books(ledger, hand, 5, "team", "queue")) == {("ops", UNASSIGNED), (UNASSIGNED, UNASSIGNED), (IDLE, IDLE)}
    ledger.put_policy(policy(), hand.now_ms)
    assert set(books(ledger, hand, 5, "team", "queue", "job")) == {
        ("research", "vision", "Job/train"),
        ("speech", "speech", "Pod/b"),
        ("ops", UNASSIGNED, "Pod/c"),
        (UNASSIGNED, UNASSIGNED, "Pod/d"),
        (IDLE, IDLE, ""),
    }
    only = books(ledger, hand, 5, "queue", where={"team": {"speech", "research"}})
    assert set(only) == {("speech",), ("vision",)}


def test_usage_is_cut_where_the_policy_changes(send, ledger, hand):
    rows = [hand.row(i + 1, i, i + 1, busy_us=0) for i in range(4)]
    send(*rows, hand.fact(5, queue_ref="kai:vision"))
    first = ledger.put_policy(policy(), hand.start_ms + 1 * MINUTE)
    assert ledger.put_policy(policy(), hand.start_ms + 2 * MINUTE) == first
    second = ledger.put_policy(policy(research="lab"), hand.start_ms + round(2.5 * MINUTE))
    assert ledger.status().policies(hand.start_ms, hand.now_ms) == [first, second]
    assert ledger.status().policies(hand.start_ms, hand.start_ms + MINUTE) == [first]
    assert ledger.status().policies(hand.start_ms + 3 * MINUTE, hand.now_ms) == [second]
    lines = present(ledger).usage((hand.start_ms, hand.start_ms + 4 * MINUTE), ("team",)).lines()
    assert {line.key["team"]: line.accounts_gpu_us.allocated for line in lines} == {
        "lab": 90_000_000,
        "research": 150_000_000,
    }
    window = present(ledger).window(WindowSpec(size=240), hand.start_ms + 4 * MINUTE, "allocated", 0.98)
    assert window.usage == {"research": 240_000_000, "speech": 0, "vision": 240_000_000}
    assert window.policy_version == second.version


def test_history_goes_with_the_refs_of_a_queue_that_is_no_more(send, ledger, hand):
    """For a queue that is renamed or whose ref moves to another, its usage follows the ref. Usage without a new owner
    stays under the old name, and with the departments above it."""
    rows = [hand.row(i + 1, i, i + 1, busy_us=0) for i in range(4)]
    send(*rows, hand.fact(5, queue_ref="kai:vision"))
    research, speech = QueuePolicy(name="research"), QueuePolicy(name="speech", parent="research", refs=("kai:speech",))
    vision = QueuePolicy(name="vision", parent="research", refs=("kai:vision",))
    at_ms = hand.start_ms + 4 * MINUTE

    def used(*queues: QueuePolicy, minute: int) -> dict[str, int]:
        ledger.put_policy(Policy(queues=queues), at_ms + minute * MINUTE)
        window = present(ledger).window(WindowSpec(size=1200), at_ms + (minute + 1) * MINUTE, "allocated", 0.98)
        return {queue: value for queue, value in window.usage.items() if value}

    whole = 4 * MINUTE_US
    assert used(research, speech, vision, minute=0) == {"research": whole, "vision": whole}
    seeing = vision.model_copy(update={"name": "seeing"})
    assert used(research, speech, seeing, minute=2) == {"research": whole, "seeing": whole}
    both = speech.model_copy(update={"refs": ("kai:speech", "kai:vision")})
    assert used(research, both, minute=4) == {"research": whole, "speech": whole}
    assert used(research, speech, minute=6) == {"research": whole, "vision": whole}
    lab = QueuePolicy(name="lab")
    assert used(research, speech, lab, seeing.model_copy(update={"parent": "lab"}), minute=8) == {
        "lab": whole,
        "seeing": whole,
    }
    assert used(lab, minute=10) == {"vision": whole}


def test_a_node_that_is_down_takes_what_nobody_holds_and_what_is_missing(send, ledger, hand, accounts):
    send(hand.row(1, 0, 10), hand.row(2, 10, 20, holder=None))
    assert accounts(0, 30)["unmetered"] == 10 * MINUTE_US
    down = Down(hand.start_ms + 5 * MINUTE, hand.start_ms + 25 * MINUTE, "NotReady")
    node = NodeFacts("prod", "n1", pool="gpu", region="eu", capacity_type="spot", down=(down,))
    ledger.observe(Facts(nodes=(node,)), hand.now_ms)
    assert books(ledger, hand, 30, "pool", "region", "capacity_type", "node") == {
        ("gpu", "eu", "spot", "n1"): {"busy": 5, "allocated_idle": 5, "down": 15, "unmetered": 5}
    }
    assert accounts(0, 30, team=IDLE) == {"down": 15 * MINUTE_US, "unmetered": 5 * MINUTE_US}
    # 15 minutes of service, 10 of them metered (5 held in the down time are metered and in service, too).
    window = present(ledger).window(WindowSpec(size=1800), hand.start_ms + 30 * MINUTE, "allocated", 0.98)
    assert (window.capacity, window.coverage) == (15 * MINUTE_US, 10 / 15)
    assert coverage(present(ledger).usage((hand.start_ms, hand.start_ms + 30 * MINUTE), ())) == 10 / 15
    # Late facts recompute it; what they do not name stays.
    ledger.observe(Facts(nodes=(NodeFacts("prod", "n1"),)), hand.now_ms)
    ledger.observe(Facts(nodes=(NodeFacts("prod", "n2"),)), hand.now_ms)
    assert accounts(0, 30)["unmetered"] == 10 * MINUTE_US
    assert "down" not in accounts(0, 30)


def test_a_lost_gpu_is_down_even_if_it_is_held(send, ledger, hand):
    send(hand.row(1, 0, 2, health="lost"), hand.row(2, 2, 3))
    assert books(ledger, hand, 3, "team", "pod") == {
        (IDLE, ""): {"down": 2},
        (UNASSIGNED, "train-0"): {"busy": 0, "allocated_idle": 0},
    }


def test_a_gpu_is_capacity_until_its_node_is_deleted(send, ledger, hand, accounts):
    send(hand.row(1, 0, 10))
    gone = NodeFacts("prod", "n1", deleted_ms=hand.start_ms + 12 * MINUTE)
    ledger.observe(Facts(nodes=(gone,)), hand.now_ms)
    assert accounts(0, 600)["unmetered"] == 2 * MINUTE_US
    assert present(ledger).window(WindowSpec(size=600), hand.start_ms + 60 * MINUTE, "busy", 0.98).capacity == 0


def test_a_gpu_that_its_node_lists_no_more_is_retired_after_a_day(send, hand, accounts):
    send(hand.row(1, 0, 1, gpu="old"), hand.row(2, 0, 1, gpu="new"))
    later = hand.now_ms + 2 * MS_PER_DAY
    day = MS_PER_DAY // MINUTE
    send(hand.row(3, 2 * day, 2 * day + 1, gpu="new"), now_ms=later)
    assert sum(accounts(0, 3 * day, gpu="old").values()) == (day + 1) * MINUTE_US
    assert sum(accounts(0, 3 * day, gpu="new").values()) == 3 * day * MINUTE_US


def test_a_node_that_returns_with_another_gpu_has_one_gpu_at_a_time(send, ledger, hand, accounts):
    ledger.observe(Facts(nodes=(NodeFacts("prod", "n1", uid="u1"),)), hand.now_ms)
    send(hand.row(1, 0, 15, gpu="A"))
    back = NodeFacts("prod", "n1", uid="u2", renewed_ms=(hand.start_ms + 16 * MINUTE,))
    ledger.observe(Facts(nodes=(back,)), hand.now_ms)
    send(*(hand.row(n, 15 * n + 5, 15 * n + 20, gpu="B") for n in (1, 2)), epoch="0193-b")
    both = accounts(0, 50)
    assert sum(both.values()) == 45 * MINUTE_US
    assert "unmetered" not in both
    assert present(ledger).window(WindowSpec(size=50 * 60), hand.start_ms + 50 * MINUTE, "busy", 0.98).coverage == 1


@pytest.mark.parametrize("listed", [False, True], ids=["no inventory", "inventory file"])
def test_without_node_objects_the_boots_that_agents_report_say_that_a_node_returned(
    send, ledger, path, clock, hand, listed
):
    """The file of an inventory says nothing about boots."""
    if listed:
        ledger.observe(Facts(nodes=(NodeFacts("prod", "n1", pool="a100"),)), hand.start_ms)
    at = [hand.start_ms + minute * MINUTE for minute in (10, 22, 30, 45)]
    send(hand.row(1, 0, 10, gpu="A"), hand.row(2, 0, 10, gpu="C"), now_ms=at[0])
    # The new machine has only the second GPU, and sends what is left in the spool first.
    send(hand.row(3, 10, 15, gpu="A"), hand.row(4, 10, 15, gpu="C"), boot_id="boot-2", now_ms=at[1])
    send(hand.row(5, 20, 30, gpu="B"), hand.row(6, 20, 30, gpu="C"), boot_id="boot-2", now_ms=at[2])
    send(hand.row(7, 30, 45, gpu="B"), hand.row(8, 30, 45, gpu="C"), boot_id="boot-2", now_ms=at[3])
    if listed:
        ledger.observe(Facts(nodes=(NodeFacts("prod", "n1", pool="a100"),)), at[3])
    assert [(node.name, node.pool) for node in ledger.status().nodes] == [("n1", "a100")] * listed
    ledger.close()
    with closing(open_ledger(path, clock)) as again:
        lines = present(again).usage((hand.start_ms, at[3]), ("gpu",)).lines()
    spans = {line.key["gpu"]: line.accounts_gpu_us.total // MINUTE_US for line in lines}
    assert spans == {"A": 15, "B": 25, "C": 45}


def test_an_import_reports_no_boots(send, hand, accounts):
    send(hand.row(1, 0, 10, gpu="A"), now_ms=hand.start_ms + 10 * MINUTE)
    batch = {"epoch": "import:slurm:1", "boot_id": "x", "now_ms": hand.start_ms + 12 * MINUTE}
    send(hand.row(1, 0, 1, gpu="Z"), **batch)
    send(hand.row(2, 10, 20, gpu="B"), now_ms=hand.start_ms + 20 * MINUTE)
    assert sum(accounts(0, 20, gpu="A").values()) == 20 * MINUTE_US


def test_a_gpu_that_moved_counts_once(send, ledger, hand):
    send(hand.row(1, 0, 1))
    later = hand.now_ms + 4 * 60 * 60_000
    send(hand.row(1, 183, 184), node="n2", now_ms=later)
    assert books(ledger, hand, 185, "node", "pod") == {
        ("n1", "train-0"): {"busy": 0, "allocated_idle": 0},
        ("n2", ""): {"unmetered": 183},
        ("n2", "train-0"): {"busy": 0, "allocated_idle": 0},
    }


def test_months_days_and_hours_are_local(send, ledger, hand):
    rows = [hand.row(i + 1, 15 * i, 15 * i + 15, busy_us=0) for i in range(4)]
    send(*rows)
    # 2026-10-01T00:00Z is 05:45 in Kathmandu.
    assert books(ledger, hand, 60, "hour", timezone="Asia/Kathmandu") == {
        ("2026-10-01T05",): {"allocated_idle": 15},
        ("2026-10-01T06",): {"allocated_idle": 45},
    }
    assert books(ledger, hand, 60, "day", timezone="America/Los_Angeles") == {("2026-09-30",): {"allocated_idle": 60}}
    # In Los Angeles the month changes at 07:00Z, after 7 hours; the rest of the span is unmetered.
    assert books(ledger, hand, 8 * 60, "month", timezone="America/Los_Angeles") == {
        ("2026-09",): {"allocated_idle": 60, "unmetered": 360},
        ("2026-10",): {"unmetered": 60},
    }
    filtered = present(ledger).usage(
        (hand.start_ms, hand.start_ms + 60 * MINUTE), ("day",), {"month": ("2026-10",)}, "America/Los_Angeles"
    )
    assert not len(filtered)


def test_the_newest_fact_of_a_pod_wins_whatever_comes_last(send, ledger, hand):
    ledger.put_policy(policy(), hand.start_ms)
    row = hand.row(1, 0, 1, busy_us=0)
    newest = hand.fact(2, queue_ref="kai:speech", observed_ms=hand.start_ms + 9)
    send(row, newest)
    spec, at = WindowSpec(size=900), hand.start_ms + 15 * MINUTE
    assert present(ledger).window(spec, at, "allocated", 0.9).usage["speech"] == MINUTE_US
    send(hand.fact(3, queue_ref="kai:vision"))
    assert set(books(ledger, hand, 1, "queue")) == {("speech",)}
    assert present(ledger).window(spec, at, "allocated", 0.9).usage["speech"] == MINUTE_US
    # The inventory saw it later still, and its clock cannot make it last for ever.
    late = hand.fact(0, queue_ref="kai:vision", observed_ms=10**15)
    ledger.observe(Facts(pods=(("prod", late),)), hand.now_ms)
    assert set(books(ledger, hand, 1, "queue")) == {("vision",)}
    assert present(ledger).window(spec, at, "allocated", 0.9).usage["vision"] == MINUTE_US
    send(hand.fact(4, queue_ref="kai:speech", observed_ms=hand.now_ms + 1), now_ms=hand.now_ms + 1)
    assert set(books(ledger, hand, 1, "queue")) == {("speech",)}


def test_the_watermark_says_how_old_the_news_are(send, ledger, hand):
    at = hand.start_ms + 60 * MINUTE
    spec = WindowSpec(size=3600)
    assert present(ledger).window(spec, at, "allocated", 0.98).watermark_ms is None
    rows = [hand.row(i + 1, 0, 50 if i else 20, gpu=f"gpu-{i}") for i in range(10)]
    send(*rows)
    assert present(ledger).window(spec, at, "allocated", 0.9).watermark_ms == hand.start_ms + 50 * MINUTE
    assert present(ledger).window(spec, at, "allocated", 0.98).watermark_ms == hand.start_ms + 20 * MINUTE
    assert (
        present(ledger).window(spec, hand.start_ms + 10 * MINUTE, "allocated", 0.98).watermark_ms
        == hand.start_ms + 10 * MINUTE
    )
    node = NodeFacts("prod", "n1", down=(Down(at - MINUTE, None, "NotReady"),))
    ledger.observe(Facts(nodes=(node,)), hand.now_ms)
    assert present(ledger).window(spec, at, "allocated", 0.98).watermark_ms is None


def test_what_a_measure_cannot_see_is_not_covered(send, ledger, hand):
    rows = (hand.row(1, 0, 1, energy_uj=50), hand.row(2, 1, 2, busy_us=None, energy_uj=7), hand.row(3, 2, 4))
    send(*rows)
    at = hand.start_ms + 4 * MINUTE
    found = {of: present(ledger).window(WindowSpec(size=240), at, of, 0.98) for of in ("allocated", "busy", "energy")}
    assert {of: window.coverage for of, window in found.items()} == {"allocated": 1.0, "busy": 0.75, "energy": 0.5}
    assert (found["energy"].unassigned, found["energy"].capacity, found["energy"].unit) == (57, 57, "uj")


def test_windows_that_begin_at_the_month_or_at_a_multiple(send, ledger, hand):
    send(hand.row(1, -30, 0), hand.row(2, 0, 30))
    at = hand.start_ms + 30 * MINUTE
    month = present(ledger).window(WindowSpec(kind="calendar"), at, "allocated", 0.98)
    assert (month.start_ms, month.unassigned) == (hand.start_ms, 30 * MINUTE_US)
    tumbling = present(ledger).window(WindowSpec(kind="tumbling", size=MS_PER_HOUR // 1000), at, "allocated", 0.98)
    assert (tumbling.start_ms, tumbling.unassigned) == (hand.start_ms, 30 * MINUTE_US)


@pytest.fixture
def two_clusters(ledger: DuckLedger, hand: Any) -> DuckLedger:
    """Books two containers of a pod and a Slurm job on two GPUs, a third GPU without holder, and a GPU of a second
    cluster."""
    main, side = (Holder(kind="pod", uid="pod-1", namespace="vision", name="train-0", container=c) for c in ("a", "b"))
    job = Holder(kind="slurm", uid="101")
    half = {"capacity_us": MINUTE_US // 2, "allocated_us": MINUTE_US // 2, "busy_us": MINUTE_US // 4}
    ledger.append(
        [
            hand.batch(
                hand.row(1, holder=main, **half),
                hand.row(2, holder=side, **half),
                hand.row(3, gpu="gpu-2", holder=job),
                hand.row(4, gpu="gpu-3", holder=None),
                hand.fact(5, labels={"gputally.dev/user": "ann"}),
            ),
            hand.batch(hand.row(1, gpu="gpu-4"), cluster="lab", epoch="0192-b"),
        ],
        hand.now_ms,
    )
    fact = hand.fact(0, "101", namespace="nlp", name="sweep", labels={"slurm/user": "bob"}, queue_ref="slurm:nlp")
    ledger.observe(Facts(pods=(("prod", fact),)), hand.now_ms)
    return ledger


def sums(ledger: DuckLedger, hand: Any, by: Sequence[Dimension], **options: Any) -> dict[tuple[str, ...], int]:
    lines = present(ledger).usage((hand.start_ms, hand.start_ms + 60_000), by, **options).lines()
    return {tuple(line.key.values()): line.accounts_gpu_us.total for line in lines}


@pytest.mark.parametrize(
    ("by", "where", "expected"),
    [
        ("container", {"gpu": ["gpu-1"]}, {"a": MINUTE_US // 2, "b": MINUTE_US // 2}),
        ("team", {"container": ["a"]}, {UNASSIGNED: MINUTE_US // 2}),
        # The time of no user, and of a pod of the other cluster that says nothing.
        ("user", {}, {"": 2 * MINUTE_US, "ann": MINUTE_US, "bob": MINUTE_US}),
        ("job", {"user": ["bob"]}, {"Slurm/sweep": MINUTE_US}),
        ("cluster", {}, {"lab": MINUTE_US, "prod": 3 * MINUTE_US}),
        ("gpu", {"cluster": ["lab"]}, {"gpu-4": MINUTE_US}),
    ],
)
def test_usage_by_container_user_and_cluster(two_clusters, hand, by, where, expected):
    assert sums(two_clusters, hand, (by,), where=where) == {(key,): gpu_us for key, gpu_us in expected.items()}


def test_breakdowns_know_the_same_names(two_clusters, hand):
    asked: tuple[Dimension, ...] = ("cluster", "container", "user")
    found = present(two_clusters).usage((hand.start_ms, hand.now_ms), asked, measures=(*START_UP, *LENT))
    assert figures_of(found, (*START_UP, *LENT)) == {}


@pytest.mark.parametrize(
    ("keys", "labels"),
    [
        ((), {}),
        (("hub/user", "owner"), {"gputally.dev/user": "zoe"}),
        (("none", "owner"), {"gputally.dev/user": "eve"}),
    ],
)
def test_a_users_name_is_taken_from_the_first_key_that_has_one(keys, labels):
    text = json.encode(pod("p", labels={"owner": "eve"}, annotations={"hub/user": "zoe"}))
    found = pod_sighting(json.decode(text, type=PodObject), 0, (), keys)
    assert found is not None
    assert found.facts.labels == labels


def test_a_users_name_alone_says_nothing_of_the_team(hand):
    """Otherwise its labels would be the earliest of the pod, and would determine the team."""
    named = hand.fact(1, labels={"gputally.dev/user": "ann"}, created_ms=hand.start_ms)
    assert not labels_count(named)
    assert labels_count(hand.fact(1, labels={"team": "x"}, created_ms=hand.start_ms))


GUARANTEES = Policy(
    queues=(
        QueuePolicy(name="root"),
        QueuePolicy(name="vision", parent="root", team="vision", deserved=1.5, refs=("kai:vision",)),
        QueuePolicy(name="speech", parent="root", team="speech", deserved=1, refs=("kai:speech",)),
    )
)


@pytest.fixture
def half_idle(ledger: DuckLedger, hand: Any) -> DuckLedger:
    """Ten minutes of two GPUs: vision's pod starts for 2.5 minutes and is idle afterwards, and the other GPU is
    free."""
    rows = [hand.row(i + 1, i, i + 1, holder=Holder(kind="pod", uid="pod-1"), busy_us=0) for i in range(10)]
    rows += [hand.row(i + 11, i, i + 1, "gpu-2", holder=None) for i in range(10)]
    fact = hand.fact(21, "pod-1", queue_ref="kai:vision", created_ms=hand.start_ms, started_ms=hand.start_ms + 150_000)
    ledger.append([hand.batch(*rows, fact)], hand.now_ms)
    ledger.put_policy(GUARANTEES, 1)
    return ledger


def breakdown(ledger: DuckLedger, hand: Any, *by: Dimension, **where: Any) -> dict[tuple[str, ...], UsageLine]:
    span = hand.start_ms, hand.start_ms + 10 * MINUTE
    lines = present(ledger).usage(span, by, where).lines()
    return {tuple(line.key.values()): line for line in broken_down(present(ledger), lines, *span, by, where, "UTC")}


def test_the_sorts_of_idle_time_add_up(half_idle, hand):
    line = breakdown(half_idle, hand, "team")["vision",]
    assert (line.starting_us, line.gang_waiting_us, line.running_idle_us) == (150_000_000, 0, 450_000_000)
    assert line.accounts_gpu_us.allocated_idle == 10 * MINUTE_US


def test_a_guarantee_reserves_what_was_free_for_whom_it_was(half_idle, hand):
    """Vision has 0.5 GPU unused and speech 1 GPU. They divide the one free GPU: a third and two thirds."""
    found = breakdown(half_idle, hand, "queue")
    assert {key[0]: line.reserved_unused_us for key, line in found.items()} == {
        "__idle__": 0, "speech": 400_000_000, "vision": 200_000_000,
    }  # fmt: skip
    assert found["speech",].accounts_gpu_us.total == 0  # a memo: it held nothing
    assert sum(line.accounts_gpu_us.total for line in found.values()) == 20 * MINUTE_US
    assert breakdown(half_idle, hand, "gpu", "queue")["gpu-2", "speech"].reserved_unused_us == 400_000_000


def test_a_guarantee_of_one_model_reserves_no_gpu_of_another(half_idle, hand):
    """Only vision's guarantee is of the free GPU's model, of which it leaves half a GPU unused."""
    model = hand.row(1).gpu_model
    by_model = {"vision": {model: {"deserved": 1.5}}, "speech": {"A10": {"deserved": 1}}}
    queues = [
        {"name": name, "team": name, "gpu_models": quotas, "refs": [f"kai:{name}"]} for name, quotas in by_model.items()
    ]
    half_idle.put_policy(Policy.model_validate({"queues": queues}), 2)
    found = breakdown(half_idle, hand, "queue")
    assert {key[0]: line.reserved_unused_us for key, line in found.items()} == {"__idle__": 0, "vision": 300_000_000}


def test_filters_hold_for_the_breakdown(half_idle, hand):
    (only,) = breakdown(half_idle, hand, "gpu", team=["vision"], gpu=["gpu-2"]).values()
    assert (only.key, only.reserved_unused_us, only.running_idle_us) == ({"gpu": "gpu-2"}, 200_000_000, 0)
    (other,) = breakdown(half_idle, hand, "team", pool=[""], team=["vision"]).values()
    assert (other.starting_us, other.reserved_unused_us) == (150_000_000, 200_000_000)
    assert breakdown(half_idle, hand, "team", team=["nobody"]) == {}


def test_without_a_policy_nothing_is_reserved(send, ledger, hand):
    send(hand.row(1, holder=None))
    assert [line.reserved_unused_us for line in breakdown(ledger, hand, "team").values()] == [0]


def test_place_by_zone_and_machine(half_idle, hand):
    assert breakdown(half_idle, hand, "zone", "instance_type").keys() == {("", "")}
    node = hand.batch(hand.row(1)).node
    half_idle.observe(Facts(nodes=(NodeFacts("prod", node, zone="eu-1a", instance_type="p5.48xlarge"),)), hand.now_ms)
    assert (
        breakdown(half_idle, hand, "zone", "instance_type")["eu-1a", "p5.48xlarge"].accounts_gpu_us.total
        == 20 * MINUTE_US
    )
    assert breakdown(half_idle, hand, "team", zone=["elsewhere"]) == {}


def test_what_somebody_reported_is_recorded_with_it(half_idle, hand):
    act = NewAct(hand.now_ms, "pods", "hpc", "ada", "no holders at all")
    half_idle.observe(Facts(), hand.now_ms, act=act)
    assert [(found.who, found.subject) for found in present(half_idle).acts("pods")] == [("ada", "hpc")]


def test_lines_of_usage_are_made_when_they_are_read(ledger):
    count = 3_000
    rows = [
        interval(START_MS + at, f"GPU-{at % 10}", pod_holder(f"{at:06}", "vision", f"uid-{at}"), span_ms=1)
        for at in range(count)
    ]
    deliver(ledger, START_MS + MINUTE, batch(rows))
    span = (START_MS, START_MS + count)
    with ledger.moment() as moment:
        moment.usage(span, ("job", "namespace", "user"))
        tracemalloc.start()
        lines = moment.usage((*span[:1], span[1] + 1), ("job", "namespace", "user")).lines()
        kept, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        allocated_us = sum(line.accounts_gpu_us.allocated for line in lines)
    assert (len(lines), allocated_us) == (count + 1, count * 1000)
    assert kept < 1_500 * count, "a line as an object takes 3 KB"


class UnreadLines(UsageLines):
    def __iter__(self) -> Iterator[UsageLine]:
        raise AssertionError("the lines are made once more")


def test_coverage_does_not_make_the_lines_of_a_long_answer():
    names = names_of(MEASURES)
    rows = np.arange(40 * len(names), dtype=np.int64).reshape(40, len(names)) * 10**15
    at = np.arange(40, dtype=np.int32).reshape(40, 1)
    usage = Usage(("job",), ([f"{at:02}" for at in range(40)],), np.zeros(40, dtype=np.int64), at, names, rows)
    assert coverage(UnreadLines(usage, 0, 40)) == coverage(usage) == coverage(list(usage.lines())) != 1


def test_fewer_figures_by_fewer_dimensions_are_those_of_an_answer_that_is_there():
    cache, question, by, names = ResultCache(), UsageQuestion((0, 1), frozenset(), "UTC"), ("team", "job"), ACCOUNTS
    rows = [(0, (team, job), range(at, at + len(ACCOUNTS) + 1))
            for at, (team, job) in enumerate((("a", "x"), ("a", "y"), ("b", "x")))]  # fmt: skip
    whole = Usage.of_rows(by, rows, ("node_down",))
    assert cache.usage(question, by, whole.names, lambda: whole) is whole
    told = cache.usage(question, ("team",), names, lambda: pytest.fail("it is asked again"))
    assert (told.names, figures_of(told)) == (names, figures_of(whole.grouped(("team",)), names))
    asked: list[str] = []
    cache.usage(question, ("team",), (*whole.names, "sm_active"), lambda: asked.append("more") or whole)
    assert asked == ["more"], "a figure that it has not is asked for"
