"""Rows cut all at once are cut as they are one by one."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from accountant.core import accounts
from accountant.core.accounts import AccountVector, part
from accountant.core.window_decay import term
from gputally.base.units import BUCKET_MS

FIGURE = st.one_of(st.just(0), st.integers(0, BUCKET_MS * 200))
ROW = st.tuples(
    st.lists(FIGURE, min_size=len(AccountVector._fields), max_size=len(AccountVector._fields)),
    st.integers(1, BUCKET_MS),
    st.floats(0, 1),
    st.floats(0, 1),
)


@settings(deadline=None)
@given(st.lists(ROW, min_size=1, max_size=20), st.floats(0, 2))
def test_parts_and_terms_of_many_rows_are_those_of_each(rows: list, weight: float) -> None:
    cells = np.array([figures for figures, *_ in rows], dtype=np.int64)
    spans = [span for _, span, _, _ in rows]
    begins = [int(min(a, b) * span) for _, span, a, b in rows]
    stops = [int(max(a, b) * span) for _, span, a, b in rows]
    numbers = [np.array(column, dtype=np.int64) for column in (spans, begins, stops)]
    assert accounts.fits(cells, numbers[0])
    found = accounts.parts(cells, *numbers)
    one_by_one = [
        part([AccountVector(*figures)], span, begin, stop)[0]
        for (figures, *_), span, begin, stop in zip(rows, spans, begins, stops, strict=True)
    ]
    assert found.tolist() == [list(held) for held in one_by_one]
    assert accounts.terms(found[:, 0], [weight] * len(rows)).tolist() == [term(c.busy_us, weight) for c in one_by_one]


def test_numbers_that_do_not_fit_are_told() -> None:
    spans = np.array([BUCKET_MS], dtype=np.int64)
    assert accounts.fits(np.array([[BUCKET_MS * 1000] + [0] * 9], dtype=np.int64), spans)
    assert not accounts.fits(np.array([[0] * 8 + [10**15, 0]], dtype=np.int64), spans)


def test_sums_go_by_equal_keys() -> None:
    keys = np.array([[1, 7], [2, 7], [1, 7]], dtype=np.int64)
    assert accounts.summed(keys, np.array([[1, 10], [2, 20], [3, 30]], dtype=np.int64)) == {
        (1, 7): [4, 40],
        (2, 7): [2, 20],
    }
