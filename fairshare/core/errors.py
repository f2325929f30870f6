"""Defines the controller's exceptions."""

from __future__ import annotations

from gputally.base.errors import FairshareError


class DivisionError(FairshareError):
    """A division that cannot be made: a name twice, an unknown parent, a cycle, a broken case."""


class AccountantUnavailable(FairshareError):
    """The accountant did not answer, or not with what was asked for."""


class AccountantRefused(AccountantUnavailable):
    """The accountant read what it was sent and does not take it: sending the same again does not help."""
