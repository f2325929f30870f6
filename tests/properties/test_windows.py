"""Windows and usage against a plain scan, and the same in whatever order intervals arrive."""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from accountant.accounts import ACCOUNTS, Cells, add, part, split
from accountant.ledger import Down, Facts, NodeFacts, Receipt
from accountant.overlap import Claim, Rank, intersect, settle, subtract, union
from accountant.store import DuckLedger, open_ledger
from accountant.windows import age_weight, factor, term, total
from accountant.wire import IDLE, UNASSIGNED, Dimension, Measure, Policy, QueuePolicy, UsageLine, WindowSpec
from agent.clock import VirtualClock
from agent.units import BUCKET_MS
from agent.wire import Batch, Gap, Holder, PodFacts, UsageInterval
from tests.effort import examples
from tests.fresh import fresh

START_MS = 1_790_812_800_000
SPAN_MS = 5 * BUCKET_MS
PODS = ("a", "b", "c")
QUEUE_OF = {"a": "left", "b": "right"}
POLICY = Policy(
    queues=(
        QueuePolicy(name="top"),
        QueuePolicy(name="left", parent="top", refs=("kai:left",)),
        QueuePolicy(name="right", parent="top", refs=("kai:right",)),
    )
)
TRUSTED = settings(max_examples=examples(4, 24), deadline=None, suppress_health_check=list(HealthCheck))


@dataclass(frozen=True)
class Stream:
    """One outbox: its sets in order, each a list of rows without numbers."""

    node: str
    epoch: str
    sets: tuple[tuple[UsageInterval, ...], ...]


def shape(
    gpu: str, start: int, end: int, pods: list[str | None], weights: list[int], busy: list[int | None], lost: bool
) -> tuple[UsageInterval, ...]:
    whole = (end - start) * 1000
    edges = [whole * sum(weights[:i]) // sum(weights) for i in range(len(weights) + 1)]
    rows = []
    for i, pod in enumerate(pods):
        capacity = edges[i + 1] - edges[i]
        ratio = busy[i]
        rows.append(
            UsageInterval(
                seq=0, start_ms=start, end_ms=end, gpu_uuid=gpu, gpu_model="H100", capacity_us=capacity,
                holder=None if pod is None else Holder(kind="pod", uid=pod, namespace="ns", name=pod),
                allocated_us=capacity if pod else 0,
                busy_us=None if ratio is None or not pod else capacity * ratio // 97,
                energy_uj=None if ratio is None else capacity * 3 + ratio, method="device",
                health="lost" if lost else "ok",
                gaps=(Gap(start, start + (end - start) // 3, "timeout"),) if ratio == 7 else (),
            )
        )  # fmt: skip
    return tuple(rows)


@st.composite
def streams(draw: st.DrawFn) -> list[Stream]:
    """Two nodes that tile their GPU with holes, and a third outbox that claims the first GPU's time too."""
    found = []
    for node, gpu, epoch in (("n1", "g1", "e1"), ("n2", "g2", "e1"), ("n1", "g1", "e0")):
        cuts = sorted(draw(st.sets(st.integers(0, SPAN_MS), min_size=2, max_size=7 if epoch == "e1" else 3)))
        sets = []
        for start, end in pairwise(cuts):
            for begin in range(start, end, BUCKET_MS):
                rows = draw(st.integers(1, 3))
                sets.append(
                    shape(
                        gpu, START_MS + begin, START_MS + min(end, begin + BUCKET_MS),
                        draw(st.lists(st.sampled_from([*PODS, None]), min_size=rows, max_size=rows)),
                        draw(st.lists(st.integers(1, 5), min_size=rows, max_size=rows)),
                        draw(st.lists(st.one_of(st.none(), st.integers(0, 120)), min_size=rows, max_size=rows)),
                        draw(st.integers(0, 9)) == 0,
                    )
                )  # fmt: skip
        found.append(Stream(node, epoch, tuple(sets)))
    return found


def batches(stream: Stream, size: int) -> list[Batch]:
    """The stream in batches of `size` sets; facts of all pods go first."""
    facts = tuple(
        PodFacts(
            seq=i + 1, uid=pod, namespace="ns", name=pod, node=stream.node, observed_ms=START_MS,
            queue_ref=f"kai:{QUEUE_OF[pod]}" if pod in QUEUE_OF else "",
        )
        for i, pod in enumerate(PODS)
    )  # fmt: skip
    made = [
        Batch(cluster="c", node=stream.node, boot_id="b", epoch=stream.epoch, first_seq=1, oldest_seq=1, facts=facts)
    ]
    seq = len(facts) + 1
    for at in range(0, len(stream.sets), size):
        rows = [row for item in stream.sets[at : at + size] for row in item]
        numbered = tuple(_numbered(row, seq + i) for i, row in enumerate(rows))
        made.append(
            Batch(
                cluster="c", node=stream.node, boot_id="b", epoch=stream.epoch, first_seq=seq, oldest_seq=1,
                intervals=numbered,
            )
        )  # fmt: skip
        seq += len(rows)
    return made


def _numbered(row: UsageInterval, seq: int) -> UsageInterval:
    return UsageInterval(**{**{f: getattr(row, f) for f in row.__struct_fields__}, "seq": seq})


# --- the oracle: every row, cut and added in plain Python -----------------------------------


@dataclass(frozen=True)
class Kept:
    gpu: str
    start_ms: int
    end_ms: int
    rows: tuple[tuple[str | None, Cells], ...]


def kept(found: list[Stream]) -> list[Kept]:
    claims: dict[str, list[tuple[Claim, tuple[UsageInterval, ...]]]] = defaultdict(list)
    for stream in found:
        seq = len(PODS) + 1
        for rows in stream.sets:
            rank = Rank(False, stream.epoch, seq, f"c/{stream.node}")
            claims[rows[0].gpu_uuid].append((Claim(rank, rows[0].start_ms, rows[0].end_ms), rows))
            seq += len(rows)
    result = []
    for gpu, known in claims.items():
        spans = settle(claim for claim, _ in known)
        for claim, rows in known:
            cells = [split(row) for row in rows]
            payers = [row.holder.uid if row.holder and row.health == "ok" else None for row in rows]
            for begin, end in spans[claim.rank]:
                for low in range(begin - begin % BUCKET_MS, end, BUCKET_MS):
                    a, b = max(begin, low), min(end, low + BUCKET_MS)
                    held = part(cells, claim.end_ms - claim.start_ms, a - claim.start_ms, b - claim.start_ms)
                    result.append(Kept(gpu, a, b, tuple(zip(payers, held, strict=True))))
    return result


def inside(item: Kept, start: int, end: int) -> list[tuple[str | None, Cells]]:
    low, high = max(start, item.start_ms), min(end, item.end_ms)
    if low >= high:
        return []
    cells = part([c for _, c in item.rows], item.end_ms - item.start_ms, low - item.start_ms, high - item.start_ms)
    return [(payer, c) for (payer, _), c in zip(item.rows, cells, strict=True)]


@pytest.fixture
def ledgers(tmp_path: Path) -> Iterator[Callable[[], DuckLedger]]:
    opened: list[DuckLedger] = []

    def make() -> DuckLedger:
        ledger = open_ledger(fresh(tmp_path / f"{len(opened)}.duckdb"), VirtualClock(START_MS + 2 * SPAN_MS))
        opened.append(ledger)
        return ledger

    yield make
    for ledger in opened:
        ledger.close()


def book(ledger: DuckLedger, group: list[Batch]) -> None:
    for result in ledger.append(group, START_MS + 2 * SPAN_MS):
        assert isinstance(result, Receipt)
        assert result.quarantined == 0


NODE_DOWN = Facts(nodes=(NodeFacts("c", "n1", down=(Down(START_MS + 400_123, START_MS + 1_500_777, "cordoned"),)),))


@pytest.mark.thorough
@TRUSTED
@given(
    found=streams(),
    low=st.integers(-1000, SPAN_MS),
    high=st.integers(0, SPAN_MS + 1000),
    middle=st.integers(0, SPAN_MS),
)
def test_usage_is_what_a_scan_of_all_rows_gives_and_adds_up(
    ledgers: Callable[[], DuckLedger], found: list[Stream], low: int, high: int, middle: int
) -> None:
    ledger = ledgers()
    for stream in found:
        book(ledger, batches(stream, 3))
    start, end = START_MS + min(low, high), START_MS + max(low, high) + 1
    expected: dict[tuple[str, str], Cells] = {}
    for item in kept(found):
        for payer, cells in inside(item, start, end):
            key = (item.gpu, payer or "")
            expected[key] = add([expected.get(key, Cells()), cells])
    lines = {(line.key["gpu"], line.key["pod"]): line for line in ledger.usage(start, end, ("gpu", "pod"))}
    for key, cells in expected.items():
        if any(cells):
            accounts = lines[key].accounts_gpu_us
            assert (accounts.busy, accounts.allocated_idle, accounts.allocated_unknown) == cells[:3]
            assert (accounts.unallocated, accounts.down) == cells[3:ACCOUNTS]
            assert (lines[key].borrowed_busy_us, lines[key].energy_uj) == (cells.borrowed_us, cells.energy_uj)
    lives = {gpu: min(i.start_ms for i in kept(found) if i.gpu == gpu) for gpu in {i.gpu for i in kept(found)}}
    for gpu, since in lives.items():
        mine = [line.accounts_gpu_us for (g, _), line in lines.items() if g == gpu]
        assert sum(accounts.total for accounts in mine) == max(0, end - max(start, since)) * 1000
        assert all(value >= 0 for accounts in mine for value in accounts.model_dump().values())
    # Cut anywhere, the pieces add up to the whole, account by account; node facts change the split only.
    for facts in (Facts(), NODE_DOWN):
        ledger.observe(facts, START_MS)
        cut = min(max(START_MS + middle, start), end)
        whole = _by_gpu(ledger, start, end)
        pieces = [_by_gpu(ledger, start, cut), _by_gpu(ledger, cut, end)]
        assert whole == {
            gpu: tuple(sum(column) for column in zip(*(p.get(gpu, (0,) * 6) for p in pieces), strict=True))
            for gpu in whole
        }
        assert sum(map(sum, whole.values())) == sum(max(0, end - max(start, since)) * 1000 for since in lives.values())
    examined = ledger.examine(start, end)
    assert examined.total_us == 0, examined.lines


@pytest.mark.thorough
@TRUSTED
@given(found=streams(), low=st.integers(-1000, SPAN_MS), high=st.integers(0, SPAN_MS + 1000))
def test_a_filter_takes_lines_away_and_a_coarser_question_adds_them_up(
    ledgers: Callable[[], DuckLedger], found: list[Stream], low: int, high: int
) -> None:
    ledger = ledgers()
    ledger.put_policy(POLICY, START_MS)
    for stream in found:
        book(ledger, batches(stream, 3))
    ledger.observe(NODE_DOWN, START_MS)
    start, end = START_MS + min(low, high), START_MS + max(low, high) + 1
    fine = ledger.usage(start, end, ("gpu", "hour", "queue", "pod", "namespace"))
    coarse: tuple[Dimension, ...] = ("hour", "queue")
    filters: list[dict[Dimension, tuple[str, ...]]] = [
        {}, {"pod": ("a", "b")}, {"pod": ("a", "")}, {"queue": (IDLE, "left")}, {"queue": ("right",)},
        {"namespace": ("ns",), "pod": ("c",)}, {"job": ("Pod/a",)},
    ]  # fmt: skip
    for where in filters:
        sums: dict[tuple[str, ...], list[int]] = defaultdict(lambda: [0] * 8)
        for line in fine:
            names = {**line.key, "job": f"Pod/{line.key['pod']}"}
            if all(names[name] in allowed for name, allowed in where.items()):
                key = tuple(line.key[name] for name in coarse)
                sums[key] = [a + b for a, b in zip(sums[key], _values(line), strict=True)]
        found_lines = {tuple(line.key.values()): _values(line) for line in ledger.usage(start, end, coarse, where)}
        assert found_lines == sums, where


def _values(line: UsageLine) -> list[int]:
    return [*line.accounts_gpu_us.model_dump().values(), line.borrowed_busy_us, line.energy_uj]


def _by_gpu(ledger: DuckLedger, start: int, end: int) -> dict[str, tuple[int, ...]]:
    lines = ledger.usage(start, end, ("gpu",))
    return {line.key["gpu"]: tuple(line.accounts_gpu_us.model_dump().values()) for line in lines}


@pytest.mark.thorough
@TRUSTED
@given(
    found=streams(),
    half_life=st.sampled_from([None, 60, 3600, 604_800]),
    at=st.integers(1, SPAN_MS + BUCKET_MS),
    size=st.integers(1, 2 * SPAN_MS // 1000),
    order=st.randoms(use_true_random=False),
)
def test_windows_are_bit_equal_whatever_the_order_and_equal_to_the_formula(
    ledgers: Callable[[], DuckLedger],
    found: list[Stream],
    half_life: int | None,
    at: int,
    size: int,
    order: random.Random,
) -> None:
    spec = WindowSpec(size=size, half_life=half_life)
    at_ms = START_MS + at
    first, second = ledgers(), ledgers()
    for ledger in (first, second):
        ledger.put_policy(POLICY, START_MS)
    book(first, [batch for stream in found for batch in batches(stream, 4)])
    # The second one hears the streams interleaved and piecemeal, and is asked in between.
    queues = [batches(stream, 1) for stream in found]
    while any(queues):
        queue = order.choice([queue for queue in queues if queue])
        book(second, [queue.pop(0)])
        second.window(spec, at_ms, "allocated", 0.98)
        if order.random() < 0.5:
            second.look_ahead()
    measures: tuple[Measure, ...] = ("allocated", "busy", "energy")
    for measure in measures:
        assert first.window(spec, at_ms, measure, 0.98) == second.window(spec, at_ms, measure, 0.98)
    window = first.window(spec, at_ms, "allocated", 0.98)
    terms: dict[str, dict[int, int]] = defaultdict(lambda: defaultdict(int))
    start = at_ms - size * 1000
    for item in kept(found):
        low, high = max(start, item.start_ms), min(at_ms, item.end_ms)
        reference = item.start_ms - item.start_ms % BUCKET_MS + BUCKET_MS
        if half_life is not None and half_life < BUCKET_MS // 1000:
            reference = min(reference, at_ms)
        for payer, cells in inside(item, start, at_ms):
            if payer:
                weight = factor(low, high, reference, half_life)
                terms[QUEUE_OF.get(payer, UNASSIGNED)][reference] += term(cells.allocated_us, weight)
    expected = {queue: total(sorted(own.items()), at_ms, half_life) for queue, own in terms.items()}
    assert window.unassigned == expected.get(UNASSIGNED, 0)
    assert window.usage["left"] == expected.get("left", 0)
    assert window.usage["right"] == expected.get("right", 0)
    assert window.usage["top"] == window.usage["left"] + window.usage["right"]
    if half_life is None:
        accounts = [line.accounts_gpu_us for line in first.usage(start, at_ms, ())]
        assert window.capacity == sum(a.total - a.down for a in accounts)
        assert window.coverage == first.coverage(start, at_ms)


@pytest.mark.thorough
@TRUSTED
@given(
    found=streams(),
    half_life=st.sampled_from([None, 3600]),
    at=st.integers(1, SPAN_MS + BUCKET_MS),
    order=st.randoms(use_true_random=False),
)
def test_checkpoints_and_restarts_change_no_answer(
    ledgers: Callable[[], DuckLedger], found: list[Stream], half_life: int | None, at: int, order: random.Random
) -> None:
    """Sums are folded at checkpoints only, and tenures written where they begin: rows have to tell the rest."""
    spec, at_ms = WindowSpec(size=2 * SPAN_MS // 1000, half_life=half_life), START_MS + at
    straight = ledgers()
    straight.put_policy(POLICY, START_MS)
    book(straight, [batch for stream in found for batch in batches(stream, 4)])
    clock = VirtualClock(START_MS + 2 * SPAN_MS)
    with TemporaryDirectory() as folder:
        path = Path(folder) / "ledger.duckdb"
        ledger = open_ledger(path, clock)
        try:
            ledger.put_policy(POLICY, START_MS)
            queues = [batches(stream, 2) for stream in found]
            while any(queues):
                book(ledger, [order.choice([queue for queue in queues if queue]).pop(0)])
                event = order.randrange(4)
                if event == 0:
                    ledger.checkpoint()
                elif event == 1:
                    ledger.close()
                    ledger = open_ledger(path, clock)
                else:
                    ledger.window(spec, at_ms, "allocated", 0.98)
            assert ledger.window(spec, at_ms, "energy", 0.98) == straight.window(spec, at_ms, "energy", 0.98)
            assert ledger.window(spec, at_ms, "allocated", 0.98) == straight.window(spec, at_ms, "allocated", 0.98)
            assert ledger.usage(START_MS, at_ms, ("gpu", "pod")) == straight.usage(START_MS, at_ms, ("gpu", "pod"))
            assert ledger.usage(START_MS, at_ms, ("queue",)) == straight.usage(START_MS, at_ms, ("queue",))
            examined = ledger.examine(START_MS, at_ms)
            assert examined.total_us == 0, examined.lines
        finally:
            ledger.close()


@given(
    start=st.integers(0, BUCKET_MS - 1),
    length=st.integers(1, BUCKET_MS),
    half_life=st.integers(1, 10**7),
    age=st.integers(0, BUCKET_MS),
)
def test_the_mean_weight_is_the_integral(start: int, length: int, half_life: int, age: int) -> None:
    end = start + length
    x = length / (half_life * 1000)
    exact = math.pow(2.0, -age / (half_life * 1000)) * -math.expm1(-math.log(2) * x) / (math.log(2) * x)
    assert math.isclose(factor(start, end, end + age, half_life), exact, rel_tol=4e-15)
    assert 0 <= factor(start, end, end + age, half_life) <= 1


def test_a_window_forgets_by_halves() -> None:
    assert age_weight(0, 3_600_000, 3600) == 0.5
    assert total([(0, 1000), (3_600_000, 1000)], 3_600_000, 3600) == 1500
    assert total([(0, 10**30), (1, 1)], 5, None) == 10**30 + 1


SPANS = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)).map(lambda s: (min(s), max(s))), max_size=8)


@given(left=SPANS, right=SPANS)
def test_span_arithmetic_is_arithmetic_of_instants(left: list[tuple[int, int]], right: list[tuple[int, int]]) -> None:
    def instants(spans: list[tuple[int, int]]) -> set[int]:
        return {at for start, end in spans for at in range(start, end)}

    a, b = union(left), union(right)
    assert instants(a) == instants(left)
    assert instants(intersect(a, b)) == instants(left) & instants(right)
    assert instants([s for span in a for s in subtract(span, b)]) == instants(left) - instants(right)
    assert all(x[1] < y[0] for x, y in pairwise(a))


ROW = st.lists(st.integers(0, 10**6), min_size=len(Cells._fields), max_size=len(Cells._fields))


@given(rows=st.lists(ROW, min_size=1, max_size=5), span=st.integers(1, 5000), cuts=st.sets(st.integers(0, 5000)))
def test_parts_of_a_set_are_never_negative_and_add_up(rows: list[list[int]], span: int, cuts: set[int]) -> None:
    whole = [Cells(*row) for row in rows]
    # Fill the last row up, so that the set is full.
    missing = -sum(cells.capacity_us for cells in whole) % (span * 1000)
    whole.append(Cells(unheld_us=missing))
    capacity = sum(cells.capacity_us for cells in whole)
    edges = [0, *sorted(cut for cut in cuts if 0 < cut < span), span]
    pieces = [part(whole, span, a, b) for a, b in pairwise(edges)]
    for (a, b), piece in zip(pairwise(edges), pieces, strict=True):
        assert all(value >= 0 for cells in piece for value in cells)
        assert sum(cells.capacity_us for cells in piece) == capacity // span * (b - a)
    assert [add(row) for row in zip(*pieces, strict=True)] == whole
