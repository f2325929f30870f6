"""Opens the ledgers of a lake as members of a fleet, and adds up their answers.

Each member computes its figures with its own price book and policies, and its months in its own time zone. A query for
usage or cost has one span and one time zone for all members. Only GPU-microseconds and exact amounts of one currency
are added. Amounts in several currencies are converted and added only if the operator gives rates.

A ledger whose tables cannot be opened, or whose content this version of gputally cannot read, is left out and named;
the others are answered. A document and a window are never without one of the ledgers that were asked for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Annotated, NamedTuple, TypeVar, cast

from pydantic import Field

from accountant.billing.statements import Statement
from accountant.billing.usage_pricing import cost
from accountant.bookkeeping.bookkeeper import Bookkeeper
from accountant.core import periods
from accountant.core.errors import LakeUnavailable, UnreadableLedger, UnsupportedQuestion
from accountant.core.periods import Month
from accountant.core.settings import InvoiceIssuer, Lake
from accountant.lake.engines.protocol import Engine
from accountant.lake.lake_ledger import LakeLedger, LedgerStatus, ledgers, readable
from accountant.ledger.protocols import exported_in, unexported
from accountant.ledger.usage import UsageLines, coverage, sum_of_usage_lines
from accountant.reports import report_builder
from accountant.reports.report_builder import Report
from accountant.reports.statement_line_charges import ChargeListing
from accountant.wire.policy_models import Measure, UsageWindow, WindowSpec
from accountant.wire.usage_cost_and_job_models import (
    Accounts,
    CostAnswer,
    CostLine,
    Dimension,
    UsageAnswer,
    UsageLine,
)
from gputally.base.clock import Clock, VirtualClock
from gputally.base.errors import AccountantError
from gputally.base.money import exact_product, exact_sum, plain, sum_if_known
from gputally.base.near_names import nearest
from gputally.server import config_loading
from gputally.server.config_loading import Exact, Model

A = TypeVar("A")
ProgressCallback = Callable[[str, int, int], None]
"""Called after each ledger: its name, the number of ledgers done, and the number of all."""


class FleetQuery(NamedTuple):
    """The parameters of a query for usage or cost over [start_ms, end_ms). where: by dimension, the values that count;
    None: all."""

    start_ms: int
    end_ms: int
    by: Sequence[Dimension]
    where: Mapping[Dimension, Collection[str]] | None = None
    timezone: str = "UTC"


class SeveralCurrencies(AccountantError):
    """Amounts in several currencies cannot be added."""


class Rates(Model):
    """Exchange rates. rates: by currency, the value of one unit of it in the currency `to`. Amounts in other currencies
    are refused."""

    to: str = Field(min_length=3, max_length=3)
    rates: dict[str, Annotated[Decimal, Field(gt=0)]] = Field(default={}, max_length=200)

    def converted(self, amount: Decimal, currency: str) -> Decimal:
        """The exact amount in the currency `to`. Raises SeveralCurrencies if there is no rate."""
        if currency == self.to:
            return amount
        if currency not in self.rates:
            raise SeveralCurrencies(
                f"there is no rate from {currency} to {self.to}: add it under `rates` in the file of --rates"
            )
        return exact_product(amount, self.rates[currency])


@dataclass(frozen=True, slots=True)
class Member:
    """A ledger of the lake with its bookkeeping.

    ledger, books: raise UnreadableLedger if they are used although there is a fault.
    clock: stands still at the end of the ledger's published figures. This instant is the present time in every answer
        about the ledger.
    fault: why this version of gputally cannot read the ledger; "" if it can."""

    status: LedgerStatus
    ledger: LakeLedger
    books: Bookkeeper
    clock: Clock
    fault: str = ""

    @property
    def name(self) -> str:
        return self.status.ledger

    def statement(self, month: Month) -> Statement:
        """The statement of a month as published by the ledger's accountant, otherwise computed from the lake."""
        return self.ledger.statement(month) or self.books.month(month)

    def report(self, month: Month, team: str | None = None, issuer: InvoiceIssuer | None = None) -> Report:
        """The month's report, as the ledger's accountant makes it. Raises UnreadableLedger.

        team: the team that the report is about; None: all.
        issuer: needed for formats that list every charge; None for the others."""
        tz = periods.zone(self.status.timezone)
        start_ms, end_ms = month.span(tz)
        end_ms = max(start_ms + 1, min(end_ms, self.clock.wall_ms()))
        with self.readable():
            return report_builder.report(
                self.ledger,
                self.books,
                start_ms,
                end_ms,
                self.status.timezone,
                month=month,
                team=team,
                listing=None if issuer is None else ChargeListing(issuer, self.status.exported_labels),
            )

    def readable(self) -> AbstractContextManager[None]:
        """Raises UnreadableLedger where the ledger's content is used and cannot be read."""
        return readable(self.name, self.status.version)


class _Unreadable:
    """Stands for a ledger, or its bookkeeping, that cannot be read: each use raises UnreadableLedger."""

    def __init__(self, fault: str) -> None:
        self._fault = fault

    def __getattr__(self, name: str) -> object:
        raise UnreadableLedger(self._fault)


class LedgerMonth(Model):
    """A month of one ledger.

    accounts_gpu_us: the whole capacity of the ledger.
    payable, due: None without a price book. Due is what teams are billed for.
    not_billed: the amount of what no team is billed for; None if there is none, or no price book.
    until_ms: the end of the month's published figures."""

    ledger: str
    timezone: str
    status: str
    until_ms: int
    currency: str | None
    accounts_gpu_us: Accounts
    gpu_hours: Exact
    payable: Exact | None
    due: Exact | None
    not_billed: Exact | None = None
    unpriced_gpu_us: int


class TeamMonth(Model):
    """The amount that one team owes in one ledger. due: None without a price book, and for what no team is billed."""

    team: str
    ledger: str
    currency: str | None
    gpu_us: int
    due: Exact | None


class FleetMonth(Model):
    """A month of several ledgers.

    totals: by currency, the sum of the amounts due.
    not_billed: by currency, the sum of what no team is billed for.
    converted: the sum of all amounts due, in the currency `converted_to`; None if the operator gave no rates.
    left_out: by ledger, why it could not be read; no figure contains it."""

    month: str
    ledgers: tuple[LedgerMonth, ...]
    teams: tuple[TeamMonth, ...]
    totals: dict[str, Exact]
    not_billed: dict[str, Exact] = Field(default_factory=dict)
    converted_to: str | None = None
    converted: Exact | None = None
    left_out: dict[str, str] = Field(default={})


class Fleet:
    """The ledgers of one lake. rates: the exchange rates that the operator gave; None: none."""

    def __init__(self, engine: Engine, rates: Rates | None = None) -> None:
        self._engine = engine
        self._ids: Mapping[str, str] = {}
        """By namespace, the ids of the ledgers that were found last, except of those that had a fault from the start:
        a former name is not remembered."""
        self.rates = rates

    def statuses(self) -> Mapping[str, LedgerStatus]:
        """The status of every ledger that publishes in the lake, by name, ascending."""
        found = ledgers(self._engine, self._ids)
        self._ids = {
            one.namespace: one.id for one in found.values() if not one.fault or one.namespace in self._ids
        }  # fmt: skip
        return found

    def members(self, names: Collection[str] = ()) -> list[Member]:
        """The ledgers with these names; all if there are no names. Raises LakeUnavailable if one is not in the
        lake."""
        known = self.statuses()
        missing = sorted(set(names) - set(known))
        if missing:
            raise LakeUnavailable(f"no ledger {missing[0]!r} publishes in this lake{nearest(missing[0], set(known))}")
        chosen = []
        for name, status in known.items():
            if not names or name in names:
                chosen.append(self._member(status))
        return chosen

    def _member(self, status: LedgerStatus) -> Member:
        clock, fault = VirtualClock(status.until_ms), status.fault
        if not fault:
            ledger = LakeLedger(self._engine, status)
            try:
                with readable(status.ledger, status.version):
                    books = Bookkeeper(ledger, clock, status.timezone, status.grace_days)  # type: ignore[arg-type]  # only read
                    return Member(status, ledger, books, clock)
            except (UnreadableLedger, LakeUnavailable) as error:
                fault = str(error)
        unreadable = _Unreadable(fault)
        return Member(status, cast(LakeLedger, unreadable), cast(Bookkeeper, unreadable), clock, fault)

    def usage(
        self, members: Sequence[Member], query: FleetQuery, progress: ProgressCallback = lambda *_: None
    ) -> UsageAnswer:
        """The accounts per group, added up over the members. Raises UnreadableLedger if none of them can be read, and
        UnsupportedQuestion for a label that none of them exports."""
        labels = _exported(members, query)

        def ask(member: Member) -> UsageLines:
            limited = _limited(query, member)
            return member.ledger.with_labels(labels).usage((limited.start_ms, limited.end_ms), *limited[2:]).lines()

        found, left_out = _of_some(members, ask, progress)
        by_key: dict[tuple[str, ...], list[UsageLine]] = {}
        for of_member in found.values():
            for line in of_member:
                by_key.setdefault(tuple(line.key.values()), []).append(line)
        lines = tuple(sum_of_usage_lines(several[0].key, several) for _, several in sorted(by_key.items()))
        return UsageAnswer(
            start_ms=query.start_ms,
            end_ms=query.end_ms,
            by=tuple(query.by),
            lines=lines,
            coverage=coverage(lines),
            note=_note(members, query.end_ms, left_out, labels),
        )

    def window(
        self,
        members: Sequence[Member],
        spec: WindowSpec,
        at_ms: int,
        measure: Measure,
        progress: ProgressCallback = lambda *_: None,
    ) -> UsageWindow:
        """The usage of each queue over a window that ends at `at_ms`, added up over the members, of which there is at
        least one.

        coverage and watermark_ms are the lowest of all members. Raises UnsupportedQuestion, and UnreadableLedger if one
        of the members cannot be read, because shares follow from windows."""
        found, left_out = asked(members, lambda member: member.ledger.window(spec, at_ms, measure, 0.0), progress)
        refuse_left_out(left_out.values())
        windows = [*found.values()]
        usage: Counter[str] = Counter()
        for window in windows:
            usage.update(window.usage)
        marks = [window.watermark_ms for window in windows]
        versions = {window.policy_version for window in windows}
        return windows[0].model_copy(
            update={
                "usage": dict(sorted(usage.items())),
                "unassigned": sum(window.unassigned for window in windows),
                "capacity": sum(window.capacity for window in windows),
                "coverage": min(window.coverage for window in windows),
                "watermark_ms": None if None in marks else min(at for at in marks if at is not None),
                "policy_version": versions.pop() if len(versions) == 1 else None,
                "since_ms": min(window.since_ms or 0 for window in windows),
            }
        )

    def cost(
        self, members: Sequence[Member], query: FleetQuery, progress: ProgressCallback = lambda *_: None
    ) -> CostAnswer:
        """The exact cost per group, with each ledger's own prices. Raises SeveralCurrencies, UnreadableLedger if none
        of the members can be read, and UnsupportedQuestion for a label that none of them exports."""
        labels = _exported(members, query)

        def ask(member: Member) -> CostAnswer:
            ledger = member.ledger.with_labels(labels)
            return cost(ledger, member.books.prices.current, *_limited(query, member))

        found, left_out = _of_some(members, ask, progress)
        answers = [*found.values()]
        currencies = {one.currency for one in answers if one.currency is not None}
        if len(currencies) > 1 and self.rates is None:
            raise SeveralCurrencies(
                f"amounts in {', '.join(sorted(currencies))} cannot be added up: query ledgers of one currency, or "
                "give exchange rates with --rates FILE"
            )
        rates = self.rates or Rates(to=min(currencies, default="USD"))
        by_key: dict[tuple[str, ...], list[CostLine]] = {}
        for one in answers:
            for line in one.lines:
                converted = {
                    name: None if amount is None else rates.converted(amount, one.currency or rates.to)
                    for name, amount in (
                        ("cost", line.cost),
                        ("held_cost", line.held_cost),
                        ("unheld_cost", line.unheld_cost),
                    )
                }
                by_key.setdefault(tuple(line.key.values()), []).append(line.model_copy(update=converted))
        lines = tuple(
            CostLine(
                key=several[0].key,
                gpu_us=sum(line.gpu_us for line in several),
                cost=sum_if_known([line.cost for line in several]),
                unpriced_gpu_us=sum(line.unpriced_gpu_us for line in several),
                held_cost=sum_if_known([line.held_cost for line in several]),
                unheld_cost=sum_if_known([line.unheld_cost for line in several]),
            )
            for _, several in sorted(by_key.items())
        )
        return CostAnswer(
            start_ms=query.start_ms,
            end_ms=query.end_ms,
            by=tuple(query.by),
            currency=rates.to if currencies else None,
            price_book_version=", ".join(sorted({one.price_book_version for one in answers if one.price_book_version})),
            lines=lines,
            total=sum_if_known([line.cost for line in lines]),
            unpriced_gpu_us=sum(line.unpriced_gpu_us for line in lines),
            note=_note(members, query.end_ms, left_out, labels),
        )

    def month(
        self, members: Sequence[Member], month: Month, progress: ProgressCallback = lambda *_: None
    ) -> tuple[FleetMonth, Mapping[str, Statement]]:
        """The month's summary, and by ledger the statements that it sums. Raises SeveralCurrencies if the operator gave
        rates, but none for the currency of a statement."""

        def ask(member: Member) -> tuple[Statement, LedgerMonth]:
            own = member.statement(month)
            return own, _ledger_month(member, month, own)

        found, left_out = asked(members, ask, progress)
        stated = {name: own for name, (own, _) in found.items()}
        teams: list[TeamMonth] = []
        totals: dict[str, Decimal] = {}
        not_billed: dict[str, Decimal] = {}
        for name, own in stated.items():
            teams += _team_months(name, own)
            if own.currency is not None and own.due_total is not None:
                totals[own.currency] = exact_sum([totals.get(own.currency, Decimal(0)), own.due_total])
            if own.currency is not None and own.not_billed:
                not_billed[own.currency] = exact_sum([not_billed.get(own.currency, Decimal(0)), own.not_billed])
        rates = self.rates
        whole = None if rates is None else exact_sum(rates.converted(due, currency) for currency, due in totals.items())
        summary = FleetMonth(
            month=str(month),
            ledgers=tuple(of_ledger for _, of_ledger in found.values()),
            teams=tuple(sorted(teams, key=lambda row: (row.team, row.ledger))),
            totals=dict(sorted(totals.items())),
            not_billed=dict(sorted(not_billed.items())),
            converted_to=rates.to if rates else None,
            converted=whole,
            left_out=left_out,
        )
        return summary, stated


def load_lake(path_or_warehouse: str) -> Lake:
    """The lake that a settings file describes (YAML, with the keys of `lake` in the accountant's settings). If the
    argument is no file, it is the address of a warehouse, whose catalog is a SQLite file in it. Raises
    gputally.base.yaml_file.FileFault."""
    path = Path(path_or_warehouse)
    if path.suffix in {".yaml", ".yml"} or path.is_file():
        return config_loading.load_yaml(path, Lake)
    return Lake(warehouse=path_or_warehouse)


def statement_lines(stated: Mapping[str, Statement]) -> Iterator[dict[str, object]]:
    """The lines of all ledgers' statements, as rows of one table."""
    for ledger, one in stated.items():
        for line in one.every_line:
            yield {
                "ledger": ledger, "month": one.month, "team": line.team, "account": line.account, "detail": line.detail,
                "gpu_model": line.gpu_model, "capacity_type": line.capacity_type, "price_row": line.price_row or "",
                "unit_price": "" if line.unit_price is None else plain(line.unit_price), "gpu_us": line.gpu_us,
                "gpu_hours": plain(line.gpu_hours), "cost": "" if line.cost is None else plain(line.cost),
                "currency": one.currency or "",
            }  # fmt: skip


def asked(
    members: Sequence[Member], ask: Callable[[Member], A], progress: ProgressCallback = lambda *_: None
) -> tuple[dict[str, A], dict[str, str]]:
    """The answers of the members by name, and by name why the others could not be read. Raises LakeUnavailable if no
    ledger's tables can be opened."""
    answers: dict[str, A] = {}
    left_out: dict[str, str] = {}
    failures = []
    for number, member in enumerate(members, 1):
        try:
            with member.readable():
                answers[member.name] = ask(member)
        except UnreadableLedger as error:
            left_out[member.name] = str(error)
        except LakeUnavailable as error:
            failures.append(error)
            left_out[member.name] = f"{member.name}: its tables in the lake cannot be opened: {error}"
        progress(member.name, number, len(members))
    if failures and len(failures) == len(members):
        raise failures[0]
    return answers, left_out


def _of_some(
    members: Sequence[Member], ask: Callable[[Member], A], progress: ProgressCallback
) -> tuple[dict[str, A], dict[str, str]]:
    """Like `asked`, but raises UnreadableLedger if none of the members can be read."""
    answers, left_out = asked(members, ask, progress)
    if not answers:
        refuse_left_out(left_out.values())
    return answers, left_out


def refuse_left_out(reasons: Collection[str]) -> None:
    """Raises UnreadableLedger if a ledger is left out. reasons: why, for each of them."""
    if reasons:
        raise UnreadableLedger("; ".join(reasons) + "; or ask for the other ledgers only")


def _limited(query: FleetQuery, member: Member) -> FleetQuery:
    """The query with its span cut off at the end of the member's published figures."""
    return query._replace(end_ms=min(query.end_ms, member.clock.wall_ms()))


def _exported(members: Sequence[Member], query: FleetQuery) -> tuple[str, ...]:
    """The labels in a query, each of which some member exports. Raises UnsupportedQuestion for another one."""
    asked_for = exported_in((*query.by, *(query.where or {})))
    known = sorted({name for member in members for name in member.status.exported_labels})
    lacking = set(asked_for) - set(known)
    if lacking:
        raise UnsupportedQuestion(unexported(min(lacking), known))
    return asked_for


def _note(members: Sequence[Member], end_ms: int, left_out: Mapping[str, str], labels: Collection[str] = ()) -> str:
    """A text that names the ledgers whose published figures end before the span, those that do not export one of these
    labels, so that its values are unknown, and those that are left out; "" if there are none."""
    behind = [
        f"{member.name} {periods.utc(member.clock.wall_ms())}"
        for member in members
        if member.clock.wall_ms() < end_ms and member.name not in left_out
    ]
    notes = [f"published until: {', '.join(behind)}"] if behind else []
    for label in sorted(labels):
        without = [
            member.name for member in members
            if member.name not in left_out and label not in member.status.exported_labels
        ]  # fmt: skip
        notes += [f"label {label} is not exported by: {', '.join(without)}"] if without else []
    return "; ".join([*notes, *(f"left out: {reason}" for reason in left_out.values())])


def _ledger_month(member: Member, month: Month, stated: Statement) -> LedgerMonth:
    sums = dict.fromkeys(Accounts.model_fields, 0)
    for line in stated.lines:
        sums[line.account] += line.gpu_us
    return LedgerMonth(
        ledger=member.name,
        timezone=stated.timezone,
        status=member.books.status(month),
        until_ms=stated.end_ms,
        currency=stated.currency,
        accounts_gpu_us=Accounts(**sums),
        gpu_hours=stated.gpu_hours,
        payable=stated.payable_total,
        due=stated.due_total,
        not_billed=stated.not_billed,
        unpriced_gpu_us=stated.unpriced_gpu_us,
    )


def _team_months(ledger: str, stated: Statement) -> Iterable[TeamMonth]:
    time: Counter[str] = Counter(dict.fromkeys(stated.charged, 0))
    for line in stated.lines:
        time[line.team] += line.gpu_us
    for team, gpu_us in time.items():
        due = None if stated.currency is None else stated.due.get(team)
        yield TeamMonth(team=team, ledger=ledger, currency=stated.currency, gpu_us=gpu_us, due=due)
