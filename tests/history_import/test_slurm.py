"""Slurm's jobs from its accounting, in both forms, whatever the file holds."""

from __future__ import annotations

import json
from pathlib import Path
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accountant.__main__ import main
from accountant.history_import.slurm_history import Job, facts, from_rest, from_sacct, read
from accountant.storage.duckdb_ledger import open_ledger
from agent.wire import Holder
from gputally.base.clock import VirtualClock
from tests.usage_records import batch, deliver, interval

UTC, BERLIN = ZoneInfo("UTC"), ZoneInfo("Europe/Berlin")
HEADING = "JobIDRaw|JobID|JobName|Account|User|Partition|Submit|Start|End|NodeList|AllocTRES|Priority"
SACCT = f"""{HEADING}
101|101|train|vision|ann|gpu|1790812800|1790812860|1790816400|n1|billing=4,cpu=8,gres/gpu:a100=4,gres/gpu=4,mem=1G|10
101.batch|101.batch|batch||||1790812860|1790812860|1790816400|n1|cpu=8|
101.0|101.0|python train.py||||1790812900|1790812900|1790816300|n1|cpu=8|
103|102_1|sweep|nlp|bob|gpu|2026-10-01T02:00:00|2026-10-01T02:01:00|Unknown|None assigned||
"""
TRAIN = Job(
    "101", "train", "vision", "ann", "", "gpu", "n1", 4, 10, 1_790_812_800_000, 1_790_812_860_000, 1_790_816_400_000,
    {"batch": "batch", "0": "python train.py"}, {"a100": 4},
)  # fmt: skip
SWEEP = Job("103", "sweep", "nlp", "bob", "102", "gpu", "", 0, None, 1_790_812_800_000, 1_790_812_860_000)
REST = {
    "jobs": [
        {
            "job_id": 101,
            "name": "train",
            "account": "vision",
            "association": {"user": "ann", "account": "vision"},
            "partition": "gpu",
            "nodes": "n1",
            "priority": {"set": True, "infinite": False, "number": 10},
            "array": {"job_id": 0, "task_id": {"set": False, "number": 0}},
            "time": {"submission": 1790812800, "start": 1790812860, "end": 1790816400},
            "tres": {
                "allocated": [
                    {"type": "cpu", "name": "", "count": 8},
                    {"type": "gres", "name": "gpu", "count": 4},
                    {"type": "gres", "name": "gpu:a100", "count": 4},
                ]
            },
            "steps": [
                {"step": {"id": "101.batch", "name": "batch"}},
                {"step": {"id": {"job_id": 101, "step_id": "0"}, "name": "python train.py"}},
            ],
        },
        {
            "job_id": {"set": True, "number": 103},
            "name": "sweep",
            "association": {"user": "bob", "account": "nlp"},
            "partition": "gpu",
            "array": {"job_id": 102},
            "priority": {"set": False, "number": 0},
            "time": {"submission": 1790812800, "start": {"set": True, "number": 1790812860}, "end": 0},
        },
    ],
    "meta": {"slurm": {"release": "24.11"}},
}


def test_both_forms_say_the_same() -> None:
    from_text = from_sacct(SACCT.encode(), BERLIN)
    assert from_text.faults == ()
    assert from_text.jobs == (TRAIN, SWEEP)
    assert read(SACCT.encode(), BERLIN) == from_text
    assert read(b" " + json.dumps(REST).encode(), UTC) == from_text


def test_a_job_as_the_ledger_takes_it() -> None:
    fact = facts(SWEEP, 7)
    assert (fact.uid, fact.workload, fact.queue_ref, fact.namespace) == ("103", "SlurmJob/102", "slurm:nlp", "nlp")
    assert facts(TRAIN, 7).workload == "SlurmJob/101"
    assert facts(TRAIN, 7).labels == {
        "slurm/user": "ann", "slurm/partition": "gpu", "slurm/step.batch": "batch", "slurm/step.0": "python train.py",
    }  # fmt: skip
    assert facts(TRAIN, 7).requests == {"gres/gpu": "4"}


@pytest.mark.parametrize(
    ("text", "faults"),
    [
        ("", [("line 1", "the heading lacks JobIDRaw and Account")]),
        ("JobID|Account\n", [("line 1", "the heading lacks JobIDRaw")]),
        ("JobIDRaw|Account\n1|a|b\n", [("line 2", "3 columns, the heading has 2")]),
        ("JobIDRaw|Account\nx|a\n", [("line 2", "not a job number: 'x'")]),
        ("JobIDRaw|Account|Start\n1|a|soon\n2|b|\n", [("line 2", "not a time: 'soon'")]),
        ("{", [("document", "not JSON")]),
        ("[]", [("document", "there is no list `jobs`")]),
        ('{"jobs": [{"job_id": 1}, 3]}', [("jobs[0]", "a job needs"), ("jobs[1]", "a job needs")]),
    ],
)
def test_what_cannot_be_read_is_named(text: str, faults: list[tuple[str, str]]) -> None:
    found = read(text.encode(), UTC).faults
    assert [
        (fault.place, fault.reason[: len(reason)]) for fault, (_, reason) in zip(found, faults, strict=True)
    ] == faults


words = st.text(st.characters(codec="utf-8"), max_size=12)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | words,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                [
                    "job_id",
                    "account",
                    "time",
                    "start",
                    "steps",
                    "step",
                    "id",
                    "set",
                    "number",
                    "tres",
                    "allocated",
                    "count",
                    "type",
                    "name",
                ]
            )
            | words,
            inner,
            max_size=5,
        )
    ),
    max_leaves=12,
)


@given(st.dictionaries(st.sampled_from(["jobs", "meta"]), st.lists(values, max_size=4) | values))
def test_no_json_breaks_it(document: object) -> None:
    for job in from_rest(json.dumps(document, allow_nan=True).encode()).jobs:
        assert facts(job, 0).uid == job.id
        assert job.account


@given(
    st.lists(
        st.lists(
            st.sampled_from(["1", "1.batch", "2_3", "gres/gpu=4", "Unknown", "99999999999", "-5", "²", "\0"]) | words,
            max_size=13,
        ),
        max_size=6,
    ),
    st.binary(max_size=60),
)
def test_no_text_breaks_it(rows: list[list[str]], tail: bytes) -> None:
    text = "\n".join([HEADING, *("|".join(row) for row in rows)]).encode() + b"\n" + tail
    for job in from_sacct(text, UTC).jobs:
        assert job.id.isdigit()
    from_sacct(tail, UTC)


def test_the_command_names_the_jobs_that_agents_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    start = 1_790_812_860_000
    path, file = tmp_path / "ledger.duckdb", tmp_path / "jobs.txt"
    ledger = open_ledger(path, VirtualClock(start + 120_000))
    holder = Holder(kind="slurm", uid="101", name="job 101", container="0")
    row = interval(start, "g", holder, span_ms=60_000, gpu_model="A100", method="process")
    deliver(ledger, start + 120_000, batch([row], cluster="hpc", node="n1", epoch="0192-a"))
    ledger.close()
    file.write_text(SACCT)
    assert main(["slurm", "import", str(file), "--cluster", "hpc", "--db", str(path)]) == 0
    assert "2 jobs of hpc taken, 0 records left out" in capsys.readouterr().out
    again = open_ledger(path, VirtualClock(start + 120_000))
    (line,) = [one for one in again.usage(start, start + 60_000, ("job", "namespace")) if one.accounts_gpu_us.allocated]
    trail = again.trail(0, 10)
    again.close()
    assert line.key == {"job": "SlurmJob/101", "namespace": "vision"}
    assert [(act.kind, act.subject, act.reason) for act in trail] == [
        ("pods", "hpc", "2 holders from slurm (jobs.txt)")
    ]
    file.write_text("nothing")
    assert main(["slurm", "import", str(file), "--db", str(path)]) == 1
    assert "line 1: the heading lacks" in capsys.readouterr().err
