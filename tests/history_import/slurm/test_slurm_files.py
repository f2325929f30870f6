"""Slurm's files as they are: names that users chose, GPU types, parts, local times, more GPUs than a node has."""

from __future__ import annotations

import json

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from accountant.histories.slurm.job_records import OF_HISTORY
from gputally.base.untrusted_text import is_name
from tests.history_import.slurm.slurm_files import COLUMNS, HOUR_S, START_S, imported, record, sacct
from tests.hypothesis_examples import examples
from tests.shared_files import shared


@pytest.mark.parametrize(
    ("name", "hours", "zone"),
    [
        ("slurm-name-with-bar", {"vision": 30, "language": 40}, "UTC"),
        ("slurm-name-with-line-end", {"vision": 30, "language": 80}, "UTC"),
        ("slurm-with-return", {"vision": 60, "language": 80}, "UTC"),
        ("slurm-clock-change", {"vision": 1, "ops": 1}, "Europe/Berlin"),
        ("slurm-two-types", {"vision": 40, "language": 20}, "UTC"),
        ("slurm-uneven", {"vision": 90, "language": 70}, "UTC"),
    ],
)
def test_files_of_other_projects_trackers(name, hours, zone):
    file, nodes = shared(f"cases/{name}.txt"), shared("cases") / f"{name}-nodes.txt"
    found = imported(file.read_bytes(), nodes.read_text() if nodes.exists() else "", zone)
    assert found.hours == hours
    assert found.unplaced == 0
    assert [fault.place for fault in found.faults] == (["job 2"] if name == "slurm-clock-change" else [])
    if name == "slurm-two-types":
        assert found.by_model == {"a100": 40, "v100": 20}
        assert found.gpus == {"n1": 6}
    if name == "slurm-uneven":
        assert found.gpus == {"n1": 8, "n2": 8}


def test_a_file_without_the_ends_of_jobs_is_refused_by_the_columns_name():
    found = imported(shared("cases/slurm-without-end.txt").read_bytes())
    assert found.hours == {}
    assert "lacks End" in found.faults[0].reason


NAMES = st.text(max_size=30) | st.lists(
    st.sampled_from(["|", "\n", "\r", "\r\n", "\0", "\t", "\x1b[31m", "\u2028", "prod", "7", "gres/gpu=8", "x" * 1100]),
    max_size=20,
).map("".join)
OTHERS = [record(101, "vision", 2), record(104, "ops", 1)]


@settings(max_examples=examples(40, 400))
@given(NAMES)
@example("a|vision|alice|gpu|1|1791288000|1791288000|1791324000|COMPLETED|n2|gres/gpu=8\n")
@example("x\nprod|999|999|fake")
@example("a\rb")
def test_no_name_of_a_job_changes_anybodys_hours(name):
    """As text with the name in the middle and at the end, and as JSON."""
    job = record(103, "language", 8, JobName=name)
    last = [*(column for column in COLUMNS if column != "JobName"), "JobName"]
    documents = [sacct(OTHERS[0], job, OTHERS[1]), sacct(OTHERS[0], job, OTHERS[1], columns=last)]
    documents.append(_json(OTHERS[0], job, OTHERS[1]))
    for raw in documents:
        found = imported(raw)
        assert found.hours == {"vision": 20, "language": 80, "ops": 10}
        assert all(map(is_name, found.names.values()))
        assert "\n" in name or found.faults == ()


@given(st.text(st.characters(codec="utf-8"), min_size=1, max_size=20) | st.just("x" * 3_000), st.binary(max_size=9))
def test_json_keeps_any_name_account_and_user_apart(text, rest):
    """A name is bytes for Slurm. slurmrestd writes them as they are."""
    job = record(103, "language", 8, JobName=text, User=text, Partition=text)
    raw = _json(OTHERS[0], job).replace(b'"name": "train"', b'"name": "' + rest.translate(None, b'"\\') + b'"')
    found = imported(raw)
    assert found.hours == {"vision": 20, "language": 80}
    assert found.faults == ()


def test_a_name_is_escaped_and_cut_and_two_long_names_stay_two():
    names = [f"{'n' * 1100}{end}" for end in "ab"]
    odd = record(1, "vision", 1, JobName="a\x1b[2J\tb")
    found = imported(sacct(odd, *(record(at, "vision", 1, JobName=name) for at, name in enumerate(names, 2))))
    assert found.hours == {"vision": 30}
    assert found.names["1"] == r"a\x1b[2J\x09b"
    assert len({found.names["2"], found.names["3"]}) == 2
    assert all(is_name(name) for name in found.names.values())


def test_a_damaged_line_costs_only_itself():
    good = [record(number, "vision", 1) for number in (1, 2, 3)]
    lines = sacct(*good).decode().split("\n")
    broken = [*lines[:2], "slurmdbd: error: lost connection", lines[2], lines[3][:20], "", ""]
    found = imported("\n".join(broken).encode())
    assert found.hours == {"vision": 20}
    assert [fault.place for fault in found.faults] == ["line 3", "line 5"]
    cut = imported("\n".join([*lines[:2], lines[2][:20], lines[3]]).encode())
    assert cut.hours == {"vision": 20}
    assert [fault.place for fault in cut.faults] == ["line 3"]


def test_a_file_with_a_byte_order_mark_line_ends_of_windows_and_trailing_separators():
    text = sacct(record(1, "vision", 2)).decode().replace("\n", "|\r\n")
    assert imported(b"\xef\xbb\xbf" + text.encode()).hours == {"vision": 20}


def test_two_texts_of_users_cannot_be_told_apart():
    columns = [*COLUMNS, "Comment"]
    jobs = [record(1, "vision", 2, Comment="fine"), record(2, "vision", 2, JobName="a|b", Comment="c")]
    found = imported(sacct(*jobs, columns=columns))
    assert found.hours == {"vision": 20}
    assert [fault.place for fault in found.faults] == ["line 3"]
    assert "JobName" in found.faults[0].reason


@pytest.mark.parametrize("column", OF_HISTORY)
def test_each_column_that_is_missing_is_named(column):
    found = imported(sacct(record(1, "vision", 2), columns=[name for name in COLUMNS if name != column]))
    assert found.hours == {}
    assert column in found.faults[0].reason


@pytest.mark.parametrize("state", ["COMPLETED", "CANCELLED by 1000", "NODE_FAIL", "TIMEOUT", "", "SOMETHING_NEW"])
def test_a_job_that_has_ended_without_an_end_is_left_out_by_its_number(state):
    found = imported(sacct(record(1, "vision", 2, End="Unknown", State=state), record(2, "ops", 1)))
    assert found.hours == {"ops": 10}
    assert [fault.place for fault in found.faults] == ["job 1"]
    assert imported(_json(record(1, "vision", 2, End="Unknown", State=state))).faults[0].place == "job 1"


def test_a_job_without_gpus_is_never_a_fault():
    odd = record(1, "vision", "cpu=4", End="Unknown", NodeList="n[")
    assert imported(sacct(odd, record(2, "ops", 1))).faults == ()


def test_a_record_that_is_exported_twice_counts_once_and_a_job_runs_once_at_a_time():
    running = record(1, "vision", 2, End="Unknown", State="RUNNING")
    ended = record(1, "vision", 2)
    again = record(1, "vision", 2, Start=str(START_S + 5 * HOUR_S), End=str(START_S + 15 * HOUR_S))
    assert imported(sacct(running, ended, ended)).hours == {"vision": 20}
    assert imported(sacct(running, again)).hours == {"vision": 30}


def test_gpu_types_of_one_node_are_pools_of_their_own():
    nodes = "n1|gpu:a100:4(S:0),gpu:v100:2(S:1)\n"
    jobs = [
        record(1, "vision", "gres/gpu=4,gres/gpu:a100=4", NodeList="n1"),
        record(2, "language", "gres/gpu=2,gres/gpu:V100=2", NodeList="n1"),
        record(3, "ops", "gres/gpu=1,gres/gpu:v100=1", NodeList="n1"),
    ]
    found = imported(sacct(*jobs), nodes, a100="NVIDIA A100")
    assert found.by_model == {"NVIDIA A100": 40, "v100": 20}
    assert found.gpus == {"n1": 6}
    assert found.unplaced == 10
    untyped = imported(sacct(jobs[0], record(2, "language", 2, NodeList="n1")), nodes)
    assert untyped.by_model == {"a100": 40, "v100": 20}
    renamed = imported(sacct(record(1, "vision", "gres/gpu:h100=2", NodeList="n1")), "n1|gpu:nvidia_h100_80gb_hbm3:2\n")
    assert (renamed.hours, renamed.unplaced) == ({"vision": 20}, 0)


def test_a_node_that_sinfo_does_not_describe_has_the_types_of_its_jobs():
    jobs = [
        record(1, "vision", "gres/gpu:a100=4,gres/gpu=4", NodeList="n1"),
        record(2, "language", "gres/gpu:v100=2,gres/gpu=2", NodeList="n1"),
        record(3, "ops", 2, NodeList="n1", Start=str(START_S + 10 * HOUR_S), End=str(START_S + 11 * HOUR_S)),
    ]
    found = imported(sacct(*jobs))
    assert found.by_model == {"a100": 42, "v100": 20}
    assert found.gpus == {"n1": 6}


def test_a_mig_type_is_a_part_of_the_nodes_model():
    nodes = "n1|gpu:h100:1,gpu:1g.10gb:7(S:0)\nn2|gpu:nvidia_a100_3g.40gb:2\nn3|gpu:rtx_1g.24gb:4\n"
    jobs = [
        record(1, "vision", "gres/gpu=1,gres/gpu:1g.10gb=1", NodeList="n1"),
        record(2, "ops", "gres/gpu=1,gres/gpu:h100=1", NodeList="n1"),
        record(3, "language", "gres/gpu=2,gres/gpu:3g.40gb=2", NodeList="n2"),
        record(4, "film", "gres/gpu=1,gres/gpu:rtx_1g.24gb=1", NodeList="n3"),
    ]
    found = imported(sacct(*jobs), nodes, h100="NVIDIA H100", nvidia_a100="NVIDIA A100", rtx="NVIDIA RTX PRO 6000")
    assert {account: round(hours, 3) for account, hours in found.hours.items()} == {
        "vision": 1.429, "ops": 10, "language": 8.571, "film": 2.5,
    }  # fmt: skip
    assert set(found.by_model) == {"NVIDIA H100", "NVIDIA A100", "NVIDIA RTX PRO 6000"}
    assert found.gpus == {"n1": 2, "n2": 1, "n3": 1}


def test_a_shard_is_the_part_of_a_gpu_that_it_is():
    jobs = [
        record(1, "vision", "cpu=1,gres/shard=2", NodeList="n1"),
        record(2, "language", 1, NodeList="n1"),
        record(3, "ops", "gres/mps=50", NodeList="n2"),
    ]
    found = imported(sacct(*jobs), "n1|gpu:a100:2,shard:8(S:0)\nn2|gpu:1,mps:100\n")
    assert found.hours == {"vision": 5, "language": 10, "ops": 5}
    assert (found.gpus, found.unplaced, found.faults) == ({"n1": 2, "n2": 1}, 0, ())
    unknown = imported(sacct(jobs[0], record(5, "film", 1)))
    assert (unknown.hours, [fault.place for fault in unknown.faults]) == ({"film": 10}, ["job 1"])


BERLIN = "Europe/Berlin"


@pytest.mark.parametrize(
    ("start", "end", "elapsed", "hours"),
    [
        ("2026-10-25T02:50:00", "2026-10-25T02:10:00", "", 1 / 3),
        ("2026-10-25T01:30:00", "2026-10-25T02:30:00", "01:00:00", 1),
        ("2026-10-25T01:30:00", "2026-10-25T02:30:00", "02:00:00", 2),
        ("2026-10-25T01:30:00", "2026-10-25T02:30:00", "", None),
        ("2026-10-25T02:10:00", "2026-10-25T02:40:00", "00:30:00", 0.5),
        ("2026-10-25T02:10:00", "2026-10-25T02:40:00", "", None),
        ("2026-10-24T12:00:00", "2026-10-26T12:00:00", "2-01:00:00", 49),
        ("2026-10-24T12:00:00", "2026-10-26T12:00:00", "", 49),
        ("2026-03-29T01:30:00", "2026-03-29T03:30:00", "", 1),
        ("2026-10-25T02:30:00+01:00", "2026-10-25T02:30:00Z", "", 1),
        ("2026-10-26T02:00:00", "2026-10-26T01:00:00", "", None),
    ],
)
def test_local_times_over_a_change_of_the_clock(start, end, elapsed, hours):
    job = record(1, "vision", 1, Submit=start, Start=start, End=end, Elapsed=elapsed)
    found = imported(sacct(job, columns=[*COLUMNS, "Elapsed"]), zone=BERLIN)
    if hours is None:
        assert (found.hours, [fault.place for fault in found.faults]) == ({}, ["job 1"])
    else:
        assert found.hours == {"vision": pytest.approx(hours, abs=1e-5)}


def test_a_local_time_that_does_not_occur_is_of_another_zone():
    job = record(1, "vision", 1, Start="2026-03-29T02:30:00", End="2026-03-29T04:30:00")
    assert "does not occur in Europe/Berlin" in imported(sacct(job), zone=BERLIN).faults[0].reason


def test_a_job_without_an_end_fills_the_gpus_that_others_leave():
    """The node does not grow, and nobody else's hours become less."""
    runaway = record(1, "vision", 8, NodeList="n1", End="Unknown", State="RUNNING")
    other = record(2, "ops", 6, NodeList="n1", Start=str(START_S + HOUR_S), End=str(START_S + 3 * HOUR_S))
    found = imported(sacct(runaway, other), "n1|gpu:8\n", until_s=START_S + 10 * HOUR_S)
    assert found.hours == {"vision": 8 + 2 * 2 + 7 * 8, "ops": 12}
    assert (found.unplaced, found.gpus) == (12, {"n1": 8})


DRAWN = st.lists(
    st.tuples(st.sampled_from(["n1", "n2", "n[1-2]"]), st.integers(1, 9), st.integers(0, 20), st.integers(1, 9),
              st.booleans()),
    max_size=8,
)  # fmt: skip


@settings(max_examples=examples(20, 200))
@given(DRAWN)
def test_every_gpu_hour_is_on_a_gpu_or_counted_as_on_none(drawn):
    jobs = [
        record(
            number, "vision", gpus, NodeList=nodes, Start=str(START_S + begin * HOUR_S),
            End="Unknown" if runs else str(START_S + (begin + length) * HOUR_S), State="RUNNING" if runs else "FAILED",
        )
        for number, (nodes, gpus, begin, length, runs) in enumerate(drawn, 1)
    ]  # fmt: skip
    found = imported(sacct(*jobs), "n[1-2]|gpu:4\n", until_s=START_S + 24 * HOUR_S)
    whole = sum(gpus * (24 - begin if runs else min(length, 24 - begin)) for _, gpus, begin, length, runs in drawn)
    assert round(sum(found.hours.values()) + found.unplaced, 3) == whole
    assert set(found.gpus.values()) <= {4}


def _json(*records: dict[str, str]) -> bytes:
    """The records as slurmrestd answers."""
    jobs = [
        {
            "job_id": int(one["JobIDRaw"]), "name": one["JobName"], "account": one["Account"], "cluster": "prod",
            "association": {"user": one["User"]}, "partition": one["Partition"], "nodes": one["NodeList"],
            "state": {"current": [one["State"]], "reason": "None"},
            "time": {"start": int(one["Start"]), "end": 0 if one["End"] == "Unknown" else int(one["End"])},
            "tres": {"allocated": [{"type": "gres", "name": "gpu", "count": int(one["AllocTRES"].split("=")[1])}]},
        }
        for one in records
    ]  # fmt: skip
    return json.dumps({"jobs": jobs}, ensure_ascii=False).encode("utf-8", "replace")


@pytest.mark.parametrize("cut", ["billing=10,cpu=2,gres/gp+", "cpu=2,mem=512M,node=", "cpu=2,mem=512M,no"])
def test_what_was_allocated_and_is_cut_off_is_a_fault_and_not_nothing(cut):
    """A column of a fixed width, as in squeue's formats: the GPUs come last."""
    found = imported(sacct(record(1, "vision", cut), record(2, "language", 1)))
    assert found.hours == {"language": 10.0}
    assert [fault.place for fault in found.faults]
