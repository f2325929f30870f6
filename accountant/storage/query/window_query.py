"""Answers a usage window: usage per queue, capacity, coverage and watermark.

A window that counts every microsecond alike, be it of one cluster, comes from the stretches of
`accountant.storage.query.window_buckets`, mostly remembered. One that looks through another lens
(accountant.storage.query.window_weights: prices, weights of models, a shard), or that decays as Slurm does, is worked
out by place (`accountant.storage.query.window_weights`): per place whole microseconds, multiplied once, exactly.
Capacity comes from the lives of the GPUs. What decays and how is `accountant.core.window_decay`.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import compress, pairwise
from zoneinfo import ZoneInfo

from accountant.core.claim_overlap import Span, cut
from accountant.core.errors import UnsupportedQuestion
from accountant.core.window_decay import age_weights, bounds, combine, slurm_weights
from accountant.ledger.team_assignment import NOBODY_RULES, Assignment, in_force
from accountant.storage.duckdb_engine import Cursor
from accountant.storage.gpu_lifetimes import Fleet, down_in
from accountant.storage.ledger_state import State
from accountant.storage.query.window_buckets import Stretch, StretchCache, capacity, coverage, metered, references
from accountant.storage.query.window_concurrent_updates import Reading
from accountant.storage.query.window_figures import NOTHING, View
from accountant.storage.query.window_gpu_census import Muster
from accountant.storage.query.window_matrix import Sheet, added_up
from accountant.storage.query.window_span_cache import Coming, Key
from accountant.storage.query.window_weights import (
    COST_UNIT_PLACES,
    EVERYTHING,
    FIGURE,
    Lens,
    PlaceCache,
    Placement,
    Weighed,
    devices,
    in_down_time,
    moves,
    not_below_zero,
    shard_of,
)
from accountant.storage.span_plan import quarters
from accountant.storage.write.interval_writer import Booked
from accountant.wire.policy_models import UNASSIGNED, Measure, UsageWindow, WindowSpec
from gputally.base.units import BUCKET_MS, MS_PER_SECOND

_MOST_SHEETS = 16


class WindowCache:
    """What is remembered between windows. Thread-safe. month_zone: of calendar windows."""

    def __init__(self, month_zone: ZoneInfo) -> None:
        self._zone = month_zone
        self._stretches = StretchCache()
        self._places = PlaceCache()
        self._adding = threading.Lock()
        self._sheets: OrderedDict[tuple[View, int], Sheet] = OrderedDict()
        """By view and figure, the one asked for last at the end."""

    def coming(self, booked: Booked) -> Coming:
        """What `take` will need of a commit: the long part of it, done before anybody has to wait for it."""
        return self._stretches.coming(booked)

    def take(self, booked: Booked, coming: Coming, version: int) -> None:
        """The commit that makes `version` changed what `booked` says."""
        self._stretches.take(booked, coming, version)
        self._places.take(booked, version)

    def forget_all(self, version: int) -> None:
        self._stretches.forget_all(version)
        self._places.forget_all(version)

    def bounds(self, spec: WindowSpec, at_ms: int) -> tuple[int, int]:
        """The window's [start_ms, end_ms)."""
        return bounds(spec, at_ms, self._zone)

    def reading(
        self, state: State, spec: WindowSpec, at_ms: int, lens: Lens = EVERYTHING
    ) -> AbstractContextManager[Reading]:
        """Around the snapshot that `window` is given. state: of now, before it."""
        return self._stretches.reading(_view(state.fleet, spec, lens), *self.bounds(spec, at_ms))

    def soon(self) -> list[Key]:
        """View and start of the quarter-hours that windows are likely to need next and that nothing is
        remembered of. Told once."""
        return self._stretches.soon()

    def reading_ahead(self, view: View, bucket: int) -> AbstractContextManager[Reading]:
        """Around the snapshot that `look_into` is given."""
        return self._stretches.reading(view, bucket, bucket + BUCKET_MS)

    def look_into(self, cursor: Cursor, state: State, bucket: int, reading: Reading) -> None:
        """Remember one quarter-hour."""
        self._stretches.look_into(cursor, state.version, bucket, reading)

    def watermark(
        self, fleet: Fleet, end_ms: int, min_coverage: float, shard: str | None = None, cluster: str | None = None
    ) -> int | None:
        """That of every window that ends at `end_ms`."""
        if shard is None:
            muster = fleet.muster_of(_apart(fleet, cluster))
        else:
            muster = Muster.of(shard_of(fleet, shard, end_ms, cluster), fleet.life, fleet.newest_end_ms)
        return muster.watermark(end_ms, min_coverage)

    def window(
        self,
        cursor: Cursor | None,
        state: State,
        spec: WindowSpec,
        at_ms: int,
        of: Measure,
        min_coverage: float,
        lens: Lens = EVERYTHING,
        reading: Reading | None = None,
    ) -> UsageWindow | None:
        """See accountant.ledger.protocols.Ledger.window. usage: own plus descendants, by queue name. The capacity of
        measure `energy` is all energy recorded. cursor None: answer from memory alone, or None where that
        does not do. Raises UnsupportedQuestion."""
        if of == "cost" and lens.book is None:
            raise UnsupportedQuestion("without a price book nothing has a cost: ask for allocated, busy or energy")
        if of in ("cost", "energy") and lens.gpu_weights:
            raise UnsupportedQuestion(f"weights of models are for GPU time, and this window measures {of}")
        if not lens.trivial or spec.decay == "slurm":
            return None if cursor is None else self._by_place(cursor, state, spec, at_ms, of, min_coverage, lens)
        start, end = self.bounds(spec, at_ms)
        stretches, policies = _stretches(state, start, end)
        view = _view(state.fleet, spec, lens)
        muster = state.fleet.muster_of(view.cluster)
        # Of a cluster that never reported there is nothing to remember, be it asked for under a thousand names.
        known = view.cluster is None or view.cluster in state.fleet.clusters
        parts = self._stretches.read(cursor, state, stretches, view, reading) if known else [()] * len(stretches)
        if parts is None:
            return None
        down = down_in(muster, stretches)
        rows_down = self._stretches.down(cursor, state.version, down, stretches, view) if known else {}
        if rows_down is None:
            return None
        ages = age_weights(references(stretches, spec.half_life), at_ms, spec.half_life)
        with self._adding:
            sheet = self._sheet(view, FIGURE[of]) if known else Sheet(FIGURE[of])
            held = added_up(sheet, parts, policies, ages)
        of_gpus = capacity(muster.lives(), down, rows_down, held.lost, stretches, spec.half_life)
        available = held.energy if of == "energy" else of_gpus.available
        usage, unassigned = _rolled_up(held.leaves, policies)
        return self._answer(
            spec, at_ms, of, lens, state.fleet,
            usage=usage,
            unassigned=unassigned,
            capacity=combine(not_below_zero(available), ages),
            watermark_ms=muster.watermark(end, min_coverage),
            coverage=coverage(metered(held.rows, of_gpus, of), of_gpus.working - held.rows.plain_lost),
            policies=policies,
            lost_ms=_newest(compress(stretches, held.lost), end),
        )  # fmt: skip

    def _sheet(self, view: View, figure: int) -> Sheet:
        sheet = self._sheets.pop((view, figure), None) or Sheet(figure)
        self._sheets[view, figure] = sheet
        while len(self._sheets) > _MOST_SHEETS:
            self._sheets.popitem(last=False)
        return sheet

    def _by_place(
        self,
        cursor: Cursor,
        state: State,
        spec: WindowSpec,
        at_ms: int,
        of: Measure,
        min_coverage: float,
        lens: Lens,
    ) -> UsageWindow:
        """The same sums, place by place, each multiplied by what its time counts."""
        start, end = self.bounds(spec, at_ms)
        slurm = spec.decay == "slurm"
        half_life = None if slurm else spec.half_life
        edges = sorted({*moves(state.fleet, start, end), *lens.cuts(start, end)})
        ticks = range(start - start % _ms(spec.calc_period), end, _ms(spec.calc_period)) if slurm else ()
        stretches, policies = _stretches(state, start, end, [*edges, *ticks])
        known = devices(cursor, profiles=lens.tells_profiles)
        starts = [stretch.start_ms for stretch in stretches]
        cuts = pairwise(bisect_left(starts, at) for at in (start, *edges, end))
        pieces = [(Placement(known, state.fleet, starts[low]), low, high) for low, high in cuts]
        asked = [(placement, stretches[low:high]) for placement, low, high in pieces]
        found = self._places.read(cursor, state, asked, (half_life, lens.tells_profiles))
        ages = age_weights(references(stretches, half_life), at_ms, half_life)
        if slurm:
            ages = slurm_weights(starts, at_ms, spec.half_life)
        total = Weighed(len(stretches))
        losses: list[Span] = []
        for (placement, low, high), held in zip(pieces, found, strict=True):
            here = stretches[low:high]
            down = down_in(state.fleet.muster_of(_apart(state.fleet, lens.cluster)), here)
            rows_down = in_down_time(cursor, placement, down, here, half_life)
            for place in filter(lens.sees, placement.places):
                of_place = [stretch.get(place, NOTHING) for stretch in held]
                mine = frozenset(gpu for gpu, where in placement.gpus.items() if where == place)
                lives = Counter((life.start_ms, life.end_ms) for life in map(state.fleet.life, mine))
                down_here = [span for span in down if span.gpu in mine]
                lost = [held.all.lost for held in of_place]
                losses += compress(here, lost)
                of_gpus = capacity(lives, down_here, rows_down.get(place, {}), lost, here, half_life)
                total.add(low, lens.weight(place, here[0].start_ms), of_place, of_gpus, of)
        usage, unassigned = _rolled_up(total.leaves(policies, ages, of), policies)
        return self._answer(
            spec, at_ms, of, lens, state.fleet,
            usage=usage,
            unassigned=unassigned,
            capacity=total.capacity(ages),
            watermark_ms=self.watermark(state.fleet, end, min_coverage, lens.shard, lens.cluster),
            coverage=coverage(total.metered, total.working),
            policies=policies,
            lost_ms=_newest(losses, end),
        )  # fmt: skip

    def _answer(
        self,
        spec: WindowSpec,
        at_ms: int,
        of: Measure,
        lens: Lens,
        fleet: Fleet,
        *,
        usage: Mapping[str, int],
        unassigned: int,
        capacity: int,
        watermark_ms: int | None,
        coverage: float,
        policies: Sequence[Assignment],
        lost_ms: int,
    ) -> UsageWindow:
        start, end = self.bounds(spec, at_ms)
        in_force_now = policies[-1].version if policies else None
        muster = fleet.muster_of(_apart(fleet, lens.cluster))
        return UsageWindow(
            kind=spec.kind,
            start_ms=start,
            end_ms=end,
            half_life_s=spec.half_life,
            decay=spec.decay,
            measure=of,
            unit=_unit(of, lens),
            by="queue",
            usage=dict(usage),
            unassigned=unassigned,
            capacity=capacity,
            watermark_ms=watermark_ms,
            coverage=coverage,
            policy_version=in_force_now.version if in_force_now is not None else None,
            gpu_weights=spec.gpu_weights if lens.gpu_weights else {},
            price_book_version=lens.book.version if lens.book is not None else None,
            shard=lens.shard,
            cluster=lens.cluster,
            policy_counting=policies[-1].counting if policies and lens.cluster is not None else None,
            lost_ms=lost_ms,
            since_ms=min(end, max(start, min((begun for begun, _ in muster.lives()), default=end))),
        )


def _apart(fleet: Fleet, cluster: str | None) -> str | None:
    """The cluster that is told apart: None where it is all there is, so that what everybody's windows remember serves
    it too."""
    return None if cluster is None or fleet.clusters == {cluster} else cluster


def _view(fleet: Fleet, spec: WindowSpec, lens: Lens) -> View:
    return View(spec.half_life, _apart(fleet, lens.cluster))


def _newest(stretches: Iterable[Span], end_ms: int) -> int:
    """End of the newest quarter-hour that holds one of them, or of the window; however finely these are cut."""
    return max((min(end_ms, -(-end // BUCKET_MS) * BUCKET_MS) for _, end in stretches), default=0)


def _unit(of: Measure, lens: Lens) -> str:
    if lens.book is not None:
        return f"1e-{COST_UNIT_PLACES} {lens.book.currency}"
    return "uj" if of == "energy" else "weighted_gpu_us" if lens.gpu_weights else "gpu_us"


def _ms(seconds: int) -> int:
    return seconds * MS_PER_SECOND


def _stretches(
    state: State, start_ms: int, end_ms: int, edges: Collection[int] = ()
) -> tuple[list[Stretch], list[Assignment]]:
    """The window cut at quarter-hours, where the mapping of queues changes, and at `edges`; per stretch its policy."""
    stretches: list[Stretch] = []
    policies: list[Assignment] = []
    for begin, end, rules in in_force(state.policies, start_ms, end_ms):
        pieces = cut((begin, end), sorted(set(edges))) if edges else [(begin, end)]
        found = [Stretch(*span) for piece in pieces for span in quarters(*piece)]
        stretches += found
        policies += [rules] * len(found)
    return stretches, policies


def _rolled_up(leaves: Mapping[str, int], policies: Sequence[Assignment]) -> tuple[dict[str, int], int]:
    """Usage per queue, own plus descendants, and what belongs to none.

    Of a queue that the policy no longer has the usage goes with its refs: to the queue that has them now. Where none or
    several do, it keeps it under its own name, and those above it that are still there keep it too."""
    current = policies[-1] if policies else NOBODY_RULES
    usage = dict.fromkeys(current.queues, 0)
    for queue, value in leaves.items():
        if queue == UNASSIGNED or not value:
            continue
        for name in current.lineage(queue) or _heirs(queue, policies, current):
            usage[name] = usage.get(name, 0) + value
    return dict(sorted(usage.items())), leaves.get(UNASSIGNED, 0)


def _heirs(queue: str, policies: Sequence[Assignment], current: Assignment) -> list[str]:
    """Under whose names the usage of a queue stands that the policy does not have: by the last one that had it."""
    before = next((rules for rules in reversed(policies) if queue in rules.queues), None)
    if before is None:
        return [queue]
    owners = {current.queue(ref) for ref in before.queues[queue].refs}
    if len(owners) == 1 and UNASSIGNED not in owners:
        return current.lineage(owners.pop())
    above = next((name for name in before.lineage(queue) if name in current.queues), None)
    return [queue, *(current.lineage(above) if above is not None else ())]
