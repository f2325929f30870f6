"""The scheduler that the demo plays: the first that is installed and can be played."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from gputally.base.errors import FairshareError
from gputally.kubernetes.scheduler_plugins import PodQueueLabels, SchedulerPlugin, schedulers

if TYPE_CHECKING:
    from fairshare.targets.scheduler_player import SchedulerPlayer


def played() -> SchedulerPlugin:
    """Return its manifest. Raises FairshareError if there is none."""
    for plugin in schedulers().values():
        if plugin.player:
            return plugin
    text = (
        f"the demo plays a scheduler, and of those installed ({', '.join(schedulers()) or 'none'}) none can be played"
    )
    raise FairshareError(f"{text}: install one whose manifest names its player")


def player() -> SchedulerPlayer:
    """Return a new player of it. Raises FairshareError, and whatever its module raises."""
    module, _, name = played().player.partition(":")
    found: SchedulerPlayer = getattr(import_module(module), name)()
    return found


def queue_ref(queue: str) -> str:
    """Return the reference to a queue of it."""
    return f"{played().prefixes[0]}:{queue}"


def pod_marks() -> tuple[str, str]:
    """Return the key of the label with a pod's queue, and the name of the scheduler in a pod's spec."""
    labels = played().pods or PodQueueLabels((), None)
    return labels.keys[0], min(labels.scheduler_names or ("",))
