"""Jobs of several pods, and waits of pods that two sources report.

The pods of Job/sweep follow each other on one H100 at 2 an hour, busy for 0:00 to 2:00, idle for 2:00 to 4:00 and busy
for half of 4:00 to 6:00. One more pod of it runs beside the last one for an hour, on another GPU."""

from __future__ import annotations

from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from gputally.base.clock import VirtualClock
from tests.seams.site import HOUR_US, MINUTE_MS, Site, book, hours_of, site
from tests.seams.site_with_cluster import watched
from tests.seams.small_month import BEGIN_MS, at, running

ID = "prod~vision~Job~sweep"
BUSY = (1, 0, 0.5)


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    prices = book("id: h100, model: H100, price: 2")
    with watched(tmp_path_factory.mktemp("jobs"), BEGIN_MS, "train", prices=prices) as found:
        found.site.clock.advance(at(8) - BEGIN_MS)
        found.site.send(
            [
                *(row for n, busy in enumerate(BUSY) for row in hours_of("A", at(2 * n), 2, f"vision/s{n}", busy)),
                *hours_of("B", at(5), 1, "vision/s3", 1),
            ],
            [
                *(
                    running(f"vision/s{n}", at(2 * n), "Job/sweep", ended_ms=at(2 * n + 2), observed_ms=at(2 * n + 2))
                    for n in range(3)
                ),
                running("vision/s3", at(5), "Job/sweep", ended_ms=at(6), observed_ms=at(6)),
                running(
                    "vision/two", at(0), "Job/two", scheduled_ms=at(0) + 10 * MINUTE_MS,
                    started_ms=at(0) + 20 * MINUTE_MS,
                ),
            ],
        )  # fmt: skip
        # The API server and the node each know the earlier instant of one step.
        found.show_pod(
            "two", ("Job", "two"), at(0) + 2 * MINUTE_MS, at(0) + 7 * MINUTE_MS, at(0) + 21 * MINUTE_MS
        )  # fmt: skip
        found.read()
        yield found.site


def test_a_job_of_several_pods_lasts_from_its_first_hour_to_its_last(jobs: Site) -> None:
    """Seven GPU-hours: busy 2, 0, 1 and 1; idle 2 and 1. At 2 an hour 14."""
    found = jobs.get(f"/v1/jobs/{ID}")
    job = found["job"]
    assert (found["start_ms"], job["held_from_ms"], job["held_until_ms"]) == (at(0), at(0), at(6))
    assert (job["created_ms"], job["ended_ms"], job["state"], job["pods"]) == (at(0), at(6), "ended", 4)
    assert (job["accounts_gpu_us"]["busy"], job["accounts_gpu_us"]["allocated_idle"]) == (4 * HOUR_US, 3 * HOUR_US)
    assert Decimal(job["cost"]) == 14
    assert [(part["gpu_hours"], Decimal(part["unit_price"]), Decimal(part["cost"])) for part in found["parts"]] == [
        ("7.000000000", 2, 14)
    ]


def test_epochs_of_a_job_of_several_pods_divide_its_cost_from_its_beginning(jobs: Site) -> None:
    """The first epoch ends with the second hour (4), the second one at 5:00 (6), and after it are two GPU-hours (4)."""
    told = [{"epoch": 1, "at": str(at(2))}, {"epoch": 2, "at": str(at(5))}]
    jobs.post(f"/v1/jobs/{ID}/progress", told)
    lines = jobs.get(f"/v1/jobs/{ID}")["epochs"]
    assert [(line["epoch"], line["start_ms"], line["end_ms"], Decimal(line["cost"])) for line in lines] == [
        (1, at(0), at(2), 4), (2, at(2), at(5), 6), (None, at(5), at(8), 4),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("span", "cost", "held"),
    [((0, 8), 14, (0, 6)), ((1, 5), 8, (0, 6)), ((4.5, 5.5), 3, (0, 6))],
    ids=["all of it", "four hours of three pods", "an hour and half an hour"],
)
def test_a_list_of_jobs_has_the_cost_of_the_span_and_the_extent_of_the_job(
    jobs: Site, span: tuple[float, float], cost: int, held: tuple[int, int]
) -> None:
    found = jobs.get("/v1/jobs", start=str(at(span[0])), end=str(at(span[1])))
    (job,) = [one for one in found["jobs"] if one["id"] == ID]
    assert (Decimal(job["cost"]), job["held_from_ms"], job["held_until_ms"]) == (cost, at(held[0]), at(held[1]))
    assert Decimal(found["total_cost"]) == cost


def test_the_rate_of_a_running_job_is_that_of_the_newest_records(tmp_path: Path) -> None:
    """The newest minutes may not have been reported yet, and count neither as held nor as free."""
    prices = book("id: h100, model: H100, price: 2")
    with site(tmp_path, VirtualClock(at(1) + 5 * MINUTE_MS), prices=prices) as found:
        found.send(hours_of("A", at(0), 1, "vision/now", 1), [running("vision/now", at(0), "Job/now")])
        (job,) = found.get("/v1/jobs", start=str(at(0)), end=str(at(2)))["jobs"]
    assert (job["state"], Decimal(job["gpus"]), Decimal(job["burn_per_hour"])) == ("running", 1, 2)


def waits(of: Site, **query: Any) -> list[tuple[Any, ...]]:
    found = of.get("/v1/waits", by="namespace", start=str(at(0)), end=str(at(8)), **query)
    return [(one["pods"], one["waiting"], one["queued"]["longest"], one["starting"]["longest"]) for one in found]


def test_of_two_sources_the_earlier_instant_counts(jobs: Site) -> None:
    """Created at 0:00 (node), scheduled at 0:07 (API server), started at 0:20 (node): 420 s and 780 s."""
    assert waits(jobs) == [(5, None, 420, 780)], "nobody reads the pods that are on no node"
    shown = jobs.tables(start=str(at(0)), end=str(at(8)))["waits"]
    assert [(row["pods"], row["longest_s"]) for row in shown] == [(5, 420)]
    job = jobs.get("/v1/jobs/prod~vision~Job~two", start=str(at(0)))["job"]
    assert (job["created_ms"], job["waited_ms"]) == (at(0), 420_000)
