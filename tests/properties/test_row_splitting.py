"""Columns of rows get the figures that each row gets alone, and are added up by key."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from accountant.core import gpu_time_accounts
from accountant.core.gpu_time_accounts import AccountVector
from accountant.core.window_decay import term
from gputally.base.units import BUCKET_MS

FIGURE = st.one_of(st.just(0), st.integers(0, BUCKET_MS * 200))
WIDTH = len(AccountVector._fields)
ROW = st.lists(FIGURE, min_size=WIDTH, max_size=WIDTH)


@given(st.lists(ROW, min_size=1, max_size=20), st.floats(0, 2))
def test_figures_of_many_rows_are_those_of_each(rows: list[list[int]], weight: float) -> None:
    found = gpu_time_accounts.figures(np.array(rows, dtype=np.int64), [weight] * len(rows))
    for row, figures in zip(rows, found.tolist(), strict=True):
        cells = AccountVector(*row)
        decaying = (cells.allocated_us, cells.busy_us, cells.energy_uj, cells.down_us)
        plain = (cells.allocated_us, cells.unheld_us, cells.down_us, cells.unknown_us, cells.energy_blind_us)
        assert figures == [*(term(value, weight) for value in decaying), *plain]


def test_sums_go_by_equal_keys() -> None:
    keys = np.array([[1, 7], [2, 7], [1, 7]], dtype=np.int64)
    distinct, sums = gpu_time_accounts.sum_by_key(keys, np.array([[1, 10], [2, 20], [3, 30]], dtype=np.int64))
    assert (distinct.tolist(), sums.tolist()) == ([[1, 7], [2, 7]], [[4, 40], [2, 20]])
