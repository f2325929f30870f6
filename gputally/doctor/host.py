"""This machine, read as the agent reads it: NVML through its own port, the kubelet's socket, the process table."""

from __future__ import annotations

import threading
from pathlib import Path

from agent.clock import Clock
from agent.driver.gpus import Gpus
from agent.kube.grpc_unary import UnaryChannel
from agent.kube.podlogs import PodLogs
from agent.kubelet import Given, Kubelet
from agent.node import NodeSource
from agent.nvml import Driver, Fault
from agent.processes import ProcessTable
from gputally.doctor.machine import Machine
from gputally.doctor.model import CannotCheck

_POD_LOGS = Path("/var/log/pods")
_BETWEEN_S = 1.0
"""Busy time is a difference: the driver is read twice."""


def look(proc: Path, clock: Clock) -> Machine:
    """GPUs, and the processes that hold them. Raises agent.errors.DriverReplaced."""
    driver = Driver()
    source = NodeSource(Gpus(driver), ProcessTable(proc), None, PodLogs(_POD_LOGS))
    try:
        snapshot = source.snapshot(clock.wall_ms())
        if snapshot.devices:
            clock.wait(_BETWEEN_S, threading.Event())
            snapshot = source.snapshot(clock.wall_ms())
        return Machine(snapshot, _counted(driver, len(snapshot.devices)))
    finally:
        source.close()


def _counted(driver: Driver, opened: int) -> int:
    try:
        return int(driver.call("nvmlDeviceGetCount"))
    except Fault:  # not started, or lost meanwhile: nothing is known beyond what was opened
        return opened


def ask_kubelet(socket: Path, clock: Clock) -> Given:
    """Its answer, or the reason in it why there is none. Raises CannotCheck where there is no kubelet."""
    if not socket.exists():
        raise CannotCheck(f"no kubelet here ({socket}); on a node of the cluster there is one")
    channel = UnaryChannel(socket, clock)
    try:
        return Kubelet(socket, clock, channel).poll()
    finally:
        channel.close()
