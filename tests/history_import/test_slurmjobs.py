"""Slurm's accounting as GPUs and holds: every GPU-second of a job, on its nodes, once."""

from __future__ import annotations

from itertools import pairwise
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from accountant.history_import import slurm_history
from accountant.history_import.gpu_assignment import rows
from accountant.history_import.import_run import Chunk, epoch
from accountant.history_import.slurm_history import Job, NodeGpus, SlurmHistory, node_names, offers

START_MS = 1_790_812_800_000
HOUR_MS = 3_600_000
DAY_MS = 24 * HOUR_MS
CHUNK = Chunk(epoch("slurm", START_MS), START_MS, START_MS + DAY_MS)


def job(number, nodes, gpus, start, end, **changes):
    """Times are minutes after the start."""
    at = {"started_ms": START_MS + start * 60_000, "ended_ms": None if end is None else START_MS + end * 60_000}
    return Job(str(number), f"job-{number}", "vision", "ann", nodes=nodes, gpus=gpus, **(at | changes))


def held(history, chunk=CHUNK):
    """GPU-minutes by job, and capacity in all."""
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
    found, faults = offers(text)
    assert found == {"n1": NodeGpus(8, "a100"), "n2": NodeGpus(2), "n4": NodeGpus(8, "1g.10gb")}
    assert [fault.place for fault in faults] == ["line 5"]


def test_gpus_of_a_job_are_divided_over_its_nodes_and_nothing_is_lost():
    history = SlurmHistory([job(1, "n[1-2]", 5, 0, 60), job(2, "n1", 1, 10, 70), job(3, "n2", 4, 60, 120)], {}, 2**60)
    minutes, capacity = held(history)
    assert minutes == {"1": 300, "2": 60, "3": 240}
    # n1 was seen to need 4 GPUs at once from 0 to 70, n2 4 from 0 to 120.
    assert capacity == 4 * 70 + 4 * 120


def test_nodes_that_were_described_are_there_all_the_time_and_have_their_model():
    nodes = {"n1": NodeGpus(8, "a100"), "n2": NodeGpus(4)}
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
        "Cluster|JobIDRaw|JobID|JobName|Account|User|Start|End|NodeList|AllocTRES\n"
        "hpc|7|7|t|vision|ann|1790812800|1790814600|n1|gres/gpu:a100=2\n"
        "hpc|7.batch|7.batch|batch|||1790812800|1790814600|n1|cpu=1\n"
        "hpc|7|7|t|vision|ann|1790816400|1790818200|n2|gres/gpu=2,gres/gpu:a100=2\n"
        "lab|7|7|t|nlp|bob|1790816400|1790818200|n2|gres/gpu=1\n"
        "hpc|8|8_[1-9]|t|vision|ann|Unknown|Unknown|None assigned|\n"
    )
    reading = slurm_history.from_sacct(text.encode(), ZoneInfo("UTC"))
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


@settings(max_examples=15, deadline=None)
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
