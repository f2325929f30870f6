"""Advice on jobs that keep GPUs busy and use little of them."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from accountant.ledger.protocols import JobKey
from gputally.advise.activity import JobActivity, activity_advice

HOUR_US = 3_600_000_000
KEY = JobKey("prod", "work", "Job/fp32")
BUSY = JobActivity("ml", KEY, 96 * HOUR_US, 4 * HOUR_US, 0, 80 * HOUR_US, 0, 4 * HOUR_US, 0)


def test_a_busy_job_without_tensor_cores_is_found_with_the_figures_of_its_busy_time() -> None:
    (found,) = activity_advice([BUSY])
    assert (found.finding, round(found.busy, 2), round(found.sm or 0, 3)) == ("few tensor cores", 0.96, 0.833)
    assert (round(found.tensor or 0, 4), round(found.inactive_gpu_hours, 6)) == (0.0417, 92.0)


def test_a_job_that_does_not_fill_its_gpus_is_found_first_by_its_multiprocessors() -> None:
    (found,) = activity_advice([replace(BUSY, sm_active_us=9 * HOUR_US)])
    assert (found.finding, found.inactive_gpu_hours) == ("few multiprocessors", 87.0)


def test_unknown_activity_is_no_finding() -> None:
    blind = replace(BUSY, sm_active_us=None, sm_unknown_us=100 * HOUR_US)
    assert activity_advice([replace(blind, tensor_active_us=None, tensor_unknown_us=100 * HOUR_US)]) == ()
    # Of half of the time the activity is known: 4 h of 48 busy hours.
    (found,) = activity_advice([replace(blind, tensor_unknown_us=50 * HOUR_US)])
    assert (found.sm, round(found.tensor or 0, 4)) == (None, 0.0833)


def test_idle_and_short_jobs_and_those_that_use_tensor_cores_are_no_finding() -> None:
    idle = replace(BUSY, busy_us=40 * HOUR_US, idle_us=60 * HOUR_US)
    short = replace(BUSY, busy_us=HOUR_US - 1, idle_us=0)
    assert activity_advice([idle, short, replace(BUSY, tensor_active_us=20 * HOUR_US)]) == ()


TIME = st.integers(0, 100 * HOUR_US)


@given(st.lists(st.builds(JobActivity, st.just("ml"), st.just(KEY), TIME, TIME, TIME, TIME | st.none(), TIME,
                          TIME | st.none(), TIME)))  # fmt: skip
def test_inactive_time_is_part_of_the_busy_time_whatever_is_known(jobs: list[JobActivity]) -> None:
    found = activity_advice(jobs)
    assert all(0 <= one.inactive_gpu_hours <= one.gpu_hours for one in found)
    assert [one.inactive_gpu_hours for one in found] == sorted((o.inactive_gpu_hours for o in found), reverse=True)
