"""Reads demand of the policy's queues from pods of the default kube-scheduler.

The label `gputally.dev/queue` names a pod's queue, and the ref `policy:NAME` refers to that label. The controller
writes no weight here. Shares take effect through the extender (`kube_scheduler_extender`), which the scheduler's own
configuration must name."""

from __future__ import annotations

from collections.abc import Sequence

from accountant.wire.policy_models import Policy
from fairshare.core.gpu_demand import LABELLED, gangs_by_label, standings_of
from fairshare.core.queues_and_weights import Condition, Observation, Pod, Standing, TargetQueue, Value
from fairshare.core.scheduler_queue_objects import owners
from fairshare.targets.weight_plan import Adapter, Mode, ObjectQuery, Seen
from gputally.kubernetes.mig_parts import NO_NODES, MigParts
from gputally.kubernetes.objects import Object

NAME = "kube-scheduler"


class KubeSchedulerAdapter(Adapter):
    """Reads the pods of the default scheduler. The controller writes no object for this target."""

    name = NAME
    prefixes = (LABELLED,)

    def reads(self, _policy: Policy) -> tuple[ObjectQuery, ...]:
        return ()

    def mode(self, policy: Policy) -> Mode:
        return "off" if policy.targets.kube_scheduler.mode == "off" else "enforce"

    def publishes(self, _policy: Policy) -> bool:
        return False

    def observe(
        self, policy: Policy, _seen: Seen, pods: Sequence[Pod] = (), _parts: MigParts = NO_NODES
    ) -> Observation:
        gangs = gangs_by_label(policy, pods)
        demand = standings_of(policy, gangs)
        names = {queue.name for queue in owners(policy, LABELLED).values()}
        standings = {name: demand.get(name, Standing(0.0, 0.0)) for name in sorted(names | demand.keys())}
        text = (
            "shares take effect if the scheduler's configuration names gputally's extender; a metric counts its calls"
        )
        conditions = [Condition("Effective", "Unknown", "AsksTheExtender", text)]
        if policy.gpu_models:
            text = "the extender's verdicts on preemptions and the controller's victims follow the quotas by model"
            conditions.append(Condition("ByModel", "True", "ByNode", text))
        return Observation({}, standings, (), tuple(conditions), gangs)

    def spec(self, queue: TargetQueue, value: Value) -> Object:
        raise AssertionError(f"the controller writes no object for kube-scheduler, and got {queue.name}: {value}")
