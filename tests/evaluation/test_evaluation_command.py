"""`python -m tests.evaluation`: tables, CSV and figures from a trace, KAI scenarios, and refusals."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from fairshare.explain import what_if_figure
from gputally.base.errors import DivisionError
from gputally.base.yaml_file import Document
from tests.evaluation import kai_scenarios
from tests.evaluation.__main__ import main
from tests.evaluation.kai_scenarios import Scenario


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """16 days: a fills 16 GPUs, b requests 8 of them from day 8 on."""
    lines = ["job_id,submit_offset_s,vc,gpus,duration_s"]
    for hour in range(0, 16 * 24, 4):
        lines += [f"a{hour}-{i},{hour * 3600},a,2,14400" for i in range(9)]
        if hour >= 8 * 24:
            lines += [f"b{hour}-{i},{hour * 3600},b,4,14400" for i in range(2)]
    file = tmp_path / "jobs.csv"
    file.write_text("\n".join(lines) + "\n")
    return file


def test_a_comparison_in_a_table_a_csv_and_figures(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = trace.parent
    (folder / "share.csv").write_text("vc,share\na,3\nb,1\nc,\n")
    given = [
        "replay",
        "--processes",
        "1",
        "--trace",
        str(trace),
        "--team-column",
        "vc",
        "--share",
        str(folder / "share.csv"),
    ]
    out = ["--output", str(folder / "out.csv"), "--plots", str(folder / "img")]
    assert main([*given, "--law", "static,default", "--capacity", "16", *out]) == 0
    text = capsys.readouterr().out
    assert "16 GPUs, 1 window" in text
    rows = list(csv.DictReader((folder / "out.csv").read_text().splitlines()))
    assert [row["policy"] for row in rows] == ["static", "default"]
    assert float(rows[1]["utilisation"]) > 0.9
    for name in ("shares", "fairness", "waits"):
        drawn = (folder / "img" / f"{name}.svg").read_text()
        assert drawn.startswith("<?xml")
        assert "<dc:date>" not in drawn


def test_a_figure_drawn_again_is_the_same_to_the_byte(tmp_path: Path) -> None:
    panels = [("a", {"static": [(0.0, 1.0), (1.0, 2.0)], "law": [(0.0, 2.0), (1.0, 1.0)]})]
    once, again = (what_if_figure.draw_days(tmp_path / name, panels).read_bytes() for name in ("once", "again"))
    assert once == again


def test_a_scenario_of_kais_simulator_in_and_its_csv_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "scenario.yaml"
    config.write_text(
        "Cycles: 40\nWindowSize: 20\nKValue: 1\nNodes: [{GPUs: 8, Count: 1}]\n"
        "Queues: [{Name: a, Weight: 1}, {Name: b, Weight: 1}]\n"
        "Jobs: {a: {GPUs: 1, NumJobs: 20}, b: {GPUs: 1, NumJobs: 20}}\n"
    )
    out = tmp_path / "out.csv"
    assert main(["play", "--kai-config", str(config), "--law", "kai", "--output", str(out)]) == 0
    assert "a                        4.00     4.00    +0.0%" in capsys.readouterr().out
    lines = out.read_text().splitlines()
    assert lines[0] == "Time,QueueID,Allocation,FairShare"
    assert lines[1:3] == ["0,a,4.0,4.0", "0,b,4.0,4.0"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["replay", "--trace", "{trace}", "--law", "fair"], "no policy 'fair'; give one of default, "),
        (["replay", "--trace", "{trace}"], "{trace}:1: no column team"),
        (
            ["replay", "--trace", "{trace}", "--team-column", "vc", "--loads", "much"],
            "--loads: 'much' is not a list of numbers",
        ),
        (["replay", "--trace", "{trace}", "--team-column", "vc", "--start", "soon"], "--start: not a duration: 'soon'"),
        (
            ["replay", "--trace", "{trace}", "--team-column", "vc", "--windows", "3"],
            "--window-days 21: the replay has only 15 days",
        ),
        (["play", "--kai-config", "{trace}.yaml"], "{trace}.yaml"),
        (["play", "--kai-config", "{trace}", "--law", "kai-1"], "no law 'kai-1' for a scenario"),
        (["play", "--kai-config", "{trace}", "--output", "{trace}.json"], "{trace}.json"),
    ],
)
def test_what_cannot_be_is_said_in_a_line(
    arguments: list[str], message: str, trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([each.replace("{trace}", str(trace)) for each in arguments]) == 1
    assert message.replace("{trace}", str(trace)) in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("vc,part\na,1\n", ":1: no column share (see docs/traces.md)"),
        ("vc,share,share\na,1,2\n", ":1: column 'share' occurs twice"),
        ("vc,share\na,1\na,2\n", ":3: 'a' needs exactly one share, a number above 0"),
        ("vc,share\na,0\n", ":2: 'a' needs exactly one share, a number above 0"),
        ("vc,share\na,much\n", ":2: share: 'much' is not a number"),
        ("vc,share\n,1\n", ":2: team: is empty"),
        ("share,vc\n1\n", ":2: team: is empty"),
        ("vc,share\na,1,2\n", ":2: more cells than columns"),
        ("vc,share\na,\n", ": no team has a share"),
        ("vc,share\nz,1\n", ": no team of {trace} has a share; the teams are a, b"),
    ],
)
def test_a_bad_file_of_shares_is_refused_with_its_line(
    text: str, message: str, trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    share = trace.parent / "share.csv"
    share.write_text(text)
    assert main(["replay", "--trace", str(trace), "--team-column", "vc", "--share", str(share)]) == 1
    assert f"{share}{message.replace('{trace}', str(trace))}" in capsys.readouterr().err


def scenario_of(data: Any) -> Scenario:
    return kai_scenarios.parse(Document("scenario.yaml", data, {}))


def test_a_scenario_is_read_as_kais_own_program_reads_it() -> None:
    """Keys in any case, null as missing, KAI's defaults, unlimited quota, and one node for every entry."""
    nodes, queue = [{"gpus": 8, "count": 3}], {"name": "a", "deservedGpus": -1, "weight": None, "priority": None}
    given = {"nodes": nodes, "queues": [queue], "jobs": None, "halfLifePeriod": None, "kvalue": None}
    scenario = scenario_of(given)
    assert (scenario.cycles, scenario.window_s, scenario.half_life_s, scenario.k) == (100, 5, None, 1.0)
    (claim,) = scenario.queues
    assert (claim.deserved, claim.weight, claim.priority) == (-1.0, 1.0, 100)
    assert scenario.gpus == (8,)
    jobs = {"a": {"GPUs": 4, "NumPods": 1, "NumJobs": 4}}
    assert kai_scenarios.entitled(scenario_of({**given, "jobs": jobs})) == {"a": 8.0}


def test_departments_divide_first_and_have_rows_of_their_own_in_as_many_cycles() -> None:
    """KAI's program also writes the departments to its CSV, and `Cycles` times."""
    tree = [{"Name": "x", "Weight": 3}, {"Name": "y"}, {"Name": "a", "Parent": "x"}, {"Name": "b", "Parent": "x"}]
    queues = [*tree, {"Name": "c", "Parent": "y"}]
    jobs = {name: {"GPUs": 1, "NumPods": 1, "NumJobs": 20} for name in "abc"}
    given = {"Cycles": 7, "KValue": 0, "Nodes": [{"GPUs": 16}], "Queues": queues, "Jobs": jobs}
    scenario = scenario_of(given)
    rows = list(kai_scenarios.csv_rows(scenario, kai_scenarios.run(scenario, "kai")))
    assert len(rows) == 7 * 5
    assert {name: (held, share) for time, name, held, share in rows if time == 6} == {
        "x": (12, 12), "y": (4, 4), "a": (6, 6), "b": (6, 6), "c": (4, 4),
    }  # fmt: skip
    assert kai_scenarios.entitled(scenario) == {"a": 6, "b": 6, "c": 4}
    with pytest.raises(DivisionError, match="can run only without turns"):
        kai_scenarios.run(scenario, "kai", turns=True)
    with pytest.raises(DivisionError, match="queue 'c' has the unknown parent 'z'"):
        scenario_of({**given, "Queues": [*tree, {"Name": "c", "Parent": "z"}]})


SIMULATED = json.loads((Path(__file__).parents[1] / "golden" / "kai_simulations.json").read_text("utf-8"))
"""Results of KAI's own simulator for this project's scenarios; its source and commit are in `meta`."""


@pytest.mark.parametrize("case", SIMULATED["scenarios"], ids=lambda case: case["name"])
def test_a_scenario_gives_what_kais_own_program_gives(case: dict[str, Any]) -> None:
    """The cycles of KAI's program take real time: where whole gangs change places, the mean varies slightly between
    runs."""
    scenario = scenario_of(case["config"])
    rows = list(kai_scenarios.csv_rows(scenario, kai_scenarios.run(scenario, "kai")))
    assert case["columns"] == ["Time", "QueueID", "Allocation", "FairShare"]
    assert len(rows) == case["rows"]
    late = [row for row in rows if row[0] >= scenario.cycles // 2]
    in_turns = max(pods[0] for pods in scenario.pods.values()) == scenario.capacity
    for queue, (allocation, share) in case["means"].items():
        mine = [row for row in late if row[1] == queue]
        within = pytest.approx if not in_turns else lambda value: pytest.approx(value, abs=scenario.capacity / 16)
        assert sum(row[2] for row in mine) / len(mine) == within(allocation)
        assert sum(row[3] for row in mine) / len(mine) == within(share)
