"""This machine, read as the agent reads it: NVML through its own port, the kubelet's socket, the process table."""

from __future__ import annotations

import threading
from pathlib import Path

from agent.clock import Clock
from agent.driver.gpus import Gpus
from agent.kube.podlogs import PodLogs
from agent.kubelet import Given, Kubelet
from agent.model import Snapshot
from agent.node import NodeSource
from agent.nvml import Driver
from agent.processes import ProcessTable
from gputally.doctor.model import CannotCheck

_POD_LOGS = Path("/var/log/pods")
_BETWEEN_S = 1.0
"""Busy time is a difference: the driver is read twice."""


def look(proc: Path, clock: Clock) -> Snapshot:
    """GPUs, and the processes that hold them. Raises agent.errors.DriverReplaced."""
    source = NodeSource(Gpus(Driver()), ProcessTable(proc), None, PodLogs(_POD_LOGS))
    try:
        first = source.snapshot(clock.wall_ms())
        if not first.devices:
            return first
        clock.wait(_BETWEEN_S, threading.Event())
        return source.snapshot(clock.wall_ms())
    finally:
        source.close()


def ask_kubelet(socket: Path, clock: Clock) -> Given:
    """Its answer, or the reason in it why there is none. Raises CannotCheck where there is no kubelet."""
    if not socket.exists():
        raise CannotCheck(f"no kubelet here ({socket}); on a node of the cluster there is one")
    return Kubelet(socket, clock).poll()
