"""Determines when each GPU was in service, down or retired, and on which node; and which GPUs may be retired or moved.

A GPU is capacity from its first booked record until its node is deleted, until it has been missing from its node's
reports for 24 h, or until it is retired by command. If another machine gets the node's name, or the machine boots
again, and reports other GPUs but not this one, the GPU is capacity up to its last record. So is a GPU known only from
an import, because no source says that it still exists. All this depends only on the booked records, the inventory and
the retirements, not on the order in which they arrived.

Retiring by command is for machines that were switched off for good and are in no cluster or inventory file. Without it
their time would be `unmetered` forever. A retired GPU that reports again is capacity again, and the time in between is
unmetered.

`GpuLifetimes` is immutable: every commit that changes it creates a new one, so a reader keeps the one of its snapshot.

`GpuCensus` counts the GPUs in service without listing them. Of ten thousand GPUs nearly all are alike: they were
installed with their rack, and their newest record ends in the last minute. A query therefore takes time in proportion
to the number of different lifetimes, and each commit updates the counts. GPUs that were ever down, or that may have
disappeared, are few and are stored individually.

`read_owners` reads which node each GPU belonged to, and `movable_gpus` decides which GPUs an administrator may move."""

from __future__ import annotations

import json
import math
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from operator import attrgetter
from typing import NamedTuple

from accountant.core.claim_overlap import Span, intersect, union
from accountant.core.errors import CannotMove, CannotRetire
from accountant.core.periods import Timeline, utc
from accountant.ledger.journal import NewAct
from accountant.ledger.protocols import (
    GpuClaim,
    GpuMove,
    GpuOwner,
    GpuOwnership,
    NamespaceFacts,
    NodeFacts,
    RetiredDevice,
    Retirement,
)
from accountant.storage.duckdb_engine import Cursor
from accountant.storage.span_splitting import TaggedSpan
from accountant.storage.write.gpu_and_pod_ownership import OwnedGpu, Ownership, with_owner
from accountant.storage.write.record_columns import GpuName
from gputally.base.units import MS_PER_DAY, MS_PER_HOUR, MS_PER_MINUTE

FOREVER = 2**62
UNLISTED_MS = MS_PER_DAY
"""A GPU without a record for so long, on a node that still reports other GPUs, is gone."""


class Life(NamedTuple):
    """The time during which one GPU is capacity; `end_ms` is FOREVER until it ends.

    home: the node of the GPU's newest record.
    nodes: (since_ms, node) of every node that the GPU was on, ascending from start_ms.
    down: spans within the life in which the node could not be used."""

    start_ms: int
    end_ms: int
    last_ms: int
    home: str
    nodes: tuple[tuple[int, str], ...]
    down: tuple[Span, ...]

    def node_at(self, at_ms: int) -> str:
        """Return the node at an instant; before the first record, the node of the first record."""
        name = self.nodes[0][1]
        for since, node in self.nodes:
            if since <= at_ms:
                name = node
        return name


Lifetime = tuple[int, int, int]
"""(start_ms, end_ms, last_ms) of a GPU that was never down."""
LifeOf = Callable[[int], Life]


@dataclass(frozen=True, slots=True)
class GpuCensus:
    """Counts GPUs by lifetime (`counts`). GPUs that were ever down, or that may have disappeared, are stored
    individually by id.

    until_ms: while all records of the fleet end before this instant, no counted GPU in service can have been missing
        for UNLISTED_MS."""

    counts: Mapping[Lifetime, int]
    individual: Mapping[int, Life]
    until_ms: int

    @classmethod
    def of(cls, gpus: Iterable[int], life: LifeOf, newest_ms: int) -> GpuCensus:
        """Count these GPUs. `newest_ms` is the end of the newest record of the fleet."""
        counts: Counter[Lifetime] = Counter()
        individual: dict[int, Life] = {}
        for gpu in gpus:
            one = life(gpu)
            if _is_individual(one, newest_ms):
                individual[gpu] = one
            else:
                counts[one.start_ms, one.end_ms, one.last_ms] += 1
        return cls(counts, individual, _until(counts))

    def changed(
        self, gpus: Iterable[int], before_of: Mapping[int, Life], life: LifeOf, newest_ms: int
    ) -> GpuCensus | None:
        """Return the census after a commit with records of these GPUs, or None if all GPUs must be counted again.
        `before_of` are the lives before the commit."""
        if newest_ms >= self.until_ms:
            return None
        counts, individual = dict(self.counts), dict(self.individual)
        unseen = [gpu for gpu, one in individual.items() if _may_be_gone(one, newest_ms)]
        for gpu in {*gpus, *unseen}:
            now, before = life(gpu), before_of.get(gpu)
            if individual.pop(gpu, None) is None and before is not None:
                key = before.start_ms, before.end_ms, before.last_ms
                left = counts[key] - 1
                if left:
                    counts[key] = left
                else:
                    del counts[key]
            if _is_individual(now, newest_ms):
                individual[gpu] = now
            else:
                key = now.start_ms, now.end_ms, now.last_ms
                counts[key] = counts.get(key, 0) + 1
        return GpuCensus(counts, individual, _until(counts))

    def lives(self) -> Mapping[Span, int]:
        """Return the number of GPUs that were capacity, by span."""
        found: Counter[Span] = Counter()
        for (start, end, _), count in self.counts.items():
            found[start, end] += count
        found.update((life.start_ms, life.end_ms) for life in self.individual.values())
        return found

    def down(self) -> Iterator[tuple[int, Span]]:
        """Yield the down time of every GPU as (id, span), by id."""
        for gpu in sorted(self.individual):
            for span in self.individual[gpu].down:
                yield gpu, span

    def watermark(self, end_ms: int, min_coverage: float) -> int | None:
        """Return the latest instant, at most end_ms, up to which at least `min_coverage` of the GPUs in service at
        end_ms have records; None if no GPU is in service.

        Earlier gaps do not lower the watermark, which says how recent the records are. They lower the coverage."""
        reached: Counter[int] = Counter()
        for (start, end, last), count in self.counts.items():
            if start < end_ms <= end:
                reached[min(last, end_ms)] += count
        for life in self.individual.values():
            if life.start_ms < end_ms <= life.end_ms and not any(s < end_ms <= e for s, e in life.down):
                reached[min(life.last_ms, end_ms)] += 1
        needed = max(1, math.ceil(min_coverage * reached.total()))
        for last in sorted(reached, reverse=True):
            needed -= reached[last]
            if needed <= 0:
                return last
        return None


def _is_individual(life: Life, newest_ms: int) -> bool:
    return bool(life.down) or _may_be_gone(life, newest_ms)


def _may_be_gone(life: Life, newest_ms: int) -> bool:
    """Return whether the GPU may have disappeared: its life has not ended otherwise, and the fleet has records from
    UNLISTED_MS or more after its newest one."""
    return life.last_ms + UNLISTED_MS <= newest_ms and life.last_ms + UNLISTED_MS < life.end_ms


def _until(counts: Iterable[Lifetime]) -> int:
    return min((last + UNLISTED_MS for _, end, last in counts if last + UNLISTED_MS < end), default=FOREVER)


LINGER_MS = MS_PER_HOUR
"""A record that begins at most this long after the deletion of its node belongs to the deleted node. A later record
shows a new node of the same name."""

NodeKey = tuple[str, str]
"""(cluster, node name)."""


class Tenure(NamedTuple):
    """The time in which a GPU was on one node.

    first_ms: start of the GPU's first booked record on this node.
    last_ms: end of its newest booked record on this node."""

    first_ms: int
    last_ms: int

    def with_(self, other: Tenure | None) -> Tenure:
        """Return the shortest tenure that covers both; this one if `other` is None."""
        if other is None:
            return self
        return Tenure(min(self.first_ms, other.first_ms), max(self.last_ms, other.last_ms))


@dataclass(frozen=True)
class MeteredGpu:
    cluster: str
    uuid: str
    model: str


@dataclass(frozen=True)
class GpuLifetimes:
    """The lifetimes of all GPUs of the ledger, and the facts of its nodes and namespaces.

    gpus, tenures: by GPU id; the tenures of a GPU are by node.
    own: for GPUs that an import named, the tenures that the agents' records alone show.
    retired: by GPU id, the instant until which the GPU is capacity.
    placed, charged: the histories of nodes and namespaces whose facts changed."""

    gpus: Mapping[int, MeteredGpu] = field(default_factory=dict)
    tenures: Mapping[int, Mapping[str, Tenure]] = field(default_factory=dict)
    own: Mapping[int, Mapping[str, Tenure]] = field(default_factory=dict)
    nodes: Mapping[NodeKey, NodeFacts] = field(default_factory=dict)
    namespaces: Mapping[NodeKey, NamespaceFacts] = field(default_factory=dict)
    retired: Mapping[int, int] = field(default_factory=dict)
    placed: Mapping[NodeKey, Timeline[NodeFacts]] = field(default_factory=dict)
    charged: Mapping[NodeKey, Timeline[NamespaceFacts]] = field(default_factory=dict)
    _newest: Mapping[NodeKey, int] = field(default_factory=dict, repr=False, compare=False)
    """End of the newest booked record per node; derived from `tenures` unless given."""
    _lives: dict[int, Life] = field(default_factory=dict, init=False, repr=False, compare=False)
    _censuses: dict[str | None, GpuCensus] = field(default_factory=dict, init=False, repr=False, compare=False)
    """The census of each cluster, and under None that of all GPUs. Created on first use and updated by commits."""

    def __post_init__(self) -> None:
        if not self._newest:
            newest: dict[NodeKey, int] = {}
            for gpu, nodes in self.tenures.items():
                _advance(newest, self.gpus[gpu].cluster, nodes)
            object.__setattr__(self, "_newest", newest)

    @cached_property
    def newest_end_ms(self) -> int:
        """End of the newest booked record of all; 0 if there is none."""
        return max(self._newest.values(), default=0)

    @cached_property
    def newest_by_cluster(self) -> Mapping[str, int]:
        """End of the newest booked record of each cluster that agents report from and that has a GPU in service."""
        in_service = {
            gpu.cluster
            for id_, gpu in self.gpus.items()
            if id_ in self.tenures and id_ not in self.retired and self.own.get(id_, True)
        }
        newest: dict[str, int] = {}
        for (cluster, _), end_ms in self._newest.items():
            if cluster in in_service:
                newest[cluster] = max(newest.get(cluster, 0), end_ms)
        return newest

    @property
    def newest_by_node(self) -> Mapping[NodeKey, int]:
        """End of the newest booked record of each node."""
        return self._newest

    @cached_property
    def extent(self) -> Span:
        """From the first booked start to the newest booked end; (0, 0) if nothing is booked."""
        starts = [tenure.first_ms for nodes in self.tenures.values() for tenure in nodes.values()]
        return (min(starts), self.newest_end_ms) if starts else (0, 0)

    @property
    def team_labels(self) -> frozenset[str]:
        """The labels by which pods of some namespace can choose a team, now or in the past."""
        past = (space for history in self.charged.values() for _, space in history.steps)
        return frozenset(space.label for space in (*self.namespaces.values(), *past) if space.label)

    def node_history(self, key: NodeKey) -> Timeline[NodeFacts]:
        """Return the labels of a node over time, without its down times."""
        known = self.nodes.get(key)
        return self.placed.get(key) or Timeline.always(
            described(known) if known is not None and known.listed else NodeFacts(*key)
        )

    def namespace_history(self, key: NodeKey) -> Timeline[NamespaceFacts]:
        return self.charged.get(key) or Timeline.always(self.namespaces.get(key) or NamespaceFacts(*key))

    def namespace_at(self, key: NodeKey, at_ms: int) -> NamespaceFacts | None:
        """Return the facts of a namespace at an instant; None if the namespace is unknown."""
        history = self.charged.get(key)
        return history.at(at_ms) if history is not None else self.namespaces.get(key)

    def node_at(self, key: NodeKey, at_ms: int) -> NodeFacts | None:
        """Return the facts of a node at an instant; None if the node is unknown."""
        history = self.placed.get(key)
        return history.at(at_ms) if history is not None else self.nodes.get(key)

    def metered(self, cluster: str) -> dict[str, Tenure]:
        """Return, for each node of a cluster, the span from the first to the newest record of an agent."""
        found: dict[str, Tenure] = {}
        for gpu, tenures in self.tenures.items():
            if self.gpus[gpu].cluster == cluster:
                for node, tenure in self.own.get(gpu, tenures).items():
                    found[node] = tenure.with_(found.get(node))
        return dict(sorted(found.items()))

    def last_ms(self, gpu: int) -> int:
        """Return the end of a GPU's newest booked record; 0 if there is none."""
        return max((t.last_ms for t in self.tenures.get(gpu, {}).values()), default=0)

    def life(self, gpu: int) -> Life:
        """Return the life of a GPU. Raises KeyError for a GPU without a booked record."""
        known = self._lives.get(gpu)
        if known is None or (known.end_ms > known.last_ms + UNLISTED_MS and self._unlisted(gpu, known)):
            known = self._lives[gpu] = self._live(gpu)
        return known

    @cached_property
    def clusters(self) -> frozenset[str]:
        """The clusters with booked records."""
        return frozenset(cluster for cluster, _ in self._newest)

    @property
    def census(self) -> GpuCensus:
        """The census of all GPUs."""
        return self.census_of(None)

    def census_of(self, cluster: str | None) -> GpuCensus:
        """Return the census of a cluster, or of all GPUs if it is None."""
        census = self._censuses.get(cluster)
        if census is None:
            gpus = [gpu for gpu in self.tenures if cluster is None or self.gpus[gpu].cluster == cluster]
            census = GpuCensus.of(gpus, self.life, self.newest_end_ms)
            if cluster is None or cluster in self.clusters:
                self._censuses[cluster] = census
        return census

    def one_of_several(self, cluster: str | None) -> str | None:
        """Return the cluster, or None if it is the only one: then its census is that of all GPUs."""
        return None if self.clusters == {cluster} else cluster

    def _unlisted(self, gpu: int, life: Life) -> bool:
        """Return whether the GPU's node has reported other GPUs for at least UNLISTED_MS since the GPU's last
        record."""
        return self._newest[self.gpus[gpu].cluster, life.home] >= life.last_ms + UNLISTED_MS

    def _left_behind(self, node: NodeKey, last_ms: int) -> bool:
        """Return whether another machine or boot of a node reports other GPUs, and none reported the GPU whose newest
        record ends at last_ms."""
        renewed = self.nodes[node].renewed_ms if node in self.nodes else ()
        next_ = bisect_left(renewed, last_ms)
        return next_ < len(renewed) and renewed[next_] < self._newest[node]

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
        if self._left_behind((cluster, home), last):
            ends.append(last)
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
        self, changes: Mapping[int, tuple[MeteredGpu, Mapping[str, Tenure]]], own: Mapping[int, Mapping[str, Tenure]]
    ) -> GpuLifetimes:
        """Return the fleet after a transaction.

        changes: by id, the GPUs of the transaction with their names and all their tenures.
        own: the changed entries of `GpuLifetimes.own`."""
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
        told = {(named.cluster, node) for named, nodes in changes.values() for node in nodes}
        returned = {node for node in told if self._returns(node, newest[node])}
        after._lives.update(self._lives)
        if returned:  # GPUs that do not report any more are among the others of the node
            for gpu, life in self._lives.items():
                if (self.gpus[gpu].cluster, life.home) in returned:
                    del after._lives[gpu]
        for gpu, (_, nodes) in changes.items():
            known = after._lives.pop(gpu, None)
            if known is not None and after._only_goes_on(gpu, known):
                after._lives[gpu] = known._replace(last_ms=nodes[known.home].last_ms)
        for cluster, before in self._censuses.items() if not returned else ():
            gpus = [gpu for gpu, (named, _) in changes.items() if cluster in (None, named.cluster)]
            census = before.changed(gpus, self._lives, after.life, after.newest_end_ms)
            if census is not None:
                after._censuses[cluster] = census
        return after

    def _returns(self, node: NodeKey, newest_ms: int) -> bool:
        """Return whether records up to newest_ms are the first ones of another machine or boot of a node."""
        renewed = self.nodes[node].renewed_ms if node in self.nodes else ()
        return bisect_left(renewed, newest_ms) > bisect_left(renewed, self._newest.get(node, 0))

    def _only_goes_on(self, gpu: int, before: Life) -> bool:
        """Return whether new records of a GPU change nothing in its life except `last_ms`. If so, a commit need not
        compute the life again."""
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


def described(node: NodeFacts) -> NodeFacts:
    """Return the facts of a node that label usage, without its down times and renewals, which have histories of their
    own, and without what its agent says of itself."""
    return replace(node, down=(), deleted_ms=None, uid="", boot_id="", renewed_ms=(), listed=True, agent=None)


def blank(node: NodeFacts) -> NodeFacts:
    """Return a node of this name about which nothing is known."""
    return NodeFacts(node.cluster, node.name)


def changes_between(
    histories: Iterable[Timeline[NodeFacts]] | Iterable[Timeline[NamespaceFacts]], start_ms: int, end_ms: int
) -> list[int]:
    """Return the instants strictly inside the span at which one of the histories changes, ascending."""
    return sorted({at for history in histories for at in history.changes() if start_ms < at < end_ms})


REPORTING_MS = 15 * MS_PER_MINUTE
"""The longest interval of an agent. A GPU with a newer record can still have a running agent."""


def retirement_ends(
    fleet: GpuLifetimes, retirement: Retirement, at_ms: int, now_ms: int, closed_ms: int
) -> dict[int, int]:
    """Return, by GPU id, the instant from which the GPU no longer counts as capacity: `at_ms`, or the end of its newest
    record if that is later.

    Capacity before `closed_ms` does not change. Raises CannotRetire if one of the GPUs cannot retire."""
    if at_ms > now_ms:
        raise CannotRetire(f"{utc(at_ms)} is in the future: retire the GPUs from now on, or from an earlier time on")
    if at_ms < closed_ms:
        raise CannotRetire(
            f"the months before {utc(closed_ms)} are closed: retire the GPUs from then on, or from a later time on"
        )
    chosen = _retiring_gpus(fleet, retirement)
    ends = {gpu: max(at_ms, fleet.last_ms(gpu)) for gpu in chosen if fleet.life(gpu).end_ms > at_ms}
    for gpu in sorted(ends, key=lambda one: fleet.gpus[one].uuid):
        last, name = fleet.last_ms(gpu), f"GPU {fleet.gpus[gpu].uuid} of {fleet.life(gpu).home}"
        if last + REPORTING_MS > now_ms:
            raise CannotRetire(f"{name} has records until {utc(last)}, so its agent is running: stop the agent first")
        if fleet.retired.get(gpu, -1) >= last - LINGER_MS:
            raise CannotRetire(f"{name} is already retired, from {utc(fleet.life(gpu).end_ms)} on")
    if not ends:
        raise CannotRetire(f"none of these GPUs counts as capacity at {utc(at_ms)}, so none needs to be retired")
    return ends


def _retiring_gpus(fleet: GpuLifetimes, retirement: Retirement) -> Sequence[int]:
    cluster = retirement.cluster or _only_cluster(fleet.clusters, CannotRetire)
    in_cluster = {gpu: one for gpu, one in fleet.gpus.items() if one.cluster == cluster and gpu in fleet.tenures}
    homes = {gpu: fleet.life(gpu).home for gpu in in_cluster}
    if retirement.node and retirement.node not in homes.values():
        raise CannotRetire(f"cluster {cluster!r} has no GPU whose newest record is from node {retirement.node!r}")
    by_uuid = {one.uuid: gpu for gpu, one in in_cluster.items() if retirement.node in ("", homes[gpu])}
    unknown = sorted(set(retirement.gpus) - by_uuid.keys())
    if unknown:
        where = f"node {retirement.node!r}" if retirement.node else f"cluster {cluster!r}"
        raise CannotRetire(f"{where} has no GPU {unknown[0]!r}")
    return [by_uuid[uuid] for uuid in retirement.gpus] if retirement.gpus else list(by_uuid.values())


def _only_cluster(clusters: Collection[str], error: type[CannotMove] | type[CannotRetire]) -> str:
    """Return the only cluster. Raises the error if there is not exactly one."""
    if not clusters:
        raise error("the ledger has no cluster, because no record is booked")
    if len(clusters) > 1:
        raise error(f"the ledger has several clusters, {', '.join(map(repr, sorted(clusters)))}: name one")
    return next(iter(clusters))


def retired_devices(fleet: GpuLifetimes, ends: Mapping[int, int]) -> tuple[RetiredDevice, ...]:
    """Return the retired GPUs in the form of the API, by node and GPU."""
    devices = (
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
    return tuple(sorted(devices, key=lambda one: (one.node, one.gpu_uuid)))


def retirement_act(devices: Sequence[RetiredDevice], now_ms: int, who: str, reason: str) -> NewAct:
    """Return the journal act of a retirement."""
    nodes = sorted({one.node for one in devices})
    content = [{"node": one.node, "gpu": one.gpu_uuid, "end_ms": one.end_ms} for one in devices]
    return NewAct(now_ms, "retired", f"{devices[0].cluster}/{','.join(nodes)}", who, reason, json.dumps(content))


def in_service(lives: Mapping[Span, int], pieces: Sequence[Span]) -> tuple[list[int], list[tuple[int, Span, int]]]:
    """Return the number of GPUs that were in service throughout each piece, and the parts of pieces in which further
    GPUs were in service, as (index of the piece, part, number of GPUs).

    `lives` is the number of GPUs by span of service. The pieces are ascending, adjacent and not empty."""
    parts: list[tuple[int, Span, int]] = []
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
                part = max(start, pieces[tag][0]), min(end, pieces[tag][1])
                if part[0] < part[1]:
                    parts.append((tag, part, count))
    return list(accumulate(changes[:-1])), parts


def gpus_at(fleet: GpuLifetimes, start_ms: int, end_ms: int) -> dict[tuple[str, str], int]:
    """Return the number of GPUs that each node had as capacity in any part of [start_ms, end_ms), by cluster and
    node."""
    counts: Counter[tuple[str, str]] = Counter()
    for gpu in fleet.tenures:
        life = fleet.life(gpu)
        ends = [since for since, _ in life.nodes[1:]] + [life.end_ms]
        nodes = {
            node
            for (since, node), until in zip(life.nodes, ends, strict=True)
            if max(since, start_ms) < min(until, end_ms)
        }
        counts.update((fleet.gpus[gpu].cluster, node) for node in nodes)
    return dict(counts)


def down_in(down: Iterable[tuple[int, Span]], pieces: Sequence[Span]) -> list[TaggedSpan]:
    """Return the down time of GPUs in each piece, tagged with the index of the piece. The pieces ascend and do not
    overlap."""
    starts = [start for start, _ in pieces]
    return [TaggedSpan(tag, low, high, gpu) for gpu, span in down for tag, low, high in _inside(span, pieces, starts)]


def _inside(span: Span, pieces: Sequence[Span], starts: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Yield the part of the span in each piece as (tag, start_ms, end_ms)."""
    start, end = span
    for tag in range(max(0, bisect_right(starts, start) - 1), bisect_left(starts, end)):
        low, high = max(start, pieces[tag][0]), min(end, pieces[tag][1])
        if low < high:
            yield tag, low, high


def read_owners(cursor: Cursor, fleet: GpuLifetimes) -> dict[GpuName, OwnedGpu]:
    """Return the owners of each GPU that has booked time. While the archive is replayed, a part's owners come after its
    rows."""
    stored: dict[GpuName, list[Ownership]] = defaultdict(list)
    rows = cursor.run("SELECT cluster, gpu_uuid, node, from_ms, at_ms, who FROM gpu_owner ORDER BY at_ms, from_ms")
    for cluster, uuid, node, from_ms, at_ms, who in rows:
        stored[cluster, uuid].append(Ownership(node, from_ms, at_ms, who))
    found: dict[GpuName, OwnedGpu] = {}
    for gpu, tenures in fleet.tenures.items():
        name = (fleet.gpus[gpu].cluster, fleet.gpus[gpu].uuid)
        if name not in stored:
            continue
        measured = fleet.own.get(gpu, tenures)
        owners: list[Ownership] = []
        for step in stored[name]:
            owners = [*with_owner(owners, step._replace(imported=step.node not in measured and not step.who))]
        owners.sort(key=attrgetter("from_ms"))
        first = min(tenure.first_ms for tenure in tenures.values())
        last = tenures[owners[-1].node].last_ms if owners[-1].node in tenures else 0
        found[name] = OwnedGpu(tuple(owners), first, max(last, owners[-1].from_ms))
    return found


CLAIMS = 10_000
"""Number of quarantined records, the newest ones, that are searched for claims of other nodes."""


def read_claims(cursor: Cursor) -> dict[GpuName, tuple[GpuClaim, ...]]:
    """Return, for each GPU, the nodes whose records of it were quarantined, sorted by node."""
    found: dict[GpuName, list[GpuClaim]] = defaultdict(list)
    for cluster, uuid, node, records, newest in cursor.rows("gpu_claims", {"limit": CLAIMS}):
        found[cluster, uuid].append(GpuClaim(node=node, records=records, newest_ms=newest))
    return {gpu: tuple(claims) for gpu, claims in found.items()}


def shown(
    owned: Mapping[GpuName, OwnedGpu], claims: Mapping[GpuName, Sequence[GpuClaim]], fleet: GpuLifetimes
) -> tuple[GpuOwnership, ...]:
    """Return the owners and claims of each GPU in the form of the API, by cluster and UUID."""
    models = {(gpu.cluster, gpu.uuid): gpu.model for gpu in fleet.gpus.values()}
    return tuple(
        GpuOwnership(
            cluster=gpu[0],
            gpu_uuid=gpu[1],
            gpu_model=models.get(gpu, ""),
            last_ms=one.last_ms,
            owners=tuple(_owners(one.owners)),
            claims=tuple(claim for claim in claims.get(gpu, ()) if claim.node != one.owner.node),
        )
        for gpu, one in sorted(owned.items())
    )


def _owners(steps: Sequence[Ownership]) -> Iterable[GpuOwner]:
    ends = [step.from_ms for step in steps[1:]]
    for step, until in zip(steps, [*ends, None], strict=True):
        yield GpuOwner(
            node=step.node, from_ms=step.from_ms, until_ms=until, recorded_ms=step.at_ms, confirmed_by=step.who
        )


def movable_gpus(
    owned: Mapping[GpuName, OwnedGpu], nodes: Collection[NodeKey], move: GpuMove, now_ms: int
) -> list[GpuName]:
    """Return the GPUs that a move names. Raises CannotMove if one of them cannot move, or if the move's node is not
    among `nodes`, which are all nodes that the accountant knows."""
    cluster = move.cluster or _only_cluster({gpu[0] for gpu in owned}, CannotMove)
    if (cluster, move.node) not in nodes:
        raise CannotMove(
            f"cluster {cluster!r} has no node {move.node!r}: no record came from it, and no inventory names it"
        )
    chosen = [(cluster, uuid) for uuid in dict.fromkeys(move.gpus)]
    for gpu in chosen:
        one = owned.get(gpu)
        if one is None:
            raise CannotMove(f"cluster {cluster!r} has no GPU {gpu[1]!r}")
        if one.owner.node == move.node:
            raise CannotMove(f"GPU {gpu[1]} already belongs to node {move.node!r}, from {utc(one.owner.from_ms)} on")
        if move.from_ms is not None and move.from_ms < one.last_ms:
            raise CannotMove(
                f"GPU {gpu[1]}: node {one.owner.node!r} has records until {utc(one.last_ms)}: move it from then on, "
                "or later"
            )
    if move.from_ms is not None and move.from_ms > now_ms:
        raise CannotMove(f"{utc(move.from_ms)} is in the future: move the GPUs from now on, or from an earlier time on")
    return chosen


def owner_act(
    before: Mapping[GpuName, OwnedGpu], after: Mapping[GpuName, OwnedGpu], now_ms: int, who: str, reason: str
) -> NewAct:
    """Return the journal act of a move."""
    content = [
        {"gpu": gpu[1], "from_node": before[gpu].owner.node, "node": one.owner.node, "from_ms": one.owner.from_ms}
        for gpu, one in sorted(after.items())
    ]
    cluster, node = min(after)[0], content[0]["node"]
    return NewAct(now_ms, "moved", f"{cluster}/{node}", who, reason, json.dumps(content))
