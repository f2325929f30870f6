"""By which clock records were dated: what the agent's time was ahead of the monotonic clock, by sequence number.

A clock that is set moves this line; within one boot of the node the monotonic clock says exactly by how much. So what
was dated by a line that turned out wrong can be dated again, as long as it is still here. Pure but for the outbox.
"""

from __future__ import annotations

from typing import Final

import msgspec

from agent.upload.spool import Outbox
from gputally.base.units import MS_PER_MINUTE

WRONG_MS: Final = 5 * MS_PER_MINUTE
"""Two lines that are further apart were not made by one clock that was disciplined. The accountant refuses records that
are as far ahead of its clock."""
_MOST: Final = 100
_KEY: Final = "clock_lines"


class Line(msgspec.Struct, frozen=True):
    """From the record `after` + 1 on, in this boot of the node."""

    after: int
    boot_id: str
    line_ms: int


class _StoredClockLines(msgspec.Struct, frozen=True):
    lines: tuple[Line, ...] = ()
    accountant: Line | None = None


_decoder = msgspec.json.Decoder(_StoredClockLines)


class ClockLines:
    """Kept in the outbox. Raises OutboxUnavailable."""

    def __init__(self, outbox: Outbox, boot_id: str) -> None:
        self._outbox = outbox
        self._boot_id = boot_id
        stored = outbox.kept(_KEY)
        try:
            self._kept = _StoredClockLines() if stored is None else _decoder.decode(stored)
        except msgspec.MsgspecError:
            self._kept = _StoredClockLines()

    @property
    def accountant_ms(self) -> int | None:
        """The accountant's line, as it said last in this boot."""
        told = self._kept.accountant
        return told.line_ms if told is not None and told.boot_id == self._boot_id else None

    @property
    def last(self) -> Line | None:
        """The newest of this boot."""
        return next((one for one in reversed(self._kept.lines) if one.boot_id == self._boot_id), None)

    def opinion(self, line_ms: int) -> bool | None:
        """Whether a line is right, by what the accountant said; None where it said nothing in this boot."""
        known = self.accountant_ms
        return None if known is None else abs(known - line_ms) <= WRONG_MS

    def told(self, line_ms: int) -> None:
        """What time it is for the accountant."""
        known = self.accountant_ms
        if known is None or abs(known - line_ms) > MS_PER_MINUTE:
            self._keep(msgspec.structs.replace(self._kept, accountant=Line(0, self._boot_id, line_ms)))

    def begin(self, line_ms: int) -> None:
        """What comes next is dated by this line."""
        last = self.last
        if last is not None and last is self._kept.lines[-1] and abs(last.line_ms - line_ms) <= WRONG_MS:
            return
        lines = (*self._kept.lines, Line(self._outbox.last_seq, self._boot_id, line_ms))[-_MOST:]
        self._keep(msgspec.structs.replace(self._kept, lines=lines))

    def wrong(self, line_ms: int) -> bool:
        """Whether records that are still to be sent were dated by another clock of this boot."""
        return any(self._is_wrong(line, upto, line_ms) for line, upto in self._spans())

    def date_again(self, line_ms: int) -> int:
        """Date what is still to be sent, of this boot, by this line; how many records that were."""
        count = 0
        lines = []
        for line, upto in self._spans():
            if self._is_wrong(line, upto, line_ms):
                count += self._outbox.move(line.after + 1, upto, line_ms - line.line_ms)
                lines.append(msgspec.structs.replace(line, line_ms=line_ms))
            else:
                lines.append(line)
        if count:
            self._keep(msgspec.structs.replace(self._kept, lines=tuple(lines)))
        return count

    def _spans(self) -> list[tuple[Line, int]]:
        """Each line with the last record that it dated."""
        lines = self._kept.lines
        ends = [*(line.after for line in lines[1:]), self._outbox.last_seq]
        return list(zip(lines, ends, strict=True))

    def _is_wrong(self, line: Line, upto: int, line_ms: int) -> bool:
        here = line.boot_id == self._boot_id and upto > max(line.after, self._outbox.durable_seq)
        return here and abs(line.line_ms - line_ms) > WRONG_MS

    def _keep(self, kept: _StoredClockLines) -> None:
        if kept != self._kept:
            self._outbox.keep(_KEY, msgspec.json.encode(kept))
            self._kept = kept
