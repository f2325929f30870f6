"""Defines exceptions of the accountant that several packages use.

Every message is one line: the reason, after the place if there is one. An invalid row inside a valid batch raises
nothing: it is quarantined, and the ledger continues. Only a batch that is invalid as a whole raises (BadBatch)."""

from __future__ import annotations

from agent.wire import Ack
from gputally.base.errors import AccountantError


class SequenceGap(AccountantError):
    """Records before this batch are missing. `ack` says from which number the agent has to send again."""

    def __init__(self, ack: Ack) -> None:
        last = ack.durable_seq
        super().__init__(f"the records after number {last} are missing: send them again, from number {last + 1} on")
        self.ack = ack


class LedgerUnavailable(AccountantError):
    """The ledger cannot do this now; the same request may succeed later (full disk, clock not trusted, shutting down).
    Nothing was stored, unless the message says so."""


class UnreadableLedger(LedgerUnavailable):
    """A ledger has published content that this version of gputally cannot read. The message names the ledger, the
    version that published, the reason, and what to do."""


class ArchiveUnavailable(LedgerUnavailable):
    """A write needs rows that are only in the archive, and they cannot be read now. Writes that do not need them
    succeed."""


class SecretsUnreadable(AccountantError):
    """A secrets file cannot be read, or is not a mapping; the message has the place and the reason."""


class LakeUnavailable(AccountantError):
    """The lake cannot be read or written at present; the message has the place and the reason."""


class LakeRefused(LakeUnavailable):
    """Nothing is published, because the lake or the ledger is not the one that it was. A person has to decide; the
    message says between what."""


class LedgerLocked(AccountantError):
    """Another process has the ledger file open."""


class LedgerDamaged(AccountantError):
    """The ledger cannot be opened without losing acknowledged records; a person has to decide."""


class InventoryError(AccountantError):
    """The inventory could not be read; the message has the place and the reason."""


class LedgerFailed(AccountantError):
    """DuckDB cannot use its database in this process any more; only a restart helps."""


class BadBatch(AccountantError):
    """The batch is refused as a whole: it cannot be decoded, is too large, or its numbering, schema or names are
    invalid. type: a stable identifier. detail: the message."""

    def __init__(self, type_: str, detail: str) -> None:
        super().__init__(detail)
        self.type = type_
        self.detail = detail


class OverQuota(AccountantError):
    """The sender has begun too much that is kept for ever. Nothing was stored; the same request may succeed later.

    quota: the name of the quota."""

    def __init__(self, message: str, quota: str) -> None:
        super().__init__(message)
        self.quota = quota


class UnsupportedQuestion(AccountantError):
    """The ledger cannot answer this query, and repeating it does not help; the message has the reason."""


class TooManyViews(AccountantError):
    """The owner, or all owners together, have as many saved views as are kept; the message says what to do."""


class CannotRedate(AccountantError):
    """Records with a date in the future cannot be corrected in this ledger; the message has the reason."""


class CannotRetire(AccountantError):
    """GPUs cannot be retired as requested, and none was; the message has the reason."""


class CannotMove(AccountantError):
    """GPUs cannot be moved to a node as requested, and none was; the message has the reason."""


class CannotRender(AccountantError):
    """A report cannot be rendered in this format; the message says what is missing and what to do."""
