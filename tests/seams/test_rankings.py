"""Rankings, hints and spot candidates of a report with more jobs than are looked at closely.

411 jobs of the namespace `many` hold a B200 for a minute each, one after the other on seven GPUs. A minute is
0.016666667 hours: at 2400 an hour on demand and 2399.40 as spot, each costs 40.0000008 and could save 0.0100000002. The
job Job/cheap holds an H100 for ten hours: at 2 and 1 it costs 20 and could save 10, more than any other. It is the
412th by its cost.

The others hold H100s too: Job/half two for five hours, each busy for half of the time, so that one would do; Job/idle
one for nine hours without using it; Job/dark one for nine hours, which may be used or not; Job/eager one for nine
hours, always busy. No spot price is below the price of spot capacity: Job/spot gets no advice."""

from __future__ import annotations

from collections.abc import Iterator
from decimal import Decimal

import pytest

from agent.wire import UsageInterval
from gputally.base.clock import VirtualClock
from tests.seams.site import HOUR_MS, MINUTE_MS, Site, book, hours_of, site, uid_of
from tests.seams.small_month import BEGIN_MS, at, running
from tests.usage_records import interval, pod_holder

MANY = 411
PRICES = book(
    "id: b, model: B200, capacity_type: on-demand, price: 2400",
    "id: b-spot, model: B200, capacity_type: spot, price: 2399.40",
    "id: h, model: H100, capacity_type: on-demand, price: 2",
    "id: h-spot, model: H100, capacity_type: spot, price: 1",
)
INVENTORY = """\
schema: 1
cluster: prod
nodes:
  - {name: n1, capacity_type: on-demand, deleted: 2026-10-25T10:00:00Z}
  - {name: n2, capacity_type: spot, deleted: 2026-10-25T10:00:00Z}
namespaces: [{name: many, team: many}, {name: few, team: few}]
"""


def minute_of(number: int, name: str) -> UsageInterval:
    """Build the minute of a job of `many`."""
    gpu, minute = divmod(number, 60)
    holder = pod_holder(name, "many", uid_of(f"many/{name}"))
    fields = {"span_ms": MINUTE_MS, "gpu_model": "NVIDIA B200", "busy_us": MINUTE_MS * 1_000}
    return interval(at(0) + minute * MINUTE_MS, f"many{gpu}", holder, **fields)


@pytest.fixture(scope="module")
def month(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    given = {"prices": PRICES, "inventory": INVENTORY}
    with site(tmp_path_factory.mktemp("many"), VirtualClock(BEGIN_MS + 12 * HOUR_MS), **given) as found:
        few = {
            "cheap": hours_of("cheap", at(0), 10, "few/cheap", 1),
            "half": [row for n in range(2) for row in hours_of(f"half{n}", at(0), 5, "few/half", 0.5)],
            "idle": hours_of("idle", at(0), 9, "few/idle", 0),
            "dark": hours_of("dark", at(0), 9, "few/dark", None),
            "eager": hours_of("eager", at(0), 9, "few/eager", 1),
        }
        names = [f"j{number:03d}" for number in range(MANY)]
        found.send(
            [
                *(minute_of(number, name) for number, name in enumerate(names)),
                *(row for rows in few.values() for row in rows),
            ],
            [
                *(running(f"many/{name}", at(0), f"Job/{name}") for name in names),
                *(running(f"few/{name}", at(0), f"Job/{name}") for name in few),
            ],
        )
        found.send(
            hours_of("spot", at(0), 10, "few/spot", 1), [running("few/spot", at(0), "Job/spot", node="n2")], node="n2"
        )
        yield found


def test_the_job_that_could_save_the_most_is_first_although_411_cost_more(month: Site) -> None:
    """Of those that held eight GPU-hours: half saves 10 as cheap does, the idle ones and eager 9."""
    rows = month.tables(start=str(at(0)), end=str(at(10)))["spot"]
    shown = [
        (row["job"], float(row["gpu_hours"]), Decimal(row["cost"]), Decimal(row["saving_at_most"])) for row in rows
    ]
    assert shown == [
        ("Job/cheap", 10, 20, 10), ("Job/half", 10, 20, 10), ("Job/dark", 9, 18, 9), ("Job/eager", 9, 18, 9),
        ("Job/idle", 9, 18, 9),
    ]  # fmt: skip


def test_the_dearest_jobs_and_those_with_the_most_idle_time(month: Site) -> None:
    """Idle are 9 hours of idle and 5 of half. Equal costs are in the order of time, then of names."""
    found = month.tables(start=str(at(0)), end=str(at(10)))
    assert [(row["job"], Decimal(row["cost"])) for row in found["jobs_by_cost"]] == [
        (f"Job/j{number:03d}", Decimal("40.0000008")) for number in range(5)
    ]
    assert [(row["job"], Decimal(row["idle_cost"])) for row in found["jobs_by_idle"]] == [
        ("Job/idle", 18), ("Job/half", 10),
    ]  # fmt: skip
    own = month.tables(start=str(at(0)), end=str(at(10)), team="few")["jobs_by_cost"]
    assert [(row["job"], Decimal(row["cost"])) for row in own] == [
        ("Job/cheap", 20), ("Job/half", 20), ("Job/dark", 18), ("Job/eager", 18), ("Job/idle", 18),
    ]  # fmt: skip


def test_each_hint_has_the_peak_on_which_it_is_based(month: Site) -> None:
    """half held two GPUs and used as much as one: it could save half of its 20. What dark used is unknown."""
    hints = month.tables(start=str(at(0)), end=str(at(10)))["hints"]
    names = ("job", "kind", "held_gpus", "peak_busy_gpus")
    figures = [(int(row["needed_gpus"]), Decimal(row["saving_at_most"])) for row in hints]
    assert [(*(row[name] for name in names), *of) for row, of in zip(hints, figures, strict=True)] == [
        ("Job/idle", "idle", 1, 0, 0, 18), ("Job/half", "fewer", 2, 1, 1, 10),
    ]  # fmt: skip
