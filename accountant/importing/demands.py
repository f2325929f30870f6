"""Who asked for GPUs of which node, from when to when. Pure.

A pod holds its GPUs while its requests are listed with a node and its phase is not over. Listing is known to the
scrape: an instant that kube-state-metrics tells itself (start, completion) counts where it fits the listing, else the
middle of what is possible.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from accountant.importing.asked import Asked, Container, makeshift_uid
from accountant.importing.cells import runs
from accountant.importing.devices import Device
from accountant.importing.placing import Demand
from accountant.importing.series import Observed, PodName, of, pod_of
from agent.units import MS_PER_SECOND
from agent.wire import Holder


def of_requests(containers: Sequence[Container], devices: Sequence[Device], seen: Observed) -> list[Demand]:
    """Of one node, on the devices that were labelled with the pod."""
    starts = {(pod_of(labels), of(labels, "uid")): round(value * MS_PER_SECOND) for labels, value in seen.starts}
    ends = {(pod_of(labels), of(labels, "uid")): round(value * MS_PER_SECOND) for labels, value in seen.ends}
    on: dict[PodName, set[tuple[str, int]]] = {}
    for device in devices:
        for part, pod in device.labelled:
            on.setdefault(pod, set()).add((device.uuid, part))
    found = []
    for one in containers:
        holder = Holder("pod", one.uid, one.pod[0], one.pod[1], one.name)
        for first, last in one.runs:
            told = (_told(starts, one), _told(ends, one))
            start, end = _edges(first, last, seen, *told, over=last + 1 in one.over)
            if start < end:
                found.append(Demand(holder, one.resource, one.count, start, end, frozenset(on.get(one.pod, ()))))
    return found


def _told(instants: Mapping[tuple[PodName, str], int], one: Container) -> int | None:
    return instants.get((one.pod, one.uid), instants.get((one.pod, "")))


def _edges(
    first: int, last: int, seen: Observed, started: int | None, ended: int | None, *, over: bool = False
) -> tuple[int, int]:
    """When it began and ended, for the first and last cell in which it was listed. over: what ended it was a sample
    that said so, in the next cell.

    A sample at s counts for the instants from s to s + window. So the first sample lies in the first cell, the last
    one `window - step` before the last cell, and the pod lived half a scrape longer on both sides on average."""
    grid = seen.grid
    low, high = grid.span(first, last)
    margin = grid.step_ms + seen.scrape_ms
    start, end = low, high
    if first:
        start = low + (grid.step_ms - seen.scrape_ms) // 2
        if started is not None and low - margin <= started <= low + grid.step_ms:
            start = started
    if last < grid.count - 1:
        end = high + (grid.step_ms - seen.scrape_ms) // 2
        if not over:
            end += seen.scrape_ms - seen.window_ms
        if ended is not None and end - margin <= ended <= end + margin:
            end = ended
    return max(grid.start_ms, start), min(grid.end_ms, end)


def of_labels(devices: Sequence[Device], asked: Asked, seen: Observed) -> list[Demand]:
    """Where kube-state-metrics was never heard: a labelled device is held by the pod it is labelled with."""
    found = []
    for device in devices:
        for (part, pod), cells in sorted(device.labelled.items(), key=lambda one: one[0]):
            uid = asked.pods[pod].uid if pod in asked.pods else makeshift_uid(pod)
            holder = Holder("pod", uid, pod[0], pod[1])
            for first, last in runs(cells):
                start, end = _edges(first, last, seen, None, None)
                if start < end:
                    at = frozenset({(device.uuid, part)})
                    found.append(Demand(holder, labelled_pool(device.uuid, part), 1, start, end, at))
    return found


def labelled_pool(uuid: str, part: int) -> str:
    """The pool that one part of a device is, where labels alone tell."""
    return f"{uuid}/{part}"


def sharers(device: Device, part: int) -> int:
    """How many pods a part was labelled with at once, and not only while one followed another; at least 1."""
    of_pods = [cells for (number, _), cells in device.labelled.items() if number == part]
    together: dict[int, int] = {}
    for cells in of_pods:
        for cell in cells:
            if cell + 1 in cells:
                together[cell] = together.get(cell, 0) + 1
    return max(together.values(), default=1)
