"""A series' samples on a grid of time."""

from __future__ import annotations

from accountant.histories.prometheus.exporter_series import PrometheusSeries
from accountant.history_import.gpu_assignment import TimeGrid

MINUTE = 60_000
HOUR = 60 * MINUTE
START = 1_790_812_800_000


def test_a_sample_is_of_the_minute_that_ends_with_it() -> None:
    grid = TimeGrid(START, START + HOUR, MINUTE)
    at = [START, START + MINUTE, START + 90_000, START + HOUR, START + HOUR + MINUTE]
    assert PrometheusSeries({}, at, [1.0, 2.0, 3.0, float("nan"), 5.0]).cells(grid) == {0: 2.0}
