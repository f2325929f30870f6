"""Converts Slurm's accounting into GPUs and their holds.

sacct says how many GPUs a job had, on which nodes and when, but not which GPUs, how many on each node, or their
utilisation. So the GPUs of a job are divided evenly over its nodes, and a node has as many GPUs as it is described with
or was seen to need at once, whichever is more. Every GPU-second of a job is on some GPU, so the hours equal Slurm's
exactly.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from accountant.core.claim_overlap import Span
from accountant.history_import.gpu_holds import Demand, GpuLayout, GpuPart, SlotHold, place
from accountant.history_import.import_run import Chunk
from accountant.history_import.kubernetes_history import NodeHistory
from accountant.inventory.slurm_accounting import Fault, Job, facts
from agent.wire import Holder
from gputally.base.units import apportion

MOST_NODES = 65_536
"""Maximum number of nodes of one job."""
_POOL = "gpu"
_RANGE = re.compile(r"(\d{1,9})(?:-(\d{1,9}))?")
_GRES = re.compile(r"gpu(?::([^:(),]+))?:(\d{1,5})(?:\([^)]*\))?(?:,|$)")


@dataclass(frozen=True, slots=True)
class NodeGpus:
    """The described GPUs of a node."""

    gpus: int
    model: str = ""


def node_names(text: str) -> list[str]:
    """`n[01-03,7],login` expanded, in its order. Raises ValueError if the text is not a list of nodes."""
    names: list[str] = []
    for one in _split(text):
        found = [""]
        for part in re.split(r"(\[[^\]]*\])", one):
            inside = _numbers(part[1:-1]) if part.startswith("[") else [part]
            if len(found) * len(inside) + len(names) > MOST_NODES:
                raise ValueError(f"more than {MOST_NODES} nodes")
            found = [head + tail for head in found for tail in inside]
        names += found
    if not names or not all(names) or any(mark in name for name in names for mark in "[], "):
        raise ValueError(f"not a list of nodes: {text[:80]!r}")
    return names


def _split(text: str) -> list[str]:
    """The text split at commas outside brackets."""
    return re.split(r",(?![^\[]*\])", text)


def _numbers(text: str) -> list[str]:
    """`01-03,7` -> 01, 02, 03, 7."""
    found: list[str] = []
    for part in text.split(","):
        match = _RANGE.fullmatch(part)
        if match is None:
            raise ValueError(f"not a range of nodes: {part[:40]!r}")
        first, last = match[1], match[2] or match[1]
        if int(last) - int(first) >= MOST_NODES:
            raise ValueError(f"more than {MOST_NODES} nodes")
        found += [f"{number:0{len(first)}d}" for number in range(int(first), int(last) + 1)]
    return found


def offers(text: str) -> tuple[dict[str, NodeGpus], list[Fault]]:
    """Reads `sinfo --Node --noheader --format '%N|%G'`: a node and its generic resources per line."""
    found: dict[str, NodeGpus] = {}
    faults = []
    for number, line in enumerate(text.splitlines(), start=1):
        name, bar, gres = line.strip().partition("|")
        if not line.strip():
            continue
        kinds = [(match[1] or "", int(match[2])) for match in _GRES.finditer(gres)]
        if not bar or not name:
            faults.append(Fault(f"line {number}", "write NODE|GRES, as gpu-01|gpu:a100:8"))
        elif kinds:
            found[name] = NodeGpus(sum(count for _, count in kinds), max(kinds, key=lambda kind: kind[1])[0])
    return found, faults


class SlurmHistory:
    """The jobs of one Slurm cluster, placed once. until_ms: assumed end of jobs that still run.

    models: the ledger's name for each GPU type of Slurm."""

    def __init__(
        self,
        jobs: Iterable[Job],
        offered: Mapping[str, NodeGpus],
        until_ms: int,
        models: Mapping[str, str] | None = None,
    ) -> None:
        self.faults: list[Fault] = []
        self._until_ms = until_ms
        self._models = models or {}
        self._offered = offered
        self._jobs: dict[str, list[Job]] = {}
        demands: dict[str, list[Demand]] = {}
        types: dict[str, Counter[str]] = {}
        for job in jobs:
            for node, count in self._nodes(job):
                start, end = self._span(job)
                demands.setdefault(node, []).append(
                    Demand(Holder("slurm", job.id, name=f"job {job.id}"), _POOL, count, start, end)
                )
                self._jobs.setdefault(node, []).append(job)
                types.setdefault(node, Counter()).update(job.types)
        self._nodes_of = {node: self._place(node, found, types[node]) for node, found in sorted(demands.items())}
        for node in sorted(offered.keys() - demands.keys()):
            self._nodes_of[node] = self._place(node, [], Counter())
        spans = [(one.start_ms, one.end_ms) for found in demands.values() for one in found]
        self.span: Span | None = (min(s for s, _ in spans), max(e for _, e in spans)) if spans else None

    def read(self, chunk: Chunk) -> list[NodeHistory]:
        """The nodes in one chunk. A node without a description exists from its first job to its last."""
        found = []
        for node, (layouts, holds) in self._nodes_of.items():
            own = {
                uuid: [hold for hold in of_gpu if hold.start_ms < chunk.end_ms and hold.end_ms > chunk.start_ms]
                for uuid, of_gpu in holds.items()
            }
            running = {hold.holder.uid for of_gpu in own.values() for hold in of_gpu}
            told = {job.id: job for job in self._jobs.get(node, ()) if job.id in running}
            found.append(NodeHistory(node, layouts, own, tuple(facts(told[uid], chunk.end_ms) for uid in sorted(told))))
        return found

    def _nodes(self, job: Job) -> Iterator[tuple[str, int]]:
        """The nodes of a job with the number of GPUs held on each."""
        start, end = self._span(job)
        if not job.gpus or start >= end:
            return
        try:
            names = node_names(job.nodes)
        except ValueError as error:
            self.faults.append(Fault(f"job {job.id}", f"{job.gpus} GPUs on {error}"))
            return
        for name, count in zip(names, apportion(job.gpus, [1] * len(names)), strict=True):
            if count:
                yield name, count

    def _span(self, job: Job) -> Span:
        """The job's time; empty if it never began."""
        if job.started_ms is None:
            return 0, 0
        return job.started_ms, min(self._until_ms, job.ended_ms if job.ended_ms is not None else self._until_ms)

    def _place(
        self, node: str, demands: Sequence[Demand], types: Counter[str]
    ) -> tuple[tuple[GpuLayout, ...], dict[str, list[SlotHold]]]:
        offer = self._offered.get(node)
        count = max(_most_at_once(demands), offer.gpus if offer is not None else 0)
        kind = (offer.model if offer is not None else "") or (types.most_common(1)[0][0] if types else "")
        known = (
            (0, self._until_ms)
            if offer is not None
            else (min(one.start_ms for one in demands), max(one.end_ms for one in demands))
        )
        names = [f"imported:slurm/{node}/{number}" for number in range(count)]
        layouts = tuple(GpuLayout(uuid, self._models.get(kind, kind), (GpuPart(),), (known,)) for uuid in names)
        holds: dict[str, list[SlotHold]] = {}
        for hold in place(demands, {_POOL: [(uuid, 0, 0) for uuid in names]}, 0).holds:
            holds.setdefault(hold.gpu, []).append(hold)
        return layouts, holds


def _most_at_once(demands: Iterable[Demand]) -> int:
    changes = [(at, sign * one.count) for one in demands for at, sign in ((one.start_ms, 1), (one.end_ms, -1))]
    held = most = 0
    for _, change in sorted(changes):  # ends before starts at the same instant
        held += change
        most = max(most, held)
    return most
