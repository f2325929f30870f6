"""From what was scraped of a Kubernetes cluster to GPUs, their holds and their pods. Pure.

Two witnesses: kube-state-metrics knows which containers asked for how many GPUs of which node, and when the pod began
and ended; dcgm-exporter knows the devices, how busy they were, and mostly which pod each was given to. Where only one
of them was scraped the other's part is inferred: without the first, a labelled device is a held one; without the
second, a node has as many GPUs as it says it can allocate, under makeshift names, and nothing is known of their use.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from accountant.importing import demands
from accountant.importing.asked import Asked, asked_for
from accountant.importing.devices import Device, devices_of, makeshift
from accountant.importing.layout import GpuLayout, Hold
from accountant.importing.placing import Demand, Slot, place
from accountant.importing.pods import facts_of
from accountant.importing.series import Observed
from accountant.overlap import Span, intersect, subtract, union
from agent.wire import PodFacts

WHOLE = "nvidia.com/gpu"


@dataclass(frozen=True, slots=True)
class NodeHistory:
    """One node in one chunk. blind: by GPU, the time in which nobody was watching it. unplaced_us: see Placed."""

    node: str
    gpus: tuple[GpuLayout, ...]
    holds: Mapping[str, Sequence[Hold]]
    facts: tuple[PodFacts, ...] = ()
    blind: Mapping[str, tuple[Span, ...]] = field(default_factory=dict)
    unplaced_us: int = 0


def histories(seen: Observed, *, scheduler: str = "", team_labels: Sequence[str] = ()) -> list[NodeHistory]:
    """By node, ascending. scheduler: who places pods of which kube-state-metrics does not say it. team_labels: labels
    of pods to keep."""
    asked = asked_for(seen)
    found = devices_of(seen, {name: pod.node for name, pod in asked.pods.items()}, asked.listed)
    nodes = sorted({device.node for device in found} | {one.node for one in asked.containers} | asked.offered.keys())
    made = []
    for node in nodes:
        own = [device for device in found if device.node == node]
        made.append(_node(node, own, asked, seen, (scheduler, team_labels)))
    return [one for one in made if one.gpus]


def _node(node: str, own: list[Device], asked: Asked, seen: Observed, naming: tuple[str, Sequence[str]]) -> NodeHistory:
    grid = seen.grid
    whole = (grid.start_ms, grid.end_ms)
    containers = [one for one in asked.containers if one.node == node]
    offered = asked.offered.get(node, {})
    if not own:
        own = makeshift(node, offered, containers, asked.labels_of(node))
    if asked.deaf:
        wanted = demands.of_labels(own, asked, seen)
        slots, pools = _labelled(own)
    else:
        wanted = demands.of_requests(containers, own, seen)
        slots, pools = _pools(own, offered, wanted)
    placed = place(wanted, pools, 2 * seen.window_ms)
    layouts, blind = [], {}
    for device in own:
        sampled = grid.spans(device.sampled)
        if asked.deaf:
            known, unseen = sampled, subtract(whole, sampled)
        else:
            there = union([*grid.spans(asked.listed.get(node, ())), *sampled])
            known = tuple(intersect(there, grid.spans(asked.heard)))
            unseen = subtract(whole, union(grid.spans(asked.heard)))
        lost = grid.spans(asked.unready.get(node, ()))
        layouts.append(device.layout(slots[device.uuid], known, lost))
        blind[device.uuid] = tuple(unseen)
    holds: dict[str, list[Hold]] = {}
    for hold in placed.holds:
        holds.setdefault(hold.gpu, []).append(hold)
    facts = facts_of(node, wanted, asked, seen, *naming)
    return NodeHistory(node, tuple(layouts), holds, facts, blind, placed.unplaced_us)


def _labelled(own: Sequence[Device]) -> tuple[dict[str, list[int]], dict[str, list[Slot]]]:
    """Every part of every GPU is a pool of its own."""
    slots = {
        device.uuid: [demands.sharers(device, part) for part in range(max(1, len(device.slices)))] for device in own
    }
    pools: dict[str, list[Slot]] = {
        demands.labelled_pool(uuid, part): [(uuid, part, slot) for slot in range(count)]
        for uuid, counts in slots.items()
        for part, count in enumerate(counts)
    }
    return slots, pools


def _pools(
    own: Sequence[Device], offered: Mapping[str, int], wanted: Sequence[Demand]
) -> tuple[dict[str, list[int]], dict[str, list[Slot]]]:
    """(slots by GPU and part, slots by resource). Instances are the pool of their profile, or of whole GPUs where the
    node offers them as such; the other GPUs are divided between the resources that the node offers."""
    names = offered.keys() | {demand.pool for demand in wanted}
    parts: dict[str, list[tuple[str, int]]] = {}
    plain: list[Device] = []
    for device in own:
        if not device.slices:
            plain.append(device)
        for number, one in enumerate(device.slices):
            named = f"nvidia.com/mig-{one.profile.replace('+', '.')}"
            parts.setdefault(named if named in names or WHOLE not in names else WHOLE, []).append((device.uuid, number))
    for name, devices in _divided(plain, sorted(n for n in names if "/mig-" not in n), offered, wanted).items():
        parts.setdefault(name, []).extend((device.uuid, 0) for device in devices)
    slots = {device.uuid: [1] * max(1, len(device.slices)) for device in own}
    pools: dict[str, list[Slot]] = {}
    for name, places in parts.items():
        each = max(1, -(-offered.get(name, 0) // len(places)) if places else 1)
        for uuid, part in places:
            slots[uuid][part] = each
        # Round by round, so that whoever comes first has a device to itself.
        pools[name] = [(uuid, part, slot) for slot in range(each) for uuid, part in places]
    return slots, pools


def _divided(
    plain: Sequence[Device], names: Sequence[str], offered: Mapping[str, int], wanted: Sequence[Demand]
) -> dict[str, list[Device]]:
    """GPUs that are not partitioned, by the resource that they are offered as. Whole ones are offered once each; what
    is left over is shared. Labels say which, where there are any."""
    if len(names) < 2:
        return {name: list(plain) for name in names}
    labelled: dict[str, set[str]] = {}
    for demand in wanted:
        for uuid, _ in demand.on:
            labelled.setdefault(demand.pool, set()).add(uuid)
    left = list(plain)
    found: dict[str, list[Device]] = {}
    shared = [name for name in names if name != WHOLE]
    for name in [WHOLE, *shared] if WHOLE in names else shared:
        others = {uuid for pool, uuids in labelled.items() if pool != name for uuid in uuids}
        mine = labelled.get(name, set())
        ranked = sorted(left, key=lambda device: (device.uuid not in mine, device.uuid in others, device.order))
        count = min(len(left), offered.get(name, len(mine))) if name != shared[-1] else len(left)
        found[name] = sorted(ranked[:count], key=lambda device: device.order)
        left = [device for device in left if device not in found[name]]
    return found
