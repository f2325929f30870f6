"""Knows which GPUs were in service when, on which node, when they were down, and when they were retired.

A GPU is capacity from its first booked record until its node is deleted, or until it has been
unlisted for 24 h while its node still reported others, or until it is retired by command. One that only
an import ever told of is capacity up to its last record: no source says that it still exists. All of it is a
function of what was booked and of the inventory, never of the order in which either came.

Immutable: every commit that changes it makes a new one, so a reader keeps the one of its snapshot.

No other source says it of a machine that was switched off for good and that no cluster or inventory file ever knew:
without records its time would be `unmetered` for ever. A GPU that reports again is capacity again, with what lay
between unmetered (accountant.storage.gpu_lifetimes).
"""

from __future__ import annotations

import json
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

from accountant.core.claim_overlap import Span, intersect, union
from accountant.core.errors import CannotRetire
from accountant.core.periods import Timeline, utc
from accountant.ledger.journal import NewAct
from accountant.ledger.protocols import NamespaceFacts, NodeFacts, RetiredDevice, Retirement
from accountant.storage.query.window_gpu_census import FOREVER, UNLISTED_MS, GpuCensus, Life
from accountant.storage.span_plan import TaggedSpan
from gputally.base.units import MS_PER_HOUR, MS_PER_MINUTE

LINGER_MS = MS_PER_HOUR
"""Records up to so long after their node's deletion are its last words; later ones are a new node."""

NodeKey = tuple[str, str]
"""(cluster, node name)."""


class Tenure(NamedTuple):
    """first_ms: start of the GPU's first booked record on a node. last_ms: end of its newest."""

    first_ms: int
    last_ms: int

    def with_(self, other: Tenure | None) -> Tenure:
        """Around both."""
        if other is None:
            return self
        return Tenure(min(self.first_ms, other.first_ms), max(self.last_ms, other.last_ms))


@dataclass(frozen=True)
class Gpu:
    cluster: str
    uuid: str
    model: str


@dataclass(frozen=True)
class Fleet:
    """gpus: by id. tenures: gpu id -> node -> Tenure. own: of the GPUs that an import told of, what agents metered of
    them, without the import. retired: gpu id -> instant. placed, charged: the histories of nodes and namespaces that
    are not what they have always been."""

    gpus: Mapping[int, Gpu] = field(default_factory=dict)
    tenures: Mapping[int, Mapping[str, Tenure]] = field(default_factory=dict)
    own: Mapping[int, Mapping[str, Tenure]] = field(default_factory=dict)
    nodes: Mapping[NodeKey, NodeFacts] = field(default_factory=dict)
    namespaces: Mapping[NodeKey, NamespaceFacts] = field(default_factory=dict)
    retired: Mapping[int, int] = field(default_factory=dict)
    placed: Mapping[NodeKey, Timeline[NodeFacts]] = field(default_factory=dict)
    charged: Mapping[NodeKey, Timeline[NamespaceFacts]] = field(default_factory=dict)
    _newest: Mapping[NodeKey, int] = field(default_factory=dict, repr=False, compare=False)
    """End of the newest booked record per node. Made from `tenures` unless given with them."""
    _lives: dict[int, Life] = field(default_factory=dict, init=False, repr=False, compare=False)
    _censuses: dict[str | None, GpuCensus] = field(default_factory=dict, init=False, repr=False, compare=False)
    """By cluster, None: of all. Once asked for; commits then carry them forward."""

    def __post_init__(self) -> None:
        if not self._newest:
            newest: dict[NodeKey, int] = {}
            for gpu, nodes in self.tenures.items():
                _advance(newest, self.gpus[gpu].cluster, nodes)
            object.__setattr__(self, "_newest", newest)

    @cached_property
    def newest_end_ms(self) -> int:
        """End of the newest booked record of all; 0 where there is none."""
        return max(self._newest.values(), default=0)

    @cached_property
    def newest_by_cluster(self) -> Mapping[str, int]:
        """End of the newest booked record of each cluster that agents report from and that has a GPU in service."""
        in_service = {
            gpu.cluster for id_, gpu in self.gpus.items() if id_ not in self.retired and self.own.get(id_, True)
        }
        newest: dict[str, int] = {}
        for (cluster, _), end_ms in self._newest.items():
            if cluster in in_service:
                newest[cluster] = max(newest.get(cluster, 0), end_ms)
        return newest

    @cached_property
    def extent(self) -> Span:
        """From the first booked start to the newest booked end; (0, 0) where nothing is booked."""
        starts = [tenure.first_ms for nodes in self.tenures.values() for tenure in nodes.values()]
        return (min(starts), self.newest_end_ms) if starts else (0, 0)

    @property
    def team_labels(self) -> frozenset[str]:
        """The labels by which pods of some namespace may name a team, now or in the past."""
        past = (space for history in self.charged.values() for _, space in history.steps)
        return frozenset(space.label for space in (*self.namespaces.values(), *past) if space.label)

    def node_history(self, key: NodeKey) -> Timeline[NodeFacts]:
        """What a node was labelled, without its down time."""
        return self.placed.get(key) or Timeline.always(self.nodes.get(key) or NodeFacts(*key))

    def namespace_history(self, key: NodeKey) -> Timeline[NamespaceFacts]:
        return self.charged.get(key) or Timeline.always(self.namespaces.get(key) or NamespaceFacts(*key))

    def namespace_at(self, key: NodeKey, at_ms: int) -> NamespaceFacts | None:
        """Who paid for a namespace at an instant; None where nothing is known of it."""
        history = self.charged.get(key)
        return history.at(at_ms) if history is not None else self.namespaces.get(key)

    def node_at(self, key: NodeKey, at_ms: int) -> NodeFacts | None:
        """What a node was labelled at an instant; None where nothing is known of it."""
        history = self.placed.get(key)
        return history.at(at_ms) if history is not None else self.nodes.get(key)

    def metered(self, cluster: str) -> dict[str, Tenure]:
        """From the first to the newest record that an agent booked on each node of a cluster."""
        found: dict[str, Tenure] = {}
        for gpu, tenures in self.tenures.items():
            if self.gpus[gpu].cluster == cluster:
                for node, tenure in self.own.get(gpu, tenures).items():
                    found[node] = tenure.with_(found.get(node))
        return dict(sorted(found.items()))

    def last_ms(self, gpu: int) -> int:
        """End of a GPU's newest booked record; 0 where there is none."""
        return max((t.last_ms for t in self.tenures.get(gpu, {}).values()), default=0)

    def life(self, gpu: int) -> Life:
        """Raises KeyError for a GPU without a booked record."""
        known = self._lives.get(gpu)
        if known is None or (known.end_ms > known.last_ms + UNLISTED_MS and self._unlisted(gpu, known)):
            known = self._lives[gpu] = self._live(gpu)
        return known

    @cached_property
    def clusters(self) -> frozenset[str]:
        """That anything was booked of."""
        return frozenset(cluster for cluster, _ in self._newest)

    @property
    def census(self) -> GpuCensus:
        """All GPUs, counted."""
        return self.census_of(None)

    def census_of(self, cluster: str | None) -> GpuCensus:
        """The GPUs of a cluster, counted; None: of all."""
        found = self._censuses.get(cluster)
        if found is None:
            mine = [gpu for gpu in self.tenures if cluster is None or self.gpus[gpu].cluster == cluster]
            found = GpuCensus.of(mine, self.life, self.newest_end_ms)
            if cluster is None or cluster in self.clusters:
                self._censuses[cluster] = found
        return found

    def _unlisted(self, gpu: int, life: Life) -> bool:
        """Whether its node has reported others for long enough since."""
        return self._newest[self.gpus[gpu].cluster, life.home] >= life.last_ms + UNLISTED_MS

    def _live(self, gpu: int) -> Life:
        cluster = self.gpus[gpu].cluster
        tenures = sorted((t.first_ms, node, t.last_ms) for node, t in self.tenures[gpu].items())
        start = tenures[0][0]
        last, home = max((last, node) for _, node, last in tenures)
        ends = [FOREVER]
        deleted = self.nodes[cluster, home].deleted_ms if (cluster, home) in self.nodes else None
        if deleted is not None and last <= deleted + LINGER_MS:
            ends.append(max(deleted, last))
        if self._newest[cluster, home] >= last + UNLISTED_MS:
            ends.append(last + UNLISTED_MS)
        if gpu in self.own and not self.own[gpu]:
            ends.append(last)
        if self.retired.get(gpu, -1) >= last - LINGER_MS:
            ends.append(max(self.retired[gpu], last))
        end = min(ends)
        down: list[Span] = []
        for (since, node, _), until in zip(tenures, [t[0] for t in tenures[1:]] + [end], strict=True):
            facts = self.nodes.get((cluster, node))
            if facts is not None:
                spans = union((d.start_ms, FOREVER if d.end_ms is None else d.end_ms) for d in facts.down)
                down += intersect(spans, [(since, min(until, end))] if since < min(until, end) else [])
        nodes = tuple((since, node) for since, node, _ in tenures)
        return Life(start, end, last, home, nodes, tuple(union(down)))

    def booked(
        self, changes: Mapping[int, tuple[Gpu, Mapping[str, Tenure]]], own: Mapping[int, Mapping[str, Tenure]]
    ) -> Fleet:
        """With the GPUs of a transaction: their names and all their tenures; own: see the class."""
        fresh = {gpu: named for gpu, (named, _) in changes.items() if self.gpus.get(gpu) != named}
        newest = dict(self._newest)
        for named, nodes in changes.values():
            _advance(newest, named.cluster, nodes)
        after = replace(
            self,
            gpus={**self.gpus, **fresh} if fresh else self.gpus,
            tenures={**self.tenures, **{gpu: nodes for gpu, (_, nodes) in changes.items()}},
            own={**self.own, **own} if own else self.own,
            _newest=newest,
        )
        after._lives.update(self._lives)
        for gpu, (_, nodes) in changes.items():
            known = after._lives.pop(gpu, None)
            if known is not None and after._only_goes_on(gpu, known):
                after._lives[gpu] = known._replace(last_ms=nodes[known.home].last_ms)
        for cluster, before in self._censuses.items():
            mine = [gpu for gpu, (named, _) in changes.items() if cluster in (None, named.cluster)]
            counted = before.changed(mine, self._lives, after.life, after.newest_end_ms)
            if counted is not None:
                after._censuses[cluster] = counted
        return after

    def _only_goes_on(self, gpu: int, before: Life) -> bool:
        """Whether new records of a GPU change nothing about its life but how far it is known: what working
        it out anew, for every GPU of every commit, would find."""
        nodes, facts = self.tenures[gpu], self.nodes.get((self.gpus[gpu].cluster, before.home))
        return (
            before.end_ms == FOREVER
            and len(nodes) == len(before.nodes) == 1
            and nodes[before.home].first_ms == before.start_ms
            and gpu not in self.retired
            and (facts is None or facts.deleted_ms is None)
        )


def _advance(newest: dict[NodeKey, int], cluster: str, nodes: Mapping[str, Tenure]) -> None:
    for node, tenure in nodes.items():
        newest[cluster, node] = max(newest.get((cluster, node), 0), tenure.last_ms)


def blank(node: NodeFacts) -> NodeFacts:
    """The same node with nothing known of it."""
    return NodeFacts(node.cluster, node.name)


def changes_between(
    histories: Iterable[Timeline[NodeFacts]] | Iterable[Timeline[NamespaceFacts]], start_ms: int, end_ms: int
) -> list[int]:
    """The instants inside the span at which one of them changes, ascending."""
    return sorted({at for history in histories for at in history.changes() if start_ms < at < end_ms})


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


def retired_devices(fleet: Fleet, ends: Mapping[int, int]) -> tuple[RetiredDevice, ...]:
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


@dataclass(frozen=True, slots=True)
class InService:
    """GPUs that were capacity, by piece. whole: all of it. parts: how many over which part of a piece."""

    whole: Sequence[int]
    parts: Mapping[int, Mapping[Span, int]]


def in_service(lives: Mapping[Span, int], pieces: Sequence[Span]) -> InService:
    """Of each piece; pieces ascend, follow each other without a hole and are not empty. lives: how many GPUs."""
    parts: dict[int, dict[Span, int]] = {}
    starts = [start for start, _ in pieces]
    changes = [0] * (len(pieces) + 1)
    for (start, end), count in lives.items():
        first, last = bisect_left(starts, start), bisect_right(starts, end) - 1
        if last >= 0 and pieces[last][1] <= end:
            last += 1
        if first < last:
            changes[first] += count
            changes[last] -= count
        for tag in {first - 1, last} if first <= last else {first - 1}:
            if 0 <= tag < len(pieces) and not first <= tag < last:
                low, high = max(start, pieces[tag][0]), min(end, pieces[tag][1])
                if low < high:
                    of_piece = parts.setdefault(tag, {})
                    of_piece[low, high] = of_piece.get((low, high), 0) + count
    return InService(list(accumulate(changes[:-1])), parts)


def lives_in(fleet: Fleet, pieces: Sequence[Span], gpus: Iterable[int]) -> list[dict[Span, int]]:
    """Per piece, how many of these GPUs were capacity over which part of it. Pieces ascend and do not overlap."""
    found: list[dict[Span, int]] = [{} for _ in pieces]
    alike = Counter((life.start_ms, life.end_ms) for life in map(fleet.life, gpus))
    starts = [start for start, _ in pieces]
    for span, count in alike.items():
        for tag, low, high in _inside(span, pieces, starts):
            found[tag][low, high] = found[tag].get((low, high), 0) + count
    return found


def gpus_at(fleet: Fleet, start_ms: int, end_ms: int) -> dict[tuple[str, str], int]:
    """By cluster and node, how many GPUs stood there as capacity for a part of [start_ms, end_ms)."""
    found: Counter[tuple[str, str]] = Counter()
    for gpu in fleet.tenures:
        life = fleet.life(gpu)
        ends = [since for since, _ in life.nodes[1:]] + [life.end_ms]
        there = {
            node
            for (since, node), until in zip(life.nodes, ends, strict=True)
            if max(since, start_ms) < min(until, end_ms)
        }
        found.update((fleet.gpus[gpu].cluster, node) for node in there)
    return dict(found)


def down_in(census: GpuCensus, pieces: Sequence[Span]) -> list[TaggedSpan]:
    """The down time of each GPU in each piece, tagged with the piece. Pieces ascend and do not overlap."""
    starts = [start for start, _ in pieces]
    return [
        TaggedSpan(tag, low, high, gpu)
        for gpu, span in census.down()
        for tag, low, high in _inside(span, pieces, starts)
    ]


def _inside(span: Span, pieces: Sequence[Span], starts: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """(tag, start_ms, end_ms) of what each piece has of the span."""
    start, end = span
    for tag in range(max(0, bisect_right(starts, start) - 1), bisect_left(starts, end)):
        low, high = max(start, pieces[tag][0]), min(end, pieces[tag][1])
        if low < high:
            yield tag, low, high
