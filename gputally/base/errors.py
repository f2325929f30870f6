"""Defines the exceptions that several programs raise."""

from __future__ import annotations


class AccountantError(Exception):
    """Base class of the accountant's errors. Catching it never hides a defect in the code."""


class CannotStart(AccountantError):
    """A folder, file or address that this process cannot use: one line, the place and the reason."""


class SettingsFault(AccountantError):
    """Invalid settings: one or more faults, one per line, each with its place and reason."""


class FairshareError(Exception):
    """Base class of fairshare's errors."""


class ClusterError(AccountantError, FairshareError):
    """Base class of the Kubernetes API's error answers. Both programs report it as their own."""

    reason = "Error"


class Conflict(ClusterError):
    """Another field manager owns the field (or the object moved on): reported, never forced.

    owners: (manager, field) of every contested field, sorted; empty when the object itself moved on."""

    reason = "Conflict"

    def __init__(self, message: str, owners: tuple[tuple[str, str], ...] = ()) -> None:
        super().__init__(message)
        self.owners = owners


class NotFound(ClusterError):
    """The object, or its kind (the CRD), does not exist."""

    reason = "NotFound"


class Refused(ClusterError):
    """The API server or a webhook refused the request as invalid, forbidden or unauthorised. Retrying does not help."""

    reason = "Refused"


class Unavailable(ClusterError):
    """No answer, or a temporary failure: time-out, 429, 5xx, a webhook that is down. Retrying may help.

    retry_after_s: when to retry, if the server said."""

    reason = "Unavailable"

    def __init__(self, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class VersionGone(Unavailable):
    """The requested resource version is too old: a watch or a paged list must start again."""

    reason = "Gone"


class Blocked(Unavailable):
    """A PodDisruptionBudget allows no eviction now."""

    reason = "Blocked"


class DivisionError(FairshareError):
    """The input of a division is invalid: a duplicate name, an unknown parent, a cycle, a malformed case."""


class AccountantUnavailable(FairshareError):
    """The accountant did not answer, or its answer was not valid."""


class AccountantRefused(AccountantUnavailable):
    """The accountant refused the request. Sending it again does not help."""
