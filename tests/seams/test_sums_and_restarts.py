"""Usage is the same from records, from the sums of a checkpoint, and after a restart: by hour, by day and in any zone.

A is used for three days of 24 hours by vision from 25 October, 0:00Z: busy for a half of each even hour and all of each
odd hour. What it did in the hours 12 of each day is unknown. Its node says that it is an `NVIDIA H100` in the first
hour, and the whole name of its model afterwards. B is free for an hour; then its node
reports it no more. It is unmetered for a day, and then no capacity."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gputally.base.clock import VirtualClock
from tests.seams.site import H100, HOUR_MS, Site, book, hours_of, site
from tests.seams.small_month import at

INVENTORY = """\
schema: 1
cluster: prod
nodes: [{name: n1, deleted: 2026-10-28T00:00:00Z}]
namespaces: [{name: vision, team: vision}]
"""
SETTINGS: dict[str, Any] = {"inventory": INVENTORY, "prices": book("id: h, model: H100, price: 2")}
SPAN = {"start": str(at(0)), "end": str(at(72))}
ASKED: list[dict[str, str]] = [
    {"by": "team,hour", **SPAN},
    {"by": "team,day", **SPAN},
    {"by": "day", "timezone": "Asia/Kolkata", **SPAN},
    {"by": "day,gpu_model", "timezone": "America/Los_Angeles", **SPAN},
    {"by": "namespace,pod", "start": str(at(0.3)), "end": str(at(49.7))},
    {"by": "gpu,gpu_model", **SPAN},
]


def busy(hour: int) -> float | None:
    return None if hour % 24 == 12 else 1 if hour % 2 else 0.5


def fill(of: Site) -> None:
    of.send(
        [
            *(
                row
                for hour in range(72)
                for row in hours_of(
                    "A", at(hour), 1, "vision/train", busy(hour), gpu_model=H100 if hour else "NVIDIA H100"
                )
            ),
            *hours_of("B", at(0), 1),
        ]
    )


def answers(of: Site) -> list[Any]:
    return [of.get("/v1/usage", **query)["lines"] for query in ASKED] + [of.tables(**SPAN)["hours"], of.lines(**SPAN)]


def checkpoint(of: Site) -> None:
    """Let the routines run that are due after some time."""
    of.clock.advance(HOUR_MS)
    of.service.maintain()


def test_usage_is_the_same_before_and_after_a_checkpoint_a_late_record_and_a_restart(tmp_path: Path) -> None:
    clock = VirtualClock(at(80))
    with site(tmp_path, clock, **SETTINGS) as found:
        fill(found)
        from_records = answers(found)
        checkpoint(found)
        assert answers(found) == from_records
    with site(tmp_path, clock, **SETTINGS) as found:
        assert answers(found) == from_records
        days = found.usage("day", **SPAN)
        # A day has 11 even hours with half, 12 odd ones and one that is unknown.
        of_a = {"busy": 17.5, "allocated_idle": 5.5, "allocated_unknown": 1}
        assert days == {
            "2026-10-25": {**of_a, "unallocated": 1, "unmetered": 23},
            "2026-10-26": {**of_a, "unmetered": 1},
            "2026-10-27": of_a,
        }
        # Days of Kolkata begin at 18:30Z. The first has nine odd hours, eight even ones besides 12, and half of one.
        kolkata = found.usage("day", timezone="Asia/Kolkata", **SPAN)
        assert kolkata["2026-10-25"] == {
            "busy": 8 * 0.5 + 9 + 0.25, "allocated_idle": 8 * 0.5 + 0.25, "allocated_unknown": 1, "unallocated": 1,
            "unmetered": 17.5,
        }  # fmt: skip
        assert list(kolkata) == ["2026-10-25", "2026-10-26", "2026-10-27", "2026-10-28"]

        # B's second hour arrives late, in a day that has sums.
        found.send(hours_of("B", at(1), 1, "vision/late", 1), epoch="later")
        late = answers(found)
        assert found.usage("day", **SPAN) == {
            "2026-10-25": {**of_a, "busy": 18.5, "unallocated": 1, "unmetered": 22},
            "2026-10-26": {**of_a, "unmetered": 2},
            "2026-10-27": of_a,
        }
        checkpoint(found)
        assert answers(found) == late
    with site(tmp_path, clock, **SETTINGS) as found:
        assert answers(found) == late
        assert found.get("/v1/check", **SPAN)["imbalance_gpu_us"] == 0


def test_unmetered_time_has_the_longest_name_of_the_model_before_and_after_a_restart(tmp_path: Path) -> None:
    """Z says that it is an `NVIDIA H100` for an hour, then the whole name, then nothing for two hours."""
    clock = VirtualClock(at(80))
    expected = {
        "NVIDIA H100": {"busy": 1},
        H100: {"busy": 1, "unmetered": 2},
    }
    with site(tmp_path, clock, **SETTINGS) as found:
        found.send(hours_of("Z", at(68), 1, "vision/z", 1, gpu_model="NVIDIA H100"))
        found.send(hours_of("Z", at(69), 1, "vision/z", 1))
        assert found.usage("gpu_model", **SPAN) == expected
        assert [(line[1], line[3], float(line[4])) for line in found.lines(**SPAN)] == [
            ("unmetered", H100, 2), ("busy", "NVIDIA H100", 1), ("busy", H100, 1),
        ]  # fmt: skip
    with site(tmp_path, clock, **SETTINGS) as found:
        assert found.usage("gpu_model", **SPAN) == expected


def test_an_hour_of_which_only_the_holder_is_known_is_held(tmp_path: Path) -> None:
    with site(tmp_path, VirtualClock(at(80)), **SETTINGS) as found:
        found.send([*hours_of("A", at(0), 1, "vision/dark", None), *hours_of("A", at(1), 71)])
        rows = {row["hour"]: row for row in found.tables(**SPAN)["hours"]}
        assert (float(rows[0]["allocated_gpu_hours"]), float(rows[0]["capacity_gpu_hours"])) == (1, 3)
        assert (rows[0]["held"], rows[0]["utilisation"]) == (1 / 3, None)
