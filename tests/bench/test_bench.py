"""Every benchmark runs at a size that takes seconds; the figures at that size mean nothing."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.bench import comparison, paths
from tests.bench.__main__ import main
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


@pytest.mark.real
@pytest.mark.parametrize("group", paths.GROUPS)
def test_this_commit_can_measure_every_group(group: Callable[[], Iterator[Figure]]) -> None:
    assert all(figure.value > 0 for figure in group())


def test_what_became_slower_than_another_commit_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def measured(tree: Path, part: str, cache: Path) -> comparison.Measured:
        assert (tree / "tests/bench/comparison.py").is_file(), "both commits run the benchmarks of this one"
        now = tree == comparison.ROOT
        figures = {"steady": (1.0, "s"), "slow": (1.2 if now else 1.0, "s"), "fast": (0.5 if now else 1.0, "s")}
        return figures | ({"new": (1.0, "s")} if now else {})

    monkeypatch.setattr(comparison, "measured", measured)
    table, slower = comparison.compare("HEAD", ["cycle"])
    assert slower == ["cycle: slow: × 1.20"]
    assert table.row_count == 4


def test_a_commit_that_cannot_load_the_present_benchmark_runs_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ran: list[str] = []

    def measured(tree: Path, part: str, cache: Path) -> comparison.Measured:
        ran.append("now" if tree == comparison.ROOT else (tree / comparison.BENCH / "cycle.py").read_text())
        return {"cycle": (1.0, "s")}

    def export(revision: str, folder: Path) -> None:
        (folder / comparison.BENCH).mkdir(parents=True)
        (folder / comparison.BENCH / "cycle.py").write_text(f"import a_name_of_{revision}")
        (folder / "fairshare").mkdir()
        (folder / "fairshare" / "__init__.py").touch()  # without the modules that the present benchmark imports

    monkeypatch.setattr(comparison, "measured", measured)
    monkeypatch.setattr(comparison, "export", export)
    assert comparison.compare("before", ["cycle"], rounds=1)[1] == []
    assert ran == ["import a_name_of_before", "now"]


@pytest.mark.parametrize("ending", [RuntimeError("broken"), SystemExit("it ended with 1")])
def test_a_part_that_fails_leaves_the_figures_of_the_others(
    ending: BaseException, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails() -> list[Figure]:
        raise ending

    from tests.bench import division, month, windows

    monkeypatch.setattr(division, "measure", lambda: [Figure("a first figure", 7, "s")])
    monkeypatch.setattr(month, "measure", fails)
    monkeypatch.setattr(windows, "measure", lambda: [Figure("a later figure", 8, "s")])
    assert main(["division", "month", "windows"]) == 1
    said = capsys.readouterr()
    assert "a first figure" in said.out
    assert "a later figure" in said.out
    assert "month" in said.out
    assert str(ending) in said.err
    assert main(["division", "month", "windows", "--json"]) == 1
    assert [name for name, *_ in json.loads(capsys.readouterr().out)] == ["a first figure", "a later figure"]


def test_a_commit_that_does_not_exist_is_a_wrong_call(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["division", "--against", "no-such-commit"]) == 2
    assert "no-such-commit" in capsys.readouterr().err
