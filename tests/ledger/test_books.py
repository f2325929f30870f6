"""Usage by queue and team, down time, and unmetered time."""

from __future__ import annotations

from typing import Any

from accountant.ledger.protocols import Down, Facts, NamespaceFacts, NodeFacts
from accountant.storage.duckdb_ledger import DuckLedger
from accountant.wire.policy_models import IDLE, UNASSIGNED, Decision, Policy, QueuePolicy, WindowSpec
from gputally.base.units import MS_PER_DAY, MS_PER_HOUR

MINUTE = 60_000
MINUTE_US = 60_000_000


def policy(**teams: str) -> Policy:
    return Policy(
        queues=(
            QueuePolicy(name="research", team=teams.get("research", "research")),
            QueuePolicy(name="vision", parent="research", refs=("kai:vision",)),
            QueuePolicy(name="speech", parent="research", refs=("kai:speech",), team="speech"),
        )
    )


def books(ledger: DuckLedger, hand: Any, end: float, *by: Any, start: float = 0, **options: Any) -> dict[Any, Any]:
    lines = ledger.usage(hand.start_ms + round(start * MINUTE), hand.start_ms + round(end * MINUTE), by, **options)
    return {
        tuple(line.key.values()): {k: v // MINUTE_US for k, v in line.accounts_gpu_us.model_dump().items() if v}
        for line in lines
    }


def test_the_queue_gives_the_team_then_its_ancestors_then_the_namespace(ledger: DuckLedger, hand: Any) -> None:
    uids = {"a": "kai:vision", "b": "policy:speech", "c": "kai:unheard-of", "d": ""}
    rows = [
        hand.row(i + 1, i, i + 1, holder=type(hand.pod)(kind="pod", uid=uid, namespace=f"ns-{uid}", name=uid))
        for i, uid in enumerate(uids)
    ]
    facts = [
        hand.fact(i + 5, uid, queue_ref=ref, workload="Job/train" if uid == "a" else "")
        for i, (uid, ref) in enumerate(uids.items())
    ]
    ledger.append([hand.batch(*rows, *facts, hand.row(9, 4, 5, holder=None))], hand.now_ms)
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


def test_usage_is_cut_where_the_policy_changes(ledger: DuckLedger, hand: Any) -> None:
    rows = [hand.row(i + 1, i, i + 1, busy_us=0) for i in range(4)]
    ledger.append([hand.batch(*rows, hand.fact(5, queue_ref="kai:vision"))], hand.now_ms)
    first = ledger.put_policy(policy(), hand.start_ms + 1 * MINUTE)
    assert ledger.put_policy(policy(), hand.start_ms + 2 * MINUTE) == first
    second = ledger.put_policy(policy(research="lab"), hand.start_ms + round(2.5 * MINUTE))
    assert ledger.policies(hand.start_ms, hand.now_ms) == [first, second]
    assert ledger.policies(hand.start_ms, hand.start_ms + MINUTE) == [first]
    assert ledger.policies(hand.start_ms + 3 * MINUTE, hand.now_ms) == [second]
    lines = ledger.usage(hand.start_ms, hand.start_ms + 4 * MINUTE, ("team",))
    assert {line.key["team"]: line.accounts_gpu_us.allocated for line in lines} == {
        "lab": 90_000_000,
        "research": 150_000_000,
    }
    window = ledger.window(WindowSpec(size=240), hand.start_ms + 4 * MINUTE, "allocated", 0.98)
    assert window.usage == {"research": 240_000_000, "speech": 0, "vision": 240_000_000}
    assert window.policy_version == second.version


def test_history_goes_with_the_refs_of_a_queue_that_is_no_more(ledger: DuckLedger, hand: Any) -> None:
    """Renamed, or given to another queue: who used much has used it still. What nobody took over stays under the old
    name, and with the departments above it."""
    rows = [hand.row(i + 1, i, i + 1, busy_us=0) for i in range(4)]
    ledger.append([hand.batch(*rows, hand.fact(5, queue_ref="kai:vision"))], hand.now_ms)
    research, speech = QueuePolicy(name="research"), QueuePolicy(name="speech", parent="research", refs=("kai:speech",))
    vision = QueuePolicy(name="vision", parent="research", refs=("kai:vision",))
    at_ms = hand.start_ms + 4 * MINUTE

    def used(*queues: QueuePolicy, minute: int) -> dict[str, int]:
        ledger.put_policy(Policy(queues=queues), at_ms + minute * MINUTE)
        window = ledger.window(WindowSpec(size=1200), at_ms + (minute + 1) * MINUTE, "allocated", 0.98)
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


def test_a_node_that_is_down_takes_what_nobody_holds_and_what_is_missing(
    ledger: DuckLedger, hand: Any, accounts: Any
) -> None:
    ledger.append([hand.batch(hand.row(1, 0, 10), hand.row(2, 10, 20, holder=None))], hand.now_ms)
    assert accounts(0, 30)["unmetered"] == 10 * MINUTE_US
    down = Down(hand.start_ms + 5 * MINUTE, hand.start_ms + 25 * MINUTE, "NotReady")
    node = NodeFacts("prod", "n1", pool="gpu", region="eu", capacity_type="spot", down=(down,))
    ledger.observe(Facts(nodes=(node,)), hand.now_ms)
    assert books(ledger, hand, 30, "pool", "region", "capacity_type", "node") == {
        ("gpu", "eu", "spot", "n1"): {"busy": 5, "allocated_idle": 5, "down": 15, "unmetered": 5}
    }
    assert accounts(0, 30, team=IDLE) == {"down": 15 * MINUTE_US, "unmetered": 5 * MINUTE_US}
    # 15 minutes of service, 10 of them metered (5 held in the down time are metered and in service, too).
    window = ledger.window(WindowSpec(size=1800), hand.start_ms + 30 * MINUTE, "allocated", 0.98)
    assert (window.capacity, window.coverage) == (15 * MINUTE_US, 10 / 15)
    assert ledger.coverage(hand.start_ms, hand.start_ms + 30 * MINUTE) == 10 / 15
    # Late facts recompute it; what they do not name stays.
    ledger.observe(Facts(nodes=(NodeFacts("prod", "n1"),)), hand.now_ms)
    ledger.observe(Facts(nodes=(NodeFacts("prod", "n2"),)), hand.now_ms)
    assert accounts(0, 30)["unmetered"] == 10 * MINUTE_US
    assert "down" not in accounts(0, 30)


def test_a_lost_gpu_is_down_even_if_it_is_held(ledger: DuckLedger, hand: Any) -> None:
    ledger.append([hand.batch(hand.row(1, 0, 2, health="lost"), hand.row(2, 2, 3))], hand.now_ms)
    assert books(ledger, hand, 3, "team", "pod") == {
        (IDLE, ""): {"down": 2},
        (UNASSIGNED, "train-0"): {"busy": 0, "allocated_idle": 0},
    }


def test_a_gpu_is_capacity_until_its_node_is_deleted(ledger: DuckLedger, hand: Any, accounts: Any) -> None:
    ledger.append([hand.batch(hand.row(1, 0, 10))], hand.now_ms)
    gone = NodeFacts("prod", "n1", deleted_ms=hand.start_ms + 12 * MINUTE)
    ledger.observe(Facts(nodes=(gone,)), hand.now_ms)
    assert accounts(0, 600)["unmetered"] == 2 * MINUTE_US
    assert ledger.window(WindowSpec(size=600), hand.start_ms + 60 * MINUTE, "busy", 0.98).capacity == 0


def test_a_gpu_that_its_node_lists_no_more_is_retired_after_a_day(ledger: DuckLedger, hand: Any, accounts: Any) -> None:
    ledger.append([hand.batch(hand.row(1, 0, 1, gpu="old"), hand.row(2, 0, 1, gpu="new"))], hand.now_ms)
    later = hand.now_ms + 2 * MS_PER_DAY
    day = MS_PER_DAY // MINUTE
    ledger.append([hand.batch(hand.row(3, 2 * day, 2 * day + 1, gpu="new"))], later)
    assert sum(accounts(0, 3 * day, gpu="old").values()) == (day + 1) * MINUTE_US
    assert sum(accounts(0, 3 * day, gpu="new").values()) == 3 * day * MINUTE_US


def test_a_gpu_that_moved_counts_once(ledger: DuckLedger, hand: Any) -> None:
    ledger.append([hand.batch(hand.row(1, 0, 1))], hand.now_ms)
    later = hand.now_ms + 4 * 60 * 60_000
    ledger.append([hand.batch(hand.row(1, 183, 184), node="n2")], later)
    assert books(ledger, hand, 185, "node", "pod") == {
        ("n1", "train-0"): {"busy": 0, "allocated_idle": 0},
        ("n2", ""): {"unmetered": 183},
        ("n2", "train-0"): {"busy": 0, "allocated_idle": 0},
    }


def test_days_and_hours_are_local(ledger: DuckLedger, hand: Any) -> None:
    rows = [hand.row(i + 1, 15 * i, 15 * i + 15, busy_us=0) for i in range(4)]
    ledger.append([hand.batch(*rows)], hand.now_ms)
    # 2026-10-01T00:00Z is 05:45 in Kathmandu.
    assert books(ledger, hand, 60, "hour", timezone="Asia/Kathmandu") == {
        ("2026-10-01T05",): {"allocated_idle": 15},
        ("2026-10-01T06",): {"allocated_idle": 45},
    }
    assert books(ledger, hand, 60, "day", timezone="America/Los_Angeles") == {("2026-09-30",): {"allocated_idle": 60}}


def test_the_newest_fact_of_a_pod_wins_whatever_comes_last(ledger: DuckLedger, hand: Any) -> None:
    ledger.put_policy(policy(), hand.start_ms)
    row = hand.row(1, 0, 1, busy_us=0)
    newest = hand.fact(2, queue_ref="kai:speech", observed_ms=hand.start_ms + 9)
    ledger.append([hand.batch(row, newest)], hand.now_ms)
    spec, at = WindowSpec(size=900), hand.start_ms + 15 * MINUTE
    assert ledger.window(spec, at, "allocated", 0.9).usage["speech"] == MINUTE_US
    ledger.append([hand.batch(hand.fact(3, queue_ref="kai:vision"))], hand.now_ms)
    assert set(books(ledger, hand, 1, "queue")) == {("speech",)}
    assert ledger.window(spec, at, "allocated", 0.9).usage["speech"] == MINUTE_US
    # The inventory saw it later still, and its clock cannot make it last for ever.
    late = hand.fact(0, queue_ref="kai:vision", observed_ms=10**15)
    ledger.observe(Facts(pods=(("prod", late),)), hand.now_ms)
    assert set(books(ledger, hand, 1, "queue")) == {("vision",)}
    assert ledger.window(spec, at, "allocated", 0.9).usage["vision"] == MINUTE_US
    ledger.append([hand.batch(hand.fact(4, queue_ref="kai:speech", observed_ms=hand.now_ms + 1))], hand.now_ms + 1)
    assert set(books(ledger, hand, 1, "queue")) == {("speech",)}


def test_the_watermark_says_how_old_the_news_are(ledger: DuckLedger, hand: Any) -> None:
    at = hand.start_ms + 60 * MINUTE
    spec = WindowSpec(size=3600)
    assert ledger.window(spec, at, "allocated", 0.98).watermark_ms is None
    rows = [hand.row(i + 1, 0, 50 if i else 20, gpu=f"gpu-{i}") for i in range(10)]
    ledger.append([hand.batch(*rows)], hand.now_ms)
    assert ledger.window(spec, at, "allocated", 0.9).watermark_ms == hand.start_ms + 50 * MINUTE
    assert ledger.window(spec, at, "allocated", 0.98).watermark_ms == hand.start_ms + 20 * MINUTE
    assert (
        ledger.window(spec, hand.start_ms + 10 * MINUTE, "allocated", 0.98).watermark_ms == hand.start_ms + 10 * MINUTE
    )
    node = NodeFacts("prod", "n1", down=(Down(at - MINUTE, None, "NotReady"),))
    ledger.observe(Facts(nodes=(node,)), hand.now_ms)
    assert ledger.window(spec, at, "allocated", 0.98).watermark_ms is None


def test_what_a_measure_cannot_see_is_not_covered(ledger: DuckLedger, hand: Any) -> None:
    rows = (hand.row(1, 0, 1, energy_uj=50), hand.row(2, 1, 2, busy_us=None, energy_uj=7), hand.row(3, 2, 4))
    ledger.append([hand.batch(*rows)], hand.now_ms)
    at = hand.start_ms + 4 * MINUTE
    found = {of: ledger.window(WindowSpec(size=240), at, of, 0.98) for of in ("allocated", "busy", "energy")}
    assert {of: window.coverage for of, window in found.items()} == {"allocated": 1.0, "busy": 0.75, "energy": 0.5}
    assert (found["energy"].unassigned, found["energy"].capacity, found["energy"].unit) == (57, 57, "uj")


def test_windows_that_begin_at_the_month_or_at_a_multiple(ledger: DuckLedger, hand: Any) -> None:
    ledger.append([hand.batch(hand.row(1, -30, 0), hand.row(2, 0, 30))], hand.now_ms)
    at = hand.start_ms + 30 * MINUTE
    month = ledger.window(WindowSpec(kind="calendar"), at, "allocated", 0.98)
    assert (month.start_ms, month.unassigned) == (hand.start_ms, 30 * MINUTE_US)
    tumbling = ledger.window(WindowSpec(kind="tumbling", size=MS_PER_HOUR // 1000), at, "allocated", 0.98)
    assert (tumbling.start_ms, tumbling.unassigned) == (hand.start_ms, 30 * MINUTE_US)


def test_decisions_are_recorded_once_and_read_newest_first(ledger: DuckLedger, hand: Any) -> None:
    def decision(number: int, reason: str = "over share") -> Decision:
        return Decision(
            id=f"d{number}", at_ms=hand.start_ms + number, kind="weight", target="kai", subject="vision",
            mode="dry-run", value=1.5, reason=reason, policy_version="v", inputs={"share": 0.25},
        )  # fmt: skip

    assert ledger.record_decisions([decision(1), decision(2), decision(2, "again")], hand.now_ms) == 2
    assert ledger.record_decisions([decision(2, "other"), decision(3)], hand.now_ms) == 1
    assert ledger.record_decisions([], hand.now_ms) == 0
    assert ledger.decisions(hand.start_ms, hand.now_ms, 2) == [decision(3), decision(2)]
    assert ledger.decisions(hand.start_ms, hand.start_ms + 2) == [decision(1)]
    told = [
        decision(4).model_copy(update={"kind": "preemption", "subject": subject, "id": f"p{number}"})
        for number, subject in enumerate(("Job/vision/train-0", "Job/vision/other", "vision/train", "train"))
    ]
    ledger.record_decisions(told, hand.now_ms)
    span = (hand.start_ms, hand.now_ms)
    assert ledger.decisions(*span, kind="preemption") == told[::-1]
    assert ledger.decisions(*span, subject="train") == [told[3]]
    assert ledger.decisions(*span, kind="preemption", gang=("vision/train",)) == [told[0]]
    assert ledger.decisions(*span, 1, gang=("train",)) == [told[2]]
    assert ledger.decisions(*span, kind="hold", subject="train") == []
