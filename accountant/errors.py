"""What can go wrong in the accountant, as few and narrow exceptions.

Every message is one line that a person can act on: the place, then the reason. Bad data is not
here: it becomes a value (a quarantined row, a result) and never stops the ledger.
"""

from __future__ import annotations

from agent.wire import Ack


class AccountantError(Exception):
    """Base of all; catching it never hides a defect of ours."""


class CannotStart(AccountantError):
    """A folder, file or address that this process cannot use: one line, the place and the reason."""


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


class ClusterUnavailable(AccountantError):
    """The API server did not answer, or not now: the same request may succeed later."""


class ResourceGone(ClusterUnavailable):
    """What a list or a watch wanted to go on from is no longer kept (410): begin again."""


class ClusterRefused(ClusterUnavailable):
    """The API server refused, in its own words; `status` is its HTTP status."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


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


class SettingsFault(AccountantError):
    """What settings do not allow: one or more faults, one line each: the place, then the reason."""
