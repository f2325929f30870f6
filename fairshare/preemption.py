"""Who gives way to whom: every claim of one cycle judged, with a reason for each victim and each one spared. Pure.

For a claim that finds no room, parts of running workloads are taken as KAI's rules allow (`preempting.searching`);
one claim after another is judged on what those before it have left. Beyond KAI's rules: no queue on the way is ever
carried below its deserved quota; nothing above a share goes to a lower priority; `preempting.limits` hold.
The same situation and policy give the same verdicts, in whatever order gangs are listed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import fsum

from accountant.wire import Policy
from fairshare.preempting import idle
from fairshare.preempting.claims import GPU, Claim, claims, refusal
from fairshare.preempting.limits import Budget
from fairshare.preempting.reclaim import Account, path
from fairshare.preempting.room import Room
from fairshare.preempting.rulings import Ground, Outcome, Situation, Spared, Verdict, Victim
from fairshare.preempting.searching import Field, Pick, Search, State, field_of
from fairshare.preempting.sparing import class_name, past_of
from fairshare.preempting.victims import counted_from, for_good


def decide(policy: Policy, situation: Situation) -> tuple[Verdict, ...]:
    """A verdict per claim, in the order in which they were served."""
    state = State(
        dict(situation.accounts),
        Room(situation.free),
        Budget(policy.preemption, situation.past, situation.now_ms),
        set(),
    )
    asked = claims(policy, situation)
    verdicts: list[Verdict] = []
    if asked:
        field = field_of(policy, situation)
        verdicts = [_judge(policy, situation, claim, field, state) for claim in asked]
    return (*verdicts, *idle.verdicts(policy, situation, state.budget, state.taken))


def _judge(policy: Policy, situation: Situation, claim: Claim, field: Field, state: State) -> Verdict:
    needs = f"needs {claim.gpus:g} GPUs"
    if state.room.place(claim.sizes, claim.gpus, claim.nodes):
        return _verdict(claim, "room", f"{needs}, and there is room for it already: its scheduler places it")
    denial = refusal(claim, state.accounts)
    if denial is not None:
        return _verdict(claim, "denied", f"{needs}, but {denial}")
    search = Search(policy, claim, field, state)
    picks = search.cheapest()
    if picks is None:
        return _verdict(claim, "denied", f"{needs}, but {search.why_not()}", spared=search.spared(()))
    victims = tuple(_victim(policy, claim, pick, field, state.accounts, situation.now_ms) for pick in picks)
    spared = search.spared(picks)
    _settle(field, situation, claim, picks, state)
    lost = fsum(victim.lost_gpu_hours for victim in victims)
    who = f"{len({pick.bundle.key for pick in picks})} workloads give way"
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
        state.budget.spend(past_of(field.team(bundle.gang.queue), bundle, situation.now_ms))
        _book(state.accounts, bundle.gang.queue, -bundle.gpus, fixed=0.0)
    if not state.room.place(claim.sizes, claim.gpus, claim.nodes):
        state.room.place((), min(claim.gpus, state.room.free(claim.nodes)), claim.nodes)
    _book(state.accounts, claim.queue, claim.gpus, fixed=0.0 if claim.preemptible else claim.gpus)


def _book(accounts: dict[str, Account], queue: str, gpus: float, *, fixed: float) -> None:
    for name in path(queue, accounts):
        stock = accounts[name].stocks[GPU]
        changed = replace(stock, allocated=stock.allocated + gpus, fixed=stock.fixed + fixed)
        accounts[name] = replace(accounts[name], stocks={**accounts[name].stocks, GPU: changed})


def _verdict(claim: Claim, outcome: Outcome, reason: str, spared: tuple[Spared, ...] = ()) -> Verdict:
    return Verdict(claim.key, claim.queue, claim.gpus, claim.trigger, outcome, reason, (), spared)
