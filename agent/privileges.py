"""What the agent may see at each level of privilege, and what stays hidden from it.

A level is what the operator granted (the chart's `agent.privilege`), not what is tried: at `allocation` the
driver's process numbers are the host's and would name some other process in the agent's own table, so they
are not looked at. Pure.
"""

from __future__ import annotations

from agent.model import PrivilegeLevel

_BUSY = ("pod-busy-on-shared-gpus", "how busy each pod is on a GPU that several share")
_MEMORY = ("pod-memory-on-shared-gpus", "how much memory each pod uses on a GPU that several share")
_STRANGERS = ("processes-outside-kubernetes", "who uses a GPU without having been given it")
_MIG = ("mig-utilisation", "how busy MIG instances are, unless a DCGM exporter says so")

_UNSEEN: dict[PrivilegeLevel, tuple[tuple[str, str], ...]] = {
    "allocation": (_BUSY, _MEMORY, _STRANGERS, _MIG),
    "process": (_MIG,),
    "profiling": (),
}


def unseen(level: PrivilegeLevel) -> tuple[str, ...]:
    """What cannot be seen at `level`, as labels."""
    return tuple(label for label, _ in _UNSEEN[level])


def explained(level: PrivilegeLevel) -> str:
    """The same in words, for the log."""
    return "; ".join(text for _, text in _UNSEEN[level]) or "nothing"
