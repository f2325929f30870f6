"""A day of a small cluster with whole, time-sliced and MIG GPUs: the true GPU-hours, and the samples of
kube-state-metrics.

Each namespace is one case. The samples are one minute apart, as OpenCost's documentation configures the scrape. A
container that ended is shown as not running for ten minutes, as for a finished pod until it is deleted, so every series
has a last sample of zero. The pod statuses of a node without power stay as they were. A second copy of the same history
lacks half an hour, as if Prometheus had been down.

The data is deterministic. The window is 24 hours; pods that run all day also run before and after it."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from gputally.base.units import MS_PER_HOUR

START_MS = 1_790_812_800_000  # 2026-10-01T00:00:00Z
DAY_S = 86_400
MARGIN_S = 900
"""Length of the history before and after the window."""
SCRAPE_S, SCRAPED_AT_S = 60, 17
LINGER_S = 600
OUTAGE_S = (12 * 3_600, 12 * 3_600 + 1_800)
"""The time for which the second copy of the history has no samples."""
DARK_S = (10 * 3_600 + 40, 11 * 3_600 + 40)
"""The time for which the node `dark` has no power."""
WHOLE, SHARED, INSTANCE = "nvidia.com/gpu", "nvidia.com/gpu.shared", "nvidia.com/mig-1g.10gb"
GAPLESS, GAPPED = "whole", "gapped"
"""The label `cluster` of the two copies."""


@dataclass(frozen=True)
class Pod:
    """A pod with one container. Times are seconds since the window's start. parts: the pod holds one of this many parts
    of its GPU."""

    namespace: str
    name: str
    node: str
    gpus: tuple[int, ...]
    start_s: int
    end_s: int
    resource: str = WHOLE
    parts: int = 1
    slot: int = 0
    """Number of the MIG instance."""

    @property
    def uid(self) -> str:
        return f"uid-{self.namespace}-{self.name}"

    def held_s(self, span: tuple[int, int] = (0, DAY_S)) -> float:
        """Return the GPU-seconds held in the span, without the time in which the node had no power."""
        low, high = max(self.start_s, span[0]), min(self.end_s, span[1])
        dark = max(0, min(high, DARK_S[1]) - max(low, DARK_S[0])) if self.node == "dark" else 0
        return max(0, high - low - dark) * len(self.gpus) / self.parts


def pods() -> tuple[Pod, ...]:
    """Return the pods of the namespaces `steady`, `jobs`, `brief`, `sliced`, `renamed`, `mig` and `dark`."""
    before, after = -MARGIN_S, DAY_S + MARGIN_S
    every = [Pod("steady", "train", "steady", tuple(range(8)), before, after)]
    every += [Pod("dark", "train", "dark", tuple(range(8)), before, after)]
    for name, resource in (("sliced", WHOLE), ("renamed", SHARED)):
        every += [Pod(name, f"notebook-{n}", name, (0,), before, after, resource, parts=3) for n in range(3)]
    every += [Pod("mig", f"serve-{n}", "mig", (0,), before, after, INSTANCE, parts=7, slot=n) for n in range(7)]
    every += list(_jobs(random.Random(1)))
    every += list(_brief(random.Random(2)))
    return tuple(every)


def _jobs(chance: random.Random) -> Iterator[Pod]:
    """Eight GPUs, each with jobs of 5 to 90 minutes one after the other."""
    for gpu in range(8):
        at, number = chance.randrange(60, 1_200), 0
        while (end := at + chance.randrange(300, 5_400)) < DAY_S - 60:
            yield Pod("jobs", f"job-{gpu}-{number}", "jobs", (gpu,), at, end)
            at, number = end + chance.randrange(60, 1_200), number + 1


def _brief(chance: random.Random) -> Iterator[Pod]:
    """20 to 59 seconds of a GPU in every ten minutes."""
    for number in range(DAY_S // 600):
        start = number * 600 + chance.randrange(10, 540)
        yield Pod("brief", f"step-{number}", "brief", (0,), start, start + chance.randrange(20, 60))


def truth(every: tuple[Pod, ...]) -> dict[str, float]:
    """Return the GPU-hours in the window by namespace."""
    found: dict[str, float] = defaultdict(float)
    for pod in every:
        found[pod.namespace] += pod.held_s() / (MS_PER_HOUR // 1_000)
    return dict(found)


def history(every: tuple[Pod, ...]) -> str:
    """Return both copies as OpenMetrics for back-filling: families together, samples of a series in order of time."""
    running, requested = [], []
    for cluster in (GAPLESS, GAPPED):
        for pod in every:
            about = f'cluster="{cluster}",container="main",namespace="{pod.namespace}",pod="{pod.name}",uid="{pod.uid}"'
            resource = pod.resource.translate(str.maketrans("./-", "___"))
            where = f'{about},node="{pod.node}",resource="{resource}",unit="integer"'
            for at in _scrapes(pod, gapped=cluster == GAPPED):
                stamp = START_MS // 1_000 + at
                running.append(f"kube_pod_container_status_running{{{about}}} {int(at < pod.end_s)} {stamp}")
                requested.append(f"kube_pod_container_resource_requests{{{where}}} {len(pod.gpus)} {stamp}")
    families = (("kube_pod_container_status_running", running), ("kube_pod_container_resource_requests", requested))
    lines = [line for name, samples in families for line in (f"# TYPE {name} gauge", *samples)]
    return "\n".join([*lines, "# EOF", ""])


def _scrapes(pod: Pod, *, gapped: bool) -> Iterator[int]:
    first = -(-(pod.start_s - SCRAPED_AT_S) // SCRAPE_S) * SCRAPE_S + SCRAPED_AT_S
    for at in range(first, min(pod.end_s + LINGER_S, DAY_S + MARGIN_S), SCRAPE_S):
        if not (gapped and OUTAGE_S[0] <= at < OUTAGE_S[1]):
            yield at
