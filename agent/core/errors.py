"""Defines the exceptions that stop the agent or one of its steps.

Bad readings are no exceptions: they are `agent.core.readings.Unavailable`. These stop a program or a step.
"""

from __future__ import annotations


class AgentError(Exception):
    """Base of all of them: the command prints `str()` and exits non-zero."""


class SettingsError(AgentError):
    """Settings that cannot hold; one line per fault, each with the place it came from."""


class OutboxLocked(AgentError):
    """Another agent has this outbox open."""


class OutboxUnavailable(AgentError):
    """The spool could not be opened, read or written: no space, no permission, a failing disk."""


class SpoolNotWritable(OutboxUnavailable):
    """The disk takes no writes now: full, read-only or failing. It may again later."""


class DriverReplaced(AgentError):
    """The kernel driver was exchanged under the loaded NVML library; only a new process can talk to it.

    Source: NVML_ERROR_LIB_RM_VERSION_MISMATCH. The command takes its own place (agent.devices.driver_lifecycle)."""


class ClockSetBack(AgentError):
    """The clock was far ahead when the agent took its time from it, and is right now: a new process dates again what is
    still in the spool, and goes on in the right time."""


class TokenUnavailable(AgentError):
    """The bearer token's file is missing, unreadable, empty or holds no token."""


class PortUnavailable(AgentError):
    """The metrics port could not be opened."""
