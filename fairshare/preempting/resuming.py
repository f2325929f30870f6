"""What was begun is brought to its end in every cycle of whoever leads, whatever else holds him up.

Nothing of it depends on usage, or on preemption still being switched on: a Workload that was switched off for
somebody must come back even if the accountant is away, or preemption or the target have been switched off since.
What this must not do: stop anybody.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from agent.units import MS_PER_MINUTE
from fairshare.adapters.kueue import WORKLOADS
from fairshare.adapters.volcano import COMMAND, JOB
from fairshare.errors import ClusterError
from fairshare.kube.kinds import Kind
from fairshare.kube.looking import list_if_served
from fairshare.kube.mapping import say
from fairshare.kube.ports import Cluster, Event
from fairshare.model import Condition
from fairshare.preempting import intents

SELDOM_MS: Final = 5 * MS_PER_MINUTE
"""Where the controller itself stops nobody, a person still may (`gputally fairshare preempt`)."""
_KINDS: Final[Mapping[str, tuple[Kind, ...]]] = {"kueue": WORKLOADS, "volcano": (JOB,)}
"""What carries intents, by target; versions of one kind show the same objects."""
NOT_RESUMED = "NotResumed"


@dataclass(frozen=True, slots=True)
class Ended:
    """By namespace/name: `resumed` runs again as it may, `left` is still being stopped. faults: what could not be
    ended yet, and why."""

    resumed: tuple[str, ...] = ()
    left: tuple[str, ...] = ()
    events: tuple[Event, ...] = ()
    faults: tuple[str, ...] = ()

    def condition(self) -> Condition | None:
        """None where nothing is left to be ended."""
        return Condition("Resumed", "False", NOT_RESUMED, say(self.faults)) if self.faults else None

    def told(self) -> tuple[str, ...]:
        """For a person, a line each."""
        return (
            *(f"{name} had given way and may run again" for name in self.resumed),
            *(f"{name} is still giving way: release again in a minute" for name in self.left),
            *(f"not given back: {fault}" for fault in self.faults),
        )


def end_all(cluster: Cluster, now_ms: int) -> Ended:
    """Of every target, once, because a person switches everything off. Raises ClusterError."""
    each = [_end(cluster, kinds, now_ms, lambda: True)[1] for kinds in _KINDS.values()]
    return Ended(
        tuple(name for ended in each for name in ended.resumed),
        tuple(name for ended in each for name in ended.left),
        tuple(event for ended in each for event in ended.events),
        tuple(fault for ended in each for fault in ended.faults),
    )


class Resuming:
    """Belongs to one controller; not made for threads."""

    def __init__(self) -> None:
        self._next_ms: dict[str, int] = {}

    def go_on(
        self, cluster: Cluster, target: str, now_ms: int, *, enforces: bool, leading: Callable[[], bool]
    ) -> Ended:
        """enforces: whether the target's preemption stops people now, so that there may be news in every cycle."""
        kinds = _KINDS.get(target, ())
        if not kinds or (not enforces and now_ms < self._next_ms.get(target, now_ms)):
            return Ended()
        try:
            found, ended = _end(cluster, kinds, now_ms, leading)
        except ClusterError as error:
            return Ended(faults=(str(error),))
        self._next_ms[target] = now_ms + (0 if found else SELDOM_MS)
        return ended


def _end(cluster: Cluster, kinds: Sequence[Kind], now_ms: int, leading: Callable[[], bool]) -> tuple[bool, Ended]:
    """Whether there was anything to end, and what came of it."""
    for kind in kinds:
        begun = [obj for obj in list_if_served(cluster, kind) if intents.read(obj) is not None]
        if not begun:
            continue
        commands = list_if_served(cluster, COMMAND) if kind == JOB else ()
        resumed: list[str] = []
        events: list[Event] = []
        faults: list[str] = []
        steps = intents.resume(cluster, kind, begun, commands, now_ms)
        while leading() and (step := next(steps, None)) is not None:
            if step.detail:
                faults.append(f"{step.name}: {step.detail}")
                continue
            resumed.append(step.name)
            if step.action == "given up":
                text = (
                    f"it was asked to restart {intents.MOST_ATTEMPTS} times for another workload, and goes on as it was"
                )
                namespace, _, name = step.name.partition("/")
                events.append(Event(kind, name, namespace, step.uid, "Warning", "NotRestarted", text, now_ms))
        names = {f"{obj['metadata'].get('namespace', '')}/{obj['metadata']['name']}" for obj in begun}
        return True, Ended(tuple(resumed), tuple(sorted(names.difference(resumed))), tuple(events), tuple(faults))
    return False, Ended()
