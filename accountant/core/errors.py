"""Defines the accountant's exceptions.

Every message is one line that a person can act on: the place, then the reason. Bad data is not
here: it becomes a value (a quarantined row, a result) and never stops the ledger.
"""

from __future__ import annotations

from agent.wire import Ack
from gputally.base.errors import AccountantError


class SequenceGap(AccountantError):
    """A batch that begins after a hole. `ack` says from where the agent has to send again."""

    def __init__(self, ack: Ack) -> None:
        super().__init__(f"numbers after {ack.durable_seq} are missing; send again from {ack.durable_seq + 1}")
        self.ack = ack


class LedgerUnavailable(AccountantError):
    """Nothing was stored; the same request may succeed later (full disk, clock behind, closing)."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class LedgerLocked(AccountantError):
    """Another process owns the ledger file."""


class LedgerDamaged(AccountantError):
    """The ledger cannot be opened without losing what was acknowledged; a person has to decide."""


class InventoryError(AccountantError):
    """The inventory could not be read: the place and the reason."""


class LedgerFailed(AccountantError):
    """The engine declared its database unusable in this process; only a restart helps."""


class BadBatch(AccountantError):
    """A batch that cannot be read as one. `type` is a stable slug, `detail` is for people."""

    def __init__(self, type_: str, detail: str) -> None:
        super().__init__(detail)
        self.type = type_
        self.detail = detail


class UnsupportedQuestion(AccountantError):
    """The ledger keeps no answer to this question; asking again will not help."""


class CannotRedate(AccountantError):
    """What is dated wrongly cannot be healed here."""


class CannotRetire(AccountantError):
    """GPUs cannot be taken out of the capacity as asked, and none was: the reason."""


class CannotMove(AccountantError):
    """GPUs cannot be moved to a node as asked, and none was: the reason."""


class CannotRender(AccountantError):
    """A report cannot be written in this form here: what is missing, and what would help."""
