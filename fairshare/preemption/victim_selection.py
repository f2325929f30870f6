"""Chooses the victims for each claim, with a reason for each victim and each spared workload.

If a claim does not fit on the free GPUs, parts of running workloads are taken as `reclaim_rules_and_limits` allows.
Three conditions are stricter. The victim's queue, and every queue above it that is not also above the claim's queue,
keeps at least its deserved quota. Only a claim within its queue's deserved quota takes from a workload of higher
priority. The policy's limits apply.

A claim for a violated latency objective may take more: also from queues above their quota that are within their fair
share, and from workloads of lower priority in its own queue.

Claims are decided one after the other. Each decision starts from the state of the cluster after the earlier ones. The
same inputs and policy give the same verdicts, in whatever order gangs are listed.

For one claim, parts are taken in the order of least loss (`victim_candidates`) until the claim's pods fit on nodes.
Parts that are then not needed are spared. Of several orders, the one that loses least work is used. The search leaves
the accounts (`SelectionState`) unchanged. `_settle` updates them when the victims are chosen."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from math import fsum

from accountant.wire.policy_models import Policy
from fairshare.core.admission_quota_tree import QuotaTree
from fairshare.core.gpu_models import OTHERS, policy_of_part, units
from fairshare.core.queues_and_weights import ALWAYS_S, UNLIMITED
from fairshare.preemption import idle_reclaim
from fairshare.preemption.claims_and_placement import (
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
from fairshare.preemption.preemption_types import Ground, Outcome, PreemptionInputs, SparedWorkload, Verdict, Victim
from fairshare.preemption.reclaim_rules_and_limits import (
    COUNT_LIMITS,
    EPSILON,
    Account,
    Accounts,
    Denial,
    ReclaimBudget,
    TakenBundles,
    above_share,
    path,
)
from fairshare.preemption.victim_candidates import (
    Bundle,
    Kind,
    bundles,
    by_node,
    by_preference,
    class_name,
    loss_text,
    make_victim,
    preemption_record,
    protected,
    teams,
)
from gputally.base.units import MS_PER_SECOND

MOST_SPARED = 200
"""Largest number of spared workloads named in one verdict."""


@dataclass(slots=True)
class SelectionState:
    """The accounts, quotas and victims after the earlier claims of the same cycle."""

    accounts: dict[str | None, dict[str, Account]]
    """The accounts of all GPUs (None), and with quotas by GPU model those of each model."""
    expected: dict[str | None, dict[str, Account]]
    """The accounts with the claims that find room without preemption. They apply to the claimant's queue, not to the
    queues that may lose GPUs."""
    room: FreeGpus
    budget: ReclaimBudget
    taken: set[str]
    """Uids of pods and keys of whole gangs that are already selected."""
    touched: set[str]
    """Keys of gangs of which anything is already selected."""
    quotas: QuotaTree
    """The tree of quotas by which the target admits work; empty if it admits work by nodes alone."""

    def accounts_for(self, claim: Claim) -> Accounts:
        """Return the accounts to use for a claim, of its GPU model alone: `expected` for its queue and those above it,
        `accounts` for all others."""
        accounts, expected = self.accounts[claim.model], self.expected[claim.model]
        return {**accounts, **{name: expected[name] for name in path(claim.queue, accounts)}}

    def of_claim(self, claim: Claim) -> Sequence[str | None]:
        """Return the keys of the accounts that a claim changes."""
        return (None,) if claim.model is None else (None, claim.model)

    def allocate(self, model: str | None, queue: str, gpus: float) -> None:
        """Add allocated GPUs of a model (None: of any) to the queue and its ancestors."""
        for accounts in (self.accounts[model], self.expected[model]):
            _add_allocation(accounts, queue, gpus, fixed=0.0)


@dataclass(frozen=True, slots=True)
class PickedBundle:
    """A part to take, and the rule that allows it."""

    bundle: Bundle
    ground: Ground


@dataclass(frozen=True, slots=True)
class Candidates:
    """The candidates for every claim: the unprotected parts in two orders, and why the others are protected.

    parts: the unprotected parts of every gang.
    workloads: keys of all running gangs, in the order in which they are reported.
    quotas: deserved quotas by GPU model (None: of all GPUs) and queue.
    teams: by queue.
    models: by running gang, its GPUs of each model; empty without quotas by model.
    model_of_node: by node; empty without quotas by model."""

    orders: tuple[BundleOrder, ...]
    parts: Mapping[str, Sequence[Bundle]]
    protected: Mapping[str, SparedWorkload]
    workloads: Sequence[str]
    quotas: Mapping[str | None, Mapping[str, float]]
    teams: Mapping[str, str]
    models: Mapping[str, Mapping[str, float]]
    model_of_node: Mapping[str, str]

    def team(self, queue: str) -> str:
        """Return the team against whose limit victims of a queue count."""
        return self.teams.get(queue, queue)

    def amounts(self, bundle: Bundle) -> Mapping[str, float]:
        """Return the GPUs of a part by model; empty without quotas by model."""
        of_gang = self.models.get(bundle.key, {})
        if len(of_gang) == 1:
            return dict.fromkeys(of_gang, bundle.gpus)
        if bundle.gpus >= fsum(of_gang.values()) - EPSILON:
            return of_gang
        found: dict[str, list[float]] = {}
        for node, gpus in bundle.by_node.items():
            found.setdefault(self.model_of_node.get(node, OTHERS), []).append(gpus)
        return {model: fsum(parts) for model, parts in found.items()}

    def gpus(self, bundle: Bundle, model: str | None) -> float:
        """Return the GPUs of a part of one model; None: of all."""
        return bundle.gpus if model is None else self.amounts(bundle).get(model, 0.0)


@dataclass(frozen=True)
class BundleOrder:
    """One order in which a search takes the unprotected parts of known queues.

    surplus: by gang, the parts without which the gang still runs."""

    bundles: Sequence[Bundle]
    surplus: Mapping[str, Sequence[Bundle]]

    @cached_property
    def kinds(self) -> frozenset[Kind]:
        return frozenset(bundle.kind for bundle in self.bundles)

    @cached_property
    def _places(self) -> Mapping[str, Sequence[int]]:
        places: dict[str, list[int]] = {}
        for place, bundle in enumerate(self.bundles):
            places.setdefault(bundle.key, []).append(place)
        return places

    def places_of(self, keys: Iterable[str], since: int) -> Sequence[int]:
        """Return where the parts of these gangs are, from place `since` on."""
        return sorted(place for key in keys for place in self._places.get(key, ()) if place >= since)


class RefusedKinds(dict[Kind, tuple[str, "str | Denial"]]):
    """The kinds of parts of which none may be taken until one of another kind is: the queue, and the reason."""

    def __init__(self, order: BundleOrder) -> None:
        super().__init__()
        self._order = order
        self._open = len(order.kinds)

    def refuse(self, kind: Kind, why: tuple[str, str | Denial]) -> None:
        self._open -= kind in self._order.kinds and kind not in self
        self[kind] = why

    def none(self) -> None:
        """Note that a part was taken, after which each kind has to be asked about again."""
        self.clear()
        self._open = len(self._order.kinds)

    def every(self) -> bool:
        """Return whether all kinds of the order are refused."""
        return not self._open


class Search:
    """The search for one claim: the parts that suffice, and why the others stay."""

    def __init__(
        self, policy: Policy, claim: Claim, candidates: Candidates, state: SelectionState, now_ms: int
    ) -> None:
        self._policy = policy
        self._now_ms = now_ms
        self._claim = claim
        self._candidates = candidates
        self._state = state
        self._accounts = state.accounts_for(claim)
        self._reasons: dict[str, tuple[str, str | Denial]] = {}
        self._rest: dict[Kind, tuple[str, str | Denial]] = {}
        """Why parts that were passed over stay, by kind."""
        self._tried: set[str] = set()
        """Keys of gangs of which a part could be taken."""
        self._unfair = False

    def cheapest(self) -> tuple[PickedBundle, ...] | None:
        """Return the selection that loses least work, where spot parts do not count, and among equal ones the fewest
        GPUs; None if none suffices."""
        selections: list[tuple[PickedBundle, ...]] = []
        for order in self._candidates.orders:
            taken, needed = self._gather(order)
            if needed is not None:
                selections.append(needed)
            if not taken:  # no part may be taken first, so none in another order
                break
        return min(selections, key=_cost, default=None)

    def why_not(self) -> str:
        """Return why no selection suffices, after `cheapest` has returned None."""
        if self._unfair:
            return f"queue {self._claim.queue} would then be above its share more than those it takes from"
        if not any(map(self._open, self._candidates.orders[0].bundles)):
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
        left_out = {claimant, *(pick.bundle.key for pick in picks)}
        spared = (self._spared(key, bool(picks)) for key in self._candidates.workloads if key not in left_out)
        return tuple(islice((workload for workload in spared if workload is not None), MOST_SPARED))

    def _spared(self, key: str, enough: bool) -> SparedWorkload | None:
        """Return why a workload stays; None if it could not be considered. enough: whether others were selected."""
        part = None
        if key not in self._reasons and key not in self._candidates.protected:
            part = next(filter(self._open, self._candidates.parts[key]), None)
            if part is not None and part.kind in self._rest and key not in self._tried:
                self._reasons[key] = self._rest[part.kind]
        if key in self._reasons:
            queue, why = self._reasons[key]
            return SparedWorkload(key, queue, *((why, None) if isinstance(why, str) else (why.reason, why.limit)))
        if key in self._candidates.protected:
            return self._candidates.protected[key]
        text = "workloads that lose less give way, and that is enough" if enough else "it alone would not make room"
        return SparedWorkload(key, part.gang.queue, text) if part is not None else None

    def _open(self, bundle: Bundle) -> bool:
        """Return whether a part can be considered: of another workload, in a known queue, and still running."""
        return (
            bundle.key != self._claim.key
            and bundle.gang.queue in self._accounts
            and not bundle.is_in(self._state.taken)
            and self._candidates.gpus(bundle, self._claim.model) > 0
            and not self._scheduler_protects(bundle)
        )

    def _scheduler_protects(self, bundle: Bundle) -> bool:
        """Return whether the scheduler itself protects the part from this claim, and keep the reason."""
        protection = bundle.gang.protection
        if protection is None or not (bundle.whole or protection.surplus):
            return False
        started_ms = bundle.gang.started_ms if bundle.gang.started_ms is not None else self._now_ms
        least_s, ran_s = protection.seconds(self._claim.path), (self._now_ms - started_ms) / MS_PER_SECOND
        if ran_s >= least_s:
            return False
        text = "its scheduler takes nothing of its queue for other queues"
        if least_s < ALWAYS_S:
            text = f"its scheduler protects it for {least_s / 60:g} min after its start, and it has run for"
            text = f"{text} {ran_s / 60:.0f}"
        self._reasons[bundle.key] = bundle.gang.queue, text
        return True

    def _gather(self, order: BundleOrder) -> tuple[int, tuple[PickedBundle, ...] | None]:
        """Take parts until the claim fits. Return their number, and those that were needed.

        None means that the claim does not fit, or only unfairly."""
        claim, candidates, state = self._claim, self._candidates, self._state
        rights = _Rights(claim, self._accounts, state.accounts, candidates, self._policy)
        budget = state.budget.copy()
        trial = _ClaimPlacement(claim, state.room.trial(claim.sizes, claim.gpus, claim.nodes), state.quotas.copy())
        picks: list[PickedBundle] = []
        missing = claim.gpus - state.room.total(claim.nodes)
        left: dict[str, list[Bundle]] = {}
        gone = {claim.key}
        counted = claim.pool in state.quotas
        refused = RefusedKinds(order)
        for part in order.bundles if counted else self._walk(order, refused, budget):
            key = part.key
            if (
                key in gone
                or (key in state.touched and part.is_in(state.taken))
                or (claim.model is not None and candidates.gpus(part, claim.model) <= 0)
                or (part.gang.protection is not None and self._scheduler_protects(part))
                or (counted and not trial.helped_by(part))
            ):
                continue
            if key in order.surplus and key not in left:
                left[key] = [each for each in order.surplus[key] if not each.is_in(state.taken)]
            bundle = part.with_rest(left[key]) if part.whole and key in left else part
            kind = bundle.kind
            if kind in refused and key not in budget.stopped:
                self._reasons[key] = refused[kind]
                continue
            queue = part.gang.queue
            ground, why = rights.to(bundle)
            denial = None if ground is None else budget.refusal(key, candidates.team(queue), bundle.lost_gpu_hours)
            if ground is None or denial is not None:
                self._reasons[key] = queue, denial or why
                if denial is None or denial.limit in COUNT_LIMITS:
                    refused.refuse(kind, self._reasons[key])
                continue
            trial.add(len(picks), bundle, candidates.gpus(bundle, claim.model))
            picks.append(PickedBundle(bundle, ground))
            self._tried.add(key)
            if part.whole:
                gone.add(key)
            else:
                left[key].remove(part)
            refused.none()
            rights.take(bundle)
            budget.spend(preemption_record(candidates.team(queue), bundle, budget.now_ms))
            missing -= candidates.gpus(bundle, claim.model)
            if missing <= EPSILON and trial.fits():
                break
        else:
            return len(picks), None
        needed = _needed(picks, trial)
        if not claim.called and not self._fair(needed):
            self._unfair = True
            return len(picks), None
        return len(picks), needed

    def _walk(self, order: BundleOrder, refused: RefusedKinds, budget: ReclaimBudget) -> Iterator[Bundle]:
        """Yield the parts of the order. While every kind is refused, yield only those of workloads that stop already,
        which other limits may allow, and pass over the rest."""
        place = 0
        while place < len(order.bundles):
            if not refused.every():
                yield order.bundles[place]
                place += 1
                continue
            self._rest |= refused
            for later in order.places_of(budget.stopped, place):
                yield order.bundles[later]
                place = later + 1
                if not refused.every():
                    break
            else:
                return

    def _fair(self, picks: Sequence[PickedBundle]) -> bool:
        taking = TakenBundles(self._claim.claimant, self._accounts)
        for pick in picks:
            taking.take(pick.bundle.gang.queue, {GPU: self._candidates.gpus(pick.bundle, self._claim.model)})
        return taking.fair(self._policy.preemption.saturation)


Right = tuple[Ground | None, str]
"""The rule by which a part may be taken, or None and the reason why there is none."""


class _Rights:
    """Answers by which rule parts may be taken for a claim, and keeps what was taken. An answer is kept until something
    is taken below the same root."""

    def __init__(
        self,
        claim: Claim,
        accounts: Accounts,
        of_models: Mapping[str | None, Accounts],
        candidates: Candidates,
        policy: Policy,
    ) -> None:
        """accounts: of the claim's GPU model. of_models: of every model, for parts that run on others too."""
        self._claim = claim
        self._rules = policy.preemption
        self._accounts = accounts
        self._candidates = candidates
        self._taking = TakenBundles(claim.claimant, accounts)
        self._of_models = {
            model: self._taking if model == claim.model else TakenBundles(claim.claimant, each)
            for model, each in of_models.items()
        }
        self._known: dict[Hashable, Right] = {}
        self._below: dict[str, list[Hashable]] = {}

    def to(self, bundle: Bundle) -> Right:
        kind = self._kind(bundle)
        known = self._known.get(kind)
        if known is None:
            known = self._known[kind] = self._right(bundle)
            self._below.setdefault(self._taking.path(bundle.gang.queue)[0], []).append(kind)
        return known

    def take(self, bundle: Bundle) -> None:
        queue = bundle.gang.queue
        for model, gpus in self._amounts(bundle).items():
            self._of_models[model].take(queue, {GPU: gpus})
        for kind in self._below.pop(self._taking.path(queue)[0], ()):
            del self._known[kind]

    def _amounts(self, bundle: Bundle) -> Mapping[str | None, float]:
        """Return the GPUs of a part by the keys of the accounts that they are in for this claim."""
        if self._claim.model is None:
            return {None: bundle.gpus}
        return dict(self._candidates.amounts(bundle).items())

    def _kind(self, bundle: Bundle) -> Hashable:
        return bundle.kind if self._claim.model is None else (bundle.kind, *sorted(self._amounts(bundle).items()))

    def _right(self, bundle: Bundle) -> Right:
        """Return the rule by which this part may be taken, or None and the reason why there is none. Both depend only
        on its kind and on what was taken before."""
        claim, rules, queue = self._claim, self._rules, bundle.gang.queue
        accounts, taking, unit = self._accounts, self._taking, units(claim.model)
        if queue == claim.queue:
            if claim.called and bundle.gang.priority < claim.priority:
                return "lower class", ""
            return None, "it is of the same queue, where the scheduler itself decides by priority"
        own, other = taking.compared(queue)
        if own == other:
            return None, f"queue {queue} is above or below queue {claim.queue} in the tree"
        below = taking.path(queue)[taking.path(queue).index(other) :]
        for model, gpus in self._amounts(bundle).items():
            for name in below:
                held, quota = self._of_models[model].held(name)[GPU], self._candidates.quotas[model][name]
                if model == claim.model and (quota == UNLIMITED or held <= quota + EPSILON):
                    return None, f"queue {name} holds {held:g} {unit}, no more than its quota"
                if quota == UNLIMITED or held - gpus < quota - EPSILON:
                    text = f"without its {gpus:g} {units(model)} queue {name} would hold less than its quota of"
                    return None, f"{text} {quota:g}"
        right = taking.right(queue)
        if right == "within quota" and rules.quota:
            return right, ""
        higher_priority = bundle.gang.priority > claim.priority
        exceeds_share = above_share(accounts[other], taking.held(other))
        if right is not None and rules.over_share and exceeds_share and not higher_priority:
            return "above share", ""
        if claim.called and not higher_priority:
            return "latency", ""
        if higher_priority:
            return None, f"its priority {bundle.gang.priority} is above {claim.priority}, and no quota is at stake"
        return None, f"queue {other} is not above its fair share of {accounts[other].stocks[GPU].share:g} {unit}"


def pool_uses(bundle: Bundle) -> Sequence[tuple[str, float]]:
    """Return the pools whose quota a part uses, each with its GPUs."""
    return bundle.gang.uses or ((bundle.gang.pool, bundle.gpus),)


def _use(quotas: QuotaTree, bundle: Bundle, sign: int) -> None:
    """Record the use of the quota by a part (1), or its end (-1)."""
    for pool, gpus in pool_uses(bundle):
        quotas.add_use(pool, sign * gpus)


class _ClaimPlacement:
    """Tests whether a claim's pods fit on the nodes, and in the quota by which its target admits work."""

    def __init__(self, claim: Claim, trial: PlacementTrial, quotas: QuotaTree) -> None:
        """trial, quotas: the test changes both in place."""
        self._claim = claim
        self._trial = trial
        self._quotas = quotas
        self._parts: dict[int, Bundle] = {}

    def helped_by(self, part: Bundle) -> bool:
        """Return whether stopping the part can help a claim with a quota: nodes lack room, or the part uses the same
        tree of quotas."""
        pool, quotas = self._claim.pool, self._quotas
        if any(quotas.root(used) == quotas.root(pool) for used, _ in pool_uses(part)):
            return True
        return not self._trial.fits()

    def add(self, number: int, bundle: Bundle, gpus: float) -> None:
        """Add a part that would be stopped. gpus: those of the claim's model."""
        self._parts[number] = bundle
        self._trial.add(number, bundle.by_node, 0.0 if bundle.pods else gpus)
        _use(self._quotas, bundle, -1)

    def take_out(self, number: int) -> None:
        """Remove a part again, as if it had never been added."""
        bundle = self._parts.pop(number)
        self._trial.take_out(number)
        _use(self._quotas, bundle, 1)

    def fits(self, without: int | None = None) -> bool:
        """Return whether the claim fits. without: the number of a part that is left out."""
        return self._admitted(without) and self._trial.fits(without)

    def _admitted(self, without: int | None) -> bool:
        if without is None:
            return self._quotas.free(self._claim.pool) >= self._claim.gpus - EPSILON
        left_out = self._parts[without]
        _use(self._quotas, left_out, 1)
        admitted = self._quotas.free(self._claim.pool) >= self._claim.gpus - EPSILON
        _use(self._quotas, left_out, -1)
        return admitted


def _needed(picks: Sequence[PickedBundle], trial: _ClaimPlacement) -> tuple[PickedBundle, ...]:
    """Return the parts without which the claim would not fit.

    The part with the largest loss is tested first. While a core is needed, so is the surplus of its gang that was taken
    before.

    The rule by which a needed part may be taken still holds when other parts are spared, because their queues then hold
    more and less of the limits is spent."""
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


def parts_of(situation: PreemptionInputs) -> Sequence[Bundle]:
    """Return the parts of all running gangs, those with the least loss first. They are the same whatever the cluster
    vetoes."""
    every = (bundle for gang in situation.gangs for bundle in bundles(gang, situation.now_ms))
    return sorted(every, key=by_preference(saturations(situation.accounts)))


def candidates_of(policy: Policy, situation: PreemptionInputs, every: Sequence[Bundle]) -> Candidates:
    """Return the candidates for the claims of a cycle. every: all parts (`parts_of`)."""
    preferred: list[Bundle] = []
    protected_workloads: dict[str, SparedWorkload] = {}
    for bundle in every:
        reason = protected(policy, situation, bundle)
        if reason is None:
            preferred.append(bundle)
        elif bundle.whole:
            protected_workloads[bundle.key] = SparedWorkload(bundle.key, bundle.gang.queue, reason)
    parts = _by_gang(preferred)
    return Candidates(
        tuple(
            BundleOrder(
                [part for part in order if part.gang.queue in situation.accounts],
                _by_gang([part for part in order if not part.whole]),
            )
            for order in (preferred, by_node(preferred))
        ),
        parts,
        protected_workloads,
        sorted(parts.keys() | protected_workloads.keys()),
        {
            model: {queue.name: queue.deserved for queue in rules.queues}
            for model, rules in (
                (None, policy), *((model, policy_of_part(policy, model)) for model in situation.models),
            )
        },
        teams(policy),
        situation.held_models,
        {node: model for model, nodes in situation.model_nodes.items() for node in nodes},
    )  # fmt: skip


def _by_gang(parts: Sequence[Bundle]) -> Mapping[str, Sequence[Bundle]]:
    result: dict[str, list[Bundle]] = {}
    for bundle in parts:
        result.setdefault(bundle.key, []).append(bundle)
    return result


def _cost(picks: Sequence[PickedBundle]) -> tuple[object, ...]:
    lost = fsum(pick.bundle.lost_gpu_hours for pick in picks if not pick.bundle.spot)
    gpus = fsum(pick.bundle.gpus for pick in picks)
    return round(lost, 6), gpus, len(picks), tuple(sorted(pick.bundle.key for pick in picks))


def decide(
    policy: Policy, situation: PreemptionInputs, every: Callable[[], Sequence[Bundle]] | None = None
) -> tuple[Verdict, ...]:
    """Return a verdict per claim in the order of service, then the verdicts of the idle rule.

    every: returns all parts (`parts_of`), for a caller that decides several times; None: they are computed here."""
    models = (None, *situation.models)
    state = SelectionState(
        {model: dict(situation.accounts_of(model)) for model in models},
        {model: dict(situation.accounts_of(model)) for model in models},
        FreeGpus(situation.free),
        ReclaimBudget(policy.preemption, situation.past, situation.now_ms),
        set(),
        set(),
        QuotaTree(situation.quotas),
    )
    in_order = claims(policy, situation)
    verdicts: list[Verdict] = []
    if in_order:
        candidates = candidates_of(policy, situation, every() if every is not None else parts_of(situation))
        verdicts = _ClaimDecisions(policy, situation, candidates, state).decide(in_order)
    return (*verdicts, *idle_reclaim.verdicts(policy, situation, state.budget, state.taken))


class _ClaimDecisions:
    """Decides the claims of one cycle, one after the other.

    It searches for victims at most `MOST_CLAIMS` times. A claim that may not preempt, or that equals an earlier claim
    without victims, needs no search and does not delay the following ones."""

    def __init__(
        self, policy: Policy, situation: PreemptionInputs, candidates: Candidates, state: SelectionState
    ) -> None:
        self._policy = policy
        self._situation = situation
        self._candidates = candidates
        self._state = state
        self._unplaceable: set[Hashable] = set()
        self._failed_searches: dict[Hashable, Search] = {}
        self._passed: dict[str, list[Claim]] = {}
        """By line of their scheduler, the claims that get no room."""

    def decide(self, in_order: Sequence[Claim]) -> list[Verdict]:
        verdicts: list[Verdict] = []
        searched = refused = 0
        for claim in in_order:
            verdict, needed_search = self._decide(claim)
            if verdict.outcome == "denied" and claim.line:
                self._passed.setdefault(claim.line, []).append(claim)
            searched += needed_search
            refused += verdict.outcome == "denied" and not needed_search
            if verdict.outcome != "denied" or needed_search or refused <= MOST_CLAIMS:
                verdicts.append(verdict)
            if searched == MOST_CLAIMS:
                break
        return verdicts

    def _decide(self, claim: Claim) -> tuple[Verdict, bool]:
        """Return the verdict, and whether it needed a search."""
        state, now = self._state, self._situation.accounts
        needs = f"needs {claim.gpus:g} GPUs"
        denial = over_limit(claim, now, state.expected[None])
        if denial is None and claim.topology:
            denial = (
                f"all of them within one {claim.topology}, which is not checked here: its scheduler makes room itself"
            )
        variants = claim.variants if denial is None else ()
        limits = [self._over_model_limit(variant) for variant in variants]
        within = (variant for variant, limit in zip(variants, limits, strict=True) if limit is None)
        placed = next(filter(self._placed, within), None)
        if placed is not None:
            for model in state.of_claim(placed):
                _add_claim(state.expected[model], claim)
            state.quotas.add_use(placed.pool, claim.gpus)
            self._failed_searches.clear()
            return _verdict(claim, "room", f"{needs}, and there is room for it already: its scheduler places it"), False
        refusals = [
            limit or refusal(variant, self._situation.accounts_of(variant.model), state.expected[variant.model])
            for variant, limit in zip(variants, limits, strict=True)
        ]
        allowed = [variant for variant, reason in zip(variants, refusals, strict=True) if reason is None]
        if not allowed:
            denial = denial or "; ".join(dict.fromkeys(reason for reason in refusals if reason is not None))
            return _verdict(claim, "denied", f"{needs}, but {denial}"), False
        failed: list[Search] = []
        searched = False
        for variant in allowed:
            requirements = variant.requirements
            known = self._failed_searches.get(requirements) if claim.key not in self._candidates.parts else None
            search = known or Search(self._policy, variant, self._candidates, state, self._situation.now_ms)
            picks = search.cheapest() if known is None else None
            ahead = self._first_served(variant, picks) if picks is not None else None
            if picks is not None and ahead is not None:
                text = f"{ahead.key} is before it in its scheduler's line and would get the room: {ahead.gpus:g} GPUs"
                return _verdict(claim, "denied", f"{needs}, but {text}"), True
            if picks is not None:
                return self._granted(variant, needs, search, picks), True
            self._failed_searches[requirements] = search
            failed.append(search)
            searched |= known is None
        reason = f"{needs}, but {failed[0].why_not()}"
        return _verdict(claim, "denied", reason, spared=failed[0].spared((), claim.key)), searched

    def _first_served(self, claim: Claim, picks: Sequence[PickedBundle]) -> Claim | None:
        """Return a claim without room that its scheduler would start in the room made for this one, because it is
        before it in their line and needs no more; None if there is none."""
        quotas = self._state.quotas.copy()
        for pick in picks:
            _use(quotas, pick.bundle, -1)
        free = quotas.free(claim.pool) + EPSILON
        before = self._passed.get(claim.line, ()) if claim.line and not claim.called else ()
        return next((e for e in before if e.gpus <= free and any(v.pool == claim.pool for v in e.variants)), None)

    def _over_model_limit(self, claim: Claim) -> str | None:
        """Return in words which limit of a queue for the claim's GPU model makes it wait; None if none does."""
        if claim.model is None:
            return None
        return over_limit(
            claim, self._situation.accounts_of(claim.model), self._state.expected[claim.model], claim.model
        )

    def _placed(self, claim: Claim) -> bool:
        """Return whether the claim fits without preemption, and reserve its room.

        If it does not fit, an equal claim does not fit either until a workload is stopped."""
        room = (claim.sizes, claim.gpus, claim.nodes)
        if (claim.pool, *room) in self._unplaceable:
            return False
        placed = self._state.quotas.free(claim.pool) >= claim.gpus - EPSILON and self._state.room.place(*room)
        if not placed:
            self._unplaceable.add((claim.pool, *room))
        return placed

    def _granted(self, claim: Claim, needs: str, search: Search, picks: Sequence[PickedBundle]) -> Verdict:
        state, now_ms = self._state, self._situation.now_ms
        victims = tuple(
            _victim(self._policy, claim, pick, self._candidates, state.accounts[claim.model], now_ms) for pick in picks
        )
        spared = search.spared(picks, claim.key)
        _settle(self._candidates, self._situation, claim, picks, state)
        self._unplaceable.clear()
        self._failed_searches.clear()
        lost = fsum(victim.lost_gpu_hours for victim in victims)
        count = len({pick.bundle.key for pick in picks})
        who = f"{count} workloads give way" if count > 1 else "1 workload gives way"
        reason = f"{needs}: {who}, {fsum(v.gpus for v in victims):g} GPUs, {lost:.1f} GPU-hours of work lost"
        if claim.why:
            reason = f"{reason}; {claim.why}"
        return replace(_verdict(claim, "preempts", reason, spared=spared), victims=victims)


def _victim(
    policy: Policy,
    claim: Claim,
    pick: PickedBundle,
    candidates: Candidates,
    accounts: Mapping[str, Account],
    now_ms: int,
) -> Victim:
    """Return the victim with the reason for its owner."""
    bundle, queue = pick.bundle, pick.bundle.gang.queue
    stock, unit = accounts[queue].stocks[GPU], units(claim.model)
    what = f"its {bundle.gpus:g} GPUs" if bundle.whole else f"{bundle.gpus:g} of its GPUs, which it can run without,"
    grounds: dict[Ground, str] = {
        "within quota": f"queue {queue} holds {stock.allocated:g} {unit} with a quota of {stock.deserved:g}, and queue"
        f" {claim.queue} is within its own quota",
        "above share": f"queue {queue} holds {stock.allocated:g} {unit}, more than its fair share of {stock.share:g},"
        f" and queue {claim.queue} is below its own",
        "latency": f"queue {queue} holds {stock.allocated:g} {unit} with a quota of {stock.deserved:g}, and"
        f" {claim.why}",
        "lower class": f"its priority {class_name(policy, bundle.gang.priority)} is lower in the same queue, and"
        f" {claim.why}",
    }
    loss = loss_text(bundle, now_ms)
    reason = f"{what} go to {claim.key} of queue {claim.queue}: {grounds[pick.ground]}; {loss}"
    return make_victim(bundle, pick.ground, candidates.team(queue), reason)


def _settle(
    candidates: Candidates,
    situation: PreemptionInputs,
    claim: Claim,
    picks: Sequence[PickedBundle],
    state: SelectionState,
) -> None:
    """Update `state` for the victims of a claim, whose GPUs the claim gets."""
    for pick in picks:
        bundle = pick.bundle
        state.touched.add(bundle.key)
        state.taken.update(pod.uid for pod in bundle.pods)
        if bundle.whole:
            state.taken.add(bundle.key)
        state.room.add(bundle.by_node)
        _use(state.quotas, bundle, -1)
        state.budget.spend(preemption_record(candidates.team(bundle.gang.queue), bundle, situation.now_ms))
        state.allocate(None, bundle.gang.queue, -bundle.gpus)
        for name, gpus in candidates.amounts(bundle).items():
            state.allocate(name, bundle.gang.queue, -gpus)
    if not state.room.place(claim.sizes, claim.gpus, claim.nodes):
        state.room.place((), min(claim.gpus, state.room.total(claim.nodes)), claim.nodes)
    state.quotas.add_use(claim.pool, claim.gpus)
    for model in state.of_claim(claim):
        _add_claim(state.accounts[model], claim)
        _add_claim(state.expected[model], claim)


def _add_claim(accounts: dict[str, Account], claim: Claim) -> None:
    """Add the GPUs that the claim gets."""
    _add_allocation(accounts, claim.queue, claim.gpus, fixed=0.0 if claim.preemptible else claim.gpus)


def _add_allocation(accounts: dict[str, Account], queue: str, gpus: float, *, fixed: float) -> None:
    """Add allocated GPUs to the queue and its ancestors."""
    for name in path(queue, accounts):
        stock = accounts[name].stocks[GPU]
        changed = replace(stock, allocated=stock.allocated + gpus, fixed=stock.fixed + fixed)
        accounts[name] = replace(accounts[name], stocks={**accounts[name].stocks, GPU: changed})


def _verdict(claim: Claim, outcome: Outcome, reason: str, spared: tuple[SparedWorkload, ...] = ()) -> Verdict:
    return Verdict(claim.key, claim.queue, claim.gpus, claim.trigger, outcome, reason, (), spared)
