"""Splits a policy, nodes and workloads by GPU model, for policies with quotas by model.

The GPUs of each model that the policy names are one part, and all other GPUs are one more part, `OTHERS`. A GPU
belongs to the part with the most precise name that covers its model. Parts share nothing: a quota of one model serves
no request for another.

A node's labels state its model. A quota of the target (a flavor) is of the model that its node labels state,
otherwise of the model that its name states. A workload that can run on several models counts as a request for each of
them, because its scheduler decides."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal
from math import fsum
from typing import Final

from accountant.wire.policy_models import ANY_MODEL, UNLIMITED_QUOTA, Policy, QueuePolicy, WindowSpec
from fairshare.core.queues_and_weights import Gang, Observation, PolicyTree, Shard, Standing
from gputally.base.gpu_model_names import gpu_model_of_node, most_precise
from gputally.kubernetes.objects import Object

OTHERS: Final = ""
"""The part of all GPUs whose model the policy does not name, or which is unknown."""

OWN_DECISIONS: Final = "they act only in the controller's own decisions, which are victims, reasons to wait and budgets"


def units(model: str | None) -> str:
    """Return the word for GPUs of a part in sentences. None: GPUs of any model."""
    return "GPUs" if model is None else f"{model} GPUs" if model else "GPUs of other models"


def parts_of(policy: Policy) -> tuple[str, ...]:
    """Return the parts into which the policy divides the GPUs; empty if it has no quotas by model."""
    return (*policy.gpu_models, OTHERS) if policy.gpu_models else ()


def policy_of_part(policy: Policy, model: str) -> Policy:
    """Return the policy for the GPUs of one part, with the figures of this model as the plain ones."""
    return policy.model_copy(update={"queues": tuple(_queue_of_part(queue, model) for queue in policy.queues)})


def _queue_of_part(queue: QueuePolicy, model: str) -> QueuePolicy:
    if not queue.gpu_models:
        return queue
    own = queue.gpu_models.get(model)
    update: dict[str, object] = {"gpu_models": {}, "deserved": own.deserved if own is not None else 0.0}
    if own is not None and own.weight is not None:
        update["weight"] = own.weight
    if own is not None and own.limit != UNLIMITED_QUOTA:
        update["limit"] = own.limit
    return queue.model_copy(update=update)


def window_of_part(spec: WindowSpec, models: Sequence[str], model: str) -> WindowSpec:
    """Return the window that counts only the GPUs of one part. Weights of models that the window has stay in force.

    models: the models that the policy names."""
    weights: dict[str, Decimal] = {}
    for name in (*models, *spec.gpu_weights, ANY_MODEL):
        part = OTHERS if name == ANY_MODEL else most_precise(name, models) or OTHERS
        weighed_as = most_precise(name, [each for each in spec.gpu_weights if each != ANY_MODEL])
        weight = spec.gpu_weights.get(weighed_as if weighed_as is not None else ANY_MODEL, Decimal(1))
        weights[name] = weight if part == model else Decimal(0)
    return spec.model_copy(update={"gpu_weights": weights})


def model_of_labels(labels: Mapping[str, str], models: Iterable[str], otherwise: str = "") -> str:
    """Return the part of a node, or of a selector of nodes. otherwise: the name of a model if the labels state none."""
    return most_precise(gpu_model_of_node(labels) or otherwise, models) or OTHERS


@dataclass(frozen=True, slots=True)
class ModelMap:
    """Which part each node and each quota of a target belongs to.

    models: all parts.
    of_node: by name of the node; only nodes that accept work.
    labels: the labels of these nodes.
    of_pool: by the target's quota (`Quota`); OTHERS also if its model is unknown."""

    models: tuple[str, ...]
    of_node: Mapping[str, str]
    labels: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    of_pool: Mapping[str, str] = field(default_factory=dict)
    _selected: dict[object, tuple[str, ...]] = field(default_factory=dict, compare=False, repr=False)
    """What `selected` has returned: many gangs have one selector."""

    @classmethod
    def of(cls, policy: Policy, nodes: Sequence[Object], of_pool: Mapping[str, str]) -> ModelMap:
        """nodes: the nodes that accept work."""
        named = policy.gpu_models
        labels = {node["metadata"]["name"]: node["metadata"].get("labels") or {} for node in nodes}
        of_node = {name: model_of_labels(each, named) for name, each in labels.items()}
        return cls(parts_of(policy), of_node, labels, of_pool)

    def selected(self, selector: Iterable[tuple[str, str | None]]) -> tuple[str, ...]:
        """Return the parts of the nodes with all these labels (with the value None: without this label)."""
        wanted = tuple(selector)
        if wanted in self._selected:
            return self._selected[wanted]
        found = {
            model
            for name, model in self.of_node.items()
            if all(self.labels[name].get(key) == value for key, value in wanted)
        }
        if not found:
            stated = gpu_model_of_node({key: value for key, value in wanted if value is not None})
            found = {most_precise(stated, self.models[:-1]) or OTHERS} if stated else set()
        self._selected[wanted] = tuple(model for model in self.models if model in found)
        return self._selected[wanted]

    def held(self, gang: Gang) -> dict[str, float]:
        """Return the GPUs that a gang holds, by part. GPUs without a known node or quota are in OTHERS."""
        uses = gang.uses or ((gang.pool, gang.allocated),)
        if gang.allocated > 0 and all(self.of_pool.get(pool) for pool, _ in uses):
            whole = fsum(amount for _, amount in uses)
            shares = [(self.of_pool[pool], gang.allocated * amount / whole) for pool, amount in uses]
        else:
            shares = [(self.of_node.get(pod.node, OTHERS), pod.gpus) for pod in gang.pods if pod.held]
            shares.append((OTHERS, max(0.0, gang.allocated - fsum(amount for _, amount in shares))))
        by_model: dict[str, list[float]] = {}
        for model, amount in shares:
            if amount > 0:
                by_model.setdefault(model, []).append(amount)
        return {model: fsum(amounts) for model, amounts in by_model.items()}

    def choices(self, gang: Gang) -> tuple[tuple[str, str], ...]:
        """Return the quotas, each with a part, by which the pods of a gang that wait may start, in the scheduler's
        order if it has one. The quota is "" if the target has none."""
        selectors = sorted({pod.selector for pod in gang.pods if not pod.node} or {()}, key=str)
        pools = [(choice.pool, choice.selector) for choice in gang.choices] or [(gang.pool, ())]
        found: list[tuple[str, str]] = []
        for pool, selector in pools:
            known = self.of_pool.get(pool, OTHERS)
            models = {known} if known else {model for one in selectors for model in self.selected((*one, *selector))}
            found += [(pool, model) for model in self.models if model in models]
        return tuple(found)


def standings_of_part(
    policy: Policy, standings: Mapping[str, Standing], gangs: Iterable[Gang], of: ModelMap, model: str
) -> dict[str, Standing]:
    """Return the standings of the queues with what their gangs request and hold of one part.

    The weight in force is none: no scheduler has a weight by model."""
    requested: dict[str, float] = {}
    allocated: dict[str, float] = {}
    smallest: dict[str, float] = {}
    for gang in gangs:
        held = of.held(gang).get(model, 0.0)
        more = max(0.0, gang.requested - gang.allocated)
        if more and not any(part == model for _, part in of.choices(gang)):
            more = 0.0
        requested[gang.queue] = requested.get(gang.queue, 0.0) + held + more
        allocated[gang.queue] = allocated.get(gang.queue, 0.0) + held
        if more and gang.waits > 0:
            smallest[gang.queue] = min(smallest.get(gang.queue, gang.minimum), gang.minimum)
    tree = PolicyTree(policy)
    requested, allocated = tree.sum_up(requested), tree.sum_up(allocated)
    return {
        name: replace(
            standing,
            requested=requested.get(name, 0.0),
            allocated=allocated.get(name, 0.0),
            weight=None,
            direction=0,
            gang=smallest.get(name, 0.0),
            most=UNLIMITED_QUOTA,
            least=0.0,
        )
        for name, standing in standings.items()
    }


def shard_of_nodes(shard: Shard, names: Iterable[str]) -> Shard:
    """Return the shard with only these nodes."""
    own = frozenset(names) if shard.nodes is None else shard.nodes & frozenset(names)
    return replace(shard, nodes=own, taken=fsum(shard.taken_by_node.get(name, 0.0) for name in sorted(own)))


def waiting_models(policy: Policy, nodes: Sequence[Object], observation: Observation) -> dict[str, tuple[str, ...]]:
    """Return the parts on which each waiting gang of a target can start; empty without quotas by model."""
    if not policy.gpu_models:
        return {}
    of = ModelMap.of(policy, nodes, observation.pool_models)
    return {
        gang.key: tuple(dict.fromkeys(model for _, model in of.choices(gang)))
        for gang in observation.gangs
        if gang.waits > 0
    }
