"""Who asks for room, in which order, and whether his queue may ask at all. Pure."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import astuple, dataclass
from math import inf

from accountant.preempting import PreemptionPolicy
from accountant.wire import Policy
from agent.units import MS_PER_SECOND
from fairshare.model import UNLIMITED, Gang
from fairshare.preempting.reclaim import EPSILON, Accounts, Asker, may_reclaim, path, ratio, within_quota
from fairshare.preempting.rulings import Call, Situation, Trigger
from fairshare.preempting.victims import key_of

GPU = "gpu"
MOST_CLAIMS = 50
"""Claims for which victims are looked for in one cycle, and refused ones that are told; others wait for the next."""


@dataclass(frozen=True, slots=True)
class Claim:
    """A need for room. sizes: of the pods to place, where they are known. nodes: None: any. pool: whose quota it needs,
    "" where its target admits by nodes alone."""

    key: str
    queue: str
    gpus: float
    sizes: tuple[float, ...]
    nodes: tuple[str, ...] | None
    priority: int
    preemptible: bool
    pool: str
    trigger: Trigger
    since_ms: int
    why: str

    @property
    def asker(self) -> Asker:
        return Asker(self.queue, {GPU: self.gpus}, self.preemptible)

    @property
    def like(self) -> Hashable:
        """Equal for claims that differ in nothing but who asks and since when."""
        return (*astuple(self)[1:-2], self.why)

    @property
    def called(self) -> bool:
        """For a latency or a person, not for its own sake."""
        return self.trigger != "waits"


def claims(policy: Policy, situation: Situation) -> tuple[Claim, ...]:
    """In the order in which they are served: calls, then within quota, then by priority, then who has least of
    its share, then who waits longest."""
    found = [*_called(situation), *(() if situation.calls_only else _waiting(policy.preemption, situation))]
    seen: dict[str, Claim] = {}
    for claim in found:
        seen.setdefault(claim.key, claim)
    accounts = situation.accounts

    def order(claim: Claim) -> tuple[object, ...]:
        stock = accounts[claim.queue].stocks[GPU]
        return (
            not claim.called,
            not within_quota(claim.asker, accounts[claim.queue]),
            -claim.priority,
            ratio(stock.allocated, stock.share),
            claim.since_ms,
            claim.key,
        )

    return tuple(sorted((claim for claim in seen.values() if claim.queue in accounts), key=order))


def over_limit(claim: Claim, now: Accounts, expected: Accounts) -> str | None:
    """Which limit keeps it waiting even where there is room, in words. now: the books of the situation; expected: with
    what earlier claims get."""
    for name in path(claim.queue, expected):
        stock = expected[name].stocks[GPU]
        if stock.limit != UNLIMITED and stock.allocated + claim.gpus > stock.limit + EPSILON:
            return f"queue {name} may hold {stock.limit:g} GPUs at most and {_holds(name, now, expected)}"
    return None


def refusal(claim: Claim, now: Accounts, expected: Accounts) -> str | None:
    """Why nobody has to give way for this claim, in words; None: it may take. now, expected: see `over_limit`."""
    if claim.called or may_reclaim(claim.asker, expected):
        return None
    stock = expected[claim.queue].stocks[GPU]
    if not claim.preemptible and stock.deserved != UNLIMITED and stock.fixed + claim.gpus > stock.deserved + EPSILON:
        return f"it may not be preempted itself, and of such work queue {claim.queue} may hold its quota at most"
    return (
        f"queue {claim.queue} {_holds(claim.queue, now, expected)}, and with {claim.gpus:g} more it would be above its"
        f" fair share of {stock.share:g}"
    )


def _holds(queue: str, now: Accounts, expected: Accounts) -> str:
    held, then = (books[queue].stocks[GPU].allocated for books in (now, expected))
    return f"holds {held:g} GPUs" + (f" and is to get {then - held:g} already" if then > held + EPSILON else "")


def _called(situation: Situation) -> Sequence[Claim]:
    found = []
    for call in situation.calls:
        mine = [gang for gang in situation.gangs if call.queue in ("", gang.queue) and _meant(gang, call)]
        waiting = [gang for gang in mine if gang.waits > 0]
        found += [_claim(gang, situation, call.trigger, call.why) for gang in waiting]
        if not waiting and call.gpus > 0:
            priority = max((gang.priority for gang in mine), default=0)
            queue = call.queue or next((gang.queue for gang in mine), "")
            key = key_of(mine[0]) if call.workload and mine else f"Queue//{queue}"
            pool = next((gang.pool for gang in mine), "")
            claim = Claim(
                key, queue, call.gpus, (), None, priority, True, pool, call.trigger, situation.now_ms, call.why
            )
            found.append(claim)
    return found


def _waiting(rules: PreemptionPolicy, situation: Situation) -> Sequence[Claim]:
    never = {each.value for each in rules.classes if not each.preempts}
    found = []
    for gang in situation.gangs:
        since = situation.now_ms if gang.created_ms is None else gang.created_ms
        if (
            gang.waits > 0
            and gang.priority not in never
            and all(pod.preempts for pod in gang.pods)
            and not any(pod.gated for pod in gang.pods)
            and situation.now_ms - since >= rules.wait * MS_PER_SECOND
        ):
            found.append(_claim(gang, situation, "waits", ""))
    return found


def _claim(gang: Gang, situation: Situation, trigger: Trigger, why: str) -> Claim:
    key = key_of(gang)
    return Claim(
        key,
        gang.queue,
        gang.waits,
        to_start(gang),
        situation.usable.get(key),
        gang.priority,
        gang.preemptible,
        gang.pool,
        trigger,
        gang.created_ms if gang.created_ms is not None else situation.now_ms,
        why,
    )


def _meant(gang: Gang, call: Call) -> bool:
    return not call.workload or named_by(gang, call.workload)


def named_by(gang: Gang, name: str) -> bool:
    """Whether NAMESPACE/NAME means this gang: by its own object's name, or by that of the job it was made for."""
    return name in {f"{gang.namespace}/{each}" for each in (gang.name, gang.job) if each}


def saturations(accounts: Accounts) -> Mapping[str, float]:
    """What every queue holds over what it is due."""
    return {
        name: ratio(account.stocks[GPU].allocated, account.stocks[GPU].share) if account.stocks[GPU].share else inf
        for name, account in accounts.items()
    }


def to_start(gang: Gang) -> tuple[float, ...]:
    """Sizes of the smallest pods that make up what it needs to start; empty where they are not known."""
    waiting = sorted(pod.gpus for pod in gang.pods if not pod.held and not pod.node)
    sizes: list[float] = []
    for size in waiting:
        if sum(sizes) < gang.waits - EPSILON:
            sizes.append(size)
    return tuple(sizes) if sum(sizes) >= gang.waits - EPSILON else ()
