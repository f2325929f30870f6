"""Which records are booked does not depend on the records beside them, and every refused one is named.

Each set of records below is the only one of its GPU. All of them are sent in batches of their own by the cluster
`apart`, and in one batch by the cluster `together`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from msgspec.structs import replace

from agent.wire import UNATTRIBUTED, Holder, Sharing, Slice, UsageInterval
from gputally.base.clock import VirtualClock
from tests.seams.site import HOUR_MS, HOUR_US, MINUTE_MS, Site, hours_of, site
from tests.seams.small_month import at

NOW_MS = at(4)
HALF = {"capacity_us": HOUR_US // 2, "allocated_us": HOUR_US // 2}
PART = Slice("3g.40gb", 1, 0, 3, 7, 40_960, 81_920)


def one(pod: str = "vision/p", begin_ms: int = at(0), busy: float | None = 0.25, **fields: Any) -> list[UsageInterval]:
    """Build an hour of a GPU. fields: those of the record that differ."""
    return [replace(row, **fields) for row in hours_of("gpu", begin_ms, 1, pod, busy)]


UNNAMED = Holder("pod", "uid", "vision", "a\x07b")
SETS: dict[str, tuple[list[UsageInterval], str]] = {
    "held": (one(), ""),
    "free": (one(""), ""),
    "unknown use": (one(busy=None), ""),
    "half, half free": ([*one(**HALF), *one("", **{**HALF, "allocated_us": 0})], ""),
    "two halves": ([*one("vision/a", **HALF), *one("nlp/b", busy=0.75, **HALF)], ""),
    "time-sliced": ([*one("vision/a", sharing=Sharing("time-slicing", 2), **HALF), *one("nlp/b", **HALF)], ""),
    "MIG": (
        [*one("vision/a", slice=PART, **HALF), *one("", slice=PART, **{**HALF, "allocated_us": 0})], ""
    ),
    "lost": (one("", health="lost"), ""),
    "busy without owner": ([*one(""), *one("", holder=UNATTRIBUTED, capacity_us=0, allocated_us=0)], ""),
    "until now and a little": (one(begin_ms=NOW_MS - HOUR_MS + 4 * MINUTE_MS), ""),
    "carried part": (one(method="carried", **HALF), ""),
    "from the future": (one(begin_ms=NOW_MS - HOUR_MS + 6 * MINUTE_MS), "future-dated"),
    "from 1999": (one(begin_ms=915_148_800_000), "before-2020"),
    "an hour and a millisecond": (
        one(capacity_us=HOUR_US + 1_000, allocated_us=HOUR_US + 1_000, end_ms=at(1) + 1), "too-long"
    ),
    "negative": (one(energy_uj=-1), "negative"),
    "beyond belief": (one(memory_mib_s=10**15 + 1), "out-of-range"),
    "more allocated than there is": (
        [*one(**{**HALF, "allocated_us": HOUR_US}), *one("", **{**HALF, "allocated_us": 0})], "over-allocated"
    ),
    "allocated to nobody": (one("", allocated_us=HOUR_US), "no-holder"),
    "capacity without owner": (one("", holder=UNATTRIBUTED), "unattributed-capacity"),
    "three halves": ([*one("vision/a", **HALF), *one("nlp/b", **HALF), *one("nlp/c", **HALF)], "over-capacity"),
    "a half alone": (one(**HALF), "incomplete-set"),
    "a bell in a name": (one(holder=UNNAMED), "bad-name"),
    "no model": (one(gpu_model="\n"), "bad-name"),
    "a bell in a GPU\x07": (one(), "bad-name"),
    "shared by minus one": (one(sharing=Sharing("mps", -1)), "out-of-range"),
    "a bell in a slice": (one(slice=Slice("1g\x07", 1, 0, 1, 7, 10, 80)), "bad-name"),
    "a slice of minus one": (one(slice=Slice("1g.10gb", -1, 0, 1, 7, 10, 80)), "out-of-range"),
}  # fmt: skip
"""Sets of records, and the reason for which each is refused; "" if it is booked."""


@pytest.fixture(scope="module")
def booked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    named = {name: [replace(row, gpu_uuid=name) for row in rows] for name, (rows, _) in SETS.items()}
    with site(tmp_path_factory.mktemp("admission"), VirtualClock(NOW_MS)) as found:
        for rows in named.values():
            found.send(rows, cluster="apart")
        found.send([row for rows in named.values() for row in rows], cluster="together")
        yield found


def test_each_set_has_the_same_fate_alone_and_beside_others(booked: Site) -> None:
    refused = Counter((one["cluster"], one["reason"]) for one in booked.get("/v1/quarantine", limit=1000))
    expected: Counter[tuple[str, str]] = Counter()
    for rows, reason in SETS.values():
        expected += Counter({(cluster, reason): len(rows) for cluster in ("apart", "together") if reason})
    assert refused == expected
    names = {name for name, (_, reason) in SETS.items() if not reason}
    span = {"start": str(at(0)), "end": str(NOW_MS)}
    apart, together = (
        booked.usage("gpu", "namespace", "mig_profile", **span, **{"where.cluster": cluster})
        for cluster in ("apart", "together")
    )
    assert apart == together
    assert {key.partition("/")[0] for key in together} == names


def test_what_was_booked_is_what_was_sent(booked: Site) -> None:
    span = {"start": str(at(0)), "end": str(at(1)), "where.cluster": "together"}
    found = booked.usage("gpu", **span)
    assert found["held"] == {"busy": 0.25, "allocated_idle": 0.75}
    assert found["free"] == {"unallocated": 1}
    assert found["unknown use"] == {"allocated_unknown": 1}
    assert found["half, half free"] == {"busy": 0.25, "allocated_idle": 0.25, "unallocated": 0.5}
    # b used 0.75 with half of the GPU: it is busy for its half.
    assert found["two halves"] == {"busy": 0.75, "allocated_idle": 0.25}
    assert found["lost"] == {"down": 1}
    assert found["carried part"] == {"busy": 0.25, "allocated_idle": 0.25, "unmetered": 0.5}


def test_the_same_records_again_change_nothing(booked: Site) -> None:
    """A node that lost its acknowledgement sends them again, and one whose outbox was lost in another one."""
    span = {"start": str(at(0)), "end": str(NOW_MS)}
    before = booked.client.get("/v1/usage", params={"by": "gpu,namespace", **span}).json()
    for epoch in ("e", "f"):
        again = booked.resend(hours_of("held", at(0), 1, "vision/p", 0.25), cluster="apart", epoch=epoch)
        assert again.status_code == 200
    assert booked.client.get("/v1/usage", params={"by": "gpu,namespace", **span}).json() == before
