"""Desired against observed: what would be written, said and recorded, in a fixed order. Pure.

A plan is values only; `fairshare.loop` carries it out or shows it. Applying a plan twice changes
nothing the second time: what already stands is not planned again.

The operator's base weight: the first write notes the weight it replaces. A weight that is later found
to be neither ours nor the base was set by somebody: it is the new base. A weight found back at the
base was reset, by a GitOps sync for example: the base stays, and ours is published again. Who applies
with ownership then makes that a conflict, which is reported and never forced.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isclose
from typing import Literal, Protocol

from accountant.wire import Policy
from fairshare.marks import Marks
from fairshare.model import Condition, Held, Observation, Weight
from fairshare.ports import Event, Kind, Object

FIELD_MANAGER = "gputally-fairshare"
Mode = Literal["off", "dry-run", "enforce"]


class Adapter(Protocol):
    """One scheduler: its objects to our model and back. Pure."""

    @property
    def name(self) -> str: ...

    @property
    def queue(self) -> Kind:
        """The kind that carries the weight."""
        ...

    @property
    def advisers(self) -> tuple[Kind, ...]:
        """Kinds that are read for advice only; their absence degrades nothing."""
        ...

    def mode(self, policy: Policy) -> Mode: ...

    def observe(
        self, policy: Policy, objects: Sequence[Object], advice: Mapping[Kind, Sequence[Object]]
    ) -> Observation: ...

    def patch(self, held: Held, weight: float | None, annotations: Mapping[str, str]) -> Object: ...


@dataclass(frozen=True, slots=True)
class Apply:
    """One server-side apply. weight: the one the object gets; None leaves it unset. why: for people."""

    target: str
    queue: str
    name: str
    previous: float | None
    weight: float | None
    why: str
    patch: Object
    field_manager: str = FIELD_MANAGER


Action = Apply | Event | Condition


def plan(
    adapter: Adapter, weights: Sequence[Weight], observation: Observation, policy_version: str, now_ms: int
) -> tuple[Action, ...]:
    """Applies and their events in the order of the queues, then the conditions."""
    actions: list[Action] = []
    for weight in sorted(weights, key=lambda weight: weight.queue):
        actions += _plan_one(adapter, weight, observation.held[weight.queue], policy_version, now_ms)
    actions += observation.conditions
    if observation.issues:
        text = "; ".join(f"{issue.subject}: {issue.reason}" for issue in observation.issues)
        actions.append(Condition("Mapped", "False", "QueuesLeftOut", text))
    else:
        actions.append(Condition("Mapped", "True", "AllFound", "every queue of the policy that has a ref was found"))
    return tuple(actions)


def release(adapter: Adapter, observation: Observation) -> tuple[Apply, ...]:
    """Give every touched object its base weight back and take our annotations off."""
    return tuple(
        Apply(
            adapter.name,
            queue,
            held.name,
            held.weight,
            base,
            "restored what stood there before" if base is not None else "unset, as it was before",
            adapter.patch(held, base, {}),
        )
        for queue, held in sorted(observation.held.items())
        if held.published is not None
        for base in (_base(held),)
    )


def same(one: float | None, other: float | None) -> bool:
    """Equal as the scheduler reads them: an unset weight is 0."""
    return isclose(one or 0.0, other or 0.0, rel_tol=1e-9)


def _base(held: Held) -> float | None:
    """The operator's weight, as far as we can know it."""
    if held.published is None or not (same(held.weight, held.published) or same(held.weight, held.base)):
        return held.weight
    return held.base


def _plan_one(adapter: Adapter, weight: Weight, held: Held, policy_version: str, now_ms: int) -> list[Action]:
    base = _base(held)
    reset = held.published is not None and not same(held.weight, held.published)
    changed = not same(weight.value, held.weight)
    if not changed and not reset:
        return []
    direction = (weight.value > (held.weight or 0.0)) - (weight.value < (held.weight or 0.0))
    noted = (
        Marks(base, weight.value, now_ms, direction, policy_version)
        if changed and not same(weight.value, held.published)
        else Marks(base, weight.value, held.changed_ms, held.direction, policy_version)
    )
    actions: list[Action] = [
        Apply(
            adapter.name,
            weight.queue,
            held.name,
            held.weight,
            weight.value,
            weight.why,
            adapter.patch(held, weight.value, noted.annotations()),
        )
    ]
    if reset and same(held.weight, held.base):
        text = f"somebody set the weight back to its base {held.weight or 0:g}; {weight.value:g} is published again"
        actions.append(_event(adapter, held, "WeightReset", text, now_ms))
    elif reset:
        text = f"somebody changed the weight to {held.weight or 0:g}: that is the new base"
        actions.append(_event(adapter, held, "BaseWeightChanged", text, now_ms))
    return actions


def _event(adapter: Adapter, held: Held, reason: str, message: str, now_ms: int) -> Event:
    return Event(adapter.queue, held.name, "", held.uid, "Normal", reason, message, now_ms)
