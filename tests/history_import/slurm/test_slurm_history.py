"""Slurm's accounting in both forms: jobs, GPUs and holds; every GPU-second once, on its nodes."""

from __future__ import annotations

import json
from itertools import pairwise
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from accountant.__main__ import main
from accountant.core.import_epochs import epoch
from accountant.histories.slurm import job_records
from accountant.histories.slurm.job_history import SlurmHistory
from accountant.histories.slurm.job_records import (
    JobRecord,
    NodeGpus,
    facts,
    from_rest,
    from_sacct,
    node_names,
    offers,
    read,
)
from accountant.history_import.gpu_assignment import rows
from accountant.history_import.protocol import Chunk
from accountant.storage.duckdb_ledger import open_ledger
from agent.wire import Holder
from gputally.base.clock import VirtualClock
from tests.moments import present
from tests.usage_records import batch, deliver, interval

UTC, BERLIN = ZoneInfo("UTC"), ZoneInfo("Europe/Berlin")
HEADING = "JobIDRaw|JobID|JobName|Account|User|Partition|Submit|Start|End|State|NodeList|AllocTRES|Priority"
SACCT = f"""{HEADING}
101|101|train|vision|ann|gpu|1790812800|1790812860|1790816400|COMPLETED|n1|billing=4,cpu=8,gres/gpu:a100=4,gres/gpu=4,mem=1G|10
101.batch|101.batch|batch||||1790812860|1790812860|1790816400|COMPLETED|n1|cpu=8|
101.0|101.0|python train.py||||1790812900|1790812900|1790816300|COMPLETED|n1|cpu=8|
103|102_1|sweep|nlp|bob|gpu|2026-10-01T02:00:00|2026-10-01T02:01:00|Unknown|RUNNING|None assigned||
"""
TRAIN = JobRecord(
    "101", "train", "vision", "ann", "", "gpu", "n1", 4, 10, 1_790_812_800_000, 1_790_812_860_000, 1_790_816_400_000,
    {"batch": "batch", "0": "python train.py"}, {"a100": 4},
)  # fmt: skip
SWEEP = JobRecord("103", "sweep", "nlp", "bob", "102", "gpu", "", 0, None, 1_790_812_800_000, 1_790_812_860_000)
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
            "state": "COMPLETED",
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
            "state": {"current": ["RUNNING"], "reason": "None"},
        },
    ],
    "meta": {"slurm": {"release": "24.11"}},
}


def test_both_forms_say_the_same():
    from_text = from_sacct(SACCT.encode(), BERLIN)
    assert from_text.faults == ()
    assert from_text.jobs == (TRAIN, SWEEP)
    assert read(SACCT.encode(), BERLIN) == from_text
    assert read(b" " + json.dumps(REST).encode(), UTC) == from_text


def test_the_same_number_in_two_clusters_and_a_requeued_job_are_records_of_their_own():
    """Both formats: slurmdbd keeps the accounting of several clusters, which number their jobs separately."""
    runs = [("east", 1_790_812_800), ("west", 1_790_812_800), ("east", 1_790_816_400)]
    table = "".join(f"7|nlp|{cluster}|{start}|gres/gpu=1\n" for cluster, start in runs)
    allocated = [{"type": "gres", "name": "gpu", "count": 1}]
    answer = [
        {"job_id": 7, "account": "nlp", "cluster": name, "time": {"start": at}, "tres": {"allocated": allocated}}
        for name, at in runs
    ]
    for text in (f"JobIDRaw|Account|Cluster|Start|AllocTRES\n{table}", json.dumps({"jobs": answer})):
        found = read(text.encode(), UTC)
        assert [(job.cluster, job.started_ms // 1000) for job in found.runs] == runs
        assert sorted((job.cluster, job.started_ms // 1000) for job in found.jobs) == sorted(runs[1:])


def test_a_job_as_the_ledger_takes_it():
    fact = facts(SWEEP, 7)
    assert (fact.uid, fact.workload, fact.queue_ref, fact.namespace) == ("103", "SlurmJob/102", "slurm:nlp", "nlp")
    assert facts(TRAIN, 7).workload == "SlurmJob/101"
    assert facts(TRAIN, 7).labels == {
        "slurm/user": "ann", "slurm/partition": "gpu", "slurm/step.batch": "batch", "slurm/step.0": "python train.py",
    }  # fmt: skip
    assert facts(TRAIN, 7).requests == {"gres/gpu": "4"}
    assert facts(TRAIN, 7).node == TRAIN.nodes != ""


@pytest.mark.parametrize(
    ("text", "faults"),
    [
        ("", [("line 1", "the heading lacks JobIDRaw and Account")]),
        ("JobID|Account\n", [("line 1", "the heading lacks JobIDRaw")]),
        ("JobIDRaw|Account\n1|a|b\n", [("line 2", "3 columns, the heading has 2")]),
        ("JobIDRaw|Account\nx|a\n", [("line 2", "not a job number: 'x'")]),
        (
            "JobIDRaw|Account|Start\n1|a|soon\n2|b|\n",
            [("line 2", "not a time: 'soon' (run sacct with SLURM_TIME_FORMAT=%s)")],
        ),
        ("{", [("document", "not JSON")]),
        ("[]", [("document", "there is no list `jobs`")]),
        ('{"jobs": [{"job_id": 1}, 3]}', [("jobs[0]", "a job needs"), ("jobs[1]", "a job needs")]),
    ],
)
def test_what_cannot_be_read_is_named(text, faults):
    found = read(text.encode(), UTC).faults
    assert [
        (fault.place, fault.reason[: len(reason)]) for fault, (_, reason) in zip(found, faults, strict=True)
    ] == faults


KEYS = (
    "job_id", "account", "time", "start", "steps", "step", "id", "set", "number", "tres", "allocated", "count", "type",
    "name",
)  # fmt: skip
words = st.text(st.characters(codec="utf-8"), max_size=12)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | words,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS) | words, inner, max_size=5),
    max_leaves=12,
)


@given(st.dictionaries(st.sampled_from(["jobs", "meta"]), st.lists(values, max_size=4) | values))
def test_no_json_breaks_it(document):
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
def test_no_text_breaks_it(rows, tail):
    text = "\n".join([HEADING, *("|".join(row) for row in rows)]).encode() + b"\n" + tail
    for job in from_sacct(text, UTC).jobs:
        assert job.id.isdigit()
    from_sacct(tail, UTC)


def test_the_command_names_the_jobs_that_agents_reported(tmp_path, capsys):
    start = 1_790_812_860_000
    path, file = tmp_path / "ledger.duckdb", tmp_path / "jobs.txt"
    ledger = open_ledger(path, VirtualClock(start + 120_000))
    holder = Holder(kind="slurm", uid="101", name="job 101", container="0")
    row = interval(start, "g", holder, span_ms=60_000, gpu_model="A100", method="process")
    deliver(ledger, start + 120_000, batch([row], cluster="hpc", node="n1", epoch="0192-a"))
    ledger.close()
    file.write_text(SACCT)
    assert main(["slurm", "import", str(file), "--cluster", "hpc", "--db", str(path)]) == 0
    assert "jobs of hpc stored: 2; faulty records left out: 0" in capsys.readouterr().out
    again = open_ledger(path, VirtualClock(start + 120_000))
    (line,) = [
        one
        for one in present(again).usage((start, start + 60_000), ("job", "namespace")).lines()
        if one.accounts_gpu_us.allocated
    ]
    trail = present(again).acts(after=0, limit=10)
    again.close()
    assert line.key == {"job": "SlurmJob/101", "namespace": "vision"}
    assert [(act.kind, act.subject, act.reason) for act in trail] == [
        ("pods", "hpc", "2 holders from slurm (jobs.txt)")
    ]
    file.write_text(SACCT + "x|104|1|2\n105|105|a\x1b[2J|nlp|bob|gpu|||||||\n")
    assert main(["slurm", "import", str(file), "--cluster", "hpc", "--db", str(path)]) == 1
    assert "jobs of hpc stored: 3; faulty records left out: 1" in capsys.readouterr().out
    assert main(["slurm", "import", str(file), "--cluster", "hpc", "--db", str(path), "--partial"]) == 0
    file.write_text("nothing")
    assert main(["slurm", "import", str(file), "--db", str(path)]) == 1
    assert "line 1: the heading lacks" in capsys.readouterr().err


START_MS = 1_790_812_800_000
HOUR_MS = 3_600_000
DAY_MS = 24 * HOUR_MS
CHUNK = Chunk(epoch("slurm", START_MS), START_MS, START_MS + DAY_MS)


def job(number, nodes, gpus, start, end, **changes):
    """Build a job. Times are minutes after the start."""
    at = {"started_ms": START_MS + start * 60_000, "ended_ms": None if end is None else START_MS + end * 60_000}
    return JobRecord(str(number), f"job-{number}", "vision", "ann", nodes=nodes, gpus=gpus, **(at | changes))


def held(history, chunk=CHUNK):
    """Return GPU-minutes by job, and the total capacity."""
    minutes, capacity = {}, 0
    for node in history.read(chunk):
        for gpu in node.gpus:
            for row in rows(gpu, node.holds.get(gpu.uuid, ()), (chunk.start_ms, chunk.end_ms), [(0, 2**60)]):
                capacity += row.capacity_us
                if row.holder is not None:
                    minutes[row.holder.uid] = minutes.get(row.holder.uid, 0) + row.allocated_us / 60_000_000
    return minutes, capacity / 60_000_000


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("n1", ["n1"]),
        ("n1,n2", ["n1", "n2"]),
        ("gpu-[01-03,7],login", ["gpu-01", "gpu-02", "gpu-03", "gpu-7", "login"]),
        ("r[1-2]n[08-10]-ib", ["r1n08-ib", "r1n09-ib", "r1n10-ib", "r2n08-ib", "r2n09-ib", "r2n10-ib"]),
    ],
)
def test_lists_of_nodes(text, names):
    assert node_names(text) == names


@pytest.mark.parametrize("text", ["", "n[1-", "n[a-b]", "n[1-99999999]", "n[1-300][1-300]", "a,,b"])
def test_what_is_no_list_of_nodes(text):
    with pytest.raises(ValueError, match=r"node"):
        node_names(text)


def test_what_sinfo_says_of_nodes():
    text = "n1|gpu:a100:8(S:0-1)\nn2|gpu:2,shard:8\nn3|(null)\nn4|gpu:1g.10gb:7(S:0),gpu:h100:1\nbad\n\n"
    found, faults = offers(text + "n[5-6]|gpu:(null):4(S:0)\n")
    assert found == {
        "n1": NodeGpus({"a100": 8}),
        "n2": NodeGpus({"": 2}, {"shard": 8}),
        "n4": NodeGpus({"1g.10gb": 7, "h100": 1}),
        "n5": NodeGpus({"": 4}),
        "n6": NodeGpus({"": 4}),
    }
    assert [fault.place for fault in faults] == ["line 5"]


def test_gpus_of_a_job_are_divided_over_its_nodes_and_nothing_is_lost():
    history = SlurmHistory([job(1, "n[1-2]", 5, 0, 60), job(2, "n1", 1, 10, 70), job(3, "n2", 4, 60, 120)], {}, 2**60)
    minutes, capacity = held(history)
    assert minutes == {"1": 300, "2": 60, "3": 240}
    # n1 was seen to need 4 GPUs at once from 0 to 70, n2 4 from 0 to 120.
    assert capacity == 4 * 70 + 4 * 120


def test_nodes_that_were_described_are_there_all_the_time_and_have_their_model():
    nodes = {"n1": NodeGpus({"a100": 8}), "n2": NodeGpus({"": 4})}
    models = {"a100": "NVIDIA A100-SXM4-80GB"}
    history = SlurmHistory([job(1, "n1", 2, 0, 60, types={"a100": 2})], nodes, 2**60, models)
    minutes, capacity = held(history)
    assert (minutes, capacity) == ({"1": 120}, 12 * 24 * 60)
    assert {gpu.model for node in history.read(CHUNK) for gpu in node.gpus} == {"NVIDIA A100-SXM4-80GB", ""}


def test_what_runs_is_taken_to_the_end_and_what_never_began_is_not():
    until = START_MS + 30 * 60_000
    jobs = [
        job(1, "n1", 1, 0, None),
        job(2, "n1", 1, 0, 60, started_ms=None),
        job(3, "n1", 1, 40, 50),
        job(4, "None]", 1, 0, 60),
    ]
    history = SlurmHistory(jobs, {}, until)
    assert held(history)[0] == {"1": 30}
    assert [fault.place for fault in history.faults] == ["job 4"]


def test_every_start_of_a_requeued_job_counts():
    text = (
        "Cluster|JobIDRaw|JobID|JobName|Account|User|Start|End|State|NodeList|AllocTRES\n"
        "hpc|7|7|t|vision|ann|1790812800|1790814600|REQUEUED|n1|gres/gpu:a100=2\n"
        "hpc|7.batch|7.batch|batch|||1790812800|1790814600|REQUEUED|n1|cpu=1\n"
        "hpc|7|7|t|vision|ann|1790816400|1790818200|FAILED|n2|gres/gpu=2,gres/gpu:a100=2\n"
        "lab|7|7|t|nlp|bob|1790816400|1790818200|FAILED|n2|gres/gpu=1\n"
        "hpc|8|8_[1-9]|t|vision|ann|Unknown|Unknown|PENDING|None assigned|\n"
    )
    reading = job_records.from_sacct(text.encode(), ZoneInfo("UTC"))
    assert [(one.cluster, one.id, one.gpus) for one in reading.runs] == [
        ("hpc", "7", 2), ("hpc", "7", 2), ("lab", "7", 1), ("hpc", "8", 0),
    ]  # fmt: skip
    assert len(reading.jobs) == 3
    history = SlurmHistory([one for one in reading.runs if one.cluster == "hpc"], {}, 2**60)
    assert held(history)[0] == {"7": 2 * 30 + 2 * 30}
    facts = [fact for node in history.read(CHUNK) for fact in node.facts]
    assert {(fact.uid, fact.queue_ref, fact.workload) for fact in facts} == {("7", "slurm:vision", "SlurmJob/7")}


_JOBS = st.lists(
    st.tuples(st.sampled_from(["n1", "n2", "n[1-2]", "n[1-3]"]), st.integers(1, 9), st.integers(0, 200),
              st.integers(1, 300)),
    max_size=12,
)  # fmt: skip


@settings(max_examples=15)
@given(_JOBS)
def test_hours_are_those_of_the_accounting_and_no_gpu_has_more_than_its_time(drawn):
    jobs = [job(n, nodes, gpus, start, start + length) for n, (nodes, gpus, start, length) in enumerate(drawn)]
    history = SlurmHistory(jobs, {}, START_MS + DAY_MS)
    minutes, _ = held(history)
    assert minutes == {
        one.id: one.gpus * (min(one.ended_ms, START_MS + DAY_MS) - one.started_ms) / 60_000 for one in jobs
    }
    for node in history.read(CHUNK):
        for holds in node.holds.values():
            ordered = sorted((hold.start_ms, hold.end_ms) for hold in holds)
            assert all(a[1] <= b[0] for a, b in pairwise(ordered))
