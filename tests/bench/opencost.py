"""GPU-hours of one day: the truth, the ledger's answer, and OpenCost's rule on a real Prometheus 3.

OpenCost itself does not run: the benchmark sends its two queries for GPU-hours and applies its rule to the answers
(`tests.compat.opencost_rule`). Both sides see the same day (`tests.compat.opencost_day`), which is identical in every
run, so a test compares the table of docs/from-opencost.md with it. Needs Prometheus (`make control-plane`).

The cost of the ledger's answer is measured on a day of 1,000 GPUs. It has no baseline: OpenCost needs more than these
two queries for an answer of its own."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from accountant.compat.opencost_api import AllocationSource
from accountant.core.settings import Limits
from accountant.storage.duckdb_ledger import open_ledger
from gputally.base.clock import VirtualClock
from tests.bench import bulk
from tests.bench.figure import Figure, median_cpu_seconds
from tests.bench.service import Spent
from tests.compat import opencost_day as day
from tests.compat.opencost_metered import answer, metered
from tests.compat.opencost_rule import Asked, Pod, by_namespace
from tests.real.prometheus import Prometheus, backfill, prometheus

RESOLUTIONS_S = (300, 60)
"""OpenCost's default resolution, and the finest that one scrape a minute allows."""
CASES = {
    "steady": "a pod with 8 GPUs, all day",
    "jobs": "197 jobs of 5 to 90 minutes, a GPU each",
    "brief": "144 pods of 20 to 59 seconds, a GPU each",
    "sliced": "a GPU time-sliced in three, three pods that request `nvidia.com/gpu`",
    "renamed": "the same, three pods that request `nvidia.com/gpu.shared`",
    "mig": "a GPU divided into seven MIG instances, seven pods that request `nvidia.com/mig-1g.10gb`",
    "dark": "a pod with 8 GPUs on a node that is without power for an hour",
}
"""The description of each namespace."""


@dataclass(frozen=True)
class Measured:
    """GPU-hours by namespace, and the number of its pods in an answer.

    theirs, gapped: by resolution, with an unbroken history and with one that lacks half an hour."""

    truth: Mapping[str, float]
    pods: Mapping[str, int]
    ours: Mapping[str, float]
    ours_named: Mapping[str, int]
    theirs: Mapping[int, Mapping[str, float]]
    theirs_named: Mapping[int, Mapping[str, int]]
    gapped: Mapping[int, Mapping[str, float]]

    def lines(self) -> Iterator[str]:
        """Return the rows of the table in docs/from-opencost.md."""
        for name, case in CASES.items():
            yield self._line(case, *(figures.get(name, 0.0) for figures in self._columns()), truth=self.truth[name])
        yield self._line("all of it", *(sum(figures.values()) for figures in self._columns()),
                         truth=sum(self.truth.values()))  # fmt: skip
        yield _row("the worst namespace", "", *(_percent(self._worst(each)) for each in self._columns()))
        named = (self.ours_named, *self.theirs_named.values())
        yield _row(
            "short pods that appear by name, of 144", str(self.pods["brief"]), *(str(n.get("brief", 0)) for n in named)
        )
        jobs = self.truth["jobs"]
        gapped = [f"{each['jobs']:.2f} ({_percent(each['jobs'] / jobs - 1)})" for each in self.gapped.values()]
        yield _row(
            "the jobs again, with Prometheus away for half an hour", f"{jobs:.2f}", "does not use Prometheus", *gapped
        )

    def _columns(self) -> tuple[Mapping[str, float], ...]:
        return self.ours, *self.theirs.values()

    def _worst(self, figures: Mapping[str, float]) -> float:
        return max((figures.get(name, 0.0) / hours - 1 for name, hours in self.truth.items()), key=abs)

    @staticmethod
    def _line(case: str, *figures: float, truth: float) -> str:
        return _row(case, f"{truth:.2f}", *(f"{each:.2f} ({_percent(each / truth - 1)})" for each in figures))


def measured(folder: Path) -> Measured:
    """Measure both sides of the day, in files in `folder`."""
    every = day.pods()
    ledger = metered(every, folder)
    try:
        ours, pods = answer(ledger, "namespace"), answer(ledger, "namespace,pod")
    finally:
        ledger.close()
    backfill(day.history(every), folder)
    start_s = day.START_MS // 1_000
    asked = [Asked(start_s, start_s + day.DAY_S, resolution) for resolution in RESOLUTIONS_S]
    with prometheus(folder) as server:
        found = {(one.resolution_s, copy): _told(server, one, copy)
                 for one in asked for copy in (day.GAPLESS, day.GAPPED)}  # fmt: skip
    return Measured(
        truth=day.truth(every),
        pods=Counter(pod.namespace for pod in every),
        ours=ours,
        ours_named=Counter(name.partition("/")[0] for name in pods),
        theirs={at: by_namespace(found[at, day.GAPLESS]) for at in RESOLUTIONS_S},
        theirs_named={at: Counter(pod[0] for pod in found[at, day.GAPLESS]) for at in RESOLUTIONS_S},
        gapped={at: by_namespace(found[at, day.GAPPED]) for at in RESOLUTIONS_S},
    )


def measure() -> list[Figure]:
    with tempfile.TemporaryDirectory() as folder:
        found = measured(Path(folder))
    figures = []
    for name in CASES:
        for resolution, theirs in found.theirs.items():
            label = f"{name}, truth {found.truth[name]:.2f}, looks {resolution // 60} min apart"
            figures.append(Figure(label, found.ours[name], "GPU-hours", "OpenCost's rule", theirs.get(name, 0.0)))
    return [*figures, _cost_of_an_answer()]


def _cost_of_an_answer() -> Figure:
    """Return the CPU time of a day by namespace, computed without a cache."""
    fleet = bulk.Fleet(nodes=125, minutes=1_440, queues=200)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "ledger.duckdb"
        bulk.write_apart(path, fleet)
        clock = VirtualClock(fleet.end_ms)
        ledger = open_ledger(path, clock)
        try:
            source = AllocationSource(ledger, clock, lambda: None, "prod", Limits(span_days=400))
            query = f"window={fleet.begin_ms // 1000},{fleet.end_ms // 1000}&aggregate=namespace"
            seconds = median_cpu_seconds(lambda: source.answer(query, summed=False))
            name = f"processor time, a day of {fleet.gpus:,} GPUs"
            return Figure(name, seconds * 1e3, "ms", memory_mib=Spent.me().peak_mib())
        finally:
            ledger.close()


def _told(server: Prometheus, asked: Asked, cluster: str) -> dict[Pod, float]:
    return asked.gpu_hours(
        server.instant(asked.running(cluster), asked.end_s), server.instant(asked.requested(cluster), asked.end_s)
    )


def _percent(off: float) -> str:
    rounded = round(off * 100, 1)
    return f"{rounded:+.1f} %" if rounded else "0.0 %"


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"
