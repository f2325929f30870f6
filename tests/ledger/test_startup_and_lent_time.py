"""Start-up and borrowed time: by definition, from hourly sums, and in parts of limited size."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from accountant.billing.usage_pricing import charge_table
from accountant.core.start_up import Launch, gang, phase_spans
from accountant.ledger.protocols import Down, Facts, NodeFacts
from accountant.ledger.team_assignment import NO_POLICY
from accountant.ledger.usage import LENT, START_UP
from accountant.prices.price_book import Billing
from accountant.storage.duckdb_engine import Cursor, Database, Row
from accountant.storage.duckdb_ledger import DuckLedger, open_ledger
from accountant.storage.ledger_state import State, load
from accountant.storage.query.group_by_dimensions import ConstantSpan, pieces_of
from accountant.storage.query.startup_and_lent_time import idle_time, lent_time
from accountant.wire.policy_models import Policy, QueuePolicy
from accountant.wire.usage_cost_and_job_models import Dimension
from gputally.base.apportionment import prorate
from gputally.base.clock import VirtualClock
from gputally.base.units import BUCKET_MS, MS_PER_HOUR
from tests.billing.usage_rows import price_book
from tests.empty_ledger import fresh
from tests.hypothesis_examples import examples
from tests.ledger.conftest import MINUTE, NOW_MS, START_MS, Hand, booked
from tests.moments import present
from tests.usage_records import pod_holder
from tests.usage_relation import figures_of, start_up

US = 60_000_000
BY = ("namespace", "pod")


def holder_of(name, namespace="vision"):
    return pod_holder(name, namespace)


def phases(ledger: DuckLedger, start=0.0, end=60.0):
    span = START_MS + round(start * MINUTE), START_MS + round(end * MINUTE)
    return start_up(present(ledger).usage(span, BY, measures=START_UP))


def test_idle_at_the_beginning_is_start_up(send, hand, ledger):
    """A pod is bound at minute 0 and runs from 2.5. The other member of its gang runs from 5. Rows are cut there."""
    a = [hand.row(i + 1, i, i + 1, holder=holder_of("a"), busy_us=0) for i in range(8)]
    b = [hand.row(i + 9, i, i + 1, "gpu-2", holder=holder_of("b"), busy_us=0) for i in range(8)]
    facts = [
        hand.fact(17, "a", name="a", workload="PyTorchJob/t", created_ms=START_MS, started_ms=START_MS + 150_000),
        hand.fact(18, "b", name="b", workload="PyTorchJob/t", created_ms=START_MS, started_ms=START_MS + 300_000),
    ]
    send(*a, *b, *facts)
    assert phases(ledger) == {("vision", "a"): (150_000_000, 150_000_000), ("vision", "b"): (300_000_000, 0)}
    halves = [phases(ledger, 0, 2.25), phases(ledger, 2.25, 8)]
    assert [sum(starting for starting, _ in half.values()) for half in halves] == [270_000_000, 180_000_000]
    assert phases(ledger, 8, 9) == {}


def test_pods_nobody_reported_idle_like_any_other(send, hand, ledger):
    send(hand.row(1, busy_us=0))
    assert phases(ledger) == {}


@pytest.fixture
def shared_gpu(hand, ledger):
    """Two pods hold a quarter of a GPU each, and half of it is free. `greedy` uses more than its quarter, `calm`
    less."""
    rows = []
    for minute in range(10):
        seq = minute * 3
        part = {"capacity_us": US // 4, "allocated_us": US // 4}
        rows += [
            hand.row(seq + 1, minute, minute + 1, holder=holder_of("greedy"), busy_us=US - 1_000_000, **part),
            hand.row(seq + 2, minute, minute + 1, holder=holder_of("calm"), busy_us=1_000_000, **part),
            hand.row(seq + 3, minute, minute + 1, holder=None, capacity_us=US // 2, allocated_us=0),
        ]
    ledger.append([hand.batch(*rows)], NOW_MS)
    return ledger


def test_borrowed_time_comes_from_the_free_part_then_from_co_holders(shared_gpu):
    found = present(shared_gpu).usage((START_MS, START_MS + 10 * MINUTE), ("pod",), measures=LENT)
    assert figures_of(found, LENT) == {
        ("",): (0, 0, -300_000_000), ("calm",): (0, -140_000_000, 0), ("greedy",): (440_000_000, 0, 0),
    }  # fmt: skip


def test_the_bill_never_exceeds_the_gpu(shared_gpu):
    book = price_book("id: a, model: H100, price: 1, valid_from: 2026-01-01")
    book = book.model_copy(update={"billing": Billing(shared_gpus="busy")})
    found = charge_table(present(shared_gpu), book, START_MS, START_MS + 10 * MINUTE, ("pod",)).charges()
    assert {(c.key[0], c.account): c.gpu_us for c in found} == {
        ("calm", "busy"): 10_000_000, ("greedy", "busy"): 590_000_000,
    }  # fmt: skip
    only = charge_table(
        present(shared_gpu), book, START_MS, START_MS + 10 * MINUTE, ("team",), {"pod": {"greedy"}}
    ).charges()
    assert sum(c.gpu_us for c in only) == 590_000_000


def test_a_node_that_is_down_lends_nothing(shared_gpu):
    down = Down(START_MS, START_MS + 10 * MINUTE, "maintenance")
    shared_gpu.observe(Facts(nodes=(NodeFacts("prod", "n1", down=(down,)),)), NOW_MS)
    busy, idle, unallocated = (
        present(shared_gpu).usage((START_MS, START_MS + 10 * MINUTE), BY, measures=LENT).columns(LENT).T
    )
    assert (busy.sum() > 0, busy.sum() + idle.sum(), unallocated.any()) == (True, 0, False)


HOURS, GPUS = 8, 6
SPAN = (START_MS + 7 * MINUTE + 1, START_MS + HOURS * MS_PER_HOUR - 11 * MINUTE)
BYS: tuple[tuple[Dimension, ...], ...] = ((), ("namespace", "day"), ("hour", "gpu", "pod"))


class CountingCursor(Cursor):
    """Passes statements to another cursor and stores the number of rows of the longest result."""

    def __init__(self, cursor: Cursor) -> None:
        self._cursor = cursor
        self.longest = 0

    def run(self, sql: str, *arguments: Any, **named: Any) -> list[Row]:
        rows = self._cursor.run(sql, *arguments, **named)
        self.longest = max(self.longest, len(rows))
        return rows

    def columns(self, sql: str, *arguments: Any, **named: Any) -> Mapping[str, Any]:
        columns = self._cursor.columns(sql, *arguments, **named)
        self.longest = max(self.longest, *map(len, columns.values()))
        return columns


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[CountingCursor, State]]:
    """Two pods of a gang share each GPU for three hours, then two others. All start late, and some borrow time."""
    place, hand, end = tmp_path_factory.mktemp("bounded") / "ledger.duckdb", Hand(), START_MS + HOURS * MS_PER_HOUR
    ledger = open_ledger(place, VirtualClock(end))
    records, numbers, half_us, pods = [], itertools.count(1), 450_000_000, {}
    for quarter, gpu, side in itertools.product(range(HOURS * 4), range(GPUS), range(2)):
        seq, life = next(numbers), quarter // 12
        name = f"p{life}-{gpu}-{side}"
        pods.setdefault(name, (life, gpu))
        busy_us = (seq * 98_765_431) % (2 * half_us if side else 2 * half_us // 3)
        records.append(
            hand.row(
                seq, quarter * 15, quarter * 15 + 15, f"gpu-{gpu}", busy_us=busy_us, capacity_us=half_us,
                allocated_us=half_us, holder=holder_of(name, f"ns-{gpu % 2}"),
            )
        )  # fmt: skip
    for name, (life, gpu) in pods.items():
        bound, start_up_ms = START_MS + life * 3 * MS_PER_HOUR, sum(map(ord, name)) * 31 % 50 * MINUTE
        records.append(
            hand.fact(
                next(numbers), name, name=name, namespace=f"ns-{gpu % 2}", workload=f"PyTorchJob/t{life}-{gpu // 3}",
                created_ms=bound, scheduled_ms=bound, started_ms=bound + start_up_ms,
            )
        )  # fmt: skip
    assert booked(ledger, end, hand.batch(*records)).quarantined == 0
    ledger.checkpoint()
    ledger.close()
    with closing(Database(place)) as database, database.cursor() as cursor:
        yield CountingCursor(cursor), load(cursor)


@pytest.mark.parametrize("by", BYS)
@pytest.mark.parametrize("most", [5, 37])
def test_the_parts_are_the_whole(kept, by, most):
    cursor, state = kept
    pieces = pieces_of(state, *SPAN, frozenset(by), ZoneInfo("Europe/Berlin"))
    moved = list(itertools.chain.from_iterable(lent_time(cursor, state, pieces, by)))
    assert sorted(itertools.chain.from_iterable(lent_time(cursor, state, pieces, by, most=most))) == sorted(moved)
    assert sum(each.gpu_us for each in moved) == 0 < len(moved)
    early = list(itertools.chain.from_iterable(idle_time(cursor, state, pieces)))
    assert sorted(itertools.chain.from_iterable(idle_time(cursor, state, pieces, most))) == sorted(early)
    assert {each.phase for each in early if each.idle_us} == {"starting", "gang_waiting"}


def test_no_answer_of_the_engine_is_longer_than_an_hour_or_a_gang(kept):
    cursor, state = kept
    pieces, longest = [ConstantSpan(*SPAN, NO_POLICY)], {}
    for most in (1, 10**6):
        cursor.longest = 0
        assert list(lent_time(cursor, state, pieces, (), most=most))
        # Four quarter-hours of every GPU, its two holders each.
        longest[most] = cursor.longest
    assert longest[1] <= 4 * GPUS * 2 < longest[10**6]
    for most in (1, 10**6):
        cursor.longest = 0
        assert list(idle_time(cursor, state, pieces, most))
        longest[most] = cursor.longest
    assert longest[1] < longest[10**6]


LAUNCH_HOURS = 5
END_MS = START_MS + LAUNCH_HOURS * MS_PER_HOUR
BY_POD: tuple[Dimension, ...] = ("pod", "gpu", "hour")


@dataclass(frozen=True)
class Pod:
    """Times are minutes after the start. running None: no start was reported. gang: pods of one gang begin together."""

    bound: int
    running: int | None
    gang: int | None

    @property
    def bound_ms(self) -> int:
        return START_MS + self.bound * MINUTE

    @property
    def running_ms(self) -> int | None:
        return None if self.running is None else START_MS + self.running * MINUTE + 12_345

    @property
    def observed_ms(self) -> int:
        return START_MS + min(self.bound + 45, LAUNCH_HOURS * 60) * MINUTE

    def kind(self, name: str) -> str:
        return f"Job/{name}" if self.gang is None else f"PyTorchJob/g{self.gang}"


_pods = st.lists(
    st.builds(
        Pod,
        bound=st.integers(0, LAUNCH_HOURS * 60 - 1),
        running=st.none() | st.integers(0, LAUNCH_HOURS * 60 + 30),
        gang=st.none() | st.integers(0, 1),
    ),
    min_size=1,
    max_size=5,
)
_edges = st.lists(
    st.integers(-20 * MINUTE, LAUNCH_HOURS * MS_PER_HOUR + 20 * MINUTE)
    | st.integers(0, LAUNCH_HOURS * 4).map(lambda quarter: quarter * BUCKET_MS),
    min_size=2,
    max_size=5,
    unique=True,
).map(sorted)


def history(pods: list[Pod], step: int, fill: Callable[[DuckLedger], None], path: Path) -> None:
    """Books pods that each hold a GPU for up to two hours, with a row every `step` minutes. Some rows have no idle
    time."""
    hand, records, numbers, whole = Hand(), [], itertools.count(1), step * US
    for number, pod in enumerate(pods):
        name = f"p{number}"
        for minute in range(pod.bound - pod.bound % step, min(pod.bound + 120, LAUNCH_HOURS * 60), step):
            seq = next(numbers)
            busy_us = whole if (minute // step) % 7 == 3 else (seq * 7_654_321) % whole
            row = hand.row(seq, minute, minute + step, f"gpu-{number}", busy_us=busy_us, holder=holder_of(name))
            records.append(row)
        records.append(
            hand.fact(
                next(numbers), name, name=name, workload=pod.kind(name), created_ms=pod.bound_ms,
                scheduled_ms=pod.bound_ms, started_ms=pod.running_ms, observed_ms=pod.observed_ms,
            )
        )  # fmt: skip
    with closing(open_ledger(fresh(path), VirtualClock(END_MS))) as ledger:
        booked(ledger, END_MS, hand.batch(*records))
        fill(ledger)


def told_by_rows(pods: list[Pod], path: Path, start_ms: int, end_ms: int) -> dict[tuple[str, ...], tuple[int, ...]]:
    """Computes start-up time by its definition: cuts every row at every phase."""
    with closing(Database(path)) as database, database.cursor() as cursor:
        rows = cursor.run(
            "SELECT h.name, g.gpu_uuid, e.start_ms, e.end_ms, e.idle_us FROM entry e JOIN holder h ON h.id = e.payer "
            "JOIN gpu g ON g.id = e.gpu WHERE e.idle_us > 0"
        )
    numbers = {f"p{number}": number for number in range(len(pods))}
    spans = phase_spans(
        Launch(
            number, gang(pod.kind(f"p{number}"), "prod/vision"), pod.bound_ms, pod.bound_ms, pod.running_ms,
            pod.observed_ms,
        )
        for number, pod in enumerate(pods)
    )  # fmt: skip
    sums: dict[tuple[str, ...], dict[str, int]] = {}
    for name, gpu, begin, stop, idle in rows:
        hour = datetime.fromtimestamp(begin // 1000, UTC).strftime("%Y-%m-%dT%H")
        for span in spans:
            low, high = max(begin, span.start_ms, start_ms), min(stop, span.end_ms, end_ms)
            if numbers.get(name) == span.holder and low < high:
                part = prorate(idle, stop - begin, low - begin, high - begin)
                group = sums.setdefault((name, gpu, hour), {"starting": 0, "gang_waiting": 0})
                group[span.phase] += part
    return {
        key: (found["starting"], found["gang_waiting"]) for key, found in sorted(sums.items()) if any(found.values())
    }


def added(pieces: Sequence[Mapping[tuple[str, ...], Sequence[int]]]) -> dict[tuple[str, ...], tuple[int, ...]]:
    sums: dict[tuple[str, ...], tuple[int, ...]] = {}
    for key, figures in [row for piece in pieces for row in piece.items()]:
        sums[key] = tuple(a + b for a, b in zip(sums.get(key, (0, 0)), figures, strict=True))
    return sums


def test_who_waits_for_a_member_that_never_idles_waits_in_every_span(send, ledger, hand):
    """The busy member has rows only before midnight. In the hour after midnight, the other member still waits for
    it."""
    began = {"early": 5, "late": 90}
    facts = [
        hand.fact(
            seq, name, name=name, workload="PyTorchJob/g", created_ms=START_MS, scheduled_ms=START_MS,
            started_ms=START_MS + minute * MINUTE, observed_ms=START_MS + 120 * MINUTE,
        )
        for seq, (name, minute) in enumerate(began.items(), 1)
    ]  # fmt: skip
    busy = hand.row(3, 0, 1, "gpu-1", busy_us=US, holder=holder_of("late"))
    idle = [hand.row(4 + n, n, n + 1, "gpu-0", busy_us=0, holder=holder_of("early")) for n in range(120)]
    send(*facts, busy, *idle, now_ms=END_MS)
    hours = [START_MS, START_MS + MS_PER_HOUR, START_MS + 2 * MS_PER_HOUR]
    by_hour = [start_up(present(ledger).usage(span, ("pod",), measures=START_UP)) for span in pairwise(hours)]
    whole = start_up(present(ledger).usage((hours[0], hours[-1]), ("pod",), measures=START_UP))
    assert whole == {("early",): (5 * MINUTE * 1000, 85 * MINUTE * 1000)}
    assert [row for piece in by_hour for row in piece.values()] == [
        (5 * MINUTE * 1000, 55 * MINUTE * 1000), (0, 30 * MINUTE * 1000),
    ]  # fmt: skip


@given(pods=_pods, edges=_edges, step=st.sampled_from((1, 5, 15)), folded=st.booleans(), late=st.booleans())
@pytest.mark.thorough
@settings(max_examples=examples(5, 30))
def test_sums_and_rows_say_the_same(pods, edges, step, folded, late):
    """For folded and unfolded hours, hours that changed after folding, and any span. Parts add up to the whole."""

    def fill(ledger: DuckLedger) -> None:
        if folded:
            ledger.checkpoint()
        if late:
            row = Hand().row(
                1, LAUNCH_HOURS * 30, LAUNCH_HOURS * 30 + 10, "gpu-late", busy_us=0, holder=holder_of("p0")
            )
            booked(ledger, END_MS, Hand().batch(row, epoch="late"))
        ledger.put_policy(Policy(queues=(QueuePolicy(name="a", team="t"),)), START_MS + 100 * MINUTE)

    with TemporaryDirectory() as folder:
        path = Path(folder) / "ledger.duckdb"
        history(pods, step, fill, path)
        asked = [(START_MS + low, START_MS + high) for low, high in [*pairwise(edges), (edges[0], edges[-1])]]
        with closing(open_ledger(path, VirtualClock(END_MS))) as ledger:
            found = [start_up(present(ledger).usage(span, BY_POD, measures=START_UP)) for span in asked]
        assert found == [told_by_rows(pods, path, *span) for span in asked]
        *pieces, whole = found
        assert added(pieces) == whole
