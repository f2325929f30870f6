"""One claim's way to room: which parts of running workloads may be taken for it, and in which order. Pure.

Parts are taken in the order in which it hurts least (`preempting.victims`), by the rights of `preempting.reclaim`
and within the limits of `preempting.limits`, until the claim's pods fit on nodes; who then turns out not to be needed
is spared. Of several orders the one counts that loses least work. What it must not do: change the books
(`State`); `fairshare.preemption` settles them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from math import fsum

from accountant.wire import Policy
from fairshare.kube.quotas import Quotas
from fairshare.model import UNLIMITED
from fairshare.preempting.claims import GPU, Claim, saturations
from fairshare.preempting.limits import Budget, Limit
from fairshare.preempting.reclaim import EPSILON, Account, Accounts, Taking, path
from fairshare.preempting.room import Room, Trial
from fairshare.preempting.rulings import Ground, Situation, Spared
from fairshare.preempting.sparing import past_of, protected, teams
from fairshare.preempting.victims import Bundle, bundles, by_node, by_preference

MOST_SPARED = 200
"""Spared workloads named in one verdict."""


@dataclass(slots=True)
class State:
    """What earlier claims of the same cycle have left."""

    accounts: dict[str, Account]
    expected: dict[str, Account]
    """The same with those claims that find room by themselves: what counts for who asks, not for who may lose."""
    room: Room
    budget: Budget
    taken: set[str]
    """Pods and whole gangs that have gone already."""
    quotas: Quotas
    """By which the target admits work; every node without quotas."""

    def books(self, queue: str) -> Accounts:
        """As they are for a claim of this queue."""
        return {**self.accounts, **{name: self.expected[name] for name in path(queue, self.accounts)}}


@dataclass(frozen=True, slots=True)
class Pick:
    """A part that would be taken, and by what right."""

    bundle: Bundle
    ground: Ground


@dataclass(frozen=True, slots=True)
class Field:
    """Whom any claim may look at: those unprotected in two orders, and why the others are left alone.

    parts: the unprotected of every gang. named: all gangs that run, in the order in which they are told. quotas,
    teams: by queue."""

    orders: tuple[Order, ...]
    parts: Mapping[str, Sequence[Bundle]]
    protected: Mapping[str, Spared]
    named: Sequence[str]
    quotas: Mapping[str, float]
    teams: Mapping[str, str]

    def team(self, queue: str) -> str:
        """Who pays for what is stopped in a queue."""
        return self.teams.get(queue, queue)


@dataclass(frozen=True, slots=True)
class Order:
    """One way through the unprotected. surplus: of them, by gang, what can go without the gang."""

    bundles: Sequence[Bundle]
    surplus: Mapping[str, Sequence[Bundle]]


class Search:
    """One claim's way to room: which picks do, and why the others stay."""

    def __init__(self, policy: Policy, claim: Claim, field: Field, state: State) -> None:
        self._policy = policy
        self._claim = claim
        self._field = field
        self._state = state
        self._accounts = state.books(claim.queue)
        self._reasons: dict[str, Spared] = {}
        self._unfair = False

    def cheapest(self) -> tuple[Pick, ...] | None:
        """Of the ways tried the one that loses least work, then the fewest GPUs; None where none leads there."""
        found = [picks for order in self._field.orders if (picks := self._gather(order)) is not None]
        return min(found, key=_cost, default=None)

    def why_not(self) -> str:
        if self._unfair:
            return f"queue {self._claim.queue} would then be above its share more than those it takes from"
        if not any(map(self._open, self._field.orders[0].bundles)):
            return "nobody runs who could give way"
        free = self._state.quotas.free(self._claim.pool)
        if free < self._claim.gpus - EPSILON:
            return (
                f"the quota of {self._claim.pool} has {max(0.0, free):g} GPUs left, and all that may be taken would not"
                " make room in it"
            )
        return "all that may be taken would not make room for it"

    def spared(self, picks: Sequence[Pick], claimant: str) -> tuple[Spared, ...]:
        """Everybody who runs and was not picked, as far as anybody reads."""
        silent = {claimant, *(pick.bundle.key for pick in picks)}
        told = (self._spared(key, bool(picks)) for key in self._field.named if key not in silent)
        return tuple(islice((each for each in told if each is not None), MOST_SPARED))

    def _spared(self, key: str, enough: bool) -> Spared | None:
        known = self._reasons.get(key) or self._field.protected.get(key)
        if known is not None:
            return known
        found = next(filter(self._open, self._field.parts[key]), None)
        text = "others give way who lose less, and that is enough" if enough else "it alone would not make room"
        return Spared(key, found.gang.queue, text) if found is not None else None

    def _open(self, bundle: Bundle) -> bool:
        """Whether it comes into question: another's, of a known queue, and still there."""
        taken = self._state.taken
        return (
            bundle.key != self._claim.key
            and bundle.gang.queue in self._accounts
            and not (taken and (bundle.key in taken or any(pod.uid in taken for pod in bundle.pods)))
        )

    def _gather(self, order: Order) -> tuple[Pick, ...] | None:
        """Take until it fits, then give back what was not needed. None: it never fits, or not fairly."""
        claim, state = self._claim, self._state
        taking, budget = Taking(claim.asker, self._accounts), state.budget.copy()
        trial = _Fitting(claim, state.room.trial(claim.sizes, claim.gpus, claim.nodes), state.quotas.copy())
        picks: list[Pick] = []
        missing = claim.gpus - state.room.free(claim.nodes)
        left: dict[str, list[Bundle]] = {}
        gone: set[str] = set()
        for part in order.bundles:
            if part.key in gone or not self._open(part) or not trial.helped_by(part):
                continue
            if part.key not in left:
                left[part.key] = list(filter(self._open, order.surplus.get(part.key, ())))
            bundle = part.with_rest(left[part.key]) if part.whole else part
            ground = self._ground(bundle, taking, budget)
            if ground is None:
                continue
            trial.give(len(picks), bundle)
            picks.append(Pick(bundle, ground))
            if part.whole:
                gone.add(part.key)
            else:
                left[part.key].remove(part)
            taking.take(bundle.gang.queue, {GPU: bundle.gpus})
            budget.spend(past_of(self._team(bundle), bundle, budget.now_ms))
            missing -= bundle.gpus
            if missing <= EPSILON and trial.fits():
                break
        else:
            return None
        needed = _needed(picks, trial)
        if not claim.called and not self._fair(needed):
            self._unfair = True
            return None
        return needed

    def _team(self, bundle: Bundle) -> str:
        return self._field.team(bundle.gang.queue)

    def _fair(self, picks: Sequence[Pick]) -> bool:
        taking = Taking(self._claim.asker, self._accounts)
        for pick in picks:
            taking.take(pick.bundle.gang.queue, {GPU: pick.bundle.gpus})
        return taking.fair(self._policy.preemption.saturation)

    def _ground(self, bundle: Bundle, taking: Taking, budget: Budget, *, note: bool = True) -> Ground | None:
        """By what right this part may be taken now; None, and the reason noted."""
        found = self._right(bundle, taking)
        reason = found[1] if found[0] is None else None
        limit: Limit | None = None
        if reason is None:
            denial = budget.refusal(bundle.key, self._team(bundle), bundle.lost_gpu_hours)
            if denial is not None:
                reason, limit = denial.reason, denial.limit
        if reason is not None:
            if note:
                self._reasons[bundle.key] = Spared(bundle.key, bundle.gang.queue, reason, limit)
            return None
        return found[0]

    def _right(self, bundle: Bundle, taking: Taking) -> tuple[Ground | None, str]:
        claim, rules, queue = self._claim, self._policy.preemption, bundle.gang.queue
        accounts = self._accounts
        if queue == claim.queue:
            if claim.called and bundle.gang.priority < claim.priority:
                return "lower class", ""
            return None, "it is of the same queue, where the scheduler itself decides by priority"
        mine, theirs = taking.levelled(queue)
        if mine == theirs:
            return None, f"queue {queue} is above or below queue {claim.queue} in the tree"
        for name in _below(theirs, taking.path(queue)):
            held, quota = taking.held(name)[GPU], self._field.quotas[name]
            if quota == UNLIMITED or held <= quota + EPSILON:
                return None, f"queue {name} holds {held:g} GPUs, no more than its quota"
            if held - bundle.gpus < quota - EPSILON:
                text = f"without its {bundle.gpus:g} GPUs queue {name} would hold less than its quota of {quota:g}"
                return None, text
        right = taking.right(queue)
        if right == "within quota" and rules.quota:
            return right, ""
        lower = bundle.gang.priority > claim.priority
        if right is not None and rules.over_share and taking_above(taking, theirs, accounts) and not lower:
            return "above share", ""
        if claim.called and not lower:
            return "latency", ""
        if lower:
            return None, f"its priority {bundle.gang.priority} is above {claim.priority}, and no quota is at stake"
        return None, f"queue {theirs} is not above its fair share of {accounts[theirs].stocks[GPU].share:g} GPUs"


class _Fitting:
    """Whether a claim's pods fit, on the nodes and in the quota by which its target admits work."""

    def __init__(self, claim: Claim, trial: Trial, quotas: Quotas) -> None:
        """trial, quotas: changed in place."""
        self._claim = claim
        self._trial = trial
        self._quotas = quotas
        self._parts: dict[int, Bundle] = {}

    def helped_by(self, part: Bundle) -> bool:
        """False where nodes have room and the part's quota is of another tree."""
        pool = self._claim.pool
        if pool not in self._quotas or self._quotas.root(part.gang.pool) == self._quotas.root(pool):
            return True
        return not self._trial.fits()

    def give(self, number: int, bundle: Bundle) -> None:
        self._parts[number] = bundle
        self._trial.give(number, bundle.by_node, 0.0 if bundle.pods else bundle.gpus)
        self._quotas.book(bundle.gang.pool, -bundle.gpus)

    def take_out(self, number: int) -> None:
        """As if it had never been given."""
        bundle = self._parts.pop(number)
        self._trial.take_out(number)
        self._quotas.book(bundle.gang.pool, bundle.gpus)

    def fits(self, without: int | None = None) -> bool:
        """without: the number of a part that is left out."""
        return self._admitted(without) and self._trial.fits(without)

    def _admitted(self, without: int | None) -> bool:
        if without is None:
            return self._quotas.free(self._claim.pool) >= self._claim.gpus - EPSILON
        left_out = self._parts[without]
        self._quotas.book(left_out.gang.pool, left_out.gpus)
        admitted = self._quotas.free(self._claim.pool) >= self._claim.gpus - EPSILON
        self._quotas.book(left_out.gang.pool, -left_out.gpus)
        return admitted


def _needed(picks: Sequence[Pick], trial: _Fitting) -> tuple[Pick, ...]:
    """Those without whom it would not fit. Who loses most is asked first whether the rest is enough. A core keeps the
    surplus taken before it.

    Who stays keeps his ground: without those given back others hold more and less is spent."""
    kept = dict(enumerate(picks))
    cores = {pick.bundle.key for pick in picks if pick.bundle.whole}
    for number, pick in sorted(kept.items(), key=lambda item: _most_lost(item[1].bundle)):
        core = pick.bundle.whole
        if len(kept) > 1 and (core or pick.bundle.key not in cores) and trial.fits(without=number):
            trial.take_out(number)
            del kept[number]
            if core:
                cores.remove(pick.bundle.key)
    return tuple(kept.values())


def _most_lost(bundle: Bundle) -> tuple[float, float, str]:
    return -bundle.lost_gpu_hours, -bundle.gpus, bundle.key


def taking_above(taking: Taking, queue: str, accounts: Accounts) -> bool:
    """Whether a queue still holds more than it may."""
    return taking.held(queue)[GPU] > accounts[queue].stocks[GPU].allocatable + EPSILON


def field_of(policy: Policy, situation: Situation) -> Field:
    """Whom the claims of a cycle may look at, from what runs."""
    allowed: list[Bundle] = []
    left_alone: dict[str, Spared] = {}
    for gang in situation.gangs:
        for bundle in bundles(gang, situation.now_ms):
            reason = protected(policy, situation, bundle)
            if reason is None:
                allowed.append(bundle)
            elif bundle.whole:
                left_alone[bundle.key] = Spared(bundle.key, gang.queue, reason)
    prefer = by_preference(saturations(situation.accounts))
    preferred = sorted(allowed, key=prefer)
    parts = _by_gang(preferred)
    return Field(
        tuple(
            Order(order, _by_gang([bundle for bundle in order if not bundle.whole]))
            for order in (preferred, by_node(preferred, prefer))
        ),
        parts,
        left_alone,
        sorted(parts.keys() | left_alone.keys()),
        {queue.name: queue.deserved for queue in policy.queues},
        teams(policy),
    )


def _by_gang(some: Sequence[Bundle]) -> Mapping[str, Sequence[Bundle]]:
    found: dict[str, list[Bundle]] = {}
    for bundle in some:
        found.setdefault(bundle.key, []).append(bundle)
    return found


def _below(top: str, way: Sequence[str]) -> Sequence[str]:
    return way[way.index(top) :]


def _cost(picks: Sequence[Pick]) -> tuple[object, ...]:
    hard = fsum(pick.bundle.lost_gpu_hours for pick in picks if not pick.bundle.spot)
    gpus = fsum(pick.bundle.gpus for pick in picks)
    return round(hard, 6), gpus, len(picks), tuple(sorted(pick.bundle.key for pick in picks))
