"""What goes wrong between the machines, in a plan made before the run: so that it can be repeated, and so
that the truth knows it.

Lost acknowledgements force agents to send again what is booked already; one agent is killed and comes back
minutes later; the accountant is away for an hour, and the agents spool.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from agent.units import MS_PER_DAY, MS_PER_MINUTE

_HOURS_PER_LOST_ACK = 24


@dataclass(frozen=True)
class FaultPlan:
    """lost_acks: (hour of the run, node). away: hours of the run in which the accountant does not answer.
    killed_ms, back_ms: when the agent on `killed_node` dies and returns."""

    lost_acks: frozenset[tuple[int, str]]
    away: frozenset[int]
    killed_node: str
    killed_ms: int
    back_ms: int


def plan(seed: int, nodes: Sequence[str], start_ms: int, days: int) -> FaultPlan:
    """About one lost acknowledgement a day; the rest once per run, off the interval grid and apart from
    each other. nodes: those without outages of their own, at least two; the first one's agent is killed."""
    random = Random(f"{seed}/faults")  # noqa: S311 - repeatable is what is wanted here
    hours = days * 24
    away = int(hours * 0.83)
    possible = [hour for hour in range(2, hours) if abs(hour - away) > 2]
    lost = random.sample(possible, max(2, hours // _HOURS_PER_LOST_ACK))
    killed_ms = start_ms + int(days * MS_PER_DAY * 0.62) // MS_PER_MINUTE * MS_PER_MINUTE + 4_567
    return FaultPlan(
        lost_acks=frozenset((hour, random.choice(nodes[1:])) for hour in lost),
        away=frozenset({away}),
        killed_node=nodes[0],
        killed_ms=killed_ms,
        back_ms=killed_ms + 11 * MS_PER_MINUTE + 890,
    )
