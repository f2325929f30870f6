"""Every benchmark runs at a size that takes seconds; the figures at that size mean nothing."""

from __future__ import annotations

import importlib

import pytest

from tests.bench.figure import Figure, Goal


@pytest.mark.parametrize(
    "part",
    [
        "windows",
        "month",
        *(
            pytest.param(part, marks=pytest.mark.real)
            for part in ("ingest", "fleet", "serving", "pages", "idle", "prometheus", "fleet_lake")
        ),
    ],
)
def test_runs_small(part: str) -> None:
    bench = importlib.import_module(f"tests.bench.{part}")
    figures: list[Figure] = bench.measure(bench.TINY)
    assert len({figure.name for figure in figures}) == len(figures) > 0
    assert all(figure.value > 0 and figure.unit for figure in figures)


def test_a_goal_says_in_words_whether_it_is_met() -> None:
    slow = Figure("rate", 10, "rows/s", "beside", 5, Goal(20, least=True), memory_mib=123.4)
    assert slow.cells() == ("10 rows/s", "5 rows/s", "× 2", "≥ 20 missed", "123 MiB")
    quick = Figure("answer", 2, "ms", "peer", 2_000, ratio_goal=Goal(500, least=True))
    assert quick.cells() == ("2 ms", "2,000 ms", "1 / 1,000", "1 / 500 met", "")
    assert Figure("time", 3, "ms", goal=Goal(3)).cells()[3] == "≤ 3 met"
