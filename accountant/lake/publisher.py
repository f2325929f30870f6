"""Writes the ledger's settled figures, day by day, and its registers to the lake.

A day is written as a whole, in one commit with other days of the ledger. A second commit writes the control totals to
the table `days`. After a crash between the two, a day's digest differs from that in `days`. The next run then writes
the day again, which is idempotent. Data that has not changed since the last run is not read."""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, timedelta
from importlib.metadata import version
from typing import Any, Final

import msgspec
import pyarrow as pa
import structlog

from accountant.billing.statements import Statement, StatementLine, canonical
from accountant.bookkeeping.bookkeeper import Bookkeeper
from accountant.bookkeeping.month_closing import ClosedMonths, statement_hash
from accountant.core.periods import Month, local_date
from accountant.core.settings import Settings
from accountant.lake import table_maintenance, tables
from accountant.lake.focus_rows import focus_rows
from accountant.lake.iceberg_catalog import Catalogue
from accountant.lake.ledger_comparison import LakeComparison, compare, compare_charges
from accountant.lake.query_engines import DuckDbEngine
from accountant.lake.table_maintenance import Removed
from accountant.lake.usage_rows import DayRows, day_rows, day_span
from accountant.ledger.protocols import EpochReport
from accountant.prices.price_book import PriceBook
from accountant.reports import report_builder
from accountant.storage.duckdb_ledger import DuckLedger
from agent.wire import PodFacts
from gputally.base.clock import Clock

_ROWS_A_COMMIT: Final = 400_000
_FAR_MS: Final = 2**53
_EVERY_DECISION: Final = 10**9


@dataclass(frozen=True, slots=True)
class Published:
    """The result of one run: days of `usage_hourly`, months of statements, other tables."""

    days: tuple[date, ...] = ()
    months: tuple[str, ...] = ()
    registers: tuple[str, ...] = ()


@dataclass(slots=True)
class _Seen:
    """The marks seen by the last run; an equal mark means that nothing changed."""

    of: dict[Hashable, Hashable] = field(default_factory=dict)

    def changed(self, thing: Hashable, found: Hashable) -> bool:
        return thing not in self.of or self.of[thing] != found

    def note(self, thing: Hashable, found: Hashable) -> None:
        self.of[thing] = found


class Publisher:
    """Publishes one ledger. catalogue: opens the lake on first use."""

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
        self.name = settings.lake.ledger or settings.kubernetes.cluster
        self._connect = catalogue
        self._opened: Catalogue | None = None
        self._seen = _Seen()
        self._parts: dict[tuple[str, str], dict[str, Any]] | None = None
        """The rows of the table `registers`; None: not read yet."""
        self._turn = 0
        self.published_ms: int | None = None
        """Start of the last successful run."""
        self.compared: LakeComparison | None = None
        """Result of the last comparison."""
        self._log = structlog.get_logger("accountant.lake")

    def publish(self, told: Callable[[str, int, int], None] = lambda *_: None) -> Published:
        """Writes what changed. told: called with a description, the number done, and the total. Raises
        AccountantError."""
        now = self._clock.wall_ms()
        days = self._publish_days(now, told)
        months = self._publish_statements(now)
        registers = self._publish_registers(now)
        found = Published(days, months, registers)
        self.published_ms = now
        if days or months or registers:
            self._log.info("published", days=len(days), months=len(months), tables=len(registers))
        return found

    def keep_small(self) -> Removed:
        """Removes old versions and the files that only they need. Raises LakeUnavailable."""
        return table_maintenance.keep_small(self._catalogue, self._clock.wall_ms(), self._lake.keep_snapshots)

    def compare(self) -> LakeComparison:
        """Compares the lake with the ledger, over the last `days_back` days, as many older days, which change every
        day, and the past months of these days. Data that changed since its publication is skipped, because the next run
        writes it. Raises LakeUnavailable."""
        now = self._clock.wall_ms()
        engine = DuckDbEngine(self._catalogue)
        compared = 0
        differences: list[str] = []
        try:
            for days in self._days_to_compare(now):
                settled = [(day, self._book_of(day)) for day in days if not self._day_waits(day)]
                found = compare(self._ledger, engine, self.name, settled, self._zone)
                compared += found.days
                differences += found.differences
                over = sorted({Month(day.year, day.month) for day in days} - {Month.of(now, self._zone)})
                stated = [self._books.month(month) for month in over if not self._month_waits(month, now)]
                differences += compare_charges(engine, self.name, stated)
        finally:
            engine.close()
        self.compared = LakeComparison(compared, tuple(dict.fromkeys(differences)))
        return self.compared

    # --- days ---------------------------------------------------------------------------------

    def days_to_look_at(self, now_ms: int) -> list[date]:
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
        """A value that changes with everything that determines the rows of a day, except how far the day has run."""
        return self._ledger.mark(*day_span(day, self._zone)), *(found.version for found in self._books.prices.versions)

    def _day_waits(self, day: date) -> bool:
        """Whether a day changed since this process published it."""
        return day in self._seen.of and self._seen.changed(("rows", day), self._day_mark(day))

    def _every_day(self, now_ms: int) -> list[date]:
        first_ms, _ = self._ledger.extent()
        if not first_ms:
            return []
        first, today = local_date(first_ms, self._zone), local_date(now_ms, self._zone)
        return [first + timedelta(days=number) for number in range((today - first).days + 1)]

    def _known_days(self) -> dict[date, dict[str, Any]]:
        """The published control totals."""
        return {row["day"]: row for row in self._read(tables.DAYS)}

    def _publish_days(self, now_ms: int, told: Callable[[str, int, int], None]) -> tuple[date, ...]:
        known: dict[date, dict[str, Any]] | None = None
        asked = self.days_to_look_at(now_ms)
        if self.published_ms is None and asked:  # days that no run has written yet, of any age
            known = self._known_days()
            asked = sorted({*asked, *(day for day in self._every_day(now_ms) if day not in known)})
        changed = []
        for day in asked:
            rows_mark = self._day_mark(day)
            mark = rows_mark, min(now_ms, day_span(day, self._zone)[1])
            if self._seen.changed(day, mark):
                changed.append((day, mark, rows_mark))
        self._turn += 1
        if not changed:
            return ()
        known = self._known_days() if known is None else known
        written: list[date] = []
        pending: list[DayRows] = []
        for number, (day, mark, rows_mark) in enumerate(changed, 1):
            found = self._day(day, now_ms)
            told("days", number, len(changed))
            self._seen.note(day, mark)
            self._seen.note(("rows", day), rows_mark)
            if known.get(day, {}).get("digest") != found.digest:
                pending.append(found)
            if sum(one.rows.num_rows for one in pending) >= _ROWS_A_COMMIT:
                written += self._write_days(pending, known, now_ms)
                pending = []
        written += self._write_days(pending, known, now_ms)
        return tuple(written)

    def _day(self, day: date, now_ms: int) -> DayRows:
        start_ms, end_ms = day_span(day, self._zone)
        book = self._book_of(day)
        changes = sorted({at for found in self._books.prices.versions for at in found.book.cuts(start_ms, end_ms)})
        with self._ledger.moment(start_ms, min(end_ms, now_ms)) as moment:
            return day_rows(self.name, moment, book, day, self._zone, now_ms, changes)

    def _book_of(self, day: date) -> PriceBook | None:
        """The price book of the day's month."""
        return self._books.priced_by(self._books.kept(Month(day.year, day.month)))

    def _write_days(self, days: Sequence[DayRows], known: dict[date, dict[str, Any]], now_ms: int) -> list[date]:
        if not days:
            return []
        try:
            rows = pa.concat_tables([one.rows for one in days])
            self._catalogue.replace(tables.USAGE_HOURLY, rows, {"ledger": self.name, "day": [one.day for one in days]})
            for one in days:
                known[one.day] = self._control_total(one, now_ms)
            self._replace(tables.DAYS, list(known.values()))
        except BaseException:
            for one in days:
                self._seen.of.pop(one.day, None)
            raise
        return [one.day for one in days]

    def _control_total(self, one: DayRows, now_ms: int) -> dict[str, Any]:
        newest = self._ledger.newest_by_cluster()
        over = one.end_ms == day_span(one.day, self._zone)[1]
        return {
            "ledger": self.name,
            "day": one.day,
            "start_ms": one.start_ms,
            "end_ms": one.end_ms,
            "sealed": over and all(at >= one.end_ms for at in newest.values()),
            "rows": one.rows.num_rows,
            **dict(zip(tables.ACCOUNT_COLUMNS[:6], one.accounts, strict=True)),
            "cost": one.cost,
            "unpriced_us": one.unpriced_us,
            "digest": one.digest,
            "timezone": self._timezone,
            "published": _instant(now_ms),
        }

    # --- statements ---------------------------------------------------------------------------

    def _publish_statements(self, now_ms: int) -> tuple[str, ...]:
        first_ms, _ = self._ledger.extent()
        if not first_ms:
            return ()
        books, written = self._books.books(), []
        month, last = Month.of(first_ms, self._zone), Month.of(now_ms, self._zone)
        stored: dict[str, tuple[str, str]] = {}
        if self.published_ms is None:
            stored = {row["month"]: (row["hash"], row["status"]) for row in self._read(tables.STATEMENTS)}
        rows, lines = [], {}
        while month <= last:
            status, mark = self._books.status(month, books), self._month_mark(month, now_ms, books)
            stated = self._books.month(month)
            rows.append(statement_row(self.name, str(month), status, stated))
            if stored.get(str(month)) == (statement_hash(stated), status):
                self._seen.note(("statement", month), mark)  # published by an earlier process
            elif self._seen.changed(("statement", month), mark):
                lines[month] = mark, line_rows(self.name, str(month), stated)
                self._publish_focus(month, mark, now_ms)
            month = month.next
        if not lines:
            return ()
        self._catalogue.replace(
            tables.STATEMENT_LINES,
            tables.STATEMENT_LINES.of_rows([row for _, several in lines.values() for row in several]),
            {"ledger": self.name, "month": [str(one) for one in lines]},
        )
        for one in lines:
            closed = books.of(str(one))
            if closed is not None:
                for table in (
                    tables.USAGE_HOURLY,
                    tables.STATEMENT_LINES,
                    tables.FOCUS,
                ):
                    self._catalogue.tag(table, f"{self.name}-{one}-{closed.hash[:12]}")
        # Last, because this table shows what an earlier process wrote completely.
        self._replace(tables.STATEMENTS, rows)
        for one, (mark, _) in lines.items():
            self._seen.note(("statement", one), mark)
            written.append(str(one))
        return tuple(written)

    def _month_mark(self, month: Month, now_ms: int, books: ClosedMonths) -> Hashable:
        """A value that changes with everything that determines a month's statement."""
        closed, status = books.of(str(month)), self._books.status(month, books)
        if closed is not None:
            return closed.hash, status
        start_ms, end_ms = month.span(self._zone)
        version_of = self._books.prices.latest.version if self._books.prices.latest else ""
        return self._ledger.mark(start_ms, end_ms), version_of, books.seen, min(now_ms, end_ms), status

    def _month_waits(self, month: Month, now_ms: int) -> bool:
        """Whether a month changed since this process published it."""
        thing = "statement", month
        return thing in self._seen.of and self._seen.changed(
            thing, self._month_mark(month, now_ms, self._books.books())
        )

    def _publish_focus(self, month: Month, mark: Hashable, now_ms: int) -> None:
        """Publishes the charges of a month that changed; those of the current month once a day, because there are
        many."""
        start_ms, end_ms = month.span(self._zone)
        if now_ms < end_ms:
            mark = local_date(now_ms, self._zone)
        if self._books.prices.current is None or not self._seen.changed(("focus", month), mark):
            return
        report = report_builder.report(
            self._ledger, self._books, start_ms, max(start_ms + 1, min(end_ms, now_ms)), self._timezone, month=month,
            issuer=self._issuer,
        )  # fmt: skip
        if report.currency is None:
            return
        found = focus_rows(self.name, str(month), report)
        self._catalogue.replace(tables.FOCUS, found, {"ledger": self.name, "month": str(month)})
        self._seen.note(("focus", month), mark)

    # --- registers ----------------------------------------------------------------------------

    def _publish_registers(self, now_ms: int) -> tuple[str, ...]:
        """Publishes the parts of registers whose digest differs from that in the table `registers`, and then updates
        this table."""
        if self._parts is None:
            self._parts = {(row["register"], row["part"]): row for row in self._read(tables.REGISTERS)}
        known, written = self._parts, []
        self._parts = None  # read again after a failure
        for table, by, rows in self._registers():
            parts: dict[Any, list[dict[str, Any]]] = {} if by else {None: rows}
            for row in rows if by else ():
                parts.setdefault(row[by], []).append(row)
            changed = {}
            for value, of_part in parts.items():
                found, key = table.of_rows(of_part), (table.name, "" if value is None else str(value))
                total = tables.digest(found)
                if key not in known or known[key]["digest"] != total:
                    known[key] = {
                        "ledger": self.name, "register": table.name, "part": key[1], "rows": found.num_rows,
                        "digest": total,
                    }  # fmt: skip
                    changed[value] = found
            if changed:
                partition = {by: list(changed)} if by else {}
                self._catalogue.replace(table, pa.concat_tables(changed.values()), {"ledger": self.name, **partition})
                written.append(table.name)
        if written:
            self._replace(tables.REGISTERS, list(known.values()))
        self._parts = known
        return (*written, *self._publish_status(now_ms))

    def _publish_status(self, now_ms: int) -> tuple[str, ...]:
        """Publishes the ledger's row in the table `ledgers`; last, so that it only describes published data."""
        first_ms, newest_ms = self._ledger.extent()
        row = {
            "ledger": self.name, "timezone": self._timezone, "grace_days": self._grace_days, "first_ms": first_ms,
            "newest_ms": newest_ms, "until_ms": now_ms,
            "clusters": json.dumps(dict(self._ledger.newest_by_cluster()), sort_keys=True),
            "teams": json.dumps(sorted(self._ledger.teams())), "published": _instant(now_ms),
            "version": version("gputally"),
        }  # fmt: skip
        if not self._seen.changed(tables.LEDGERS.name, tuple(row.values())):
            return ()
        self._replace(tables.LEDGERS, [row])
        self._seen.note(tables.LEDGERS.name, tuple(row.values()))
        return (tables.LEDGERS.name,)

    def _registers(self) -> Iterator[tuple[tables.LakeTable, str, list[dict[str, Any]]]]:
        """Each register, the column that divides it into parts ("": one part), and its rows."""
        name = self.name
        yield tables.POLICIES, "", [
            {
                "ledger": name, "version": one.version, "effective": _instant(one.effective_ms),
                "effective_ms": one.effective_ms, "policy": one.policy.model_dump_json(),
            }
            for one in self._ledger.policies(0, _FAR_MS)
        ]  # fmt: skip
        yield tables.PRICES, "", list(self._prices())
        yield tables.ACTS, "", [
            {
                "ledger": name, "number": act.number, "at": _instant(act.at_ms), "at_ms": act.at_ms, "kind": act.kind,
                "subject": act.subject, "who": act.who, "reason": act.reason, "content": act.content,
                "digest": act.digest,
            }
            for act in self._ledger.acts()
        ]  # fmt: skip
        yield tables.NODES, "", [
            {
                "ledger": name, "cluster": node.cluster, "node": node.name, "pool": node.pool, "region": node.region,
                "capacity_type": node.capacity_type, "facts": msgspec.json.encode(node).decode(),
            }
            for node in self._ledger.nodes()
        ]  # fmt: skip
        yield tables.EPOCHS, "", [
            {
                "ledger": name, "cluster": one.key.cluster, "namespace": one.key.namespace, "job": one.key.job,
                "epoch": one.epoch, "at_ms": one.at_ms, "who": one.who,
            }
            for one in self._epochs()
        ]  # fmt: skip
        yield tables.PODS, "month", self._pods()
        yield tables.DECISIONS, "day", self._decisions()

    def _epochs(self) -> list[EpochReport]:
        with self._ledger.moment() as moment:
            return moment.epochs_between(0, _FAR_MS)

    def _prices(self) -> Iterator[dict[str, Any]]:
        for found in self._books.prices.versions:
            for row in found.book.rows:
                yield {
                    "ledger": self.name, "price_book": found.version, "taken": _instant(found.at_ms),
                    "price_row": row.id, "gpu_model": row.model, "pool": row.pool, "region": row.region,
                    "capacity_type": row.capacity_type, "price": row.price, "per": row.per,
                    "currency": found.book.currency, "row": row.model_dump_json(),
                }  # fmt: skip

    def _pods(self) -> list[dict[str, Any]]:
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
            for pod in self._ledger.pods(0, _FAR_MS, placed=True)
        ]  # fmt: skip

    def _decisions(self) -> list[dict[str, Any]]:
        return [
            {
                "ledger": self.name, "day": local_date(one.at_ms, self._zone), "cluster": one.cluster, "id": one.id,
                "at": _instant(one.at_ms), "at_ms": one.at_ms, "kind": one.kind, "subject": one.subject,
                "decision": one.model_dump_json(),
            }
            for one in self._ledger.decisions(0, _FAR_MS, _EVERY_DECISION)
        ]  # fmt: skip

    # --- internal -----------------------------------------------------------------------------

    @property
    def _catalogue(self) -> Catalogue:
        if self._opened is None:
            self._opened = self._connect()
            self._opened.create_missing()
        return self._opened

    def _read(self, table: tables.LakeTable) -> list[dict[str, Any]]:
        return self._catalogue.read(table, self.name)

    def _replace(self, table: tables.LakeTable, rows: list[dict[str, Any]]) -> None:
        """Replaces all rows of this ledger in a table."""
        self._catalogue.replace(table, table.of_rows(rows), {"ledger": self.name})


def _first_seen_ms(facts: PodFacts) -> int:
    known = (facts.created_ms, facts.scheduled_ms, facts.started_ms)
    return next((at for at in known if at is not None), facts.observed_ms)


def _instant(at_ms: int) -> datetime:
    return datetime.fromtimestamp(at_ms // 1_000, UTC).replace(microsecond=at_ms % 1_000 * 1_000)


def statement_row(ledger: str, month: str, status: str, stated: Statement) -> dict[str, Any]:
    return {
        "ledger": ledger, "month": month, "status": status, "timezone": stated.timezone, "currency": stated.currency,
        "price_book": stated.price_book_version or None, "gpu_us": stated.gpu_us, "cost": stated.cost,
        "payable": stated.payable_total, "due": stated.due_total, "unpriced_gpu_us": stated.unpriced_gpu_us,
        "hash": statement_hash(stated), "canonical": canonical(stated).decode(),
    }  # fmt: skip


def line_rows(ledger: str, month: str, stated: Statement) -> list[dict[str, Any]]:
    kinds = [("usage", line) for line in stated.lines] + [("commitment", line) for line in stated.commitments]
    found = [_line(kind, line, None) for kind, line in kinds]
    found += [_line("correction", one.line, one.amount, one.month, one.reason) for one in stated.corrections]
    found += [
        {
            "kind": "adjustment", "team": one.team, "cost": one.amount, "currency": one.currency,
            "about_month": one.month, "reason": one.reason,
        }
        for one in stated.adjustments
    ]  # fmt: skip
    return [
        {"currency": stated.currency, **row, "ledger": ledger, "month": month, "line": number}
        for number, row in enumerate(found, 1)
    ]


def _line(
    kind: str, line: StatementLine, amount: Any, about: str | None = None, reason: str | None = None
) -> dict[str, Any]:
    names = (
        "team", "account", "detail", "gpu_model", "capacity_type", "price_row", "unit_price", "gpu_us", "gpu_hours",
    )  # fmt: skip
    found = {name: getattr(line, name) for name in names}
    return {
        **found,
        "kind": kind,
        "cost": amount if kind == "correction" else line.cost,
        "about_month": about,
        "reason": reason,
    }
