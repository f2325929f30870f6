"""What Prometheus' sampling adds to a usage window, and where: looks too many at the ends of a series."""

from __future__ import annotations

import pytest

from tests.compat.sampling import Sampling, integral

MINUTE, WINDOW_END = 60, 24 * 3_600
DAY = Sampling(WINDOW_END, MINUTE, MINUTE, None, left_closed=False)


@pytest.mark.parametrize("minutes", [1, 26, 27, 28, 600])
def test_usage_that_reaches_the_windows_end_has_one_look_more_than_minutes(minutes: int) -> None:
    """The look at the end itself finds the sample of the minute that has just ended."""
    held = [(WINDOW_END - minutes * 60.0, float(WINDOW_END), 1.0)]
    exact = integral(held, 0, WINDOW_END, None) / MINUTE
    assert DAY.sum(held, WINDOW_END) == minutes + 1
    assert exact == minutes
    # 3.57 % where a queue's only usage in the window is its last 27 minutes.
    assert 1 - exact / DAY.sum(held, WINDOW_END) == pytest.approx(1 / (minutes + 1))


@pytest.mark.parametrize("minutes", [1, 27, 600])
def test_a_series_that_ends_inside_the_window_is_looked_at_for_the_rest_of_five_minutes(minutes: int) -> None:
    """Its last sample is a minute before its end, and is found until it is five minutes old."""
    held = [(7_200.0, 7_200.0 + minutes * 60, 1.0)]
    assert DAY.sum(held, WINDOW_END) == minutes + 4
    assert integral(held, 0, WINDOW_END, None) / MINUTE == minutes


def test_usage_on_both_sides_of_the_windows_ends_is_exact() -> None:
    held = [(-7_200.0, WINDOW_END + 7_200.0, 1.0)]
    assert DAY.sum(held, WINDOW_END) == integral(held, 0, WINDOW_END, None) / MINUTE
