"""How a scheduler stops a workload whole, through the workload's own object, and lets it run again.

The patch that stops a workload also writes an annotation on the object: the intent to stop it and let it run again. So
every later cycle, and every other replica, knows what is to be finished. A scheduler without such a way has its
workloads stopped by evicting their pods."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from fairshare.targets.status_config_map import decoded
from gputally.kubernetes.objects import Kind, Object

PREEMPTION = "gputally.dev/preemption"
REASON = "gputally.dev/preempted-because"
ASKED_AGAIN, GIVEN_UP = "asked again", "given up"
"""Actions of steps after which the workload still runs."""


@dataclass(frozen=True, slots=True)
class PreemptionIntent:
    """The annotation of a workload that gputally is stopping.

    decision: the id under which the preemption is recorded.
    attempts: the number of times that the scheduler was asked so far."""

    decision: str
    at_ms: int
    attempts: int = 1

    def text(self) -> str:
        return msgspec.json.encode(self).decode()


_INTENT = msgspec.json.Decoder(PreemptionIntent)
WITHOUT_INTENT: Final[Mapping[str, Any]] = {"metadata": {"annotations": {PREEMPTION: None}}}
"""The change that removes the intent."""


def read_intent(obj: Object) -> PreemptionIntent | None:
    """Return the intent that gputally wrote on an object; None without one, or if a user made it invalid."""
    text = (obj["metadata"].get("annotations") or {}).get(PREEMPTION)
    return decoded(text or "", _INTENT)


@dataclass(frozen=True, slots=True)
class NextStep:
    """A step towards the end of a preemption.

    change: the patch of the object.
    command: an object to create before."""

    action: str
    change: Mapping[str, Any]
    command: Object | None = None


class WholeStop(ABC):
    """Stops workloads of one kind through their own objects. It makes no request.

    kinds: the versions of the kind, which show the same objects.
    commands: the kind of the objects that tell the scheduler's controllers what to do, if it has any.
    gave_up: why a preemption failed for good, after a step GIVEN_UP."""

    kinds: tuple[Kind, ...]
    commands: Kind | None = None
    gave_up: str = ""

    @abstractmethod
    def change(self) -> Mapping[str, Any]:
        """Return the fields that stop the workload, which the patch with the intent writes too."""

    @abstractmethod
    def ended(self, obj: Object) -> str | None:
        """Return why the object needs no stopping (`it is … already`); None if it runs."""

    @abstractmethod
    def next_step(
        self, obj: Object, intent: PreemptionIntent, commands: Sequence[Object], now_ms: int
    ) -> NextStep | None:
        """Return what lets the workload run again, or has it stopped again; None if it is too early.

        commands: the commands on which the scheduler has not acted yet."""

    def command(self, _name: str, _namespace: str, _uid: str, _reason: str, /) -> Object | None:
        """Return the object to create after the patch, which tells the scheduler to stop the workload."""
        return None
