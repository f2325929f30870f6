"""The arithmetic of windows: decay weights, spans that are cut and joined, divided sets, and sums of rows."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from accountant.core.claim_overlap import intersect, subtract, union
from accountant.core.gpu_time_accounts import AccountVector, add, figures, part, sum_by_key
from accountant.core.window_decay import age_weight, age_weights, combine, factor, term
from gputally.base.units import BUCKET_MS


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
    assert combine([1000, 1000], age_weights([0, 3_600_000], 3_600_000, 3600)) == 1500
    assert combine([10**30, 1], age_weights([0, 1], 5, None)) == 10**30 + 1


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


WIDTH = len(AccountVector._fields)
ROW = st.lists(st.integers(0, 10**6), min_size=WIDTH, max_size=WIDTH)


@given(rows=st.lists(ROW, min_size=1, max_size=5), span=st.integers(1, 5000), cuts=st.sets(st.integers(0, 5000)))
def test_parts_of_a_set_are_never_negative_and_add_up(rows: list[list[int]], span: int, cuts: set[int]) -> None:
    whole = [AccountVector(*row) for row in rows]
    # Fill the last row up, so that the set is full.
    missing = -sum(cells.capacity_us for cells in whole) % (span * 1000)
    whole.append(AccountVector(unheld_us=missing))
    capacity = sum(cells.capacity_us for cells in whole)
    edges = [0, *sorted(cut for cut in cuts if 0 < cut < span), span]
    pieces = [part(whole, span, a, b) for a, b in pairwise(edges)]
    for (a, b), piece in zip(pairwise(edges), pieces, strict=True):
        assert all(value >= 0 for cells in piece for value in cells)
        assert sum(cells.capacity_us for cells in piece) == capacity // span * (b - a)
    assert [add(row) for row in zip(*pieces, strict=True)] == whole


FIGURE = st.one_of(st.just(0), st.integers(0, BUCKET_MS * 200))


@given(st.lists(st.lists(FIGURE, min_size=WIDTH, max_size=WIDTH), min_size=1, max_size=20), st.floats(0, 2))
def test_figures_of_many_rows_are_those_of_each(rows: list[list[int]], weight: float) -> None:
    found = figures(np.array(rows, dtype=np.int64), [weight] * len(rows))
    for row, values in zip(rows, found.tolist(), strict=True):
        cells = AccountVector(*row)
        decaying = (cells.allocated_us, cells.busy_us, cells.energy_uj, cells.down_us)
        plain = (cells.allocated_us, cells.unheld_us, cells.down_us, cells.unknown_us, cells.energy_blind_us)
        assert values == [*(term(value, weight) for value in decaying), *plain]


def test_sums_go_by_equal_keys() -> None:
    keys = np.array([[1, 7], [2, 7], [1, 7]], dtype=np.int64)
    distinct, sums = sum_by_key(keys, np.array([[1, 10], [2, 20], [3, 30]], dtype=np.int64))
    assert (distinct.tolist(), sums.tolist()) == ([[1, 7], [2, 7]], [[4, 40], [2, 20]])
