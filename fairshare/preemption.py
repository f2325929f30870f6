"""Who gives way to whom: every claim of one cycle judged, with a reason for each victim and each one spared. Pure.

For a claim that finds no room, parts of running workloads are taken as KAI's rules allow (`preempting.searching`);
one claim after another is judged on what those before it have left. Beyond KAI's rules: no queue on the way is ever
carried below its deserved quota; nothing above a share goes to a lower priority; `preempting.limits` hold.
The same situation and policy give the same verdicts, in whatever order gangs are listed.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from math import fsum

from accountant.wire import Policy
from fairshare.kube.quotas import Quotas
from fairshare.preempting import idle
from fairshare.preempting.claims import GPU, MOST_CLAIMS, Claim, claims, over_limit, refusal
from fairshare.preempting.limits import Budget
from fairshare.preempting.reclaim import EPSILON, Account, path
from fairshare.preempting.room import Room
from fairshare.preempting.rulings import Ground, Outcome, Situation, Spared, Verdict, Victim
from fairshare.preempting.searching import Field, Pick, Search, State, field_of
from fairshare.preempting.sparing import class_name, past_of
from fairshare.preempting.victims import counted_from, for_good


def decide(policy: Policy, situation: Situation) -> tuple[Verdict, ...]:
    """A verdict per claim, in the order in which they were served."""
    state = State(
        dict(situation.accounts),
        dict(situation.accounts),
        Room(situation.free),
        Budget(policy.preemption, situation.past, situation.now_ms),
        set(),
        Quotas(situation.quotas),
    )
    asked = claims(policy, situation)
    verdicts = _Court(policy, situation, field_of(policy, situation), state).judge(asked) if asked else []
    return (*verdicts, *idle.verdicts(policy, situation, state.budget, state.taken))


class _Court:
    """Claims of one cycle, judged one after the other. It looks for victims `MOST_CLAIMS` times at most; who needs no
    search, because he may not ask or asks like one that found nobody, keeps nobody behind him waiting."""

    def __init__(self, policy: Policy, situation: Situation, field: Field, state: State) -> None:
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
        """The verdict, and whether it took a search."""
        state, now = self._state, self._situation.accounts
        needs = f"needs {claim.gpus:g} GPUs"
        denial = over_limit(claim, now, state.expected)
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
        """Whether it finds room as things are; who asks for the same finds none either, until somebody goes."""
        wanted = (claim.sizes, claim.gpus, claim.nodes)
        if (claim.pool, *wanted) in self._full:
            return False
        placed = self._state.quotas.free(claim.pool) >= claim.gpus - EPSILON and self._state.room.place(*wanted)
        if not placed:
            self._full.add((claim.pool, *wanted))
        return placed

    def _granted(self, claim: Claim, needs: str, search: Search, picks: Sequence[Pick]) -> Verdict:
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
    policy: Policy, claim: Claim, pick: Pick, field: Field, accounts: Mapping[str, Account], now_ms: int
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
    since = counted_from(bundle, now_ms)
    reason = (
        f"{what} go to {claim.key} of queue {claim.queue}: {grounds[pick.ground]};"
        f" {bundle.lost_gpu_hours:.1f} GPU-hours of work since {since} are lost{for_good(bundle)}"
    )
    return Victim(
        bundle.gang,
        bundle.pods,
        bundle.gpus,
        bundle.lost_gpu_hours,
        bundle.whole,
        pick.ground,
        field.team(queue),
        reason,
    )


def _settle(field: Field, situation: Situation, claim: Claim, picks: Sequence[Pick], state: State) -> None:
    """The books as they are once the claim has what it takes."""
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


def _verdict(claim: Claim, outcome: Outcome, reason: str, spared: tuple[Spared, ...] = ()) -> Verdict:
    return Verdict(claim.key, claim.queue, claim.gpus, claim.trigger, outcome, reason, (), spared)
