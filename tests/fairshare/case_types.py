"""What a case of a scheduler consists of, in the tests that all schedulers pass."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from accountant.wire.policy_models import Policy
from fairshare.core.queues_and_weights import Gang, Pod
from fairshare.preemption.preemption_types import Victim
from gputally.kubernetes.memory_cluster import MemoryCluster
from gputally.kubernetes.objects import POD, Kind, Object, value_at
from tests.fairshare.builders import policy_of

Reason = tuple[str, str, str, str]
"""Target (or condition, for the controller's own), type, status, reason."""
BEFORE = "2026-09-30T00:00:00Z"
RULES = {"mode": "enforce", "wait": 0, "min_runtime": 0, "per_cluster": 1}


@dataclass(frozen=True)
class Case:
    """The condition of a policy with one queue `a` has `reason` with the objects `wrong`, and another one with `right`.

    ref: of the queue. target: the policy's settings of the target. queue: further keys of the policy's queue."""

    reason: Reason
    ref: str
    wrong: list[Object]
    right: list[Object]
    target: dict[str, Any] = field(default_factory=dict)
    queue: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Scene:
    """A cluster in which queue a holds 16 GPUs in four gangs of 4, and b waits for 4 of them.

    weights: reads what the controller writes."""

    policy: Policy
    objects: Sequence[Object]
    weights: Callable[[MemoryCluster], Mapping[str, Any]]


def scene_weights(kind: Any, path: Sequence[str], cluster: MemoryCluster) -> Mapping[str, Any]:
    return {obj["metadata"]["name"]: value_at(obj, path) for obj in cluster.list(kind)}


def scene_policy(ref: str, target: str, **settings: Any) -> Policy:
    queues = [{"name": name, "deserved": 4, "refs": [f"{ref}:{name}"]} for name in "ab"]
    return policy_of(queues, targets={target: settings}, preemption=RULES)


def victim_of(*names: str, kind: Kind = POD, uid: str = "uid-x") -> Victim:
    pods = tuple(Pod(f"uid-{name}", "ns", name, 4.0, "n0", held=True) for name in names)
    gang = Gang("a", kind, "ns", "x", uid, 4.0 * len(pods), 4.0 * len(pods), 4.0, pods=pods)
    return Victim(gang, pods, gang.allocated, 1.0, True, "within quota", "a", "because")
