"""Writes the ledger's settled figures and registers to the lake, and compares the lake with the ledger.

The ledger's first publication records the act `lake` with a random id, the ledger's name in the lake and the warehouse.
Everything in the lake carries this id. A publisher whose lake is missing, has another id, or knows more acts or earlier
records than the ledger writes nothing, because then the lake or the ledger is not what it was (LakeRefused).

Registers are the tables of pods, nodes, decisions, policies, prices, acts (journal entries), epochs and outboxes. A
day is written as a whole, in one commit with other days of the ledger. A second commit writes the control totals to the
table `days`. After a crash between the two commits, a day's digest differs from that in `days`, and the next run writes
the day again, which is idempotent. Data that has not changed since the last run is not read.

The comparison is per cluster, day and account, exact to the microsecond and the cent."""

from __future__ import annotations

import json
import threading
import uuid
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import Any, Final
from zoneinfo import ZoneInfo

import msgspec
import pyarrow as pa
import structlog
from sqlglot import exp

from accountant.billing.charge import quantify
from accountant.billing.quota_usage import ModelSpans
from accountant.billing.statements import Statement
from accountant.billing.usage_pricing import charges
from accountant.bookkeeping.bookkeeper import Bookkeeper, closed_statement
from accountant.bookkeeping.month_closing import ClosedMonth, ClosedMonths, statement_hash
from accountant.core.errors import LakeRefused, LakeUnavailable, UnreadableLedger
from accountant.core.periods import Month, day_span, local_date, utc
from accountant.core.settings import Settings
from accountant.lake import tables
from accountant.lake.duckdb_engine import DuckDbEngine
from accountant.lake.engines.protocol import Engine
from accountant.lake.iceberg_catalog import Catalogue, Removed, namespace_of, rows_where
from accountant.lake.lake_ledger import every_column, readable
from accountant.lake.table_rows import DayRows, day_rows, focus_rows, line_rows, statement_row
from accountant.ledger.journal import Act, ActKind, NewAct, record
from accountant.ledger.protocols import EpochReport, Ledger, Moment, NodeFacts
from accountant.prices.price_book import PriceBook
from accountant.reports import report_builder
from accountant.storage.duckdb_ledger import DuckLedger
from accountant.wire.usage_cost_and_job_models import label_dimension, label_of
from agent.wire import PodFacts
from gputally.base.clock import Clock
from gputally.base.version import __version__

_ROWS_A_COMMIT: Final = 400_000
_FAR_MS: Final = 2**53
_EVERY_DECISION: Final = 10**9
_ACCOUNTS: Final = tables.ACCOUNT_COLUMNS[:6]
_CENT: Final = Decimal("0.005")
"""Half a cent. Costs that differ by less count as equal, because the lake's amounts are rounded."""
ProgressCallback = Callable[[str, int, int], None]
"""Called with what is done, the number done and the total."""


@dataclass(frozen=True, slots=True)
class Published:
    """What one run wrote: days of `usage_hourly`, months of statements, and the names of other tables."""

    days: tuple[date, ...] = ()
    months: tuple[str, ...] = ()
    registers: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class LakeComparison:
    """The result of comparing published days with the ledger.

    days: number of compared days.
    differences: one line of text per difference, in the order of the days."""

    days: int
    differences: tuple[str, ...]


class Publisher:
    """Publishes one ledger. catalogue: opens the lake; called on first use, and after the lake was refused."""

    def __init__(
        self,
        ledger: DuckLedger,
        books: Bookkeeper,
        settings: Settings,
        clock: Clock,
        catalogue: Callable[[], Catalogue],
    ) -> None:
        assert settings.lake is not None
        self._ledger, self._books, self._clock = ledger, books, clock
        self._zone, self._timezone, self._grace_days = settings.zone, settings.timezone, settings.grace_days
        self._lake, self._issuer = settings.lake, settings.issuer
        self._labels = tuple(label_dimension(name) for name in settings.exported_labels)
        self.name = name_of(settings)
        self._connect = catalogue
        self._opened: Catalogue | None = None
        self._marks: dict[Hashable, Any] = {}
        """By day, month or table: the value of its mark when it was written. An equal mark means that nothing has
        changed. `span`: the first and the last day of the last run that succeeded; if they are others now, days and
        months of any age can be missing in the lake, or be left over."""
        self._parts: dict[tuple[str, str], dict[str, Any]] | None = None
        """The rows of the table `registers`; None: not read yet."""
        self._turn = 0
        self._left_former_names = False
        self.published_ms: int | None = None
        """Start of the last successful run."""
        self.compared: LakeComparison | None = None
        """Result of the last comparison."""
        self.refused = ""
        """Why the last run wrote nothing, if a person has to decide what is right; "": nothing was refused."""
        self._alone = threading.RLock()
        """Only one thread writes or removes."""
        self._log = structlog.get_logger("accountant.lake")

    def publish(self, progress: ProgressCallback = lambda *_: None) -> Published:
        """Writes the days, months and registers that have changed. Raises AccountantError; LakeRefused if the lake or
        the ledger is not what it was."""
        return self._run(progress, repair=False)

    def repair(self, who: str, reason: str, progress: ProgressCallback = lambda *_: None) -> Published:
        """Makes the lake equal to the ledger, also where they do not differ by the control totals, and where the ledger
        begins later or has other acts than the lake. Begins a lake that is missing. Recorded as an act. Raises
        AccountantError; LakeRefused if the tables belong to a ledger with another id."""
        with self._alone:
            self._ledger.require_present(self._clock.wall_ms())
            self._opened = None  # opened again after a failure
            self._opened = self._open(repair=True)
            self._record(self._id(), who, reason)
            self._marks.clear()
            self._parts = self.published_ms = None
            return self._run(progress, repair=True)

    def _run(self, progress: ProgressCallback, *, repair: bool) -> Published:
        with self._alone:
            now = self._clock.wall_ms()
            self._ledger.require_present(now)
            try:
                self._catalogue.version += 1
                stored = {} if repair else self._stored_statements()
                span = self._span(now)
                moved = self._changed("span", span)
                # Before the days are written again, because records that came after the closing are in them.
                self._tag_hours(stored)
                days = self._publish_days(now, progress, moved=moved, repair=repair)
                months = self._publish_statements(now, stored, moved=moved)
                registers = self._publish_registers(now, moved=moved, repair=repair)
            except LakeRefused as error:
                self.refused = str(error)
                raise
            self._leave_former_names()
            self.refused = ""
            self._marks["span"] = span
            self.published_ms = now
        if days or months or registers:
            self._log.info("published", days=len(days), months=len(months), tables=len(registers))
        return Published(days, months, registers)

    def remove_old_versions(self) -> Removed:
        """Removes old versions of the tables, and files that no version needs. Raises LakeUnavailable."""
        with self._alone:
            return self._catalogue.remove_old_versions(self._lake.keep_snapshots)

    def compare(self) -> LakeComparison:
        """Compares the lake with the ledger: the last `days_back` days, as many older days (different ones every day),
        and the past months of all these days. A day or month that has changed since its publication is skipped, because
        the next run writes it. Raises LakeUnavailable."""
        now = self._clock.wall_ms()
        engine = DuckDbEngine(self._catalogue)
        compared = 0
        differences: list[str] = []
        try:
            for days in self._days_to_compare(now):
                unchanged = [(day, self._book_of(day)) for day in days if not self._day_changed(day)]
                comparison = compare_days(self._ledger, engine, self.name, unchanged, self._zone)
                compared += comparison.days
                differences += comparison.differences
                past = sorted({Month(day.year, day.month) for day in days} - {Month.of(now, self._zone)})
                stated = [self._books.month(month) for month in past if not self._month_changed(month, now)]
                differences += compare_charges(engine, self.name, stated)
        finally:
            engine.close()
        differences += self._withdrawn(now)
        self.compared = LakeComparison(compared, tuple(dict.fromkeys(differences)))
        return self.compared

    def _withdrawn(self, now_ms: int) -> list[str]:
        """A line of text for each day and month of which the lake has rows and the ledger has none; empty if the ledger
        begins elsewhere than at the last publication, because the next one removes them."""
        if "span" in self._marks and self._marks["span"][:1] != self._span(now_ms)[:1]:
            return []
        days = self._left_over_days(self._catalogue.parts(tables.USAGE_HOURLY), now_ms)
        found = [f"{day}: usage_hourly has rows of this day, and the ledger has none" for day in sorted(days)]
        for table in (tables.STATEMENT_LINES, tables.FOCUS):
            months = self._left_over_months(self._catalogue.parts(table), now_ms)
            found += [
                f"{month}: {table.name} has rows of this month, and the ledger has none" for month in sorted(months)
            ]
        return found

    # --- days ---------------------------------------------------------------------------------

    def _changed(self, thing: Hashable, mark: Hashable) -> bool:
        return thing not in self._marks or self._marks[thing] != mark

    def days_to_check(self, now_ms: int) -> list[date]:
        """The last `days_back` days, and one of the older days, in rotation."""
        every = self._every_day(now_ms)
        older, lately = every[: -self._lake.days_back], every[-self._lake.days_back :]
        return [*older[self._turn % len(older) :][:1], *lately] if older else lately

    def _days_to_compare(self, now_ms: int) -> list[list[date]]:
        """The last `days_back` days, and one of the spans of that length before them, in rotation."""
        every, length = self._every_day(now_ms), self._lake.days_back
        older = every[:-length]
        stretches = [older[at : at + length] for at in range(0, len(older), length)]
        turn = local_date(now_ms, self._zone).toordinal()
        return [every[-length:], *([stretches[turn % len(stretches)]] if stretches else [])]

    def _day_mark(self, day: date) -> tuple[Hashable, ...]:
        """A value that changes with everything that determines the rows of a day, except the present time."""
        return self._ledger.status().mark(*day_span(day, self._zone)), *(
            found.version for found in self._books.prices.versions
        )

    def _day_changed(self, day: date) -> bool:
        """Whether a day has changed since this process published it."""
        return day in self._marks and self._changed(("rows", day), self._day_mark(day))

    def _every_day(self, until_ms: int) -> list[date]:
        first_ms, _ = self._ledger.status().extent
        if not first_ms:
            return []
        first, last = local_date(first_ms, self._zone), local_date(until_ms, self._zone)
        return [first + timedelta(days=number) for number in range((last - first).days + 1)]

    def _until_ms(self, now_ms: int) -> int:
        """The present time, or the end of the newest record if the clock is a little behind it."""
        return max(now_ms, self._ledger.status().newest_ms)

    def _span(self, now_ms: int) -> tuple[date, ...]:
        """The first and the last day of the ledger; empty without records."""
        every = self._every_day(self._until_ms(now_ms))
        return (every[0], every[-1]) if every else ()

    def _left_over_days(self, days: Collection[date], now_ms: int) -> set[date]:
        """Those of the days in the lake that the ledger does not have, for example because an import was withdrawn."""
        return set(days) - set(self._every_day(self._until_ms(now_ms)))

    def _left_over_months(self, months: Collection[str], now_ms: int) -> set[str]:
        """Those of the months in the lake that the ledger does not have."""
        return set(months) - {str(month) for month in self._every_month(self._until_ms(now_ms))}

    def _known_days(self) -> dict[date, dict[str, Any]]:
        """The rows of the table `days` of this ledger, by day."""
        return {row["day"]: row for row in self._read(tables.DAYS)}

    def _publish_days(self, now_ms: int, progress: ProgressCallback, *, moved: bool, repair: bool) -> tuple[date, ...]:
        """Publishes the days that have changed, and removes those that the ledger does not have. moved: the days of the
        ledger are not those of the last run."""
        known, days = self._known_days() if moved else {}, self.days_to_check(now_ms)
        if moved:
            every = self._every_day(now_ms)
            self._remove_days(
                known, self._left_over_days(set(known) | self._catalogue.parts(tables.USAGE_HOURLY), now_ms)
            )
            if repair:
                self._forget_wrong_totals(known)
            days = every if repair else sorted({*days, *(day for day in every if day not in known)})
        changed: list[tuple[date, dict[Hashable, Any]]] = []
        for day in days:
            rows_mark = self._day_mark(day)
            mark = rows_mark, min(now_ms, day_span(day, self._zone)[1])
            if self._changed(day, mark):
                changed.append((day, {day: mark, ("rows", day): rows_mark}))
        self._turn += 1
        if changed and not moved:
            known = self._known_days()
        written: list[date] = []
        pending: list[tuple[DayRows, dict[Hashable, Any]]] = []
        for number, (day, marks) in enumerate(changed, 1):
            of_day = self._day(day, now_ms)
            progress("days", number, len(changed))
            if known.get(day, {}).get("digest") == of_day.digest:
                self._marks |= marks
            else:
                pending.append((of_day, marks))
            if sum(one.rows.num_rows for one, _ in pending) >= _ROWS_A_COMMIT:
                written += self._write_days(pending, known, now_ms)
                pending = []
        written += self._write_days(pending, known, now_ms)
        return tuple(written)

    def _forget_wrong_totals(self, known: dict[date, dict[str, Any]]) -> None:
        """Removes the days whose rows in the lake are not those of their control totals."""
        hourly = self._catalogue.open(tables.USAGE_HOURLY)
        for day, total in [*known.items()]:
            rows = hourly.scan(rows_where({"day": day})).to_arrow().select(tables.USAGE_HOURLY.arrow.names)
            if total["digest"] != tables.digest(rows.cast(tables.USAGE_HOURLY.arrow)):
                del known[day]

    def _remove_days(self, known: dict[date, dict[str, Any]], days: Collection[date]) -> None:
        """Removes days of which the ledger has no records."""
        if not days:
            return
        for day in days:
            known.pop(day, None)
            self._marks.pop(day, None)
            self._marks.pop(("rows", day), None)
        self._catalogue.replace(tables.USAGE_HOURLY, tables.USAGE_HOURLY.arrow.empty_table(), {"day": [*days]})
        self._replace(tables.DAYS, list(known.values()))
        self._log.info("days_left_the_lake", days=len(days), first=str(min(days)), last=str(max(days)))

    def _day(self, day: date, now_ms: int) -> DayRows:
        start_ms, end_ms = day_span(day, self._zone)
        book = self._book_of(day)
        prices = {at for found in self._books.prices.versions for at in found.book.cuts(start_ms, end_ms)}
        with self._ledger.moment(start_ms, min(end_ms, now_ms)) as moment:
            # A month is billed in parts, in each of which quotas are by the same GPU models.
            quotas = ModelSpans.of(moment.status().policies(start_ms, end_ms), start_ms, end_ms).edges[1:-1]
            changes = sorted({*prices, *quotas})
            return day_rows(self.name, moment, book, day, self._zone, now_ms, changes, self._labels)

    def _book_of(self, day: date) -> PriceBook | None:
        """The price book of the day's month."""
        return self._books.priced_by(self._books.kept(Month(day.year, day.month)))

    def _write_days(
        self,
        days: Sequence[tuple[DayRows, dict[Hashable, Any]]],
        known: dict[date, dict[str, Any]],
        now_ms: int,
    ) -> list[date]:
        """Writes days, each with its marks."""
        if not days:
            return []
        rows = pa.concat_tables([one.rows for one, _ in days])
        self._catalogue.replace(tables.USAGE_HOURLY, rows, {"day": [one.day for one, _ in days]})
        for one, _ in days:
            known[one.day] = self._control_total(one, now_ms)
        self._replace(tables.DAYS, list(known.values()))
        for _, marks in days:
            self._marks |= marks
        return [one.day for one, _ in days]

    def _control_total(self, one: DayRows, now_ms: int) -> dict[str, Any]:
        newest = self._ledger.status().newest_by_cluster
        over = one.end_ms == day_span(one.day, self._zone)[1]
        return {
            "ledger": self.name,
            "day": one.day,
            "start_ms": one.start_ms,
            "end_ms": one.end_ms,
            "sealed": over and all(at >= one.end_ms for at in newest.values()),
            "rows": one.rows.num_rows,
            **dict(zip(_ACCOUNTS, one.accounts, strict=True)),
            "currency": one.currency,
            "cost": one.cost,
            "unpriced_us": one.unpriced_us,
            "digest": one.digest,
            "timezone": self._timezone,
            "published": _instant(now_ms),
        }

    # --- statements ---------------------------------------------------------------------------

    def _stored_statements(self) -> dict[str, tuple[str, str]]:
        """By month the hash and the status of the statement that an earlier process published; empty after the first
        run."""
        if self.published_ms is not None:
            return {}
        return {row["month"]: (row["hash"], row["status"]) for row in self._read(tables.STATEMENTS)}

    def _tag_hours(self, stored: dict[str, tuple[str, str]]) -> None:
        """Tags the hours of each month that was closed since the last run."""
        books = self._books.books()
        for closed in books.closed:
            month = Month.parse(closed.month)
            mark = closed.hash, self._books.status(month, books)
            if stored.get(closed.month) != mark and self._changed(("statement", month), mark):
                self._tag_hours_of(closed, are_new=False)

    def _tag_hours_of(self, closed: ClosedMonth, *, are_new: bool) -> bool:
        """Tags the hours in the lake with a closed month if they are those of its statement. Returns whether the month
        has its tag. are_new: whether the hours are those of the ledger now."""
        hourly, name = tables.USAGE_HOURLY, self._tag_of(closed)
        if name in self._catalogue.open(hourly).refs():
            return True
        stated = closed_statement(closed)
        book = self._books.priced_by(stated)
        # Such a book bills busy time to others than those that the hours name, so only totals can be compared.
        by_team = book is None or (book.billing.shared_gpus != "busy" and book.mig_basis != "memory")
        if not (by_team or are_new):
            return False
        engine = DuckDbEngine(self._catalogue)
        try:
            is_stated = hours_are_stated(engine, self.name, stated, self._zone, by_team=by_team)
        finally:
            engine.close()
        if is_stated:
            self._catalogue.tag(hourly, name)
        return is_stated

    def _tag_of(self, closed: ClosedMonth) -> str:
        return f"{self.name}-{closed.month}-{closed.hash[:12]}"

    def _publish_statements(self, now_ms: int, stored: dict[str, tuple[str, str]], *, moved: bool) -> tuple[str, ...]:
        """Publishes the months that have changed, and removes those that the ledger does not have."""
        books, rows, lines = self._books.books(), [], {}
        gone = moved and self._remove_months(now_ms)
        for month in self._every_month(now_ms):
            status, mark = self._books.status(month, books), self._month_mark(month, now_ms, books)
            stated = self._books.month(month)
            rows.append(statement_row(self.name, str(month), status, stated))
            if stored.get(str(month)) == (statement_hash(stated), status):
                self._marks["statement", month] = mark  # published by an earlier process
            elif self._changed(("statement", month), mark):
                lines[month] = mark, line_rows(self.name, str(month), stated)
                self._publish_focus(month, mark, now_ms)
        if lines:
            self._catalogue.replace(
                tables.STATEMENT_LINES,
                tables.STATEMENT_LINES.of_rows([row for _, several in lines.values() for row in several]),
                {"month": [str(one) for one in lines]},
            )
        for one in lines:
            closed = books.of(str(one))
            if closed is not None:
                for table in (tables.STATEMENT_LINES, tables.FOCUS):
                    self._catalogue.tag(table, self._tag_of(closed))
                if not self._tag_hours_of(closed, are_new=True):
                    self._log.warning(
                        "month_without_tagged_hours", month=closed.month, reason="its hours in the lake were never "
                        "those of its statement: records came between its closing and the publications beside it",
                    )  # fmt: skip
        # Last, because this table shows what an earlier process wrote completely.
        if lines or gone:
            self._replace(tables.STATEMENTS, rows)
        self._marks |= {("statement", one): mark for one, (mark, _) in lines.items()}
        return tuple(str(one) for one in lines)

    def _every_month(self, until_ms: int) -> tuple[Month, ...]:
        """The months from the ledger's first record on, and those that were closed, ascending."""
        found = {Month.parse(closed.month) for closed in self._books.books().closed}
        first_ms, _ = self._ledger.status().extent
        if first_ms:
            month, last = (Month.of(at, self._zone) for at in (first_ms, until_ms))
            while month <= last:
                found.add(month)
                month = month.next
        return tuple(sorted(found))

    def _remove_months(self, now_ms: int) -> bool:
        """Removes the lines and charges of months that the ledger does not have. Returns whether the lake had any, or
        their statements."""
        gone = self._left_over_months({row["month"] for row in self._read(tables.STATEMENTS)}, now_ms)
        for table in (tables.STATEMENT_LINES, tables.FOCUS):
            left = self._left_over_months(self._catalogue.parts(table), now_ms)
            if left:
                self._catalogue.replace(table, table.arrow.empty_table(), {"month": [*left]})
            gone |= left
        for month in map(Month.parse, gone):
            self._marks.pop(("statement", month), None)
            self._marks.pop(("focus", month), None)
        if gone:
            self._log.info("months_left_the_lake", months=sorted(gone))
        return bool(gone)

    def _month_mark(self, month: Month, now_ms: int, books: ClosedMonths) -> Hashable:
        """A value that changes with everything that determines a month's statement."""
        closed, status = books.of(str(month)), self._books.status(month, books)
        if closed is not None:
            return closed.hash, status
        start_ms, end_ms = month.span(self._zone)
        version_of = self._books.prices.latest.version if self._books.prices.latest else ""
        return self._ledger.status().mark(start_ms, end_ms), version_of, books.seen, min(now_ms, end_ms), status

    def _month_changed(self, month: Month, now_ms: int) -> bool:
        """Whether a month has changed since this process published it."""
        thing, mark = ("statement", month), self._month_mark(month, now_ms, self._books.books())
        return thing in self._marks and self._changed(thing, mark)

    def _publish_focus(self, month: Month, mark: Hashable, now_ms: int) -> None:
        """Publishes the charges of a month if the month has changed; those of the current month only once a day,
        because there are many."""
        start_ms, end_ms = month.span(self._zone)
        if now_ms < end_ms:
            mark = local_date(now_ms, self._zone)
        if self._books.prices.current is None or not self._changed(("focus", month), mark):
            return
        report = report_builder.report(
            self._ledger, self._books, start_ms, max(start_ms + 1, min(end_ms, now_ms)), self._timezone, month=month,
            issuer=self._issuer,
        )  # fmt: skip
        if report.currency is None:
            return
        rows = focus_rows(self.name, str(month), report)
        self._catalogue.replace(tables.FOCUS, rows, {"month": str(month)})
        self._marks["focus", month] = mark

    # --- registers ----------------------------------------------------------------------------

    def _publish_registers(self, now_ms: int, *, moved: bool, repair: bool) -> tuple[str, ...]:
        """Publishes the parts of registers whose digests differ from those in the table `registers`, removes the parts
        that the ledger does not have, and then updates that table."""
        if self._parts is None:
            self._parts = {(row["register"], row["part"]): row for row in self._read(tables.REGISTERS)}
        known, written_tables = self._parts, []
        self._parts = None  # read again after a failure
        for table, by, rows in self._registers():
            parts: dict[str, list[dict[str, Any]]] = {} if by else {"": rows}
            for row in rows if by else ():
                parts.setdefault(str(row[by]), []).append(row)
            there = {part for register, part in known if register == table.name}
            if moved and by:
                there |= {str(value) for value in self._catalogue.parts(table)}
            changed = {gone: table.arrow.empty_table() for gone in there - set(parts)}
            for gone in changed:
                known.pop((table.name, gone), None)
            for name, of_part in parts.items():
                part, key = table.of_rows(of_part), (table.name, name)
                digest = tables.digest(part)
                if repair or key not in known or known[key]["digest"] != digest:
                    known[key] = {
                        "ledger": self.name, "register": table.name, "part": name, "rows": part.num_rows,
                        "digest": digest,
                    }  # fmt: skip
                    changed[name] = part
            if changed:
                partition = {by: list(changed)} if by else {}
                self._catalogue.replace(table, pa.concat_tables(changed.values()), partition)
                written_tables.append(table.name)
        if written_tables:
            self._replace(tables.REGISTERS, list(known.values()))
        self._parts = known
        return (*written_tables, *self._publish_status(now_ms))

    def _publish_status(self, now_ms: int) -> tuple[str, ...]:
        """Publishes the ledger's row in the table `ledgers` if it has changed. This is the last step of a run, so that
        the row describes published data only."""
        status = self._ledger.status()
        row = {
            "ledger": self.name, "id": self._id(), "acts": status.last_act, "timezone": self._timezone,
            "grace_days": self._grace_days, "first_ms": status.extent[0],
            "newest_ms": status.newest_ms, "until_ms": now_ms,
            "clusters": json.dumps(dict(status.newest_by_cluster), sort_keys=True),
            "teams": json.dumps(sorted(status.teams)),
            "exported_labels": json.dumps([*map(label_of, self._labels)]), "published": _instant(now_ms),
            "version": __version__,
        }  # fmt: skip
        name, mark = tables.LEDGERS.name, tuple(row.values())
        if not self._changed(name, mark):
            return ()
        self._replace(tables.LEDGERS, [row])
        self._marks[name] = mark
        return (name,)

    def _leave_former_names(self) -> None:
        """Notes in the row of each former name under which name the ledger is published now. A reader that can open
        none of the tables under the new name then still knows whose the former figures are."""
        if self._left_former_names:
            return
        acts = self._acts("lake")
        renamed_ms = acts[-1].at_ms
        for act in reversed(acts):
            if act.subject != self.name:
                break
            renamed_ms = act.at_ms
        is_left = True
        for name in sorted({act.subject for act in acts} - {self.name}):
            try:
                self._leave(namespace_of(name), renamed_ms)
            # Its tables may be out of reach of this name's credentials, or have what this ledger lacks.
            except (LakeUnavailable, UnreadableLedger) as error:
                self._log.warning("former_name_not_left", ledger=name, reason=str(error))
                is_left = False
        self._left_former_names = is_left

    def _leave(self, namespace: str, renamed_ms: int) -> None:
        """Raises LakeUnavailable, also if this ledger lacks anything that is published there: then it is a copy of one
        that goes on under that name. Raises UnreadableLedger."""
        catalogue = self._catalogue
        for row in catalogue.read(tables.LEDGERS, namespace) if catalogue.has(tables.LEDGERS, namespace) else ():
            with readable(str(row["ledger"]), str(row["version"] or "")):
                if row["id"] == self._id() and row["until_ms"] <= renamed_ms and row["renamed_to"] != self.name:
                    self._require_whole(catalogue, namespace)
                    catalogue.leave(namespace, {**row, "renamed_to": self.name})

    def _registers(self) -> Iterator[tuple[tables.LakeTable, str, list[dict[str, Any]]]]:
        """Each register, the column that divides it into parts ("": one part), and its rows."""
        name = self.name
        yield tables.POLICIES, "", [
            {
                "ledger": name, "version": one.version, "effective": _instant(one.effective_ms),
                "effective_ms": one.effective_ms, "policy": one.policy.model_dump_json(),
            }
            for one in self._ledger.status().policies(0, _FAR_MS)
        ]  # fmt: skip
        yield tables.PRICES, "", list(self._prices())
        yield tables.ACTS, "", [
            {
                "ledger": name, "number": act.number, "at": _instant(act.at_ms), "at_ms": act.at_ms, "kind": act.kind,
                "subject": act.subject, "who": act.who, "reason": act.reason, "content": act.content,
                "digest": act.digest,
            }
            for act in self._acts()
        ]  # fmt: skip
        newest = self._ledger.status().newest_by_node
        yield tables.NODES, "", [
            {
                "ledger": name, "cluster": node.cluster, "node": node.name, "pool": node.pool, "region": node.region,
                "capacity_type": node.capacity_type, "facts": msgspec.json.encode(node).decode(),
                "newest_ms": newest.get((node.cluster, node.name)),
            }
            for node in self._nodes()
        ]  # fmt: skip
        yield tables.EPOCHS, "", [
            {
                "ledger": name, "cluster": one.key.cluster, "namespace": one.key.namespace, "job": one.key.job,
                "epoch": one.epoch, "at_ms": one.at_ms, "who": one.who,
            }
            for one in self._epochs()
        ]  # fmt: skip
        yield tables.OUTBOXES, "", [
            {"ledger": name, "cluster": cluster, "node": node, "epoch": epoch, "number": number}
            for (cluster, node, epoch), number in self._ledger.outboxes().items()
        ]  # fmt: skip
        yield tables.PODS, "month", self._pods()
        yield tables.DECISIONS, "day", self._decisions()

    def _nodes(self) -> Iterator[NodeFacts]:
        """Also the nodes that no inventory lists, of which there are records or an agent's report alone."""
        status = self._ledger.status()
        facts_of, agents = {(node.cluster, node.name): node for node in status.nodes}, status.agents
        for key in sorted({*facts_of, *agents, *status.newest_by_node}):
            yield facts_of.get(key) or NodeFacts(*key, listed=False, agent=agents.get(key))

    def _epochs(self) -> list[EpochReport]:
        with self._ledger.moment() as moment:
            return moment.epochs()

    def _acts(self, *kinds: ActKind) -> list[Act]:
        with self._ledger.moment() as moment:
            return moment.acts(*kinds)

    def _prices(self) -> Iterator[dict[str, Any]]:
        for version_of in self._books.prices.versions:
            for row in version_of.book.rows:
                yield {
                    "ledger": self.name, "price_book": version_of.version, "taken": _instant(version_of.at_ms),
                    "price_row": row.id, "gpu_model": row.model, "pool": row.pool, "region": row.region,
                    "capacity_type": row.capacity_type, "price": row.price, "per": row.per,
                    "currency": version_of.book.currency, "row": row.model_dump_json(),
                }  # fmt: skip

    def _pods(self) -> list[dict[str, Any]]:
        with self._ledger.moment() as moment:
            pods = list(moment.pods(0, _FAR_MS, placed=True))
        return [
            {
                "ledger": self.name,
                "month": str(Month.of(_first_seen_ms(pod.facts), self._zone)),
                "cluster": pod.cluster, "uid": pod.facts.uid, "namespace": pod.facts.namespace, "pod": pod.facts.name,
                "job": pod.key.job, "team": pod.team, "queue": pod.queue,
                **{
                    name: None if (at := getattr(pod.facts, f"{name}_ms")) is None else _instant(at)
                    for name in ("created", "scheduled", "started", "ended")
                },
                "facts": msgspec.json.encode(pod.facts).decode(),
            }
            for pod in pods
        ]  # fmt: skip

    def _decisions(self) -> list[dict[str, Any]]:
        with self._ledger.moment() as moment:
            decisions = moment.decisions(0, _FAR_MS, _EVERY_DECISION)
        return [
            {
                "ledger": self.name, "day": local_date(one.at_ms, self._zone), "cluster": one.cluster, "id": one.id,
                "at": _instant(one.at_ms), "at_ms": one.at_ms, "kind": one.kind, "subject": one.subject,
                "decision": one.model_dump_json(),
            }
            for one in decisions
        ]  # fmt: skip

    # --- internal -----------------------------------------------------------------------------

    @property
    def _catalogue(self) -> Catalogue:
        if self._opened is None:
            with self._alone:
                if self._opened is None:  # two claims at one time would refuse each other's commits
                    self._opened = self._open(repair=False)
        return self._opened

    def _open(self, *, repair: bool) -> Catalogue:
        """Opens the lake and claims this ledger's tables. Begins a lake only if the ledger has not published there yet,
        or to repair it. A ledger that is refused has written nothing, so it stops no accountant that publishes rightly.

        The id is recorded before the claim, so that tables with a claim always belong to a ledger that knows its id."""
        catalogue, known = self._connect(), self._acts("lake")
        is_new = not known or (known[-1].subject, json.loads(known[-1].content)["warehouse"]) != self._place
        ledger_id = self._id() if known else uuid.uuid4().hex
        if is_new or repair:
            catalogue.begin()
        catalogue.require_own(ledger_id)
        if not repair:
            self._require_whole(catalogue)
            catalogue.begin()  # what this version adds to the tables of an earlier one
        if is_new:
            self._record(ledger_id, "accountant", "the ledger is published for the first time under this name")
        catalogue.claim(ledger_id)
        return catalogue

    @property
    def _place(self) -> tuple[str, str]:
        """The name and the warehouse under which the ledger is published."""
        return self.name, self._lake.warehouse

    def _id(self) -> str:
        """The id that the ledger got when it was published first."""
        found: str = json.loads(self._acts("lake")[0].content)["id"]
        return found

    def _record(self, ledger_id: str, who: str, reason: str) -> None:
        content = json.dumps({"id": ledger_id, "warehouse": self._lake.warehouse})
        record(self._ledger, [NewAct(self._clock.wall_ms(), "lake", self.name, who, reason, content)], None)

    def _require_whole(self, catalogue: Catalogue, namespace: str = "") -> None:
        """Raises LakeRefused if the ledger lacks acts or old records that the lake has, and LakeUnavailable while it
        lacks records that agents may send again. Only reads.

        namespace: where the ledger was published; "": under its present name."""
        cure = (
            "If the ledger was lost or an old backup was restored, restore the newest backup and the archive. If the "
            "ledger is right, `gputally accountant check --lake --repair` makes the lake equal to it"
        )
        lacked = self._lacked_act(catalogue.read(tables.ACTS, namespace))
        if lacked is not None:
            raise LakeRefused(
                f"{catalogue.place}: act {lacked} of the ledger {self.name} in the lake is not in the "
                f"ledger (its last act is {self._ledger.status().last_act}), so nothing was published. {cure}"
            )
        for row in catalogue.read(tables.LEDGERS, namespace):
            # The acts of this row, not of the table `acts`, which is written earlier than the row.
            removing = self._acts("withdrawn", "redated", "retired", "moved")
            if any(act.number > row["acts"] for act in removing):
                continue  # the ledger's records became fewer by an act
            status = self._ledger.status()
            first_ms, newest_ms = status.extent
            if row["first_ms"] and (not first_ms or row["first_ms"] < first_ms):
                begins = f"begins at {utc(first_ms)}" if first_ms else "has no records"
                raise LakeRefused(
                    f"{catalogue.place}: in the lake the ledger {self.name} begins at {utc(row['first_ms'])}, and the "
                    f"ledger {begins}, so nothing was published. {cure}"
                )
            newest = {"": newest_ms, **status.newest_by_cluster}
            published = {"": row["newest_ms"], **json.loads(row["clusters"])}
            behind = sorted(name for name, at_ms in published.items() if newest.get(name, 0) < at_ms)
            if behind:
                ends = f"end at {utc(newest_ms)}" if behind == [""] else f"of cluster {behind[-1]} end earlier"
                raise LakeUnavailable(
                    f"{catalogue.place}: in the lake the records of the ledger {self.name} end at "
                    f"{utc(row['newest_ms'])}, and in the ledger those {ends}. Nothing is published until the agents "
                    f"have sent again what is missing. {cure}"
                )

        outboxes = self._ledger.outboxes()
        fewer = [
            row for row in (
                catalogue.read(tables.OUTBOXES, namespace) if catalogue.has(tables.OUTBOXES, namespace) else ()
            )
            if outboxes.get((row["cluster"], row["node"], row["epoch"]), 0) < row["number"]
        ]  # fmt: skip
        if fewer:
            row = fewer[0]
            raise LakeUnavailable(
                f"{catalogue.place}: the lake has records of {len(fewer)} outboxes that the ledger {self.name} lacks, "
                f"among them those of node {row['node']} in cluster {row['cluster']} up to number {row['number']}. "
                f"Nothing is published until the agents have sent them again. {cure}"
            )

    def _lacked_act(self, published: Sequence[dict[str, Any]]) -> int | None:
        """The number of the newest published act if the ledger does not have it. published: rows of the table
        `acts`."""
        last = max(published, key=lambda row: row["number"], default=None)
        if last is None:
            return None
        with self._ledger.moment() as moment:
            own = moment.acts(after=last["number"] - 1, limit=1)
        return None if own and own[0].digest == last["digest"] else int(last["number"])

    def _read(self, table: tables.LakeTable) -> list[dict[str, Any]]:
        return self._catalogue.read(table)

    def _replace(self, table: tables.LakeTable, rows: list[dict[str, Any]]) -> None:
        """Replaces all rows of a table."""
        self._catalogue.replace(table, table.of_rows(rows), {})


def name_of(settings: Settings) -> str:
    """The name under which an accountant publishes its ledger."""
    assert settings.lake is not None
    return settings.lake.ledger or settings.kubernetes.cluster


def _first_seen_ms(facts: PodFacts) -> int:
    known = (facts.created_ms, facts.scheduled_ms, facts.started_ms)
    return next((at for at in known if at is not None), facts.observed_ms)


def _instant(at_ms: int) -> datetime:
    return datetime.fromtimestamp(at_ms // 1_000, UTC).replace(microsecond=at_ms % 1_000 * 1_000)


def compare_days(
    ledger: Ledger,
    engine: Engine,
    name: str,
    days: Sequence[tuple[date, PriceBook | None]],
    timezone: ZoneInfo,
) -> LakeComparison:
    """Compares the published days of a ledger with its present records.

    days: the days to compare, with the price book of each. Days that begin after the last publication are skipped.

    Raises LakeUnavailable."""
    if not days:
        return LakeComparison(0, ())
    dates = [day for day, _ in days]
    span = min(dates), max(dates)
    until_ms = max((row["until_ms"] for row in _rows(engine, every_column(tables.LEDGERS), name)), default=0)
    totals = {row["day"]: row for row in _rows(engine, every_column(tables.DAYS), name)}
    rows: dict[tuple[date, str], dict[str, Any]] = {}
    sums = [exp.cast(exp.func("sum", exp.column(column)), "DECIMAL(38, 0)").as_(column) for column in _ACCOUNTS]
    amount = exp.cast(exp.func("sum", exp.column("cost")), "DECIMAL(38, 9)").as_("cost")
    query = exp.select("day", "cluster", *sums, amount).from_("usage_hourly").group_by("day", "cluster")
    for row in _rows(engine, query, name, span):
        rows[row["day"], row["cluster"]] = row
    compared, differences = 0, []
    for day, book in days:
        if day not in totals:
            if day_span(day, timezone)[0] < until_ms:
                differences.append(f"{day}: the table days has no row of this published day")
            continue
        compared += 1
        of_day = {cluster: row for (row_day, cluster), row in rows.items() if row_day == day}
        with ledger.moment(totals[day]["start_ms"], totals[day]["end_ms"]) as moment:
            differences += _day_differences(moment, book, day, totals[day], of_day, timezone)
    return LakeComparison(compared, tuple(differences))


def compare_charges(engine: Engine, name: str, stated: Sequence[Statement]) -> list[str]:
    """Compares the amounts that teams owe by the table `focus` with those of the statements, and returns a line of text
    per difference. Months without charges in the lake are skipped. Raises LakeUnavailable."""
    due = exp.cast(exp.func("sum", exp.column("BilledCost")), "DECIMAL(38, 9)").as_("due")
    query = exp.select("month", "SubAccountId", due).from_("focus").group_by("month", "SubAccountId")
    in_lake: dict[str, dict[str, Decimal]] = {}
    for row in _rows(engine, query, name):
        in_lake.setdefault(row["month"], {})[row["SubAccountId"]] = row["due"]
    differences = []
    for one in stated:
        of_month = in_lake.get(str(one.month))
        if of_month is None or one.currency is None:
            continue
        for team in sorted({*of_month, *one.charged}):
            owed, charged = one.charged.get(team, Decimal(0)), of_month.get(team, Decimal(0))
            if owed != charged:
                differences.append(f"{one.month} {team}: {charged:f} is due in the lake and {owed:f} in the ledger")
    return differences


def hours_are_stated(engine: Engine, name: str, stated: Statement, timezone: ZoneInfo, *, by_team: bool = True) -> bool:
    """Whether the rows of `usage_hourly` have the capacity, the unmetered and down time, the unpriced time and, to the
    cent, the cost of a month's statement. Raises LakeUnavailable.

    by_team: whether the busy time of each team and GPU model is compared, too. A statement bills it as it is recorded,
        unless the price book moves it."""
    days = local_date(stated.start_ms, timezone), local_date(stated.end_ms - 1, timezone)
    columns = ("unmetered_us", "down_us", "unpriced_us")
    sums = {"gpu_us": " + ".join(_ACCOUNTS), **dict(zip(columns, columns, strict=True))}
    first, last = (exp.cast(exp.Literal.string(day.isoformat()), "DATE") for day in days)
    of_month = exp.select().from_("usage_hourly").where(exp.column("day") >= first, exp.column("day") <= last)
    query = of_month.select(
        *(exp.cast(exp.func("sum", exp.maybe_parse(of)), "DECIMAL(38, 0)").as_(to) for to, of in sums.items()),
        exp.cast(exp.func("sum", exp.column("cost")), "DECIMAL(38, 9)").as_("cost"),
    )
    (row,) = _rows(engine, query, name, days)
    unmetered, down = (
        sum(line.gpu_us for line in stated.lines if line.account == account) for account in ("unmetered", "down")
    )
    # Pricing moves no time from or to these two accounts, and all other time is billed.
    time_us = stated.gpu_us, unmetered, down, stated.unpriced_gpu_us
    in_lake = tuple(int(row[name] or 0) for name in sums)
    if in_lake != time_us or abs((row["cost"] or Decimal(0)) - stated.cost) >= _CENT:
        return False
    if not by_team:
        return True
    busy: Counter[tuple[str, str]] = Counter()
    for line in stated.lines:
        if line.account == "busy":
            busy[line.team, line.gpu_model] += line.gpu_us
    time = exp.cast(exp.func("sum", exp.column("busy_us")), "DECIMAL(38, 0)").as_("busy_us")
    query = of_month.select("team", "gpu_model", time).group_by("team", "gpu_model")
    hours = {(row["team"], row["gpu_model"]): int(row["busy_us"]) for row in _rows(engine, query, name, days)}
    return +Counter(hours) == +busy


def _day_differences(
    ledger: Moment,
    book: PriceBook | None,
    day: date,
    total: dict[str, Any],
    rows: dict[str, dict[str, Any]],
    timezone: ZoneInfo,
) -> list[str]:
    span = total["start_ms"], total["end_ms"]
    differences = []
    lines = {line.key["cluster"]: line for line in ledger.usage(span, ("cluster",), None, timezone.key).lines()}
    for cluster in sorted({*lines, *rows}):
        for column in _ACCOUNTS:
            in_lake = int(rows[cluster][column] or 0) if cluster in rows else 0
            in_ledger = getattr(lines[cluster].accounts_gpu_us, column.removesuffix("_us")) if cluster in lines else 0
            if in_lake != in_ledger:
                differences.append(f"{day} {cluster}: {column} is {in_lake} in the lake and {in_ledger} in the ledger")
    if book is None:
        return differences
    unpriced_us = 0
    priced = quantify((charge.key, charge) for charge in charges(ledger, book, *span, ("cluster",), None, timezone.key))
    for (cluster,), parts in priced.items():
        unpriced_us += sum(part.gpu_us for part in parts if part.cost is None)
        cost = sum((part.cost for part in parts if part.cost is not None), Decimal(0))
        lake_cost = (rows[cluster]["cost"] if cluster in rows else None) or Decimal(0)
        if abs(cost - lake_cost) >= _CENT:
            differences.append(f"{day} {cluster}: cost is {lake_cost:.2f} in the lake and {cost:.2f} in the ledger")
    if unpriced_us != total["unpriced_us"]:
        differences.append(
            f"{day}: {total['unpriced_us']} GPU-µs are unpriced in the lake and {unpriced_us} in the ledger"
        )
    return differences


def _rows(engine: Engine, query: exp.Select, name: str, days: tuple[date, date] | None = None) -> list[dict[str, Any]]:
    own = query.where(exp.column("ledger").eq(exp.Literal.string(name)))
    rows: list[dict[str, Any]] = engine.query(own, namespace_of(name), days).to_pylist()
    return rows
