"""Trace files of every kind, whole and broken."""

from __future__ import annotations

import gzip
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fairshare.simulator.job_traces import TraceError, load
from tests.shared_files import shared

HEADER = "job_id,submit_offset_s,team,gpus,duration_s\n"


def write(folder: Path, text: str, name: str = "trace.csv") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def faults(path: Path) -> list[str]:
    with pytest.raises(TraceError) as caught:
        load(path, 0)
    return str(caught.value).splitlines()


def test_csv_gzip_and_parquet_say_the_same(tmp_path: Path) -> None:
    text = HEADER + "b,60,vision,8,3600\na,0,speech,1,90\n"
    plain = write(tmp_path, text)
    packed = tmp_path / "trace.csv.gz"
    packed.write_bytes(gzip.compress(text.encode()))
    columns = {"job_id": ["b", "a"], "submit_offset_s": [60, 0], "team": ["vision", "speech"], "gpus": [8, 1]}
    pq.write_table(pa.table({**columns, "duration_s": [3600.0, 90.0], "unused": [1, 2]}), tmp_path / "trace.parquet")
    jobs = load(plain, 5_000)
    assert [(job.id, job.submit_ms, job.gpus) for job in jobs] == [("a", 5_000, 1), ("b", 65_000, 8)]
    assert load(packed, 5_000) == load(tmp_path / "trace.parquet", 5_000) == jobs


def test_faults_carry_file_and_line(tmp_path: Path) -> None:
    path = write(tmp_path, HEADER + "a,0,vision,1,60\nb,0,vision,none,60\nc,-1,vision,1,60\n")
    assert faults(path) == [
        f"{path}:3: gpus: 'none' is not a number",
        f"{path}:4: submit_offset_s: -1 is not between 0 and 316,224,000",
    ]


def test_the_line_is_right_behind_a_cell_of_several_lines(tmp_path: Path) -> None:
    path = write(tmp_path, HEADER + '"a\nb",0,vision,1,60\nc,0,vision,x,60\n')
    assert [fault.removeprefix(f"{path}:").split(":")[0] for fault in faults(path)] == ["3", "4"]


def test_many_faults_are_cut_short(tmp_path: Path) -> None:
    path = write(tmp_path, HEADER + "".join(f"{i},0,vision,x,60\n" for i in range(100)))
    lines = faults(path)
    assert len(lines) == 21
    assert lines[-1] == f"{path}: 80 more rows are invalid"


def test_parquet_faults_carry_the_row(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    columns = {"job_id": ["a", "b"], "submit_offset_s": [0, 0], "team": ["v", None], "gpus": [1, 1]}
    pq.write_table(pa.table({**columns, "duration_s": [1, 1]}), path)
    assert faults(path) == [f"{path}: row 2: team: is empty"]


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("t.csv", b"job_id,team\n", ":1: no column submit_offset_s, gpus, duration_s (see docs/traces.md)"),
        ("t.csv", b"job_id,team,team\n", ":1: column 'team' occurs twice"),
        ("t.csv", b"", ":1: no column job_id, submit_offset_s, team, gpus, duration_s (see docs/traces.md)"),
        ("t.csv", HEADER.encode(), ": the file has no jobs"),
        ("t.csv", HEADER.encode() + b"a,0,v,1,60,7\n", ":2: more cells than columns"),
        ("t.csv", b"\xff\xfe\x00", ": not a CSV file"),
        ("t.csv.gz", b"not gzip", ": Not a gzipped file"),
        ("t.csv.gz", gzip.compress(HEADER.encode() * 500, mtime=0)[:60], ": not a CSV file"),
        ("t.parquet", b"PAR1", ": not a Parquet file"),
    ],
)
def test_files_that_are_no_traces(tmp_path: Path, name: str, content: bytes, reason: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    (line,) = faults(path)
    assert line.startswith(f"{path}{reason}")


def test_a_missing_file(tmp_path: Path) -> None:
    assert faults(tmp_path / "none.csv") == [f"{tmp_path / 'none.csv'}: No such file or directory"]


def test_the_public_slice_is_read_whole() -> None:
    path = shared("traces/slice_demo_philly_64gpu_7d.csv.gz")
    jobs = load(path, 0)
    assert len(jobs) == 1_682
    assert Counter(job.queue for job in jobs)["team-b"] == 60
    assert max(job.gpus for job in jobs) == 16
    assert jobs[0].utilisation_permille == 933
