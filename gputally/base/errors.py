"""Defines the exceptions that several programs raise."""

from __future__ import annotations


class AccountantError(Exception):
    """Base of all; catching it never hides a defect of ours."""


class CannotStart(AccountantError):
    """A folder, file or address that this process cannot use: one line, the place and the reason."""


class SettingsFault(AccountantError):
    """What settings do not allow: one or more faults, one line each: the place, then the reason."""


class FairshareError(Exception):
    """Base of everything this stage raises."""


class ClusterError(AccountantError, FairshareError):
    """Base of what the cluster's API answers instead of doing what was asked. Both programs report it as their own."""

    reason = "Error"


class Conflict(ClusterError):
    """Another field manager owns the field (or the object moved on): reported, never forced.

    owners: (manager, field) of every contested field, sorted; empty when the object itself moved on."""

    reason = "Conflict"

    def __init__(self, message: str, owners: tuple[tuple[str, str], ...] = ()) -> None:
        super().__init__(message)
        self.owners = owners


class NotFound(ClusterError):
    """The object, or the kind itself (its CRD), is not there."""

    reason = "NotFound"


class Refused(ClusterError):
    """The API server or a webhook said no: invalid, forbidden, unauthorised. Trying again does not help."""

    reason = "Refused"


class Unavailable(ClusterError):
    """No answer, or one that says later: time-out, 429, 5xx, a webhook that is down. Try again later.

    retry_after_s: when, if the server said."""

    reason = "Unavailable"

    def __init__(self, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class VersionGone(Unavailable):
    """What was asked for is too old: a watch or a page has to be started anew."""

    reason = "Gone"


class Blocked(Unavailable):
    """A PodDisruptionBudget allows no eviction now."""

    reason = "Blocked"


class DivisionError(FairshareError):
    """A division that cannot be made: a name twice, an unknown parent, a cycle, a broken case."""


class AccountantUnavailable(FairshareError):
    """The accountant did not answer, or not with what was asked for."""


class AccountantRefused(AccountantUnavailable):
    """The accountant read what it was sent and does not take it: sending the same again does not help."""
