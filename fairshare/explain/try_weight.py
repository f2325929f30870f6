"""Computes what every queue would be entitled to if one had another weight.

The entitlement is the part of the cluster that follows from quotas and weights if every queue requests more than it
gets. Past usage is left out: `what_if_simulation` replays it. The GPUs are those that the newest cycle divided, by its
record: the ledger also counts GPUs that are down or that the scheduler does not place work on."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from accountant.wire.decision_text import EVERYTHING, number
from accountant.wire.option_types import MOST
from accountant.wire.policy_models import Decision, Policy
from fairshare.core.queues_and_weights import PolicyTree
from fairshare.laws.weight_calculation import static_parts
from gputally.base.errors import FairshareError
from gputally.base.units import MS_PER_DAY
from gputally.base.untrusted_text import as_name

LOOK_BACK_MS: Final = 7 * MS_PER_DAY
"""How long ago a cycle may have been whose record states the divided GPUs."""
MOST_RECORDS: Final = 200
"""Records of cycles that are read to find the newest one of each target."""


@dataclass(frozen=True, slots=True)
class Divided:
    """The GPUs that are divided.

    target: the scheduler whose cycle divided them; "" for the GPUs that the ledger has in service.
    at_ms: when that cycle was; None if no cycle is on record."""

    target: str
    gpus: float
    at_ms: int | None = None


@dataclass(frozen=True, slots=True)
class TriedQueue:
    """A queue under both weights.

    part, part_then: the part of the cluster (0..1) that it is entitled to now, and with the other weight.
    gpus, gpus_then: the same in GPUs."""

    queue: str
    depth: int
    weight: float
    weight_then: float
    part: float
    part_then: float
    gpus: float
    gpus_then: float


def divided(cycles: Iterable[Decision], in_service: float) -> tuple[Divided, ...]:
    """Return the GPUs that the newest cycle of each target divided, or those in service if none is on record.

    cycles: records of weights, newest first."""
    newest: dict[str, Divided] = {}
    for cycle in cycles:
        gpus = number(cycle.inputs.get("gpus"))
        if (cycle.kind, cycle.subject) == ("weight", EVERYTHING) and gpus is not None and gpus > 0:
            newest.setdefault(cycle.target, Divided(cycle.target, gpus, cycle.at_ms))
    return tuple(newest[target] for target in sorted(newest)) or (Divided("", in_service),)


def try_weight(policy: Policy, gpus: float, queue: str, weight: float) -> tuple[TriedQueue, ...]:
    """Return every queue of the policy, in the order of its tree. Raises FairshareError.

    gpus: the GPUs that are divided.
    queue, weight: the queue and its other weight."""
    if not 0 <= weight <= MOST:
        raise FairshareError(f"weight: give a number from 0 to {MOST:g}")
    if gpus <= 0:
        raise FairshareError("no GPU in service is known, as in a cycle that holds its weights: nothing can be divided")
    if queue not in {each.name for each in policy.queues}:
        raise FairshareError(f"the policy in force has no queue {as_name(queue, 200)!r}")
    changed = [each.model_copy(update={"weight": weight}) if each.name == queue else each for each in policy.queues]
    now, then = (static_parts(one, gpus) for one in (policy, policy.model_copy(update={"queues": tuple(changed)})))
    return tuple(
        TriedQueue(
            each.name, depth, each.weight, weight if each.name == queue else each.weight, now[each.name],
            then[each.name], now[each.name] * gpus, then[each.name] * gpus,
        )
        for depth, each in PolicyTree(policy).downwards()
    )  # fmt: skip
