"""Computes what each queue used of its guaranteed quota, borrowed beyond it, or left unused.

The guarantee is the policy's deserved quota at the time, counted per hour. An hour in which a queue held more does not
compensate for an hour in which it held less, because an unused guarantee cannot be used later. Only queues without
children hold GPUs.

A guarantee counts from the ledger's first record on, and not in hours in which all GPUs were unmetered: what was held
then is unknown, so nothing of it is unused.

Unused guarantees reserve at most the unallocated time of the same hour. If all queues together left more unused than
was free, the free time is divided among them in proportion.

With quotas by GPU model each model counts for itself, and so do all other GPUs together: time held on one model uses
nothing of a guarantee of another, and a guarantee reserves unallocated time of its own model alone."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from typing import NamedTuple, TypeVar
from zoneinfo import ZoneInfo

from accountant.core.periods import hours
from accountant.ledger.usage import ACCOUNTS, HELD, Usage
from accountant.wire.policy_models import Policy, PolicyVersion
from accountant.wire.usage_cost_and_job_models import Dimension, QueueGuarantee
from gputally.base.apportionment import apportion
from gputally.base.gpu_model_names import most_precise
from gputally.base.units import US_PER_MS

_MILLI = 1_000
"""Deserved quotas are decimal numbers of GPUs, counted here in thousandths."""
_KNOWN = tuple(name for name in ACCOUNTS if name != "unmetered")


@dataclass(frozen=True, slots=True)
class QuotaRow:
    """GPU-µs of one queue. guaranteed_us and unused_us are None if its quota was unlimited at some time.

    within_us + borrowed_us is the time that the queue held. within_us + unused_us is its guarantee."""

    queue: str
    team: str
    guaranteed_us: int | None
    within_us: int
    borrowed_us: int

    @property
    def unused_us(self) -> int | None:
        return None if self.guaranteed_us is None else self.guaranteed_us - self.within_us


class Lot(NamedTuple):
    """What a guarantee is counted by: the GPUs of one model in one local hour, while the policies name the same models.

    span: the number of the span of `ModelSpans`.
    model: the model as the policy names it; "" for all other GPUs."""

    span: int
    hour: str
    model: str


@dataclass(frozen=True, slots=True)
class ModelSpans:
    """The parts of a span in each of which the policies in force have quotas by the same GPU models.

    edges: their starts, and the end of the last one.
    models: the models of each part, as the policies name them; none without quotas by model."""

    edges: tuple[int, ...]
    models: tuple[tuple[str, ...], ...]

    @classmethod
    def of(cls, policies: Sequence[PolicyVersion], start_ms: int, end_ms: int) -> ModelSpans:
        edges = [start_ms]
        models: list[tuple[str, ...]] = []
        for version, since, _ in _in_force(policies, start_ms, end_ms):
            named = tuple(sorted(version.policy.gpu_models))
            if not models:
                models.append(named)
            elif models[-1] != named:
                edges.append(since)
                models.append(named)
        return cls((*edges, end_ms), tuple(models) or ((),))

    @property
    def dimensions(self) -> tuple[Dimension, ...]:
        """What usage is asked by, so that `lot` can assign it, beside the queue."""
        return ("hour", "gpu_model") if any(self.models) else ("hour",)

    def lot(self, span: int, hour: str, gpu_model: str = "") -> Lot:
        models = self.models[span]
        return Lot(span, hour, (most_precise(gpu_model, models) or "") if models else "")

    def held(self, usage: Usage) -> Counter[tuple[str, Lot]]:
        """Held GPU-µs by queue and lot. usage: for `edges`, by at least the queue and `dimensions`."""
        sums: Counter[tuple[str, Lot]] = Counter()
        at = [usage.by.index(name) for name in ("queue", *self.dimensions)]
        allocated = usage.columns(HELD).sum(axis=1).tolist()
        for span, key, gpu_us in zip(usage.span.tolist(), usage.row_keys(), allocated, strict=True):
            queue, *place = (key[index] for index in at)
            sums[queue, self.lot(span, *place)] += gpu_us
        return sums

    def unmetered_hours(self, usage: Usage) -> set[tuple[int, str]]:
        """The span and the hour of all hours in which there were GPUs and nothing of them is known. usage: as `held`
        needs it."""
        at = usage.by.index("hour")
        places = [(span, key[at]) for span, key in zip(usage.span.tolist(), usage.row_keys(), strict=True)]
        known = {place for place, some in zip(places, usage.columns(_KNOWN).sum(axis=1).tolist(), strict=True) if some}
        missing = {place for place, gpu_us in zip(places, usage.column("unmetered").tolist(), strict=True) if gpu_us}
        return missing - known


def quotas(
    policies: Sequence[PolicyVersion], usage: Usage, start_ms: int, end_ms: int, tz: ZoneInfo, since_ms: int = 0
) -> tuple[QuotaRow, ...]:
    """One row per leaf queue of the policies in force in the span, by name. Empty if no queue has a deserved quota.

    usage: as `ModelSpans.held` needs it.
    since_ms: start of the ledger's first record."""
    quota_of = [
        (name, model, milli)
        for version, _, _ in _in_force(policies, start_ms, end_ms)
        for name, _, by_model in _leaves(version.policy)
        for model, milli in by_model.items()
        if milli
    ]
    if not quota_of:
        return ()
    unlimited = {(name, model) for name, model, milli in quota_of if milli < 0}
    spans = ModelSpans.of(policies, start_ms, end_ms)
    deserved, teams = leaf_quotas(policies, start_ms, end_ms, tz, since_ms)
    unknown = spans.unmetered_hours(usage)
    deserved = {
        name: Counter({lot: gpu_us for lot, gpu_us in lots.items() if (lot.span, lot.hour) not in unknown})
        for name, lots in deserved.items()
    }
    held: dict[str, Counter[Lot]] = {name: Counter() for name in deserved}
    for (queue, lot), gpu_us in spans.held(usage).items():
        if queue in held:
            held[queue][lot] += gpu_us
    return tuple(
        _row(name, teams[name], deserved[name], held[name], {model for queue, model in unlimited if queue == name})
        for name in sorted(deserved)
    )


def leaf_quotas(
    policies: Sequence[PolicyVersion], start_ms: int, end_ms: int, tz: ZoneInfo, since_ms: int = 0
) -> tuple[dict[str, Counter[Lot]], dict[str, str]]:
    """Guaranteed GPU-µs by leaf queue and lot, and the team by leaf queue, of the policies in force in the span.

    since_ms: the instant from which guarantees count."""
    deserved: dict[str, Counter[Lot]] = defaultdict(Counter)
    teams: dict[str, str] = {}
    starts = ModelSpans.of(policies, start_ms, end_ms).edges[:-1]
    for version, since, until in _in_force(policies, start_ms, end_ms):
        lengths, span = hours(max(since, since_ms), until, tz), bisect_right(starts, since) - 1
        for name, team, by_model in _leaves(version.policy):
            teams[name] = team
            for hour, length_ms in lengths.items():
                for model, milli in by_model.items():
                    deserved[name][Lot(span, hour, model)] += max(0, milli) * length_ms * US_PER_MS // _MILLI
    return deserved, teams


def guarantees(policy: PolicyVersion, usage: Usage, start_ms: int, end_ms: int) -> tuple[QueueGuarantee, ...]:
    """What each leaf queue is guaranteed and held on average in a span, by queue and GPU model.

    usage: as `ModelSpans.held` needs it."""
    held: Counter[tuple[str, str]] = Counter()
    for (queue, lot), gpu_us in ModelSpans.of((policy,), start_ms, end_ms).held(usage).items():
        held[queue, lot.model] += gpu_us
    metered = usage.sum_of_accounts().is_known
    rows = []
    for queue, team, by_model in _leaves(policy.policy):
        for model, milli in by_model.items():
            guaranteed = None if milli < 0 else gpus(milli, _MILLI)
            held_gpus = gpus(held[queue, model], (end_ms - start_ms) * US_PER_MS) if metered else None
            bound = held_gpus if guaranteed is None else guaranteed
            above = None if held_gpus is None or bound is None else max(Decimal(0), held_gpus - bound)
            rows.append(
                QueueGuarantee(
                    queue=queue, team=team, gpu_model=model, guaranteed_gpus=guaranteed, held_gpus=held_gpus,
                    above_gpus=above,
                )
            )  # fmt: skip
    return tuple(sorted(rows, key=lambda row: (row.queue, row.gpu_model)))


def gpus(amount: int, one: int) -> Decimal:
    """A number of GPUs to the thousandth. one: the amount that is one GPU."""
    return Decimal(round(Fraction(amount * _MILLI, one))) / _MILLI


def _row(queue: str, team: str, deserved: Counter[Lot], held: Counter[Lot], unlimited: Set[str]) -> QuotaRow:
    """unlimited: the models of which the queue had no bound at some time."""
    within = sum(gpu_us if lot.model in unlimited else min(gpu_us, deserved[lot]) for lot, gpu_us in held.items())
    return QuotaRow(queue, team, None if unlimited else deserved.total(), within, held.total() - within)


def _in_force(
    policies: Sequence[PolicyVersion], start_ms: int, end_ms: int
) -> Iterable[tuple[PolicyVersion, int, int]]:
    """Yields each version with the part of the span in which it was in force. The first version also applies before
    its start."""
    for i, version in enumerate(policies):
        since = start_ms if i == 0 else max(start_ms, version.effective_ms)
        until = min(end_ms, policies[i + 1].effective_ms) if i + 1 < len(policies) else end_ms
        if since < until:
            yield version, since, until


def _leaves(policy: Policy) -> Iterable[tuple[str, str, Mapping[str, int]]]:
    """Yields the name and the team of each queue without children, and its deserved quotas in thousandths of a GPU by
    GPU model; "" is that of GPUs of no model that the policy names, or of all."""
    parents = {queue.parent for queue in policy.queues}
    for queue in policy.queues:
        if queue.name not in parents:
            by_model = {model: quota.deserved for model, quota in queue.gpu_models.items()} or {"": queue.deserved}
            if not queue.gpu_models and queue.deserved < 0:
                by_model = dict.fromkeys(("", *policy.gpu_models), queue.deserved)
            milli = {model: round(deserved * _MILLI) for model, deserved in by_model.items()}
            yield queue.name, policy.team_of(queue.name), milli


K = TypeVar("K", bound=Hashable)


def unused_by_queue(
    policies: Sequence[PolicyVersion], usage: Usage, start_ms: int, end_ms: int, tz: ZoneInfo
) -> tuple[dict[Lot, dict[str, int]], dict[str, str]]:
    """Unused guaranteed GPU-µs by lot and queue, and the team by queue. usage: as `ModelSpans.held` needs it."""
    deserved, teams = leaf_quotas(policies, start_ms, end_ms, tz)
    held = ModelSpans.of(policies, start_ms, end_ms).held(usage)
    unused: dict[Lot, dict[str, int]] = defaultdict(dict)
    for queue, by_lot in deserved.items():
        for lot, gpu_us in by_lot.items():
            if gpu_us > held[queue, lot]:
                unused[lot][queue] = gpu_us - held[queue, lot]
    return unused, teams


def unused_by_team(
    policies: Sequence[PolicyVersion], usage: Usage, start_ms: int, end_ms: int, tz: ZoneInfo
) -> Mapping[Lot, Counter[str]]:
    """Unused guaranteed GPU-µs by lot and team, for queues that belong to a team."""
    by_queue, teams = unused_by_queue(policies, usage, start_ms, end_ms, tz)
    by_team: dict[Lot, Counter[str]] = defaultdict(Counter)
    for lot, queues in by_queue.items():
        for queue, unused_us in queues.items():
            if teams[queue]:
                by_team[lot][teams[queue]] += unused_us
    return by_team


def reserve(free: Mapping[K, int], unused: Mapping[str, int]) -> dict[tuple[K, str], int]:
    """Divides the unallocated time of each kind of GPU in one lot among the unused guarantees. The keys of the result
    are pairs of a key of `free` and a key of `unused`."""
    total = min(sum(free.values()), sum(unused.values()))
    if not total:
        return {}
    return {
        (kind, owner): gpu_us
        for kind, part in zip(free, apportion(total, list(free.values())), strict=True)
        for owner, gpu_us in zip(unused, apportion(part, list(unused.values())), strict=True)
        if gpu_us
    }
