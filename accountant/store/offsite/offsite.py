"""What leaves the ledger's volume, and what comes back from there: copies, the archive, rows of long ago.

Copies and parts of the archive are taken from a reader's snapshot: the writer goes on meanwhile. Only what they
change in the ledger's own tables takes the writer's lock, briefly.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from accountant.errors import LedgerDamaged
from accountant.store import misdating
from accountant.store.database import Cursor, Database, fingerprints
from accountant.store.offsite import freezing
from accountant.store.offsite.adopting import groups, marks_of, take_rest
from accountant.store.offsite.archive import Archive, Part
from accountant.store.transactions import Transactions
from accountant.store.writing import columns
from accountant.store.writing.incoming import Stream


class Offsite(Transactions):
    """The part of the ledger that knows of other volumes."""

    def copy_to(self, path: Path) -> int:
        """A consistent copy of the whole ledger in a new file, read back and held against what was copied; how many
        rows it has. Raises LedgerUnavailable, or LedgerDamaged where the copy is not what was copied."""
        with self._copying:
            with self._database.duplicating(path), self._snapshot() as (cursor, _):
                here = self._database.duplicate(cursor)
            copy = Database(path)
            try:
                with copy.cursor() as cursor:
                    there = fingerprints(cursor)
            finally:
                copy.close()
            path.with_name(path.name + ".lock").unlink(missing_ok=True)
            if here != there:
                differing = sorted(name for name in here.keys() | there.keys() if here.get(name) != there.get(name))
                raise LedgerDamaged(f"{path}: differs from the ledger in {', '.join(differing)}")
            return sum(count for count, _ in here.values())

    def archive(self, now_ms: int) -> Part | None:
        """Write what came since the last part into the next; None where nothing did, or there is no archive.

        Raises LedgerUnavailable; then nothing is archived that was not before."""
        if self._archive is None:
            return None
        with self._copying:
            self._require_space()  # the part could not be entered
            with self._swap:
                if not self._news:
                    return None
                self._news, (pods, self._pods) = False, (self._pods, set())
            try:
                with self._snapshot() as (cursor, state):
                    part = self._archive.write(cursor, state.parts + 1, now_ms, pods, state.archived_registers)
                with self._writing, self._transaction() as cursor:
                    self._enter(cursor, part, {**state.archived, **state.marks})
            except BaseException:
                with self._swap:
                    self._news, self._pods = True, None
                raise
            return part

    def archived_act(self) -> int:
        """The number of the newest act that the archive has; 0 where it has none, or there is no archive."""
        return 0 if self._archive is None else self._state.archived_registers.get("act", 0)

    def adopt(self, now_ms: int) -> int:
        """Take over what the archive has beyond this ledger; how many parts that were. Raises LedgerDamaged."""
        if self._archive is None:
            return 0
        with self._writing:
            parts = self._archive.parts(self._state.parts)
            for position, part in enumerate(parts):
                # A ledger that lacks the part before is older than this one, also where the part has no rows.
                self._adopt(self._archive, part, now_ms, behind=position > 0)
            if parts:
                self.checkpoint()
            return len(parts)

    def _adopt(self, archive: Archive, part: Part, now_ms: int, *, behind: bool) -> None:
        archive.verify(part)
        self._heal(archive, part)
        with self._database.cursor() as reading:
            last = {**self._state.archived, **marks_of(reading, archive, part)}
            for group in groups(reading, archive, part, self._state.marks, now_ms):
                behind = True
                self._book(group)
        with self._transaction() as cursor:
            take_rest(cursor, archive, part, behind=behind)
            self._enter(cursor, part, last)
        self._names.forget()
        self._reread()

    def _heal(self, archive: Archive, part: Part) -> None:
        """What the archive has before the part is as it was before the healings that the part tells of."""
        (acts,) = archive.files([part.number], "act")
        with self._database.cursor() as reading:
            healings = misdating.healings(reading, str(acts))
        for at_ms in healings:
            with self._transaction() as cursor:
                misdating.heal(cursor, at_ms, self._state.days)
                self._commit(cursor, self._state)
            self._reread()

    def _enter(self, cursor: Cursor, part: Part, marks: dict[Stream, int]) -> None:
        """The part is of this ledger from now on; `marks` are in the archive."""
        ids = self._names.stream.resolve(cursor, marks)
        cursor.run(
            "INSERT INTO archive_part VALUES (?, ?, ?, ?, ?)",
            [part.number, part.at_ms, part.low_ms, part.high_ms, part.rows],
        )
        cursor.run("DELETE FROM archive_mark")
        rows = [(ids[stream], seq) for stream, seq in marks.items()]
        cursor.run("INSERT INTO archive_mark FROM incoming", incoming=columns.table(columns.NUMBER, rows))
        registers = {**self._state.archived_registers, **part.registers}
        cursor.run("DELETE FROM archive_register")
        cursor.run(
            "INSERT INTO archive_register SELECT unnest(?::VARCHAR[]), unnest(?::BIGINT[])",
            [list(registers), list(registers.values())],
        )
        after = replace(self._state, archived=marks, parts=part.number, archived_registers=registers)
        self._commit(cursor, after, news=False)

    def freeze(self, before_ms: int) -> int:
        """Let rows of hours before an instant leave the file, as far as the archive has them; how many hours."""
        if self._archive is None:
            return 0
        total = 0
        while True:
            with self._writing, self._transaction() as cursor:
                hours = freezing.freeze(cursor, self._archive, before_ms)
                self._commit(cursor, replace(self._state, frozen=self._state.frozen | hours), news=False)
            if not hours:
                return total
            total += len(hours)
