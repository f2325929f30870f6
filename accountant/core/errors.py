"""Defines the accountant's exceptions, and names the known names that are most like a mistyped one.

Every message is one line that a person can act on: the place, then the reason. Bad data is not
here: it becomes a value (a quarantined row, a result) and never stops the ledger.
"""

from __future__ import annotations

from collections.abc import Collection
from difflib import get_close_matches

from agent.wire import Ack
from gputally.base.errors import AccountantError
from gputally.base.untrusted_text import escaped


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


class SecretsUnreadable(AccountantError):
    """A file of secrets cannot be read, or is not a mapping: the place and the reason."""


class LakeUnavailable(AccountantError):
    """The lake cannot be read or written now: the place and the reason."""


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


_NAMED = 3
"""Names in an error at most."""
_LONGEST = 200
"""Characters of a name in an error."""
_ALIKE = 0.5
"""How alike a name has to be, from 0 to 1."""


def nearest(name: str, known: Collection[str]) -> str:
    """`; did you mean vision or speech?`, or `; known are …`; "" where nothing is known."""
    folded = {each.casefold(): each for each in sorted(known) if each}
    alike = [folded[each] for each in get_close_matches(name.casefold(), folded, _NAMED, _ALIKE)]
    if alike:
        return f"; did you mean {' or '.join(shown(each) for each in alike)}?"
    if not folded:
        return ""
    few = sorted(folded.values())[:_NAMED]
    more = f" and {len(folded) - len(few):,} more" if len(folded) > len(few) else ""
    return f"; known are {', '.join(shown(each) for each in few)}{more}"


def shown(name: str) -> str:
    """A name in an error: quoted, short, without characters that steer a terminal."""
    return f"'{escaped(name[:_LONGEST])}'"
