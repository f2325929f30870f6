"""Which GPUs a command takes out of the capacity, and from when. Pure.

Nobody else says it of a machine that was switched off for good and that no cluster or inventory file ever knew: without
records its time would be `unmetered` for ever. A GPU that reports again is capacity again, with what lay between
unmetered (accountant.store.fleet).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from accountant.errors import CannotRetire
from accountant.journal import NewAct
from accountant.ledger import RetiredDevice, Retirement
from accountant.periods import utc
from accountant.store.fleet import LINGER_MS, Fleet
from agent.units import MS_PER_MINUTE

REPORTING_MS = 15 * MS_PER_MINUTE
"""The longest interval: a GPU with a record so new may have an agent that goes on."""


def retiring(fleet: Fleet, asked: Retirement, at_ms: int, now_ms: int, closed_ms: int) -> dict[int, int]:
    """By GPU id the instant from which each is no capacity: `at_ms`, or the end of its newest record if that is later.

    closed_ms: what was capacity before it stays so. Raises CannotRetire, and then none is to be retired."""
    if at_ms > now_ms:
        raise CannotRetire(f"{utc(at_ms)} is yet to come")
    if at_ms < closed_ms:
        raise CannotRetire(f"the months before {utc(closed_ms)} are closed: retire from then on, or later")
    chosen = _chosen(fleet, asked)
    ends = {gpu: max(at_ms, fleet.last_ms(gpu)) for gpu in chosen if fleet.life(gpu).end_ms > at_ms}
    for gpu in sorted(ends, key=lambda one: fleet.gpus[one].uuid):
        last, name = fleet.last_ms(gpu), f"GPU {fleet.gpus[gpu].uuid} of {fleet.life(gpu).home}"
        if last + REPORTING_MS > now_ms:
            raise CannotRetire(f"{name} reported until {utc(last)}, just now: stop its agent first")
        if fleet.retired.get(gpu, -1) >= last - LINGER_MS:
            raise CannotRetire(f"{name} is retired already, from {utc(fleet.life(gpu).end_ms)} on")
    if not ends:
        raise CannotRetire(f"none of these GPUs counts as capacity at {utc(at_ms)}")
    return ends


def _chosen(fleet: Fleet, asked: Retirement) -> Sequence[int]:
    cluster = asked.cluster or _only(fleet)
    here = {gpu: one for gpu, one in fleet.gpus.items() if one.cluster == cluster and gpu in fleet.tenures}
    homes = {gpu: fleet.life(gpu).home for gpu in here}
    if asked.node and asked.node not in homes.values():
        raise CannotRetire(f"cluster {cluster!r} has no GPU that was seen on node {asked.node!r} last")
    mine = {one.uuid: gpu for gpu, one in here.items() if asked.node in ("", homes[gpu])}
    unknown = sorted(set(asked.gpus) - mine.keys())
    if unknown:
        where = f"node {asked.node!r}" if asked.node else f"cluster {cluster!r}"
        raise CannotRetire(f"{where} has no GPU {unknown[0]!r}")
    return [mine[uuid] for uuid in asked.gpus] if asked.gpus else list(mine.values())


def _only(fleet: Fleet) -> str:
    clusters = sorted(fleet.clusters)
    if len(clusters) != 1:
        known = ", ".join(map(repr, clusters)) or "none"
        raise CannotRetire(f"name the cluster; the ledger knows {known}")
    return clusters[0]


def listed(fleet: Fleet, ends: Mapping[int, int]) -> tuple[RetiredDevice, ...]:
    """What is done by it, by node and GPU."""
    made = (
        RetiredDevice(
            cluster=fleet.gpus[gpu].cluster,
            node=fleet.life(gpu).home,
            gpu_uuid=fleet.gpus[gpu].uuid,
            gpu_model=fleet.gpus[gpu].model,
            last_ms=fleet.last_ms(gpu),
            end_ms=end,
        )
        for gpu, end in ends.items()
    )
    return tuple(sorted(made, key=lambda one: (one.node, one.gpu_uuid)))


def act_of(found: Sequence[RetiredDevice], now_ms: int, who: str, reason: str) -> NewAct:
    """What the journal keeps of it."""
    nodes = sorted({one.node for one in found})
    content = [{"node": one.node, "gpu": one.gpu_uuid, "end_ms": one.end_ms} for one in found]
    return NewAct(now_ms, "retired", f"{found[0].cluster}/{','.join(nodes)}", who, reason, json.dumps(content))
