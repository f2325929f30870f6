"""Converts the jobs in Slurm's accounting into GPUs and their holds.

Slurm says how many GPUs of each type a job had, on which nodes and when. It does not say which GPUs, how many on each
node, or their utilisation. A node has the GPUs that sinfo says, and never more. A node that sinfo does not describe has
as many as its jobs needed at once, from its first job to its last.

Jobs are assigned to pools, of which each is one GPU type of one node. Jobs with the least choice are first: those with
an end before those without one (which may have ended long ago), those on fewer nodes first, then by start. A job is
divided evenly over its nodes as far as their GPUs are free for its whole time. What is left takes whatever is free at
each moment. The rest is *unplaced*: it is counted, and held on no GPU, so that no GPU has more than its time.

A part of a GPU (`gres/shard`, `gres/mps`) is counted as the part it is: on a node with 2 GPUs and 8 shards, a shard is
a quarter of a GPU. A MIG instance is the part of a GPU that its profile says.

All other time of a job is left out with a reason, as a `Fault`."""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import lru_cache
from itertools import groupby, pairwise
from math import lcm

from accountant.core.claim_overlap import Span
from accountant.core.node_lists import node_names
from accountant.histories.slurm.job_records import MOST_GPUS, JobRecord, NodeGpus, facts
from accountant.history_import.gpu_assignment import (
    Demand,
    GpuLayout,
    GpuPart,
    NodeHistory,
    Slot,
    SlotHold,
    mig_slice,
    pack_instances,
    place,
)
from accountant.history_import.protocol import Chunk, Fault
from agent.wire import Holder, Slice
from gputally.base.apportionment import apportion
from gputally.base.mig_profiles import parse_mig_profile
from gputally.base.units import US_PER_MS

_ANY = "*"
"""The type of GPUs of which the record does not say the type."""


@dataclass(slots=True)
class _Levels:
    """The number of slots of one pool that are taken at each time.

    most: the number of slots.
    grows: whether the pool has only as many slots as are taken at once, because sinfo does not describe the node."""

    most: int
    grows: bool = False
    times: list[int] = field(default_factory=list)
    taken: list[int] = field(default_factory=list)
    """The level from each of the `times` on."""
    grants: list[tuple[JobRecord, int, int, int, bool]] = field(default_factory=list)
    """(job, slots, start, end, whether it has a part of a GPU)."""

    def free(self, start: int, end: int) -> int:
        """The slots that are free during the whole span."""
        first = max(0, bisect_right(self.times, start) - 1)
        return self.most - max(self.taken[first : bisect_left(self.times, end)], default=0)

    def take(self, job: JobRecord, slots: int, start: int, end: int, *, part: bool) -> None:
        for at in (start, end):
            place_of = bisect_left(self.times, at)
            if place_of == len(self.times) or self.times[place_of] != at:
                self.times.insert(place_of, at)
                self.taken.insert(place_of, self.taken[place_of - 1] if place_of else 0)
        for number in range(bisect_left(self.times, start), bisect_left(self.times, end)):
            self.taken[number] += slots
        self.grants.append((job, slots, start, end, part))

    def edges(self, start: int, end: int) -> list[int]:
        return self.times[bisect_right(self.times, start) : bisect_left(self.times, end)]

    @property
    def slots(self) -> int:
        return max(self.taken, default=0) if self.grows else self.most


@dataclass(frozen=True, slots=True)
class _Request:
    """Slots that a job has on some of the pools, in order of its nodes: by node, the pools and the slots of one GPU or
    part."""

    job: JobRecord
    count: int
    pools: Mapping[str, Sequence[str]]
    kind: str
    start: int
    end: int

    @property
    def order(self) -> tuple[object, ...]:
        choice = sum(map(len, self.pools.values()))
        return self.job.ended_ms is None, choice, self.start, self.job.cluster, self.job.id, self.kind


class SlurmHistory:
    """The jobs of one Slurm cluster. The constructor assigns them to nodes and GPUs, and `read` returns those of one
    chunk.

    until_ms: the end of jobs that have none yet; later ends are cut to it.
    models: the ledger's name for each GPU type of Slurm."""

    def __init__(
        self,
        jobs: Iterable[JobRecord],
        offered: Mapping[str, NodeGpus],
        until_ms: int,
        models: Mapping[str, str] | None = None,
    ) -> None:
        self.faults: list[Fault] = []
        self._until_ms = until_ms
        self._models = models or {}
        self._offered = offered
        self._pools: dict[tuple[str, str], _Levels] = {
            (node, kind): _Levels(count * self._slots_of(node, kind))
            for node, offer in offered.items()
            for kind, count in offer.types.items()
        }
        self._unplaced: list[tuple[JobRecord, int, int, int]] = []
        """(job, millionths of a GPU, start, end) of time that is on no GPU."""
        runs = list(self._one_run_at_a_time(jobs))
        self._seen = _types_of(runs)
        requests = [request for job in runs for request in self._requests(job)]
        for request in sorted(requests, key=lambda one: one.order):
            self._assign(request)
        self._nodes_of = {node: self._place(node, pools) for node, pools in self._by_node()}
        held = [(request.start, request.end) for request in requests] + [
            (start, end) for *_, start, end in self._unplaced
        ]
        self.span: Span | None = (min(s for s, _ in held), max(e for _, e in held)) if held else None

    def read(self, chunk: Chunk) -> list[NodeHistory]:
        """The nodes in one chunk. A node without a description exists from its first job to its last."""
        found = []
        unplaced = self._unplaced_in(chunk)
        for node, (layouts, holds, jobs_of) in self._nodes_of.items():
            own = {
                uuid: [hold for hold in of_gpu if hold.start_ms < chunk.end_ms and hold.end_ms > chunk.start_ms]
                for uuid, of_gpu in holds.items()
            }
            running = {hold.holder.uid for of_gpu in own.values() for hold in of_gpu}
            jobs = {job.id: job for job in jobs_of if job.id in running}
            about = tuple(facts(jobs[uid], chunk.end_ms) for uid in sorted(jobs))
            found.append(NodeHistory(node, layouts, own, about, unplaced_us=unplaced.pop(node, 0)))
        # Time of jobs that are on no node of the ledger at all.
        found += [NodeHistory(node, (), {}, unplaced_us=us) for node, us in sorted(unplaced.items())]
        return found

    def _one_run_at_a_time(self, jobs: Iterable[JobRecord]) -> Iterator[JobRecord]:
        """The runs with their true ends: a job that started again had ended before."""
        by_id = sorted(jobs, key=lambda job: (job.cluster, job.id, job.started_ms or 0))
        for _, group in groupby(by_id, key=lambda job: (job.cluster, job.id)):
            runs = list(group)
            for job, following in zip(runs, [*runs[1:], None], strict=True):
                limit = following.started_ms if following is not None else None
                runs_on = limit is not None and job.started_ms is not None and not job.doubt
                yield replace(job, ended_ms=min(limit, job.ended_ms or limit)) if runs_on and limit is not None else job

    def _requests(self, job: JobRecord) -> Iterator[_Request]:
        """What a job has on which pools. A job whose time or place is not known becomes a fault."""
        if not job.gpus and not job.shares:
            return
        if job.doubt:
            self._leave_out(job, job.doubt)
            return
        if job.started_ms is None or job.started_ms >= self._until_ms:
            return
        start, end = job.started_ms, min(self._until_ms, job.ended_ms if job.ended_ms is not None else self._until_ms)
        if start >= end:
            return
        try:
            names = _names(job.nodes)
        except ValueError as error:
            self._leave_out(job, str(error), start, end)
            return
        if job.gpus > MOST_GPUS * len(names):
            self._leave_out(job, f"more than {MOST_GPUS} GPUs on a node", start, end)
            return
        typed = job.types if sum(job.types.values()) <= job.gpus else {}
        counts = {**typed, _ANY: job.gpus - sum(typed.values())}
        for kind, count in counts.items():
            if count:
                yield _Request(job, count, {node: self._pools_for(node, kind) for node in names}, "", start, end)
        for kind, count in job.shares.items():
            able = [node for node in names if kind in self._offered.get(node, NodeGpus({})).shares]
            if not able:
                self._leave_out(job, f"sinfo does not say how many parts ({kind}) the GPUs of {job.nodes[:80]} have")
            else:
                pools = {node: self._pools_for(node, _ANY) for node in able}
                yield _Request(job, count, pools, kind, start, end)

    def _leave_out(self, job: JobRecord, reason: str, start: int | None = None, end: int | None = None) -> None:
        what = f"{job.gpus} GPUs" if job.gpus else ", ".join(f"{n} {kind}" for kind, n in job.shares.items())
        self.faults.append(Fault(f"job {job.id}", f"its time on {what} is left out: {reason}"))
        if start is not None and end is not None:
            self._unplaced.append((job, job.gpus * _PPM, start, end))

    def _pools_for(self, node: str, kind: str) -> list[str]:
        """The pools of a node on which GPUs of a type can be: those of this type, of one whose name contains the other
        name (as Slurm compares them), or any."""
        offer = self._offered.get(node)
        if offer is None:
            kind = self._seen.get(node, "") if kind == _ANY else kind
            self._pools.setdefault((node, kind), _Levels(MOST_GPUS, grows=True))
            return [kind]
        same = [one for one in offer.types if one.casefold() == kind.casefold()]
        like = [one for one in offer.types if one and _mig_of(one) == _mig_of(kind) and _contain(one, kind)]
        whole = [one for one in offer.types if _mig_of(one) is None]
        return same or like or whole or list(offer.types)

    def _slots_of(self, node: str, kind: str) -> int:
        """The slots of one GPU of a pool: 1, or so many that each part that sinfo names is a whole number of them."""
        offer = self._offered.get(node)
        if offer is None or _mig_of(kind) is not None:
            return 1
        return lcm(*(part.denominator for part in _parts(offer).values())) if offer.shares else 1

    def _assign(self, request: _Request) -> None:
        """Gives a request its slots: evenly and for its whole time, then what is free at each moment."""
        each = {node: self._slots_of_one(node, pools, request.kind) for node, pools in request.pools.items()}
        left = request.count
        free = {
            node: self._free(node, pools, request.start, request.end, each[node])
            for node, pools in request.pools.items()
        }
        given = Counter[str]()
        while left and free:
            shares = apportion(left, [1] * len(free))
            for node, share in zip(list(free), shares, strict=True):
                room = free[node]
                count = min(share, room - given[node])
                given[node] += count
                left -= count
                if given[node] >= room:
                    del free[node]
        for node, count in given.items():
            self._take(request, node, count, each[node], request.start, request.end)
        if left:
            self._fill(request, left, each)

    def _fill(self, request: _Request, count: int, each: Mapping[str, int]) -> None:
        edges = {request.start, request.end}
        for node, pools in request.pools.items():
            edges.update(at for pool in pools for at in self._pools[node, pool].edges(request.start, request.end))
        for start, end in pairwise(sorted(edges)):
            left = count
            for node, pools in request.pools.items():
                room = self._free(node, pools, start, end, each[node])
                some = min(left, room)
                self._take(request, node, some, each[node], start, end)
                left -= some
            if left:
                self._unplaced.append((request.job, left * self._ppm(request), start, end))

    def _ppm(self, request: _Request) -> int:
        """The size of one GPU or part of a request, in millionths of a GPU."""
        node, pools = next(iter(request.pools.items()))
        if request.kind:
            return int(_parts(self._offered[node])[request.kind] * _PPM)
        mig = self._instance(node, pools[0], 0)
        return _PPM if mig is None else _PPM * mig.compute // mig.compute_of

    def _slots_of_one(self, node: str, pools: Sequence[str], kind: str) -> int:
        slots = self._slots_of(node, pools[0])
        return int(_parts(self._offered[node])[kind] * slots) if kind else slots

    def _free(self, node: str, pools: Sequence[str], start: int, end: int, each: int) -> int:
        return sum(self._pools[node, pool].free(start, end) // each for pool in pools)

    def _take(self, request: _Request, node: str, count: int, each: int, start: int, end: int) -> None:
        for pool in request.pools[node]:
            levels = self._pools[node, pool]
            some = min(count, levels.free(start, end) // each)
            if some:
                levels.take(request.job, some * each, start, end, part=bool(request.kind))
            count -= some

    def _by_node(self) -> Iterator[tuple[str, list[tuple[str, _Levels]]]]:
        found: dict[str, list[tuple[str, _Levels]]] = {}
        for (node, kind), levels in sorted(self._pools.items(), key=lambda one: one[0]):
            if levels.slots:
                found.setdefault(node, []).append((kind, levels))
        yield from sorted(found.items())

    def _place(
        self, node: str, pools: Sequence[tuple[str, _Levels]]
    ) -> tuple[tuple[GpuLayout, ...], dict[str, list[SlotHold]], list[JobRecord]]:
        """The GPUs of a node, pool by pool, with the holds on them and the jobs that hold them."""
        whole = [(start, end) for _, levels in pools for _, _, start, end, _ in levels.grants]
        described = node in self._offered
        known = (0, self._until_ms) if described else (min(s for s, _ in whole), max(e for _, e in whole))
        layouts: list[GpuLayout] = []
        slots: dict[str, list[Slot]] = {}
        demands: list[Demand] = []
        jobs: list[JobRecord] = []
        for kind, levels in pools:
            count = levels.slots // self._slots_of(node, kind)
            made, slots[kind] = self._gpus(node, kind, count, len(layouts), known)
            layouts += made
            # A part takes the last GPUs first, so that the first ones stay whole.
            slots[f"{kind}/parts"] = slots[kind][::-1]
            for job, taken, start, end, part in levels.grants:
                holder = Holder("slurm", job.id, name=f"job {job.id}")
                demands.append(Demand(holder, f"{kind}/parts" if part else kind, taken, start, end))
                jobs.append(job)
        holds: dict[str, list[SlotHold]] = {}
        for hold in place(demands, slots, 0).holds:
            holds.setdefault(hold.gpu, []).append(hold)
        return tuple(layouts), holds, jobs

    def _gpus(self, node: str, kind: str, count: int, first: int, known: Span) -> tuple[list[GpuLayout], list[Slot]]:
        """`count` GPUs (or MIG instances, which are packed on GPUs) of one pool and their slots. first: the number of
        the first GPU."""
        model = self._model(node, kind)
        instances = [one for number in range(count) if (one := self._instance(node, kind, number)) is not None]
        if instances:
            packed = pack_instances(instances)
            parts = [tuple(GpuPart(one) for one in of_gpu) for of_gpu in packed]
        else:
            parts = [(GpuPart(slots=self._slots_of(node, kind)),)] * count
        layouts, slots = [], list[Slot]()
        for number, of_gpu in enumerate(parts, start=first):
            uuid = f"imported:slurm/{node}/{number}"
            layouts.append(GpuLayout(uuid, model, of_gpu, (known,)))
            slots += [(uuid, at, slot) for at, part in enumerate(of_gpu) for slot in range(part.slots)]
        return layouts, slots

    def _model(self, node: str, kind: str) -> str:
        """The model of the GPUs of a pool. The type of a MIG instance is that of a profile, which is no model: the
        model stands before it, or is that of the other GPUs of the node if they have only one."""
        profile = _mig_of(kind)
        if kind in self._models or profile is None:
            return self._models.get(kind, kind)
        before = kind[: -len(profile)].rstrip("_-.:/")
        types = self._offered.get(node, NodeGpus({})).types
        others = {one for one in types if one and _mig_of(one) is None}
        name = before or (next(iter(others)) if len(others) == 1 else "")
        return self._models.get(name, name)

    def _instance(self, node: str, kind: str, number: int) -> Slice | None:
        profile = _mig_of(kind)
        return None if profile is None else mig_slice(profile, number, self._model(node, kind))

    def _unplaced_in(self, chunk: Chunk) -> dict[str, int]:
        """GPU-microseconds on no GPU in a chunk, by the first node of the job."""
        found = Counter[str]()
        for job, ppm, start, end in self._unplaced:
            span_ms = min(end, chunk.end_ms) - max(start, chunk.start_ms)
            if span_ms > 0:
                found[_first_node(job.nodes)] += span_ms * US_PER_MS * ppm // _PPM
        return dict(found)


_PPM = 1_000_000


def _types_of(jobs: Iterable[JobRecord]) -> dict[str, str]:
    """The GPU type of which each node's jobs had most."""
    counts: dict[str, Counter[str]] = {}
    for job in jobs:
        if job.types:
            with suppress(ValueError):
                for node in _names(job.nodes):
                    counts.setdefault(node, Counter()).update(job.types)
    return {node: kinds.most_common(1)[0][0] for node, kinds in counts.items()}


def _contain(one: str, other: str) -> bool:
    return one.casefold() in other.casefold() or other.casefold() in one.casefold()


def _first_node(nodes: str) -> str:
    try:
        return _names(nodes)[0]
    except ValueError:
        return ""


def _parts(offer: NodeGpus) -> dict[str, Fraction]:
    """The part of a GPU that one shard of each kind is, on a node whose GPUs are divided into them together."""
    gpus = sum(count for kind, count in offer.types.items() if _mig_of(kind) is None)
    return {kind: Fraction(gpus, count) for kind, count in offer.shares.items() if count}


@lru_cache(maxsize=10_000)
def _names(nodes: str) -> tuple[str, ...]:
    """The nodes of a list, each once. Raises ValueError."""
    return tuple(dict.fromkeys(node_names(nodes)))


@lru_cache(maxsize=1_000)
def _mig_of(kind: str) -> str | None:
    """The MIG profile at the end of a GPU type (`1g.10gb`, `nvidia_a100_1g.10gb`); None if the type is not MIG."""
    match = _PROFILE_AT_END.search(kind)
    return match[0] if match is not None and parse_mig_profile(match[0]) is not None else None


_PROFILE_AT_END = re.compile(r"(?<!\d)(?:\d+c\.)?\d+g\.\d+gb(?:[-+.]\w[\w.+]*)?$", re.IGNORECASE)
