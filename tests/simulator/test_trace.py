"""Rows become jobs, or faults with a place."""

from __future__ import annotations

import pytest

from fairshare.simulator.job_traces import DEFAULT_UTILISATION_PERMILLE, parse_jobs, teams_of
from fairshare.simulator.simulation_model import Job

ROW = {"job_id": "j1", "submit_offset_s": "60.5", "team": "vision", "gpus": "8", "duration_s": "3600"}


def fault(**changes: object) -> str:
    jobs, faults = parse_jobs([("f.csv:2", {**ROW, **changes})], 0)
    assert jobs == []
    (only,) = faults
    return str(only)


def test_a_row_becomes_a_job() -> None:
    jobs, faults = parse_jobs([("f:2", {**ROW, "mean_gpu_util_pct": "91.26", "extra": "ignored"})], 1_000)
    assert faults == []
    assert jobs == [Job("j1", "vision", 61_500, 8, 3_600_000, utilisation_permille=913)]


def test_typed_values_read_like_text() -> None:
    row = {
        "job_id": 7,
        "submit_offset_s": 60.5,
        "team": "vision",
        "gpus": 8.0,
        "duration_s": 3600,
        "preemptible": False,
    }
    (job,), _ = parse_jobs([("row 1", row)], 0)
    assert (job.id, job.gpus, job.preemptible, job.utilisation_permille) == (
        "7",
        8,
        False,
        DEFAULT_UTILISATION_PERMILLE,
    )


def test_the_measured_utilisation_counts_before_the_drawn_one() -> None:
    (job,), _ = parse_jobs([("f:2", {**ROW, "synthetic_mean_gpu_util_pct": "10", "mean_gpu_util_pct": "20"})], 0)
    assert job.utilisation_permille == 200
    (job,), _ = parse_jobs([("f:2", {**ROW, "synthetic_mean_gpu_util_pct": "10", "mean_gpu_util_pct": ""})], 0)
    assert job.utilisation_permille == 100


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"job_id": ""}, "job_id: is empty"),
        ({"team": "  "}, "team: is empty"),
        ({"team": "a\x00b"}, "team: must be at most 200 printable characters"),
        ({"gpus": "0"}, "gpus: 0 is outside 1 … 1e+06"),
        ({"gpus": "0.5"}, "gpus: 0.5 is outside 1 … 1e+06"),
        ({"gpus": "1.5"}, "gpus: 1.5 is not a whole number; the replay knows no parts of a GPU"),
        ({"gpus": "many"}, "gpus: 'many' is not a number"),
        ({"gpus": None}, "gpus: is empty"),
        ({"duration_s": "-1"}, "duration_s: -1 is outside 0.001 … 3.16224e+08"),
        ({"duration_s": "nan"}, "duration_s: nan is outside 0.001 … 3.16224e+08"),
        ({"duration_s": float("nan")}, "duration_s: is empty"),
        ({"submit_offset_s": "inf"}, "submit_offset_s: inf is outside 0 … 3.16224e+08"),
        ({"submit_offset_s": "-5"}, "submit_offset_s: -5 is outside 0 … 3.16224e+08"),
        ({"mean_gpu_util_pct": "101"}, "mean_gpu_util_pct: 101 is outside 0 … 100"),
        ({"kind": "batch"}, "kind: 'batch' is none of training, notebook, short, inference"),
        ({"preemptible": "maybe"}, "preemptible: 'maybe' is neither true nor false"),
    ],
)
def test_a_bad_cell_is_named_with_its_place(changes: dict[str, object], reason: str) -> None:
    assert fault(**changes) == f"f.csv:2: {reason}"


def test_every_fault_is_told_and_good_rows_stay() -> None:
    rows = [("f:2", ROW), ("f:3", {**ROW, "gpus": "x"}), ("f:4", ROW), ("f:5", {**ROW, "job_id": "j2"})]
    jobs, faults = parse_jobs(rows, 0)
    assert [job.id for job in jobs] == ["j1", "j2"]
    assert [fault.place for fault in faults] == ["f:3", "f:4"]
    assert faults[1].reason == "job_id 'j1' occurs twice, first at f:2"


def test_jobs_come_by_submission() -> None:
    rows = [
        ("f:2", {**ROW, "job_id": "late"}),
        ("f:3", {**ROW, "job_id": "early", "submit_offset_s": 0, "team": "asr"}),
    ]
    jobs, _ = parse_jobs(rows, 0)
    assert [job.id for job in jobs] == ["early", "late"]
    assert teams_of(jobs) == ("asr", "vision")
