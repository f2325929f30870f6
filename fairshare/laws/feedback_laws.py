"""Defines the signature of a feedback law, and the laws static, KAI, Fair Tree and multifactor.

A law looks at one set of siblings (queues of one parent and one priority) and says what to divide by
now instead of the configured weights. `fairshare.laws.weight_calculation` walks the tree, keeps the answer within the
policy's bounds and paces it, so a law knows neither the tree nor the cluster, and works at every level
of the tree alike: usage, pool and targets of siblings are relative to what their parent has.

Invariants every law keeps outside turns (tests/properties/test_laws.py): the outcome depends on the
values alone, not on their order; who used more never gets more; scaling all configured weights scales
nothing else; with no history the configured weights come back. A law is pure: what it must remember
comes in and goes out as `Memory`, numbers by name that survive JSON.

At every level the level fairshare LF = S / U (normalised shares over the level's usage) orders siblings;
a subtree is ranked whole before the next begins; a user's fairshare is its rank over the number of users.
Documented ties: sibling users with equal LF share a rank, sibling accounts with equal LF have their
children ranked together, and a user tied with an account gets its best user's rank.

`slurm_compat=True` does what Slurm does: accounts are never merged (its count of tied accounts stops at
every account), and ties are compared in 80-bit floats. Otherwise values within 1e-12 are equal.

Source: SchedMD Slurm 284c3b95f08a, src/plugins/priority/multifactor/fair_tree.c (read, not copied) and
doc/html/fair_tree.shtml. Pure.

Usage of an association is weighed against its siblings': U_E = U + (U_E of the parent - U) · shares /
siblings' shares, so that a quiet account pays for a busy parent. S is the product of normalised shares
down the tree.

The exact decayed integral is what gputally counts; `slurm_*` functions reproduce Slurm's own linearised
decay, which under-counts, for cross-checks against `sshare`.

Source: SchedMD Slurm 284c3b95f08a, src/plugins/priority/multifactor/priority_multifactor.c (read, not
copied). Pure.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import exp2, fsum, inf, isclose, log
from operator import itemgetter, lt, mul
from typing import Any, Literal, NamedTuple, Protocol, Self

import numpy as np

Memory = Mapping[str, Mapping[str, float]]
"""What a law keeps from one cycle to the next, per queue. Empty at first; losing it only loses momentum."""


class LawQueue(NamedTuple):
    """One queue as a law sees it. GPUs unless said otherwise.

    weight: configured, >= 0. target: its part (0..1) of the pool by quota and weight, if all queues asked for
    everything. usage: U, its usage in the policy's window over what the siblings had then (as GPU time: usage * pool *
    window). requested contains allocated; both contain its children's. gang: its smallest pending gang, 0 where it has
    none. weight_now: the weight in force, None where unset. reclaims: evictions made for its sake since the last cycle,
    as far as known."""

    name: str
    weight: float
    target: float
    usage: float
    requested: float
    allocated: float
    deserved: float = 0.0
    limit: float = -1.0
    gang: float = 0.0
    weight_now: float | None = None
    reclaims: float = 0.0


class LawColumns(NamedTuple):
    """Queues as columns, each of a field of `LawQueue`, in step: laws look at one thing of all, and a replay has them
    so. No row is made for them."""

    names: Sequence[str]
    weights: Sequence[float]
    targets: Sequence[float]
    usage: Sequence[float]
    requested: Sequence[float]
    allocated: Sequence[float]
    deserved: Sequence[float]
    limits: Sequence[float]
    gangs: Sequence[float]
    weights_now: Sequence[float | None]
    reclaims: Sequence[float]

    @classmethod
    def of(cls, members: Sequence[LawQueue]) -> Self:
        """At least one."""
        return cls(*zip(*members, strict=True))


@lru_cache(256)
def _picking(which: tuple[bool, ...]) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """Takes these places out of a column; who competes is mostly the same for hours."""
    places = [place for place, one in enumerate(which) if one]
    if len(places) > 1:
        return itemgetter(*places)
    return lambda column: tuple(column[place] for place in places)


@dataclass(frozen=True, slots=True)
class LawQueues:
    """Queues that are divided together. pool: GPUs there are for them. window_s: how long the usage
    window is in effect: its size, or with a half-life the integral of its decay over it. explain: False where traces
    and notes are not read, as in replays, which ask thousands of times."""

    columns: LawColumns
    pool: float
    window_s: float
    now_ms: int
    explain: bool = True

    @property
    def members(self) -> tuple[LawQueue, ...]:
        return tuple(map(LawQueue._make, zip(*self.columns, strict=True)))

    def only(self, which: Sequence[bool]) -> LawQueues:
        """The same cycle among some of them, in their order."""
        columns = LawColumns._make(map(_picking(tuple(which)), self.columns))
        return LawQueues(columns, self.pool, self.window_s, self.now_ms, self.explain)

    def by_name(self) -> LawQueues:
        """The same in the order of their names."""
        names = self.columns.names
        if all(map(lt, names, names[1:])):
            return self
        columns = LawColumns.of(sorted(self.members, key=lambda member: member.name))
        return LawQueues(columns, self.pool, self.window_s, self.now_ms, self.explain)


@dataclass(frozen=True, slots=True)
class LawResult:
    """What a law wants. wanted: a weight >= 0 for each of `names`, which are those of the siblings, in their order.
    traces: the numbers on the way, by queue and name, in the order in which they arose. notes: a clause for people, by
    queue. turn: the queue that has its turn now; its weights then go out as they are, past step and clamp."""

    names: Sequence[str]
    wanted: Sequence[float]
    traces: Mapping[str, Mapping[str, float]]
    notes: Mapping[str, str] = field(default_factory=dict)
    memory: Memory = field(default_factory=dict)
    turn: str | None = None

    @property
    def weights(self) -> Mapping[str, float]:
        """By queue."""
        return dict(zip(self.names, self.wanted, strict=True))


class Law(Protocol):
    """Pure: equal arguments, equal verdict."""

    @property
    def relative(self) -> bool:
        """True: only the proportions of the weights mean something, and only among those who compete
        (ask for more than their quota); such a law is stateless and asked about the competitors alone.
        False: they are the weights to publish, and the law looks at demand itself."""
        ...

    def __call__(self, siblings: LawQueues, memory: Memory, /) -> LawResult: ...


def normalised(siblings: LawQueues) -> list[float]:
    """n: every one's configured weight over their sum; all 0 where there is none."""
    weights = siblings.columns.weights
    total = fsum(weights)
    return [weight / total for weight in weights] if total > 0 else [0.0] * len(weights)


@dataclass(frozen=True, slots=True)
class Static:
    """No feedback: the configured weights."""

    relative = True

    def __call__(self, siblings: LawQueues, _memory: Memory, /) -> LawResult:
        names, n = siblings.columns.names, normalised(siblings)
        return LawResult(names, n, {name: {"n": part} for name, part in zip(names, n, strict=True)})


@dataclass(frozen=True, slots=True)
class Kai:
    """P = max(0, n + k (n - U)): published with the scheduler's own k at 0, the same first round as its
    own history would give.

    Source: KAI-Scheduler resource_division.go, commit d5bc503a."""

    k: float
    relative = True

    def __call__(self, siblings: LawQueues, _memory: Memory, /) -> LawResult:
        k, names, usage = self.k, siblings.columns.names, siblings.columns.usage
        parts = normalised(siblings)
        wanted = [n + k * (n - u) if n > 0.0 else 0.0 for n, u in zip(parts, usage, strict=True)]
        if min(wanted) < 0.0:
            wanted = [max(0.0, p) for p in wanted]
        if not siblings.explain:
            return LawResult(names, wanted, {})
        rows = zip(names, parts, usage, wanted, strict=True)
        return LawResult(names, wanted, {name: {"n": n, "U": u, "k": k, "P": p} for name, n, u, p in rows})


ROOT = "root"
_TIED = 1e-12
Level = float | np.longdouble


@dataclass(frozen=True, slots=True)
class Account:
    """A row of the account tree. shares None: the parent's own (a user then always comes first, an account
    hands its children up). usage counts for users; an account's is its users'."""

    name: str
    parent: str
    kind: Literal["account", "user"]
    shares: int | None
    usage: float = 0.0


@dataclass(frozen=True, slots=True)
class Ranking:
    """level_fs: LF of every row. fairshare: of users, rank / number of users, 1 is first."""

    level_fs: Mapping[str, float]
    fairshare: Mapping[str, float]


def fair_tree(rows: Sequence[Account], *, slurm_compat: bool = False) -> Ranking:
    """Rank all users. Rows of unknown parents are not reached."""
    tree = _Tree(rows, slurm_compat)
    tree.rank(tree.children(ROOT), tied_with_account=False)
    return Ranking({name: float(value) for name, value in tree.level.items()}, tree.fairshare)


class _Tree:
    def __init__(self, rows: Sequence[Account], slurm_compat: bool) -> None:
        self._compat = slurm_compat
        self._below: dict[str, list[Account]] = {}
        self._usage: dict[str, float] = {}
        handed_up = {row.name: row.parent for row in rows if row.kind == "account" and row.shares is None}
        for row in rows:
            parent = row.parent
            while parent in handed_up:
                parent = handed_up[parent]
            if row.name not in handed_up:
                self._below.setdefault(parent, []).append(row)
        self._users = sum(row.kind == "user" for row in rows)
        self._next = self._users
        self._rank = self._users
        self.fairshare: dict[str, float] = {}
        self.level: dict[str, Level] = {}
        self._measure(ROOT)

    def _measure(self, account: str) -> float:
        """Usage of the subtree; sets LF of everything below."""
        rows = self._below.get(account, [])
        for row in rows:
            self._usage[row.name] = self._measure(row.name) if row.kind == "account" else row.usage
        whole = sum(self._usage[row.name] for row in rows)
        shares = sum(row.shares for row in rows if row.shares is not None)
        for row in rows:
            self.level[row.name] = self._level(row, shares, whole)
        return whole

    def _level(self, row: Account, shares: int, whole: float) -> Level:
        if row.shares is None:
            return inf
        if row.shares == 0 or shares == 0:
            # An idle user without shares has 0 / 0, which Slurm takes for infinite; an account has none.
            return inf if row.kind == "user" and shares == 0 and whole == 0 else 0.0
        if whole == 0 or self._usage[row.name] == 0:
            return inf
        if self._compat:
            return np.longdouble(row.shares / shares) / (np.longdouble(self._usage[row.name]) / np.longdouble(whole))
        return row.shares / shares / (self._usage[row.name] / whole)

    def children(self, account: str) -> list[Account]:
        return self._below.get(account, [])

    def rank(self, siblings: Sequence[Account], *, tied_with_account: bool) -> None:
        ordered = sorted(siblings, key=lambda row: (-self.level[row.name], row.kind != "user", row.name))
        before: Level | None = None
        at = 0
        while at < len(ordered):
            row = ordered[at]
            tied = tied_with_account if at == 0 else before is not None and self._equal(before, self.level[row.name])
            before = self.level[row.name]
            at += 1
            if row.kind == "user":
                if not tied:
                    self._rank = self._next
                self.fairshare[row.name] = self._rank / self._users
                self._next -= 1
                continue
            merged = list(self.children(row.name))
            while not self._compat and at < len(ordered) and self._equal(before, self.level[ordered[at].name]):
                merged += self.children(ordered[at].name)
                at += 1
            self.rank(merged, tied_with_account=tied)

    def _equal(self, one: Level, other: Level) -> bool:
        if self._compat:
            return bool(one == other)
        return one == other or isclose(one, other, rel_tol=_TIED)


@dataclass(frozen=True, slots=True)
class FairTree:
    """Fair Tree as weights: among siblings, the configured part times the rank, so that the order of
    service becomes a gradient and no weight is ever zero."""

    relative = True

    def __call__(self, siblings: LawQueues, _memory: Memory, /) -> LawResult:
        names, usage, n = siblings.columns.names, siblings.columns.usage, normalised(siblings)
        levels = [part / u if u > 0 else inf if part > 0 else 0.0 for part, u in zip(n, usage, strict=True)]
        ordered = sorted(zip([-level for level in levels], names, range(len(names)), strict=True))
        fairshare = [1.0] * len(ordered)
        rank, above = len(ordered), inf
        for at, (_, _, q) in enumerate(ordered):
            if at and not _same(above, levels[q]):
                rank = len(ordered) - at
            above = levels[q]
            fairshare[q] = rank / len(ordered)
        wanted = list(map(mul, n, fairshare))
        if not siblings.explain:
            return LawResult(names, wanted, {})
        traces = {
            names[q]: {"n": n[q], "U": usage[q], "LF": min(levels[q], 1e9), "fairshare": fairshare[q]}
            for _, _, q in ordered
        }
        return LawResult(names, wanted, traces)


def _same(one: float, other: float) -> bool:
    return one == other or isclose(one, other, rel_tol=_TIED)


@dataclass(frozen=True, slots=True)
class Factor:
    """norm_shares: S. norm_usage: U_A, of the root's. effective_usage: U_E. fairshare: F, 0..1."""

    norm_shares: float
    norm_usage: float
    effective_usage: float
    fairshare: float


def fair_share_factor(usage: float, shares: float, dampening: float = 1.0) -> float:
    """F = 2^(-(U/S)/d); 0 where there are no shares."""
    return exp2(-usage / shares / dampening) if shares > 0 else 0.0


def factors(rows: Sequence[Account], dampening: float = 1.0) -> dict[str, Factor]:
    """Every association's factor. Usage on account rows is ignored: it is their users'."""
    below: dict[str, list[Account]] = {}
    for row in rows:
        below.setdefault(row.parent, []).append(row)
    usage: dict[str, float] = {}

    def measure(name: str) -> float:
        for row in below.get(name, ()):
            usage[row.name] = row.usage if row.kind == "user" else measure(row.name)
        return sum(usage[row.name] for row in below.get(name, ()))

    whole = measure(ROOT)
    found: dict[str, Factor] = {}

    def level(name: str) -> list[Account]:
        """Who competes below `name`: an account on its parent's shares hands its children up."""
        rows = below.get(name, [])
        return rows + [own for row in rows if row.shares is None and row.kind == "account" for own in level(row.name)]

    def descend(name: str, shares: float, effective: float | None) -> None:
        rows = level(name)
        whole_shares = sum(row.shares or 0 for row in rows)
        for row in rows:
            used = min(1.0, usage[row.name] / whole) if whole else 0.0
            if row.shares is None:  # it stands on its parent's shares, and answers for its parent's usage
                own, charged = 1.0, used if effective is None else effective
            else:
                own = row.shares / whole_shares if whole_shares else 0.0
                charged = used if effective is None else used + (effective - used) * own
            found[row.name] = Factor(shares * own, used, charged, fair_share_factor(charged, shares * own, dampening))
            if row.shares is not None:
                descend(row.name, shares * own, charged)

    descend(ROOT, 1.0, None)
    return found


def exact_decay(elapsed_s: float, half_life_s: float) -> float:
    """What is left of a usage after `elapsed_s`."""
    return exp2(-elapsed_s / half_life_s)


def slurm_decay(elapsed_s: float, half_life_s: float) -> float:
    """The same as Slurm computes it: (1 - 0.693 / half-life) ^ seconds, never quite 0; no half-life, no decay."""
    if half_life_s <= 0:
        return 1.0
    return float(max((1 - 0.693 / half_life_s) ** elapsed_s, sys.float_info.min))


def exact_accrual(rate: float, run_s: float, observed_s: float, half_life_s: float) -> float:
    """∫ rate · 2^(-age / half-life) of a job that ran for the first `run_s` of `observed_s` seconds."""
    ended = exp2(-(observed_s - run_s) / half_life_s)
    return rate * half_life_s / log(2) * (ended - exp2(-observed_s / half_life_s))


def slurm_accrual(rate: float, run_s: int, observed_s: int, half_life_s: float, period_s: int = 300) -> float:
    """The same in Slurm's periods: a new slice is decayed by its whole length."""
    usage, at = 0.0, 0
    while at < observed_s:
        step = min(period_s, observed_s - at)
        ran = max(0, min(run_s - at, step))
        usage = usage * slurm_decay(step, half_life_s) + ran * slurm_decay(ran, half_life_s) * rate
        at += step
    return usage


@dataclass(frozen=True, slots=True)
class Multifactor:
    """The classic factor as weights: the configured part times 2^(-U/n), never zero."""

    dampening: float = 1.0
    relative = True

    def __call__(self, siblings: LawQueues, _memory: Memory, /) -> LawResult:
        names, usage, n = siblings.columns.names, siblings.columns.usage, normalised(siblings)
        factors = [fair_share_factor(max(0.0, u), part, self.dampening) for part, u in zip(n, usage, strict=True)]
        wanted = list(map(mul, n, factors))
        if not siblings.explain:
            return LawResult(names, wanted, {})
        rows = zip(names, n, usage, factors, strict=True)
        return LawResult(names, wanted, {name: {"n": part, "U": u, "F": factor} for name, part, u, factor in rows})
