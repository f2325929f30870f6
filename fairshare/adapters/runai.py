"""Run:ai: projects and departments as our model, weights as their `overQuotaWeight` in one node pool. Pure.

Run:ai owns the Queue objects that its scheduler reads, and undoes what others write there; what it takes is its own
API. `runai:PROJECT` and `runai-department:NAME` refer to the resources of one organisational unit in the policy's
node pool, `runai:PROJECT/POOL` to those in another one. Here they are objects, as `fairshare.runai` makes them, so
that everything else goes as for any target; what we noted on them stands in a ConfigMap, for Run:ai keeps no notes.

Weights act only where *Over quota weight* is switched on in Run:ai's general settings, and history must not be
counted by a node pool's own time-based fair share as well. What this must not do: read workloads; what a unit asks
for and holds is Run:ai's word, and nobody is preempted here.

Source: Run:ai REST API, organizations/projects and departments ("node pool resources"), node-pools.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from accountant.wire import Policy
from fairshare.kube import marks
from fairshare.kube.fields import look
from fairshare.kube.kinds import Kind, Object
from fairshare.kube.mapping import match, owners
from fairshare.kube.quantities import quantity
from fairshare.model import Condition, Held, Issue, Observation, Pod, Standing, Value, Weight
from fairshare.plan import Read, Seen

PROJECT = Kind("run.ai/v1", "Project", "projects", status=False)
DEPARTMENT = Kind("run.ai/v1", "Department", "departments", status=False)
NODE_POOL = Kind("run.ai/v1", "NodePool", "node-pools", status=False)
UNITS = (PROJECT, DEPARTMENT)
WEIGHT = ("spec", "gpu", "overQuotaWeight")
PROJECT_PREFIX, DEPARTMENT_PREFIX = "runai", "runai-department"
NAME = "runai"


class RunaiAdapter:
    """`fairshare.plan.Adapter` for Run:ai."""

    name = NAME
    prefixes = (PROJECT_PREFIX, DEPARTMENT_PREFIX)

    def reads(self, _policy: Policy) -> tuple[Read, ...]:
        return (Read((PROJECT,), required=True), Read((DEPARTMENT,)), Read((NODE_POOL,)))

    def mode(self, policy: Policy) -> Literal["off", "dry-run", "enforce"]:
        target = policy.targets.runai
        return target.apply if target.mode != "off" else "off"

    def publishes(self, _policy: Policy) -> bool:
        return True

    def observe(self, policy: Policy, seen: Seen, _pods: Sequence[Pod] = ()) -> Observation:
        default = policy.targets.runai.node_pool
        owner = {_full(ref, default): queue for ref, queue in owners(policy, *self.prefixes).items()}
        units = [obj for kind in UNITS for obj in seen.get(kind, ())]
        found = match(units, owner, ref_of, "Run:ai unit")
        issues = list(found.issues)
        held: dict[str, Held] = {}
        standings: dict[str, Standing] = {}
        for name, obj in sorted(found.found.items()):
            number = look(obj, WEIGHT)
            weight = None if number is None else quantity(number)
            if number is not None and weight is None:
                issues.append(Issue(obj["metadata"]["name"], f"overQuotaWeight is {number!r}"))
                continue
            held[name] = _held(obj, weight)
            noted = held[name]
            allocated = quantity(look(obj, ("status", "allocated"))) or 0.0
            requested = max(allocated, quantity(look(obj, ("status", "requested"))) or 0.0)
            standings[name] = Standing(requested, allocated, weight, noted.changed_ms, noted.direction)
        pools = {str(look(obj, ("spec", "nodePool"))) for obj in found.found.values()}
        left = {
            obj["metadata"]["name"]: _held(obj, quantity(number))
            for obj in found.strangers
            if marks.carries(obj) and (number := look(obj, WEIGHT)) is not None
        }
        acts = effective(seen.get(NODE_POOL, ()), pools)
        return Observation(held, standings, tuple(issues), (acts,), left=left)

    def express(
        self, _policy: Policy, weights: Sequence[Weight], _observation: Observation, _gpus: float
    ) -> Mapping[str, Value]:
        """A number, as Run:ai has it; weights matter only relative to siblings'."""
        return {weight.queue: weight.value for weight in weights}

    def patch(self, held: Held, value: Value | None, annotations: Mapping[str, str]) -> Object:
        assert held.kind is not None, "every unit of Run:ai is shown with its kind"
        metadata: dict[str, Any] = {"name": held.name, "uid": held.uid}
        if annotations:
            metadata["annotations"] = dict(annotations)
        patch: dict[str, Any] = {"apiVersion": held.kind.api_version, "kind": held.kind.kind, "metadata": metadata}
        if value is not None:
            patch["spec"] = {"gpu": {"overQuotaWeight": value}}
        return patch


def ref_of(obj: Object) -> str:
    """`runai:PROJECT/POOL`, the node pool always named."""
    prefix = PROJECT_PREFIX if obj["kind"] == PROJECT.kind else DEPARTMENT_PREFIX
    return f"{prefix}:{look(obj, ('spec', 'unit'))}/{look(obj, ('spec', 'nodePool'))}"


def effective(pools: Sequence[Object], used: set[str]) -> Condition:
    """Whether our weights are the only history that Run:ai sees, in the node pools that are written to."""
    double = sorted(
        pool["metadata"]["name"]
        for pool in pools
        if pool["metadata"]["name"] in used and look(pool, ("spec", "timeBasedFairShare", "enabled")) is True
    )
    if double:
        text = f"time-based fair share is on in node pool {', '.join(double)}: switch it off, history is in the weights"
        return Condition("Effective", "False", "HistoryCountedTwice", text)
    text = (
        "weights act where Over quota weight is switched on in Run:ai's general settings, which its API does not tell"
    )
    return Condition("Effective", "Unknown", "SettingNotSeen", text)


def _full(ref: str, default: str) -> str:
    return ref if "/" in ref else f"{ref}/{default}"


def _held(obj: Object, weight: float | None) -> Held:
    metadata = obj["metadata"]
    kind = next(kind for kind in UNITS if kind.kind == obj["kind"])
    identity = (metadata["name"], metadata.get("uid", ""), metadata.get("resourceVersion", ""), weight)
    noted = marks.read(metadata.get("annotations") or {})
    if noted is None:
        return Held(*identity, kind=kind)
    return Held(*identity, noted.published, noted.base, noted.changed_ms, noted.direction, kind)
