"""What the agent may see at each level of privilege, and what stays hidden from it.

A level is what the operator granted (the chart's `agent.privilege`), not what is tried: at `allocation` the
driver's process numbers are the host's and would name some other process in the agent's own table, so they
are not looked at. What the driver tells at a level that does not promise it is not hidden, and what it refuses
at a level that does is. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence

from agent.ladder import SOLE
from agent.model import DeviceReading, PrivilegeLevel, Unavailable

_BUSY = ("pod-busy-on-shared-gpus", "how busy each pod is on a GPU that several share")
_MEMORY = ("pod-memory-on-shared-gpus", "how much memory each pod uses on a GPU that several share")
_STRANGERS = ("processes-outside-kubernetes", "who uses a GPU without having been given it")
_MIG = ("mig-utilisation", "how busy MIG instances are, unless a DCGM exporter says so")
_ALL = (_BUSY, _MEMORY, _STRANGERS, _MIG)

_UNSEEN: dict[PrivilegeLevel, tuple[tuple[str, str], ...]] = {
    "allocation": _ALL,
    "process": (_MIG,),
    "profiling": (),
}


def unseen(level: PrivilegeLevel, devices: Sequence[DeviceReading] = ()) -> tuple[str, ...]:
    """What cannot be seen at `level`, as labels, and where there are devices, what is not seen of them."""
    hidden = {label for label, _ in _UNSEEN[level]}
    instances = [instance for device in devices for instance in device.instances]
    if instances:
        hidden.discard(_MIG[0])
        if any(isinstance(instance.busy_us, Unavailable) for instance in instances):
            hidden.add(_MIG[0])
    for device in devices:
        if device.unlisted:
            hidden |= {_BUSY[0], _MEMORY[0], _STRANGERS[0]}
        if any(isinstance(holder.busy_us, Unavailable) and holder.busy_us != SOLE for holder in device.holders):
            hidden.add(_BUSY[0])
        if any(isinstance(holder.memory_mib, Unavailable) for holder in device.holders):
            hidden.add(_MEMORY[0])
    return tuple(label for label, _ in _ALL if label in hidden)


def explained(level: PrivilegeLevel) -> str:
    """The same in words, for the log."""
    return "; ".join(text for _, text in _UNSEEN[level]) or "nothing"
