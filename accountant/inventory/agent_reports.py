"""What agents say of themselves and of their GPUs, as it is kept with their nodes: the newest release, and the errors
of each GPU, added up over the agents that counted them one after the other.

An agent counts from its start on, and the driver from when it was loaded. A count that has another begin than before,
or is smaller, began again, and is added to what was counted until then. So a restart loses only what happened between
the last report and the restart, and a report that arrives twice counts once. Texts are cut and made printable, and of
too many GPUs and kinds of errors the newest are kept: a node can neither fill the ledger nor be refused for them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Final

from accountant.ledger.protocols import AgentFacts, GpuErrorCount, GpuHealth, NodeFacts
from agent.wire import AgentReport, GpuError, GpuReport
from gputally.base.units import MS_PER_MINUTE
from gputally.base.untrusted_text import as_name

LONGEST_VERSION: Final = 64
"""Characters that are kept of an agent's version."""
STORED_EVERY_MS: Final = 5 * MS_PER_MINUTE
"""The reports of one agent are stored at most this often, because each store is a commit. A later one brings what is
left out."""
MOST_GPUS: Final = 64
MOST_KINDS: Final = 16
"""GPUs of one node, and kinds of errors of one GPU, that are kept."""
_LONGEST: Final = 120
_MOST: Final = 10**15


def reported(
    before: NodeFacts | None,
    cluster: str,
    name: str,
    report: AgentReport | None,
    now_ms: int,
    owns: Callable[[str], bool] = lambda _: True,
) -> NodeFacts | None:
    """The node after its agent said this of itself; None if there is nothing to store.

    owns: whether a GPU belongs to the node; what the agent says of another one does not count."""
    known = before.agent if before is not None else None
    if known is None and report is None:
        return None
    if known is not None and 0 <= now_ms - known.at_ms < STORED_EVERY_MS:
        return None
    said = report or AgentReport()
    gpus = None
    if said.gpus is not None:
        gpus = _added((known.gpus or ()) if known is not None else (), filter(_owned(owns), said.gpus), now_ms)
    told = AgentFacts(as_name(said.version, LONGEST_VERSION), now_ms, gpus)
    if known is not None and replace(known, at_ms=now_ms) == told:
        return None
    return replace(before or NodeFacts(cluster, name, listed=False), agent=told)


def _owned(owns: Callable[[str], bool]) -> Callable[[GpuReport], bool]:
    return lambda gpu: owns(gpu.gpu_uuid)


def _added(before: Iterable[GpuHealth], told: Iterable[GpuReport], now_ms: int) -> tuple[GpuHealth, ...]:
    """The GPUs of a node, by uuid. A GPU that is not told any more, such as one that fell off the bus, keeps its
    errors."""
    known = {gpu.gpu_uuid: gpu for gpu in before}
    gpus = {uuid: replace(gpu, needs=(), unread=()) for uuid, gpu in known.items() if gpu.errors}
    listed = set()
    for gpu in told:
        uuid = as_name(gpu.gpu_uuid)
        listed.add(uuid)
        earlier = known.get(uuid)
        unread = sorted(gpu.unread.items())[:MOST_KINDS]
        gpus[uuid] = GpuHealth(
            uuid,
            _counted(earlier.errors if earlier is not None else (), gpu.errors, now_ms),
            tuple(as_name(need, _LONGEST) for need in gpu.needs[:MOST_KINDS]),
            tuple(f"{as_name(kind, _LONGEST)}: {as_name(why, _LONGEST)}" for kind, why in unread),
        )
    newest = sorted(gpus.values(), key=lambda gpu: (gpu.gpu_uuid not in listed, -(gpu.last_ms or 0), gpu.gpu_uuid))
    return tuple(sorted(newest[:MOST_GPUS], key=lambda gpu: gpu.gpu_uuid))


def _counted(before: Iterable[GpuErrorCount], told: Iterable[GpuError], now_ms: int) -> tuple[GpuErrorCount, ...]:
    known = {error.kind: error for error in before}
    for error in told:
        kind, number = as_name(error.kind, _LONGEST), min(max(0, error.count), _MOST)
        since_ms, last_ms = _instant(error.since_ms, now_ms), _instant(error.last_ms, now_ms)
        earlier = known.get(kind)
        if earlier is None:
            if number:
                known[kind] = GpuErrorCount(kind, number, since_ms, last_ms, number, since_ms)
            continue
        goes_on = earlier.counted_from_ms == since_ms and number >= earlier.counted
        more = number - earlier.counted if goes_on else number
        known[kind] = GpuErrorCount(
            kind, min(earlier.count + more, _MOST), earlier.since_ms,
            max(filter(None, (earlier.last_ms, last_ms, now_ms if more and last_ms is None else None)), default=None),
            number, since_ms,
        )  # fmt: skip
    newest = sorted(known.values(), key=lambda error: (-(error.last_ms or 0), error.kind))
    return tuple(newest[:MOST_KINDS])


def _instant(at_ms: int | None, now_ms: int) -> int | None:
    """An instant as an agent's clock had it, not after now; None if it is none."""
    return None if at_ms is None or at_ms < 0 else min(at_ms, now_ms)
