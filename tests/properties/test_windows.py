"""Windows and usage equal a plain computation over all rows, for any order of arrival."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from accountant.core.gpu_time_accounts import ACCOUNTS, AccountVector, add
from accountant.core.window_decay import factor, term
from accountant.ledger.protocols import Down, Facts, NodeFacts
from accountant.storage.duckdb_ledger import DuckLedger, open_ledger
from accountant.wire.policy_models import IDLE, UNASSIGNED, Measure, WindowSpec
from accountant.wire.usage_cost_and_job_models import Dimension, UsageLine
from gputally.base.clock import VirtualClock
from gputally.base.units import BUCKET_MS
from tests.effort import examples
from tests.properties.streams import (
    POLICY,
    QUEUE_OF,
    SPAN_MS,
    START_MS,
    Stream,
    batches,
    book,
    inside,
    kept,
    streams,
    total,
)

TRUSTED = settings(max_examples=examples(4, 24), deadline=None, suppress_health_check=list(HealthCheck))


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
    ledgers: Callable[..., DuckLedger], found: list[Stream], low: int, high: int, middle: int
) -> None:
    ledger = ledgers(policy=None)
    for stream in found:
        book(ledger, batches(stream, 3))
    start, end = START_MS + min(low, high), START_MS + max(low, high) + 1
    expected: dict[tuple[str, str], AccountVector] = {}
    for item in kept(found):
        for payer, cells in inside(item, start, end):
            key = (item.gpu, payer or "")
            expected[key] = add([expected.get(key, AccountVector()), cells])
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
    ledgers: Callable[..., DuckLedger], found: list[Stream], low: int, high: int
) -> None:
    ledger = ledgers()
    for stream in found:
        book(ledger, batches(stream, 3))
    ledger.observe(NODE_DOWN, START_MS)
    start, end = START_MS + min(low, high), START_MS + max(low, high) + 1
    fine = ledger.usage(start, end, ("gpu", "hour", "queue", "pod", "namespace"))
    coarse: tuple[Dimension, ...] = ("hour", "queue")
    filters: list[dict[Dimension, tuple[str, ...]]] = [
        {}, {"pod": ("a", "d")}, {"pod": ("a", "")}, {"queue": (IDLE, "left")}, {"queue": ("right",)},
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
    ledgers: Callable[..., DuckLedger],
    found: list[Stream],
    half_life: int | None,
    at: int,
    size: int,
    order: random.Random,
) -> None:
    spec = WindowSpec(size=size, half_life=half_life)
    at_ms = START_MS + at
    first, second = ledgers(), ledgers()
    book(first, [batch for stream in found for batch in batches(stream, 4)])
    # The second one hears the streams interleaved and piecemeal, and is asked in between.
    queues = [batches(stream, 1) for stream in found]
    while any(queues):
        queue = order.choice([queue for queue in queues if queue])
        book(second, [queue.pop(0)])
        second.window(spec, at_ms, "allocated", 0.98)
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
        booked = first.coverage(start, at_ms)
        assert window.coverage == (1.0 if booked is None else booked)


@pytest.mark.thorough
@TRUSTED
@given(
    found=streams(),
    half_life=st.sampled_from([None, 3600]),
    at=st.integers(1, SPAN_MS + BUCKET_MS),
    order=st.randoms(use_true_random=False),
)
def test_checkpoints_and_restarts_change_no_answer(
    ledgers: Callable[..., DuckLedger], found: list[Stream], half_life: int | None, at: int, order: random.Random
) -> None:
    """Sums are computed only at checkpoints, and tenures are written when they begin. The rest follows from the
    rows."""
    spec, at_ms = WindowSpec(size=2 * SPAN_MS // 1000, half_life=half_life), START_MS + at
    straight = ledgers()
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
