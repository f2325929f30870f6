"""Reconstructs which pods held how many GPUs of which node, and when.

There are two sources. kube-state-metrics knows which containers requested how many GPUs on which node, and when a pod
began and ended. dcgm-exporter knows the devices, their utilisation, and mostly the pod that each was assigned to.

If only one of them was scraped, the other's information is inferred. Without kube-state-metrics, a labelled device
counts as held. Without dcgm-exporter, a node has as many GPUs as it says it can allocate, with placeholder names and
unknown use.

kube-state-metrics replaces punctuation in label names. The names of labels that may identify a pod's owner are known
and restored (`exporter_series.pod_label_names`). Queue labels follow the rule in
`gputally.kubernetes.pod_queue_labels`.

A pod holds its GPUs while kube-state-metrics lists its requests with a node and its phase is neither Succeeded nor
Failed. The listing is exact only to the scrape interval. If kube-state-metrics reports an instant (start, completion)
that fits the listing, this instant is used. Otherwise the middle of the possible range is used."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from math import gcd

from accountant.core.claim_overlap import intersect, subtract, union
from accountant.histories.prometheus.exporter_series import (
    MIG_RESOURCE,
    MOST_GPUS,
    WHOLE,
    ExporterDevice,
    Labels,
    Observed,
    PodName,
    PodSeries,
    RequestingContainer,
    asked_for,
    assumed_devices,
    devices_of,
    makeshift_uid,
    of,
    pod_label_names,
    pod_of,
    whole_number,
)
from accountant.history_import.gpu_assignment import Demand, NodeHistory, Slot, SlotHold, place, runs
from accountant.inventory import pod_facts
from agent.wire import Holder, Owner, PodFacts
from gputally.base.gpu_model_names import parse_gpu_model
from gputally.base.mig_profiles import parse_mig_profile, usual_memory_gb
from gputally.base.units import MS_PER_SECOND
from gputally.kubernetes.pod_queue_labels import queue_ref

_ABOVE = (("ReplicaSet", "replicaset"), ("Job", "job_name"))
"""Kinds whose owners kube-state-metrics reports, and the label that names them."""


def facts_of(
    node: str,
    wanted: Sequence[Demand],
    asked: PodSeries,
    seen: Observed,
    scheduler: str,
    team_labels: Sequence[str] = (),
) -> tuple[PodFacts, ...]:
    """The facts of the pods that held GPUs of a node in this chunk, by uid; `seq` is 0.

    team_labels: further labels to keep."""
    index = _PodTables(seen, team_labels)
    held: dict[str, tuple[PodName, dict[str, int]]] = {}
    counted = set()
    for demand in wanted:
        who = demand.holder
        _, requests = held.setdefault(who.uid, ((who.namespace, who.name), {}))
        if not asked.deaf and (who.uid, who.container, demand.pool) not in counted:
            counted.add((who.uid, who.container, demand.pool))
            requests[demand.pool] = requests.get(demand.pool, 0) + demand.count
    return tuple(index.fact(node, uid, pod, requests, seen, scheduler) for uid, (pod, requests) in sorted(held.items()))


class _PodTables:
    """The labels, owners, schedulers and instants of pods, by name and uid."""

    def __init__(self, seen: Observed, team_labels: Sequence[str]) -> None:
        self._names = pod_label_names(team_labels)
        self._team_labels = frozenset(team_labels)
        self._labels = _by_pod(seen.pod_labels)
        self._owners = _by_pod(seen.owners)
        self._info = _by_pod(seen.pods)
        self._schedulers = _by_pod(seen.schedulers)
        self._starts, self._ends = _instants(seen.starts), _instants(seen.ends)
        self._above: dict[tuple[str, str, str], Owner] = {}
        for labels in seen.upper_owners:
            for kind, name in _ABOVE:
                if (own := of(labels, name)) and (owner := _owner(labels, "owner")) is not None:
                    self._above[of(labels, "namespace"), kind, own] = owner

    def fact(
        self, node: str, uid: str, pod: PodName, requests: Mapping[str, int], seen: Observed, scheduler: str
    ) -> PodFacts:
        written = self._of(self._labels, pod, uid)
        labels = {key: of(written, name) for name, key in self._names.items() if written.get(name)}
        chain = self._chain(pod, uid)
        placed_by = of(self._of(self._schedulers, pod, uid), "name") or scheduler
        started = _instant_of(self._starts, pod, uid)
        return PodFacts(
            seq=0,
            uid=uid,
            namespace=pod[0],
            name=pod[1],
            node=node,
            labels={key: value for key, value in labels.items() if key in self._team_labels},
            owners=chain,
            workload=pod_facts.job(chain, labels),
            queue_ref=queue_ref(pod[0], placed_by, labels),
            requests={name: str(count) for name, count in sorted(requests.items())},
            scheduled_ms=started,
            started_ms=started,
            ended_ms=_instant_of(self._ends, pod, uid),
            observed_ms=seen.grid.end_ms,
        )

    def _chain(self, pod: PodName, uid: str) -> tuple[Owner, ...]:
        named, created = self._of(self._owners, pod, uid), self._of(self._info, pod, uid)
        nearest = _owner(named, "owner") or _owner(created, "created_by")
        if nearest is None:
            return ()
        above = self._above.get((pod[0], nearest.kind, nearest.name))
        return (nearest,) if above is None else (nearest, above)

    @staticmethod
    def _of(table: Mapping[tuple[PodName, str], Labels], pod: PodName, uid: str) -> Labels:
        return table.get((pod, uid)) or table.get((pod, "")) or {}


def _key(labels: Labels) -> tuple[PodName, str]:
    return pod_of(labels), of(labels, "uid")


def _by_pod(table: Sequence[Labels]) -> dict[tuple[PodName, str], Labels]:
    return {_key(labels): labels for labels in table}


def _owner(labels: Labels, prefix: str) -> Owner | None:
    """The controller that the labels `PREFIX_kind` and `PREFIX_name` of a series name; None if it is `<none>`."""
    kind, name = of(labels, f"{prefix}_kind"), of(labels, f"{prefix}_name")
    if not kind or not name or kind == "<none>" or of(labels, "owner_is_controller") == "false":
        return None
    return Owner(kind, name)


def of_requests(
    containers: Sequence[RequestingContainer], devices: Sequence[ExporterDevice], seen: Observed
) -> list[Demand]:
    """The demands of one node, with the devices that were labelled with each pod."""
    starts, ends = _instants(seen.starts), _instants(seen.ends)
    on: dict[PodName, set[tuple[str, int]]] = {}
    for device in devices:
        for part, pod in device.labelled:
            on.setdefault(pod, set()).add((device.uuid, part))
    found = []
    for one in containers:
        holder = Holder("pod", one.uid, one.pod[0], one.pod[1], one.name)
        for first, last in one.runs:
            reported = _instant_of(starts, one.pod, one.uid), _instant_of(ends, one.pod, one.uid)
            start, end = _edges(first, last, seen, *reported, over=last + 1 in one.over)
            if start < end:
                found.append(Demand(holder, one.resource, one.count, start, end, frozenset(on.get(one.pod, ()))))
    return found


def _instants(series: Sequence[tuple[Labels, float]]) -> dict[tuple[PodName, str], int]:
    """Epoch ms by pod and uid."""
    return {_key(labels): round(seconds * MS_PER_SECOND) for labels, seconds in series if seconds == seconds}  # not NaN


def _instant_of(instants: Mapping[tuple[PodName, str], int], pod: PodName, uid: str) -> int | None:
    """The instant of a pod; if no series names its uid, that of a series without a uid."""
    return instants.get((pod, uid), instants.get((pod, "")))


def _edges(
    first: int, last: int, seen: Observed, started: int | None, ended: int | None, *, over: bool = False
) -> tuple[int, int]:
    """When a container began and ended, from the first and last cell in which it was listed. over: its end was shown by
    a sample in the next cell.

    A sample at s counts for the instants from s to s + window. The first sample therefore lies in the first cell, the
    last one `window - step` before the last cell, and on average the pod lived half a scrape interval longer on both
    sides."""
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


def of_labels(devices: Sequence[ExporterDevice], asked: PodSeries, seen: Observed) -> list[Demand]:
    """The demands if kube-state-metrics was never scraped: a labelled device is held by the pod in its label."""
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
    """The name of the pool that consists of this one part of a device, for parts that only the labels of dcgm-exporter
    show."""
    return f"{uuid}/{part}"


def sharers(device: ExporterDevice, part: int) -> int:
    """The largest number of pods with which a part was labelled at the same time; at least 1. A pod that takes over
    from another within a cell does not count as simultaneous."""
    of_pods = [cells for (number, _), cells in device.labelled.items() if number == part]
    together: dict[int, int] = {}
    for cells in of_pods:
        for cell in cells:
            if cell + 1 in cells:
                together[cell] = together.get(cell, 0) + 1
    return max(together.values(), default=1)


def histories(seen: Observed, *, scheduler: str = "", team_labels: Sequence[str] = ()) -> list[NodeHistory]:
    """The history of each node, ascending.

    scheduler: the assumed scheduler of pods for which kube-state-metrics reports none.
    team_labels: labels of pods to keep."""
    asked = asked_for(seen)
    found = devices_of(seen, {name: pod.node for name, pod in asked.pods.items()}, asked.listed)
    nodes = sorted({device.node for device in found} | {one.node for one in asked.containers} | asked.offered.keys())
    made = []
    for node in nodes:
        own = [device for device in found if device.node == node]
        made.append(_node(node, own, asked, seen, (scheduler, team_labels)))
    return [one for one in made if one.gpus or one.unplaced_us]


def _node(
    node: str, own: list[ExporterDevice], asked: PodSeries, seen: Observed, naming: tuple[str, Sequence[str]]
) -> NodeHistory:
    grid = seen.grid
    whole = (grid.start_ms, grid.end_ms)
    containers = [one for one in asked.containers if one.node == node]
    offered = asked.offered.get(node, {})
    labels = asked.node_labels.get(node, {})
    # HAMi offers each GPU several times, so what the node offers says nothing about its GPUs.
    count = whole_number(labels.get("label_nvidia_com_gpu_count", ""))
    cards = sum(max(1, len(device.slices)) for device in own) or count
    replicas = whole_number(labels.get("label_nvidia_com_gpu_replicas", ""))
    divided = cards is not None and offered.get(WHOLE, 0) > cards and (replicas is None or replicas < 2)
    divided &= not labels.get("label_nvidia_com_gpu_product", "").endswith("-SHARED")  # time-slicing or MPS
    pods = {one.pod for one in containers}
    schedulers = {of(labels, "name") for labels in seen.schedulers if pod_of(labels) in pods} if divided else set()
    limited = any(one.limits for one in containers) or any("hami" in name for name in schedulers)
    limited |= divided and (replicas is not None or any(one.limits for one in asked.containers))
    if not own:
        own_count = {WHOLE: count} if count is not None and count <= MOST_GPUS else {}
        own = assumed_devices(node, own_count if limited else offered, [] if limited else containers, labels)
    parts, clear = 1, True
    if asked.deaf:
        wanted = placeable = of_labels(own, asked, seen)
        slots, pools = _labelled(own)
    else:
        wanted = placeable = of_requests(containers, own, seen)
        slots, pools = _pools(own, offered, wanted)
        listed = [one for one in wanted if one.pool == WHOLE]
        if divided and not limited and listed and not _sliced(listed, cards or 0, schedulers, seen):
            # Parts of time-sliced GPUs or whole GPUs of HAMi: nothing shows which.
            clear = False
            placeable = [replace(one, pool="") if one.pool == WHOLE else one for one in wanted]
        if limited:
            sizes = _sizes(containers, own, labels)
            clear = None not in sizes.values()
            parts, placeable = _in_parts(wanted, sizes)
            slots, pools = _whole_in_parts(own, parts)
    placed = place(placeable, pools, 2 * seen.window_ms)
    layouts, blind = [], {}
    for device in own:
        sampled = grid.spans(device.sampled)
        if asked.deaf:
            known, unseen = sampled, subtract(whole, sampled)
        else:
            there = union([*grid.spans(asked.listed.get(node, ())), *sampled])
            known = tuple(intersect(there, grid.spans(asked.heard)))
            unseen = subtract(whole, union(grid.spans(asked.heard)))
        if not clear:  # some part of each GPU of the node is held, and nobody knows which
            known, unseen = (), [whole]
        lost = grid.spans(asked.unready.get(node, ()))
        layouts.append(device.layout(slots[device.uuid], known, lost))
        blind[device.uuid] = tuple(unseen)
    holds: dict[str, list[SlotHold]] = {}
    for hold in placed.holds:
        holds.setdefault(hold.gpu, []).append(hold)
    facts = facts_of(node, wanted, asked, seen, *naming)
    return NodeHistory(node, tuple(layouts), holds, facts, blind, placed.unplaced_us // parts)


def _sliced(listed: Sequence[Demand], cards: int, schedulers: Collection[str], seen: Observed) -> bool:
    """Whether something shows that a node that offers more GPUs than it has divides them by time-slicing, and does not
    offer each of HAMi's several times.

    Either its pods were placed by Kubernetes' own scheduler, which HAMi replaces in every pod that requests a GPU. Or
    more of them had a GPU at once than there are, and none has a limit: without one, HAMi gives a pod all of a GPU.

    Source: Project-HAMi, pkg/scheduler/webhook.go."""
    if "default-scheduler" in schedulers:
        return True
    # The instants of a handover are not exact, so the last two windows of each do not count.
    edges = [(one.start_ms, 1) for one in listed]
    edges += [(max(one.start_ms, one.end_ms - 2 * seen.window_ms), -1) for one in listed]
    return max(accumulate(step for _, step in sorted(edges))) > cards


_LISTED_PARTS = 1_000
"""Parts of a GPU, to which HAMi's limits are rounded."""


def _sizes(
    containers: Sequence[RequestingContainer], own: Sequence[ExporterDevice], labels: Mapping[str, str]
) -> dict[tuple[str, str], int | None]:
    """The part of a GPU, in thousandths, that HAMi's limits allow a container, by uid and container; None if a limit is
    a size and the GPUs' memory is unknown.

    As in the agent, the part is the larger of the parts of cores and memory, because no other pod can use it, and a
    container without a memory limit has all memory."""
    listed = labels.get("label_nvidia_com_gpu_memory", "")
    model = next((device.model for device in own if device.model), "")
    memory_gb = parse_gpu_model(model).memory_gb or usual_memory_gb(model)
    memory_mib = whole_number(listed) or (memory_gb and memory_gb * 1024)
    found: dict[tuple[str, str], int | None] = {}
    for one in containers:
        cores, size, percent = (one.limits.get(name, 0) for name in ("cores", "memory", "memory percent"))
        if size and not memory_mib:
            found[one.uid, one.name] = None
            continue
        memory = size / memory_mib if size and memory_mib else percent / 100 if percent else 1.0
        found[one.uid, one.name] = max(1, round(min(1.0, max(memory, cores / 100)) * _LISTED_PARTS))
    return found


def _in_parts(wanted: Sequence[Demand], sizes: Mapping[tuple[str, str], int | None]) -> tuple[int, list[Demand]]:
    """The demands in parts of a GPU, and into how many parts each GPU is divided. A demand of unknown size has a pool
    that does not exist, so that it is counted and held on no GPU."""
    each = [sizes[demand.holder.uid, demand.holder.container] for demand in wanted]
    unit = gcd(_LISTED_PARTS, *(size for size in each if size is not None))
    made = []
    for demand, size in zip(wanted, each, strict=True):
        if size is None:
            made.append(replace(demand, pool="", count=demand.count * _LISTED_PARTS // unit))
        else:
            made.append(replace(demand, count=demand.count * size // unit))
    return _LISTED_PARTS // unit, made


def _whole_in_parts(own: Sequence[ExporterDevice], parts: int) -> tuple[dict[str, list[int]], dict[str, list[Slot]]]:
    """The GPUs of a node, each divided into equal parts; GPU by GPU, so that a pod is on one GPU if it fits."""
    slots = {device.uuid: [parts] * max(1, len(device.slices)) for device in own}
    in_order = [(uuid, part) for uuid, counts in slots.items() for part in range(len(counts))]
    return slots, {WHOLE: [(uuid, part, slot) for uuid, part in in_order for slot in range(parts)]}


def _labelled(own: Sequence[ExporterDevice]) -> tuple[dict[str, list[int]], dict[str, list[Slot]]]:
    """Every part of every GPU is a pool of its own."""
    slots = {device.uuid: [sharers(device, part) for part in range(max(1, len(device.slices)))] for device in own}
    pools: dict[str, list[Slot]] = {
        labelled_pool(uuid, part): [(uuid, part, slot) for slot in range(count)]
        for uuid, counts in slots.items()
        for part, count in enumerate(counts)
    }
    return slots, pools


def _pools(
    own: Sequence[ExporterDevice], offered: Mapping[str, int], wanted: Sequence[Demand]
) -> tuple[dict[str, list[int]], dict[str, list[Slot]]]:
    """The slots by GPU and part, and the slots by resource. MIG instances are in the pool of their profile, or
    of whole GPUs if the node offers them as such. The other GPUs are divided between the resources that the node
    offers."""
    names = offered.keys() | {demand.pool for demand in wanted}
    parts: dict[str, list[tuple[str, int]]] = {}
    plain: list[ExporterDevice] = []
    for device in own:
        if not device.slices:
            plain.append(device)
        for number, one in enumerate(device.slices):
            parts.setdefault(_mig_pool(one.profile, names), []).append((device.uuid, number))
    for name, devices in _divided(plain, sorted(n for n in names if "/mig-" not in n), offered, wanted).items():
        parts.setdefault(name, []).extend((device.uuid, 0) for device in devices)
    slots = {device.uuid: [1] * max(1, len(device.slices)) for device in own}
    pools: dict[str, list[Slot]] = {}
    for name, places in parts.items():
        each = max(1, -(-offered.get(name, 0) // len(places)) if places else 1)
        for uuid, part in places:
            slots[uuid][part] = each
        # One slot of each device in turn, so that the first pods get separate devices.
        pools[name] = [(uuid, part, slot) for slot in range(each) for uuid, part in places]
    return slots, pools


_ROUNDING_GB = 2


def _mig_pool(profile: str, names: Collection[str]) -> str:
    """The resource under which Kubernetes offers the instances of a profile.

    It has the profile's name, or that of instances with the same slices and nearly the same memory, because
    dcgm-exporter rounds the memory in another way (1g.11gb for 1g.12gb). Otherwise the node offers its instances as
    whole GPUs (MIG strategy single)."""
    mig = parse_mig_profile(profile)
    if mig is None:
        return WHOLE
    named = f"{MIG_RESOURCE}{mig.resource}"
    if named in names:
        return named
    like = []
    for name in names:
        other = parse_mig_profile(name.removeprefix(MIG_RESOURCE)) if name.startswith(MIG_RESOURCE) else None
        if other is not None and other.slices == mig.slices:
            like.append((other.suffix != mig.suffix, abs(other.memory_gb - mig.memory_gb), name))
    best = min((one for one in like if one[1] <= _ROUNDING_GB), default=None)
    if best is not None:
        return best[2]
    return next((name for name in (WHOLE, f"{WHOLE}.shared") if name in names), named)


def _divided(
    plain: Sequence[ExporterDevice], names: Sequence[str], offered: Mapping[str, int], wanted: Sequence[Demand]
) -> dict[str, list[ExporterDevice]]:
    """Divides the GPUs without MIG among the resources that the node offers. As many as it offers of `nvidia.com/gpu`
    are whole, and the others are shared. The exporter's labels decide which, if there are any."""
    if len(names) < 2:
        return {name: list(plain) for name in names}
    labelled: dict[str, set[str]] = {}
    for demand in wanted:
        for uuid, _ in demand.on:
            labelled.setdefault(demand.pool, set()).add(uuid)
    left = list(plain)
    found: dict[str, list[ExporterDevice]] = {}
    shared = [name for name in names if name != WHOLE]
    for name in [WHOLE, *shared] if WHOLE in names else shared:
        others = {uuid for pool, uuids in labelled.items() if pool != name for uuid in uuids}
        mine = labelled.get(name, set())
        ranked = sorted(left, key=lambda device: (device.uuid not in mine, device.uuid in others, device.order))
        count = min(len(left), offered.get(name, len(mine))) if name != shared[-1] else len(left)
        found[name] = sorted(ranked[:count], key=lambda device: device.order)
        left = [device for device in left if device not in found[name]]
    return found
