"""The default kube-scheduler: it has no queues to write weights on, so that it asks us instead. Pure.

Pods say by the label `gputally.dev/queue` where they belong; `policy:NAME` refers to that label. Shares come
from the same laws as everywhere; they act through the extender (`fairshare.extender`), which the scheduler's
own configuration has to name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from accountant.wire import Policy
from fairshare.demand import LABELLED, amounts, labelled
from fairshare.kinds import Object
from fairshare.mapping import owners
from fairshare.model import Condition, Held, Observation, Pod, Standing, Value, Weight
from fairshare.plan import Read, Seen


class KubeSchedulerAdapter:
    """`fairshare.plan.Adapter` for the default scheduler: all reading, no writing."""

    name = "kube-scheduler"
    prefixes = (LABELLED,)

    def reads(self, _policy: Policy) -> tuple[Read, ...]:
        return ()

    def mode(self, policy: Policy) -> Literal["off", "dry-run", "enforce"]:
        return "off" if policy.targets.kube_scheduler.mode == "off" else "enforce"

    def publishes(self, _policy: Policy) -> bool:
        return False

    def observe(self, policy: Policy, _seen: Seen, pods: Sequence[Pod] = ()) -> Observation:
        gangs = labelled(policy, pods)
        asked = amounts(policy, gangs)
        names = {queue.name for queue in owners(policy, LABELLED).values()}
        standings = {name: asked.get(name, Standing(0.0, 0.0)) for name in sorted(names | asked.keys())}
        text = "shares act where the scheduler's configuration names our extender; its requests are counted"
        return Observation({}, standings, (), (Condition("Effective", "Unknown", "AsksTheExtender", text),), gangs)

    def express(
        self, _policy: Policy, _weights: Sequence[Weight], _observation: Observation, _gpus: float
    ) -> Mapping[str, Value]:
        return {}

    def patch(self, held: Held, value: Value | None, annotations: Mapping[str, str]) -> Object:
        raise AssertionError(f"nothing is ever written for {held.name}: {value}, {annotations}")
