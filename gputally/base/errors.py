"""Defines the exceptions that several programs raise, and `without_password`, which hides passwords in URLs."""

from __future__ import annotations

import re

_PASSWORD = re.compile(r"(^[\w+.-]+://|//|^(?![\w+.-]+://))([^:/@\s]*):\S*@")


def without_password(text: str) -> str:
    """Return a URL, or a text with URLs, with `***` in place of the password. The URL need not be valid."""
    return _PASSWORD.sub(r"\1\2:***@", text)


class AccountantError(Exception):
    """Base class of the accountant's errors. Catching it never hides a defect in the code."""


class CannotStart(AccountantError):
    """This process cannot use a folder, a file or an address. The message is one line: the place and the reason."""


class FairshareError(Exception):
    """Base class of fairshare's errors."""


class SettingsFault(AccountantError, FairshareError):
    """The settings of a program are invalid. The message has one line per fault: its place and the reason."""


class AgentError(Exception):
    """Base class of the agent's errors: the command prints `str()` and exits with a code other than 0.

    A failed reading is not an exception but `agent.core.readings.Unavailable`."""


class ClusterError(AccountantError, FairshareError):
    """Base class of the Kubernetes API's errors. The accountant and the controller both report it as their own."""

    reason = "Error"


class Conflict(ClusterError):
    """Another field manager owns a field, or the object has changed since it was read. Nothing is written.

    owners: (manager, field) of every contested field, sorted; empty if the object has changed."""

    reason = "Conflict"

    def __init__(self, message: str, owners: tuple[tuple[str, str], ...] = ()) -> None:
        super().__init__(message)
        self.owners = owners


class NotFound(ClusterError):
    """The object or its kind (the CRD) does not exist."""

    reason = "NotFound"


class ClusterRefused(ClusterError):
    """The API server or a webhook refused the request as invalid, forbidden or unauthorized. Retrying does not help."""

    reason = "Refused"


class ClusterUnavailable(ClusterError):
    """The API server did not answer or failed temporarily (time-out, 429, 5xx, a webhook that is down). Retry later.

    retry_after_s: the server's Retry-After in seconds; None if it sent none."""

    reason = "Unavailable"

    def __init__(self, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class VersionGone(ClusterUnavailable):
    """The requested resource version is too old. Start the watch or the paged list again."""

    reason = "Gone"


class Blocked(ClusterUnavailable):
    """A PodDisruptionBudget allows no eviction at present."""

    reason = "Blocked"


class DivisionError(FairshareError):
    """The input of a division is invalid, for example a duplicate name, an unknown parent or a cycle of parents."""


class AccountantUnavailable(FairshareError):
    """The accountant did not answer, or its answer is invalid or a refusal.

    reason: of the condition that reports it: one of docs/conditions.md."""

    def __init__(self, message: str, reason: str = "AccountantUnavailable") -> None:
        super().__init__(message)
        self.reason = reason


class AccountantRefused(AccountantUnavailable):
    """The accountant refused the request. Sending it again does not help."""
