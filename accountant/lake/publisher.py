"""Writes the ledger's settled figures and registers to the lake.

A publisher whose lake is not its ledger's writes nothing (`own_tables`). A day is written as a whole, in one commit
with other days of the ledger. A second commit writes the control totals to the table `days`. After a crash between the
two commits, a day's digest differs from that in `days`, and the next run writes the day again, which is idempotent.
Data that has not changed since the last run is not read. `compare` tells where the lake differs from the ledger."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass
from datetime import date, timedelta
from typing import Any, Final

import pyarrow as pa
import structlog

from accountant.billing.quota_usage import ModelSpans
from accountant.bookkeeping.act_contents import closed_statement
from accountant.bookkeeping.bookkeeper import Bookkeeper
from accountant.bookkeeping.month_closing import ClosedMonth, ClosedMonths, statement_hash
from accountant.core.errors import LakeRefused
from accountant.core.periods import Month, day_span, local_date
from accountant.core.settings import Settings
from accountant.lake import tables
from accountant.lake.duckdb_engine import DuckDbEngine
from accountant.lake.iceberg_catalog import Catalogue, Removed, rows_where
from accountant.lake.lake_comparison import LakeComparison, compare_charges, compare_days, hours_are_stated
from accountant.lake.own_tables import OwnLedger, OwnTables
from accountant.lake.register_rows import registers
from accountant.lake.table_rows import DayRows, day_rows, focus_rows, instant, line_rows, statement_row
from accountant.prices.price_book import PriceBook
from accountant.reports import report_builder
from accountant.reports.statement_line_charges import ChargeListing
from accountant.wire.usage_cost_and_job_models import label_dimension
from gputally.base.clock import Clock
from gputally.base.version import __version__

_ROWS_A_COMMIT: Final = 400_000
_ACCOUNTS: Final = tables.ACCOUNT_COLUMNS[:6]
ProgressCallback = Callable[[str, int, int], None]
"""Called with what is done, the number done and the total."""


@dataclass(frozen=True, slots=True)
class Published:
    """What one run wrote: days of `usage_hourly`, months of statements, and the names of other tables."""

    days: tuple[date, ...] = ()
    months: tuple[str, ...] = ()
    registers: tuple[str, ...] = ()


class Publisher:
    """Publishes one ledger. catalogue: opens the lake; called on first use, and after the lake was refused."""

    def __init__(
        self,
        ledger: OwnLedger,
        books: Bookkeeper,
        settings: Settings,
        clock: Clock,
        catalogue: Callable[[], Catalogue],
    ) -> None:
        assert settings.lake is not None
        self._ledger, self._books, self._clock = ledger, books, clock
        self._zone, self._timezone, self._grace_days = settings.zone, settings.timezone, settings.grace_days
        self._lake, self._listing = settings.lake, ChargeListing(settings.issuer, settings.exported_labels)
        self._labels = tuple(label_dimension(name) for name in settings.exported_labels)
        self.name = name_of(settings)
        self._own = OwnTables(ledger, self.name, self._lake.warehouse, clock, catalogue)
        self._marks: dict[Hashable, Any] = {}
        """By day, month or table: the value of its mark when it was written. An equal mark means that nothing has
        changed. `span`: the first and the last day of the last run that succeeded; if they are others now, days and
        months of any age can be missing in the lake, or be left over."""
        self._parts: dict[tuple[str, str], dict[str, Any]] | None = None
        """The rows of the table `registers`; None: not read yet."""
        self._turn = 0
        self.published_ms: int | None = None
        """Start of the last successful run."""
        self.compared: LakeComparison | None = None
        """Result of the last comparison."""
        self.refused = ""
        """Why the last run wrote nothing, if a person has to decide what is right; "": nothing was refused."""
        self._log = structlog.get_logger("accountant.lake")

    def publish(self, progress: ProgressCallback = lambda *_: None) -> Published:
        """Writes the days, months and registers that have changed. Raises AccountantError; LakeRefused if the lake or
        the ledger is not what it was."""
        return self._run(progress, repair=False)

    def repair(self, who: str, reason: str, progress: ProgressCallback = lambda *_: None) -> Published:
        """Makes the lake equal to the ledger, also where they do not differ by the control totals, and where the ledger
        begins later or has other acts than the lake. Begins a lake that is missing. Recorded as an act. Raises
        AccountantError; LakeRefused if the tables belong to a ledger with another id."""
        with self._own.alone:
            self._ledger.require_present(self._clock.wall_ms())
            self._own.repair(who, reason)
            self._marks.clear()
            self._parts = self.published_ms = None
            return self._run(progress, repair=True)

    def _run(self, progress: ProgressCallback, *, repair: bool) -> Published:
        with self._own.alone:
            now = self._clock.wall_ms()
            self._ledger.require_present(now)
            try:
                self._own.catalogue.version += 1
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
            self._own.leave_former_names()
            self.refused = ""
            self._marks["span"] = span
            self.published_ms = now
        if days or months or registers:
            self._log.info("published", days=len(days), months=len(months), tables=len(registers))
        return Published(days, months, registers)

    def remove_old_versions(self) -> Removed:
        """Removes old versions of the tables, and files that no version needs. Raises LakeUnavailable."""
        with self._own.alone:
            return self._own.catalogue.remove_old_versions(self._lake.keep_snapshots)

    def compare(self) -> LakeComparison:
        """Compares the lake with the ledger: the last `days_back` days, as many older days (different ones every day),
        and the past months of all these days. A day or month that has changed since its publication is skipped, because
        the next run writes it. Raises LakeUnavailable."""
        now = self._clock.wall_ms()
        engine = DuckDbEngine(self._own.catalogue)
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
        days = self._left_over_days(self._own.catalogue.parts(tables.USAGE_HOURLY), now_ms)
        found = [f"{day}: usage_hourly has rows of this day, and the ledger has none" for day in sorted(days)]
        for table in (tables.STATEMENT_LINES, tables.FOCUS):
            months = self._left_over_months(self._own.catalogue.parts(table), now_ms)
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
                known, self._left_over_days(set(known) | self._own.catalogue.parts(tables.USAGE_HOURLY), now_ms)
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
        hourly = self._own.catalogue.open(tables.USAGE_HOURLY)
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
        self._own.catalogue.replace(tables.USAGE_HOURLY, tables.USAGE_HOURLY.arrow.empty_table(), {"day": [*days]})
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
        self._own.catalogue.replace(tables.USAGE_HOURLY, rows, {"day": [one.day for one, _ in days]})
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
            "published": instant(now_ms),
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
        if name in self._own.catalogue.open(hourly).refs():
            return True
        stated = closed_statement(closed)
        book = self._books.priced_by(stated)
        # Such a book bills busy time to others than those that the hours name, so only totals can be compared.
        by_team = book is None or (book.billing.shared_gpus != "busy" and book.mig_basis != "memory")
        if not (by_team or are_new):
            return False
        engine = DuckDbEngine(self._own.catalogue)
        try:
            is_stated = hours_are_stated(engine, self.name, stated, self._zone, by_team=by_team)
        finally:
            engine.close()
        if is_stated:
            self._own.catalogue.tag(hourly, name)
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
            self._own.catalogue.replace(
                tables.STATEMENT_LINES,
                tables.STATEMENT_LINES.of_rows([row for _, several in lines.values() for row in several]),
                {"month": [str(one) for one in lines]},
            )
        for one in lines:
            closed = books.of(str(one))
            if closed is not None:
                for table in (tables.STATEMENT_LINES, tables.FOCUS):
                    self._own.catalogue.tag(table, self._tag_of(closed))
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
            left = self._left_over_months(self._own.catalogue.parts(table), now_ms)
            if left:
                self._own.catalogue.replace(table, table.arrow.empty_table(), {"month": [*left]})
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
            listing=self._listing,
        )  # fmt: skip
        if report.currency is None:
            return
        rows = focus_rows(self.name, str(month), report)
        self._own.catalogue.replace(tables.FOCUS, rows, {"month": str(month)})
        self._marks["focus", month] = mark

    # --- registers ----------------------------------------------------------------------------

    def _publish_registers(self, now_ms: int, *, moved: bool, repair: bool) -> tuple[str, ...]:
        """Publishes the parts of registers whose digests differ from those in the table `registers`, removes the parts
        that the ledger does not have, and then updates that table."""
        if self._parts is None:
            self._parts = {(row["register"], row["part"]): row for row in self._read(tables.REGISTERS)}
        known, written_tables = self._parts, []
        self._parts = None  # read again after a failure
        for table, by, rows in registers(self._ledger, self._books.prices, self.name, self._zone):
            parts: dict[str, list[dict[str, Any]]] = {} if by else {"": rows}
            for row in rows if by else ():
                parts.setdefault(str(row[by]), []).append(row)
            there = {part for register, part in known if register == table.name}
            if moved and by:
                there |= {str(value) for value in self._own.catalogue.parts(table)}
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
                self._own.catalogue.replace(table, pa.concat_tables(changed.values()), partition)
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
            "ledger": self.name, "id": self._own.id(), "acts": status.last_act, "timezone": self._timezone,
            "grace_days": self._grace_days, "first_ms": status.extent[0],
            "newest_ms": status.newest_ms, "until_ms": now_ms,
            "clusters": json.dumps(dict(status.newest_by_cluster), sort_keys=True),
            "teams": json.dumps(sorted(status.teams)),
            "exported_labels": json.dumps([*self._listing.labels]), "published": instant(now_ms),
            "version": __version__,
        }  # fmt: skip
        name, mark = tables.LEDGERS.name, tuple(row.values())
        if not self._changed(name, mark):
            return ()
        self._replace(tables.LEDGERS, [row])
        self._marks[name] = mark
        return (name,)

    # --- internal -----------------------------------------------------------------------------

    def _read(self, table: tables.LakeTable) -> list[dict[str, Any]]:
        return self._own.catalogue.read(table)

    def _replace(self, table: tables.LakeTable, rows: list[dict[str, Any]]) -> None:
        """Replaces all rows of a table."""
        self._own.catalogue.replace(table, table.of_rows(rows), {})


def name_of(settings: Settings) -> str:
    """The name under which an accountant publishes its ledger."""
    assert settings.lake is not None
    return settings.lake.ledger or settings.kubernetes.cluster
