"""Defines the exceptions that stop the agent or one of its steps.

A failed reading is not an exception but `agent.core.readings.Unavailable`."""

from __future__ import annotations


class AgentError(Exception):
    """Base class of the agent's errors: the command prints `str()` and exits with a code other than 0."""


class SettingsError(AgentError):
    """Invalid settings; one line per fault, each with the place it came from."""


class OutboxLocked(AgentError):
    """Another agent is using this outbox."""


class OutboxUnavailable(AgentError):
    """The spool could not be opened, read or written: no space, no permission, a failing disk."""


class SpoolNotWritable(OutboxUnavailable):
    """The disk cannot be written now: it is full, read-only or failing. This may pass."""


class DriverReplaced(AgentError):
    """The kernel driver was replaced while its NVML library was loaded; only a new process can talk to the new driver.

    Source: NVML_ERROR_LIB_RM_VERSION_MISMATCH. The command restarts itself (agent.devices.driver_lifecycle)."""


class ClockSetBack(AgentError):
    """The clock was far ahead when the agent started, and is right now: a new process must correct the times in the
    spool and continue with the right time."""


class TokenUnavailable(AgentError):
    """The bearer token's file is missing, unreadable, empty or holds no token."""


class PortUnavailable(AgentError):
    """The metrics port could not be opened."""
