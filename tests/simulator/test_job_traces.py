"""Jobs from the rows of a trace and from the ledger."""

from __future__ import annotations

import pytest

from accountant.wire.policy_models import Policy
from fairshare.explain.what_if_simulation import (
    ModelHistory,
    ReplayHistory,
    assumptions,
    compare,
    leaves_only,
    replay_under,
    replayed_queue,
)
from fairshare.simulator.job_traces import (
    DEFAULT_UTILISATION_PERMILLE,
    US_PER_GPU_HOUR,
    HeldHour,
    capacity,
    jobs,
    parse_jobs,
    teams_of,
)
from fairshare.simulator.simulation_model import SimulatedJob

ROW = {"job_id": "j1", "submit_offset_s": "60.5", "team": "vision", "gpus": "8", "duration_s": "3600"}


def fault(**changes: object) -> str:
    jobs, faults = parse_jobs([("f.csv:2", {**ROW, **changes})], 0)
    assert jobs == []
    (only,) = faults
    return str(only)


def test_a_row_becomes_a_job() -> None:
    jobs, faults = parse_jobs([("f:2", {**ROW, "mean_gpu_util_pct": "91.26", "extra": "ignored"})], 1_000)
    assert faults == []
    assert jobs == [SimulatedJob("j1", "vision", 61_500, 8, 3_600_000, utilisation_permille=913)]


def test_typed_values_read_like_text() -> None:
    typed = {"job_id": 7, "submit_offset_s": 60.5, "gpus": 8.0, "duration_s": 3600, "preemptible": False}
    (job,), _ = parse_jobs([("row 1", {**ROW, **typed})], 0)
    assert (job.id, job.gpus, job.preemptible) == ("7", 8, False)
    assert job.utilisation_permille == DEFAULT_UTILISATION_PERMILLE


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
        ({"gpus": "0"}, "gpus: 0 is not between 1 and 1,000,000"),
        ({"gpus": "0.5"}, "gpus: 0.5 is not between 1 and 1,000,000"),
        ({"gpus": "1.5"}, "gpus: 1.5 is not a whole number; a replay has only whole GPUs"),
        ({"gpus": "many"}, "gpus: 'many' is not a number"),
        ({"gpus": None}, "gpus: is empty"),
        ({"duration_s": "-1"}, "duration_s: -1 is not between 0.001 and 316,224,000"),
        ({"duration_s": "nan"}, "duration_s: nan is not between 0.001 and 316,224,000"),
        ({"duration_s": float("nan")}, "duration_s: is empty"),
        ({"submit_offset_s": "inf"}, "submit_offset_s: inf is not between 0 and 316,224,000"),
        ({"submit_offset_s": "-5"}, "submit_offset_s: -5 is not between 0 and 316,224,000"),
        ({"mean_gpu_util_pct": "101"}, "mean_gpu_util_pct: 101 is not between 0 and 100"),
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
    early = {**ROW, "job_id": "early", "submit_offset_s": 0, "team": "asr"}
    jobs, _ = parse_jobs([("f:2", {**ROW, "job_id": "late"}), ("f:3", early)], 0)
    assert [job.id for job in jobs] == ["early", "late"]
    assert teams_of(jobs) == ("asr", "vision")


H = US_PER_GPU_HOUR


def _jobs(*held: tuple[str, int, int], different: int = 0, wait_s: float = 0.0) -> list[tuple[int, int, int]]:
    gpus_of = {("q", job): different for job, _, _ in held}
    work = jobs([HeldHour("q", *each) for each in held], ("q",), gpus_of, {"q": wait_s})
    return list(zip(work.submit_s, work.gpus, work.duration_s, strict=True))


def test_a_long_job_is_as_large_as_its_fullest_hour_and_begins_where_its_first_hour_does() -> None:
    assert _jobs(("j", 2, 4 * H), ("j", 3, 8 * H), ("j", 4, 2 * H)) == [(2 * 3600 + 1800, 8, 6300)]


def test_a_short_job_is_as_large_as_the_gpus_it_held() -> None:
    assert _jobs(("j", 0, 2 * H // 3), different=4) == [(0, 4, 600)]


def test_it_was_submitted_its_queues_wait_before() -> None:
    assert _jobs(("j", 5, H), wait_s=900.0) == [(5 * 3600 - 900, 1, 3600)]
    assert _jobs(("j", 0, H), wait_s=900.0) == [(0, 1, 3600)]


def test_a_gap_of_a_day_is_a_stop_and_a_longer_one_another_job() -> None:
    assert [run[2] for run in _jobs(("j", 0, H), ("j", 24, H))] == [7200]
    assert [run[2] for run in _jobs(("j", 0, H), ("j", 25, H))] == [3600, 3600]


def test_work_is_kept_and_strangers_are_counted() -> None:
    held = [HeldHour("q", f"j{i}", i, (i + 1) * H) for i in range(6)] + [HeldHour("x", "j", 0, H)]
    work = jobs(held, ("q",), {}, {})
    assert work.gpu_hours == pytest.approx(21)
    assert work.left_out == 1


def test_capacity_is_the_median_of_known_hours() -> None:
    assert capacity([0, 16 * H, 16 * H, 8 * H, 0]) == 16
    assert capacity([0, 0]) == 0


def test_leaves_get_their_part_of_their_parents_weight() -> None:
    tree = [
        {"name": "p", "weight": 3}, {"name": "q", "weight": 1},
        {"name": "p1", "parent": "p", "weight": 1, "deserved": 2}, {"name": "p2", "parent": "p", "weight": 2},
    ]  # fmt: skip
    leaves = {queue.name: queue for queue in leaves_only(Policy.model_validate({"queues": tree})).queues}
    assert {name: queue.weight for name, queue in leaves.items()} == {
        "q": 0.25, "p1": pytest.approx(0.25), "p2": pytest.approx(0.5),
    }  # fmt: skip
    assert leaves["p1"].deserved == 2
    assert all(queue.parent is None for queue in leaves.values())


def test_a_limit_holds_for_the_leaves_under_it_and_what_cannot_be_told_is_said() -> None:
    tree = [
        {"name": "p", "limit": 4}, {"name": "p1", "parent": "p", "limit": 8}, {"name": "p2", "parent": "p", "limit": 2},
        {"name": "closed", "limit": 0}, {"name": "c1", "parent": "closed"}, {"name": "c2", "parent": "closed"},
        {"name": "one", "limit": 3}, {"name": "alone", "parent": "one"}, {"name": "free"},
    ]  # fmt: skip
    policy = Policy.model_validate({"queues": tree})
    limits = {queue.name: queue.limit for queue in leaves_only(policy).queues}
    assert limits == {"p1": 4, "p2": 2, "c1": 0, "c2": 0, "alone": 3, "free": -1}
    leaves = tuple(limits)
    work = jobs([HeldHour("c1", "j", 0, 4 * H), HeldHour("free", "k", 0, 16 * H)], leaves, {}, {})
    assert [each.gpu_hours for each in replayed_queue([replay_under(policy, work, 8, 24 * 3600)], 0)] == [0.0] * 6
    told = assumptions(ReplayHistory(work, 8, 0, 24 * 3600, None, None, ("as ever",)), policy, policy)
    assert told == (
        "as ever",
        "the limit of p applies to each queue below separately, its quota to none",
        "1 jobs are larger than the 8 GPUs and are left out",
    )


def test_what_each_got_is_of_the_span_alone() -> None:
    policy = Policy.model_validate({"queues": [{"name": "q"}, {"name": "r"}]})
    work = jobs([HeldHour("q", "j", hour, 4 * H) for hour in range(48)], ("q", "r"), {}, {})
    record = replay_under(policy, work, 8, 48 * 3600)
    assert [each.gpu_hours for each in replayed_queue([record], 24 * 3600)] == [96.0, 0.0]
    assert [each.jobs for each in replayed_queue([record], 0)] == [1, 0]


def test_a_policy_with_quotas_by_model_is_replayed_for_each_model() -> None:
    """Two jobs fill the A10, and the H100 are free: only a policy without quotas by model lets one run on them."""
    held = [HeldHour("q", name, hour, 8 * H) for name in ("j", "k") for hour in range(12)]
    by_model = {"NVIDIA A10": ModelHistory(held, {}, 8), "NVIDIA H100 80GB HBM3": ModelHistory([], {}, 8)}
    past = ReplayHistory(jobs(held, ("q",), {}, {}), 16, 0, 48 * 3600, None, None, (), by_model)
    any_model = Policy.model_validate({"queues": [{"name": "q", "deserved": 16}]})
    quotas = {"H100": {"deserved": 8}, "A10": {"deserved": 8}}
    by_its_model = Policy.model_validate({"queues": [{"name": "q", "gpu_models": quotas}]})
    (row,) = compare(any_model, by_its_model, past, 0, lambda _part, _step: None).rows
    assert (row.now.gpu_hours, row.then.gpu_hours) == (192.0, 192.0)
    assert (row.now.jobs, row.then.jobs) == (2, 2)
    assert row.now.mean_wait_h < 1
    assert row.then.mean_wait_h == pytest.approx(6, abs=0.5)
