"""Chooses the victims for each claim and gives a reason for each.

For a claim without room, parts of running workloads are taken as KAI's rules allow. Three conditions are stricter than
KAI's rules. Neither the victim's queue nor a queue above it, up to the level below the common ancestor, goes below its
deserved quota. Only a claim within its queue's deserved quota takes from a workload of higher priority. The policy's
limits apply.

Claims are decided one after the other. Each claim sees the cluster as the earlier ones have left it. The same inputs
and policy give the same verdicts, in whatever order gangs are listed.

For one claim, parts are taken in the order of least loss (`victim_candidates`) until the claim's pods fit on nodes.
Parts that are then not needed are spared. Of several orders, the one that loses least work is used. The search does not
change the accounts (`State`). `_settle` does."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from math import fsum

from accountant.wire.policy_models import Policy
from fairshare.core.admission_quota_tree import Quotas
from fairshare.core.queues_and_weights import UNLIMITED
from fairshare.preemption import idle_reclaim
from fairshare.preemption.preemption_claims import (
    GPU,
    MOST_CLAIMS,
    Claim,
    FreeGpus,
    PlacementTrial,
    claims,
    over_limit,
    refusal,
    saturations,
)
from fairshare.preemption.preemption_rules import (
    EPSILON,
    Account,
    Accounts,
    Budget,
    Limit,
    TakenBundles,
    above_share,
    path,
)
from fairshare.preemption.preemption_types import Ground, Outcome, PreemptionInputs, SparedWorkload, Verdict, Victim
from fairshare.preemption.victim_candidates import (
    Bundle,
    bundles,
    by_node,
    by_preference,
    class_name,
    loss_text,
    past_of,
    protected,
    teams,
    victim_of,
)

MOST_SPARED = 200
"""Largest number of spared workloads named in one verdict."""


@dataclass(slots=True)
class State:
    """The accounts, quotas and victims after the earlier claims of the same cycle."""

    accounts: dict[str, Account]
    expected: dict[str, Account]
    """The accounts together with the claims that fit without preemption. They are used for the claimant's queue and
    those above it, not for the queues that may lose GPUs."""
    room: FreeGpus
    budget: Budget
    taken: set[str]
    """Pods and whole gangs that are already selected."""
    quotas: Quotas
    """Quotas by which the target admits work. Without quotas only nodes count."""

    def books(self, queue: str) -> Accounts:
        """Return the accounts to use for a claim of this queue: `expected` for the queue and those above it, `accounts`
        for all others."""
        return {**self.accounts, **{name: self.expected[name] for name in path(queue, self.accounts)}}


@dataclass(frozen=True, slots=True)
class PickedBundle:
    """A part to take, and the rule that allows it."""

    bundle: Bundle
    ground: Ground


@dataclass(frozen=True, slots=True)
class Field:
    """The candidates for every claim: the unprotected parts in two orders, and why the others are protected.

    parts: the unprotected parts of every gang.
    named: the keys of all running gangs, sorted; spared workloads are reported in this order.
    quotas, teams: by queue."""

    orders: tuple[BundleOrder, ...]
    parts: Mapping[str, Sequence[Bundle]]
    protected: Mapping[str, SparedWorkload]
    named: Sequence[str]
    quotas: Mapping[str, float]
    teams: Mapping[str, str]

    def team(self, queue: str) -> str:
        """Return the team against whose limit victims of a queue count."""
        return self.teams.get(queue, queue)


@dataclass(frozen=True, slots=True)
class BundleOrder:
    """One order of the unprotected parts.

    surplus: by gang, the parts that can be stopped while the gang continues."""

    bundles: Sequence[Bundle]
    surplus: Mapping[str, Sequence[Bundle]]


class Search:
    """The search for one claim: the parts that suffice, and why the others stay."""

    def __init__(self, policy: Policy, claim: Claim, field: Field, state: State) -> None:
        self._policy = policy
        self._claim = claim
        self._field = field
        self._state = state
        self._accounts = state.books(claim.queue)
        self._reasons: dict[str, SparedWorkload] = {}
        self._unfair = False

    def cheapest(self) -> tuple[PickedBundle, ...] | None:
        """Return the selection that loses least work, where spot parts do not count, and among equal ones the fewest
        GPUs; None if none suffices."""
        found = [picks for order in self._field.orders if (picks := self._gather(order)) is not None]
        return min(found, key=_cost, default=None)

    def why_not(self) -> str:
        if self._unfair:
            return f"queue {self._claim.queue} would then be above its share more than those it takes from"
        if not any(map(self._open, self._field.orders[0].bundles)):
            return "no workload runs that could give way"
        free = self._state.quotas.free(self._claim.pool)
        if free < self._claim.gpus - EPSILON:
            return (
                f"the quota of {self._claim.pool} has {max(0.0, free):g} GPUs left, and all that may be taken would not"
                " make room in it"
            )
        return "all that may be taken would not make room for it"

    def spared(self, picks: Sequence[PickedBundle], claimant: str) -> tuple[SparedWorkload, ...]:
        """Return the running workloads that were not selected, up to a limit."""
        silent = {claimant, *(pick.bundle.key for pick in picks)}
        told = (self._spared(key, bool(picks)) for key in self._field.named if key not in silent)
        return tuple(islice((each for each in told if each is not None), MOST_SPARED))

    def _spared(self, key: str, enough: bool) -> SparedWorkload | None:
        known = self._reasons.get(key) or self._field.protected.get(key)
        if known is not None:
            return known
        found = next(filter(self._open, self._field.parts[key]), None)
        text = "others give way who lose less, and that is enough" if enough else "it alone would not make room"
        return SparedWorkload(key, found.gang.queue, text) if found is not None else None

    def _open(self, bundle: Bundle) -> bool:
        """Return whether a part can be considered: of another workload, in a known queue, and still running."""
        taken = self._state.taken
        return (
            bundle.key != self._claim.key
            and bundle.gang.queue in self._accounts
            and not (taken and (bundle.key in taken or any(pod.uid in taken for pod in bundle.pods)))
        )

    def _gather(self, order: BundleOrder) -> tuple[PickedBundle, ...] | None:
        """Take parts until the claim fits, then return those that were needed.

        None means that it never fits, or only unfairly."""
        claim, state = self._claim, self._state
        taking, budget = TakenBundles(claim.asker, self._accounts), state.budget.copy()
        trial = _ClaimPlacement(claim, state.room.trial(claim.sizes, claim.gpus, claim.nodes), state.quotas.copy())
        picks: list[PickedBundle] = []
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
            picks.append(PickedBundle(bundle, ground))
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

    def _fair(self, picks: Sequence[PickedBundle]) -> bool:
        taking = TakenBundles(self._claim.asker, self._accounts)
        for pick in picks:
            taking.take(pick.bundle.gang.queue, {GPU: pick.bundle.gpus})
        return taking.fair(self._policy.preemption.saturation)

    def _ground(self, bundle: Bundle, taking: TakenBundles, budget: Budget, *, note: bool = True) -> Ground | None:
        """Return the rule by which this part may be taken now; None after the reason was noted."""
        found = self._right(bundle, taking)
        reason = found[1] if found[0] is None else None
        limit: Limit | None = None
        if reason is None:
            denial = budget.refusal(bundle.key, self._team(bundle), bundle.lost_gpu_hours)
            if denial is not None:
                reason, limit = denial.reason, denial.limit
        if reason is not None:
            if note:
                self._reasons[bundle.key] = SparedWorkload(bundle.key, bundle.gang.queue, reason, limit)
            return None
        return found[0]

    def _right(self, bundle: Bundle, taking: TakenBundles) -> tuple[Ground | None, str]:
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
        if right is not None and rules.over_share and above_share(accounts[theirs], taking.held(theirs)) and not lower:
            return "above share", ""
        if claim.called and not lower:
            return "latency", ""
        if lower:
            return None, f"its priority {bundle.gang.priority} is above {claim.priority}, and no quota is at stake"
        return None, f"queue {theirs} is not above its fair share of {accounts[theirs].stocks[GPU].share:g} GPUs"


class _ClaimPlacement:
    """Tests whether a claim's pods fit on the nodes, and in the quota by which its target admits work."""

    def __init__(self, claim: Claim, trial: PlacementTrial, quotas: Quotas) -> None:
        """trial, quotas: this object changes them in place."""
        self._claim = claim
        self._trial = trial
        self._quotas = quotas
        self._parts: dict[int, Bundle] = {}

    def helped_by(self, part: Bundle) -> bool:
        """Return False if nodes have room and the part's quota is in another tree."""
        pool = self._claim.pool
        if pool not in self._quotas or self._quotas.root(part.gang.pool) == self._quotas.root(pool):
            return True
        return not self._trial.fits()

    def give(self, number: int, bundle: Bundle) -> None:
        self._parts[number] = bundle
        self._trial.give(number, bundle.by_node, 0.0 if bundle.pods else bundle.gpus)
        self._quotas.book(bundle.gang.pool, -bundle.gpus)

    def take_out(self, number: int) -> None:
        """Remove a part again, as if it had never been added."""
        bundle = self._parts.pop(number)
        self._trial.take_out(number)
        self._quotas.book(bundle.gang.pool, bundle.gpus)

    def fits(self, without: int | None = None) -> bool:
        """Return whether the claim fits. without: the number of a part that is left out."""
        return self._admitted(without) and self._trial.fits(without)

    def _admitted(self, without: int | None) -> bool:
        if without is None:
            return self._quotas.free(self._claim.pool) >= self._claim.gpus - EPSILON
        left_out = self._parts[without]
        self._quotas.book(left_out.gang.pool, left_out.gpus)
        admitted = self._quotas.free(self._claim.pool) >= self._claim.gpus - EPSILON
        self._quotas.book(left_out.gang.pool, -left_out.gpus)
        return admitted


def _needed(picks: Sequence[PickedBundle], trial: _ClaimPlacement) -> tuple[PickedBundle, ...]:
    """Return the parts without which the claim would not fit.

    The part with the largest loss is tested first. A core keeps the surplus that was taken before it.

    A candidate that stays keeps its rule. Returning other parts leaves their queues with more and spends less of the
    limits, so the rule still holds."""
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


def field_of(policy: Policy, situation: PreemptionInputs) -> Field:
    """Return the candidates for the claims of a cycle."""
    allowed: list[Bundle] = []
    left_alone: dict[str, SparedWorkload] = {}
    for gang in situation.gangs:
        for bundle in bundles(gang, situation.now_ms):
            reason = protected(policy, situation, bundle)
            if reason is None:
                allowed.append(bundle)
            elif bundle.whole:
                left_alone[bundle.key] = SparedWorkload(bundle.key, gang.queue, reason)
    prefer = by_preference(saturations(situation.accounts))
    preferred = sorted(allowed, key=prefer)
    parts = _by_gang(preferred)
    return Field(
        tuple(
            BundleOrder(order, _by_gang([bundle for bundle in order if not bundle.whole]))
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


def _cost(picks: Sequence[PickedBundle]) -> tuple[object, ...]:
    hard = fsum(pick.bundle.lost_gpu_hours for pick in picks if not pick.bundle.spot)
    gpus = fsum(pick.bundle.gpus for pick in picks)
    return round(hard, 6), gpus, len(picks), tuple(sorted(pick.bundle.key for pick in picks))


def decide(policy: Policy, situation: PreemptionInputs) -> tuple[Verdict, ...]:
    """Return a verdict per claim, in the order in which they were served."""
    state = State(
        dict(situation.accounts),
        dict(situation.accounts),
        FreeGpus(situation.free),
        Budget(policy.preemption, situation.past, situation.now_ms),
        set(),
        Quotas(situation.quotas),
    )
    asked = claims(policy, situation)
    verdicts = _ClaimDecisions(policy, situation, field_of(policy, situation), state).judge(asked) if asked else []
    return (*verdicts, *idle_reclaim.verdicts(policy, situation, state.budget, state.taken))


class _ClaimDecisions:
    """The claims of one cycle, decided one after the other.

    It searches for victims at most `MOST_CLAIMS` times. Some claims need no search, because they may not preempt or
    equal a claim without victims. These do not delay the following ones."""

    def __init__(self, policy: Policy, situation: PreemptionInputs, field: Field, state: State) -> None:
        self._policy = policy
        self._situation = situation
        self._field = field
        self._state = state
        self._full: set[Hashable] = set()
        self._vain: dict[Hashable, Search] = {}

    def judge(self, asked: Sequence[Claim]) -> list[Verdict]:
        verdicts: list[Verdict] = []
        searched = refused = 0
        for claim in asked:
            verdict, looked = self._judge(claim)
            searched += looked
            refused += verdict.outcome == "denied" and not looked
            if verdict.outcome != "denied" or looked or refused <= MOST_CLAIMS:
                verdicts.append(verdict)
            if searched == MOST_CLAIMS:
                break
        return verdicts

    def _judge(self, claim: Claim) -> tuple[Verdict, bool]:
        """Return the verdict, and whether it needed a search."""
        state, now = self._state, self._situation.accounts
        needs = f"needs {claim.gpus:g} GPUs"
        denial = over_limit(claim, now, state.expected)
        if denial is None and claim.topology:
            denial = (
                f"all of them within one {claim.topology}, which is not checked here: its scheduler makes room itself"
            )
        if denial is None and self._placed(claim):
            _book(state.expected, claim.queue, claim.gpus, fixed=0.0 if claim.preemptible else claim.gpus)
            state.quotas.book(claim.pool, claim.gpus)
            self._vain.clear()
            return _verdict(claim, "room", f"{needs}, and there is room for it already: its scheduler places it"), False
        denial = denial or refusal(claim, now, state.expected)
        if denial is not None:
            return _verdict(claim, "denied", f"{needs}, but {denial}"), False
        known = self._vain.get(claim.like) if claim.key not in self._field.parts else None
        search = known or Search(self._policy, claim, self._field, state)
        picks = search.cheapest() if known is None else None
        if picks is None:
            self._vain[claim.like] = search
            reason = f"{needs}, but {search.why_not()}"
            return _verdict(claim, "denied", reason, spared=search.spared((), claim.key)), known is None
        return self._granted(claim, needs, search, picks), True

    def _placed(self, claim: Claim) -> bool:
        """Return whether it fits without preemption. If it does not, an equal claim does not fit either until a
        workload is stopped."""
        wanted = (claim.sizes, claim.gpus, claim.nodes)
        if (claim.pool, *wanted) in self._full:
            return False
        placed = self._state.quotas.free(claim.pool) >= claim.gpus - EPSILON and self._state.room.place(*wanted)
        if not placed:
            self._full.add((claim.pool, *wanted))
        return placed

    def _granted(self, claim: Claim, needs: str, search: Search, picks: Sequence[PickedBundle]) -> Verdict:
        state, now_ms = self._state, self._situation.now_ms
        victims = tuple(_victim(self._policy, claim, pick, self._field, state.accounts, now_ms) for pick in picks)
        spared = search.spared(picks, claim.key)
        _settle(self._field, self._situation, claim, picks, state)
        self._full.clear()
        self._vain.clear()
        lost = fsum(victim.lost_gpu_hours for victim in victims)
        count = len({pick.bundle.key for pick in picks})
        who = f"{count} workloads give way" if count > 1 else "1 workload gives way"
        reason = f"{needs}: {who}, {fsum(v.gpus for v in victims):g} GPUs, {lost:.1f} GPU-hours of work lost"
        if claim.why:
            reason = f"{reason}; {claim.why}"
        return replace(_verdict(claim, "preempts", reason, spared=spared), victims=victims)


def _victim(
    policy: Policy, claim: Claim, pick: PickedBundle, field: Field, accounts: Mapping[str, Account], now_ms: int
) -> Victim:
    bundle, queue = pick.bundle, pick.bundle.gang.queue
    stock = accounts[queue].stocks[GPU]
    what = f"its {bundle.gpus:g} GPUs" if bundle.whole else f"{bundle.gpus:g} of its GPUs, which it can run without,"
    grounds: dict[Ground, str] = {
        "within quota": f"queue {queue} holds {stock.allocated:g} GPUs with a quota of {stock.deserved:g}, and queue"
        f" {claim.queue} is within its own quota",
        "above share": f"queue {queue} holds {stock.allocated:g} GPUs, more than its fair share of {stock.share:g},"
        f" and queue {claim.queue} is below its own",
        "latency": f"queue {queue} holds {stock.allocated:g} GPUs with a quota of {stock.deserved:g}, and {claim.why}",
        "lower class": f"its priority {class_name(policy, bundle.gang.priority)} is lower in the same queue, and"
        f" {claim.why}",
    }
    loss = loss_text(bundle, now_ms)
    reason = f"{what} go to {claim.key} of queue {claim.queue}: {grounds[pick.ground]}; {loss}"
    return victim_of(bundle, pick.ground, field.team(queue), reason)


def _settle(
    field: Field, situation: PreemptionInputs, claim: Claim, picks: Sequence[PickedBundle], state: State
) -> None:
    """Update the accounts after the claim has its victims."""
    for pick in picks:
        bundle = pick.bundle
        state.taken.update(pod.uid for pod in bundle.pods)
        if bundle.whole:
            state.taken.add(bundle.key)
        state.room.give(bundle.by_node)
        state.quotas.book(bundle.gang.pool, -bundle.gpus)
        state.budget.spend(past_of(field.team(bundle.gang.queue), bundle, situation.now_ms))
        for books in (state.accounts, state.expected):
            _book(books, bundle.gang.queue, -bundle.gpus, fixed=0.0)
    if not state.room.place(claim.sizes, claim.gpus, claim.nodes):
        state.room.place((), min(claim.gpus, state.room.free(claim.nodes)), claim.nodes)
    state.quotas.book(claim.pool, claim.gpus)
    for books in (state.accounts, state.expected):
        _book(books, claim.queue, claim.gpus, fixed=0.0 if claim.preemptible else claim.gpus)


def _book(accounts: dict[str, Account], queue: str, gpus: float, *, fixed: float) -> None:
    for name in path(queue, accounts):
        stock = accounts[name].stocks[GPU]
        changed = replace(stock, allocated=stock.allocated + gpus, fixed=stock.fixed + fixed)
        accounts[name] = replace(accounts[name], stocks={**accounts[name].stocks, GPU: changed})


def _verdict(claim: Claim, outcome: Outcome, reason: str, spared: tuple[SparedWorkload, ...] = ()) -> Verdict:
    return Verdict(claim.key, claim.queue, claim.gpus, claim.trigger, outcome, reason, (), spared)
