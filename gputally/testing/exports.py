"""The contract of exports, as tests. Derive a class from `ExportSuite` and say how the amounts are read back:

    class TestJournal(ExportSuite):
        plugin = EXPORT

        def due(self, content):
            return {team: Decimal(amount) for team, amount in re.findall(PATTERN, content.decode())}

The reports come from a small ledger of two teams, whose month has names as users of a cluster may choose them."""

from __future__ import annotations

import io
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from decimal import Decimal
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import pytest
from msgspec import structs

from accountant.core.errors import CannotRender
from accountant.core.settings import InvoiceIssuer
from accountant.exports import rendering_process
from accountant.exports.protocol import SEAM, ExportPlugin
from accountant.ledger.protocols import Facts, NamespaceFacts
from accountant.prices.price_book import PriceBook
from accountant.reports.report_builder import Report, build
from accountant.reports.statement_line_charges import ChargeListing
from accountant.storage.duckdb_ledger import open_ledger
from agent.wire import Batch, Holder, PodFacts, UsageInterval
from gputally.base.clock import VirtualClock
from gputally.base.plugins import usable
from gputally.base.units import MS_PER_DAY, MS_PER_HOUR, US_PER_MS

START_MS, END_MS = 1_790_812_800_000, 1_793_491_200_000
"""October 2026 in UTC."""
HOSTILE = "=cmd|'/c calc'!A1 <script>alert(1)</script> \"; drop, x\\n {a: 1}"
"""A name as a user of the cluster may choose it."""
TEAMS = {"vision": "vision", HOSTILE: HOSTILE}
"""The team of each namespace."""
CONTROL = ("\x1b", "\x00", "\u202e")
MODEL = "NVIDIA H100 80GB HBM3"
# 16.575 and 9.945 EUR are due: halves of a cent, and cents that a float loses if it is multiplied by 100.
_BOOK = {
    "schema": 1, "currency": "EUR", "timezone": "UTC",
    "rows": [{
        "id": "h100", "model": "H100", "price": "3.315", "per": "gpu-hour", "valid_from": "2026-01-01",
        "source": "a contract", "as_of": "2026-01-01", "basis": "gpu-only",
    }],
}  # fmt: skip


@dataclass(frozen=True)
class Reports:
    """Reports of one ledger. month: of all teams. team: of one. unpriced: the month without a price book. empty: a
    month without any record. days: five days, which are no month."""

    month: Report
    team: Report
    unpriced: Report
    empty: Report
    days: Report


@cache
def reports(charges: bool) -> Reports:
    """The reports, with every charge of their month if `charges`."""
    book, listing = PriceBook.model_validate(_BOOK), ChargeListing(InvoiceIssuer(), ()) if charges else None
    clock = VirtualClock(END_MS + MS_PER_DAY)
    with tempfile.TemporaryDirectory() as folder:
        ledger = open_ledger(Path(folder) / "ledger.duckdb", clock)
        try:
            spaces = tuple(NamespaceFacts("c", name, team, since_ms=0) for name, team in TEAMS.items())
            ledger.observe(Facts(namespaces=spaces), clock.wall_ms())
            (receipt,) = ledger.append([_records()], clock.wall_ms())
            if isinstance(receipt, Exception):
                raise receipt
            with ledger.moment(START_MS - (END_MS - START_MS), END_MS) as moment:
                return Reports(
                    month=build(moment, book, START_MS, END_MS, listing=listing),
                    team=build(moment, book, START_MS, END_MS, team="vision", listing=listing),
                    unpriced=build(moment, None, START_MS, END_MS, listing=listing),
                    empty=build(moment, book, END_MS, END_MS + 30 * MS_PER_DAY, listing=listing),
                    days=build(moment, book, START_MS, START_MS + 5 * MS_PER_DAY),
                )
        finally:
            ledger.close()


def _records() -> Batch:
    """Two GPUs for some hours, one of which nobody holds in the last hour."""
    rows, facts = [], []
    for gpu, (space, hours) in enumerate(zip(TEAMS, (5, 3), strict=True)):
        pod = Holder("pod", f"uid-{gpu}", space, f"pod-{gpu}")
        facts.append(PodFacts(seq=gpu + 1, uid=pod.uid, namespace=space, name=pod.name, node="n", observed_ms=START_MS))
        for hour in range(hours + gpu):
            start_ms, whole_us = START_MS + hour * MS_PER_HOUR, MS_PER_HOUR * US_PER_MS
            rows.append(
                UsageInterval(
                    seq=0, start_ms=start_ms, end_ms=start_ms + MS_PER_HOUR, gpu_uuid=f"GPU-{gpu}", gpu_model=MODEL,
                    holder=pod if hour < hours else None, capacity_us=whole_us,
                    allocated_us=whole_us if hour < hours else 0, busy_us=whole_us // 2 if hour < hours else 0,
                    method="simulated",
                )
            )  # fmt: skip
    return Batch(
        cluster="c", node="n", boot_id="b", epoch="e", first_seq=1, oldest_seq=1, facts=tuple(facts),
        intervals=tuple(structs.replace(row, seq=seq) for seq, row in enumerate(rows, len(facts) + 1)),
    )  # fmt: skip


def written(plugin: ExportPlugin, report: Report) -> bytes:
    """What the export writes."""
    stream = io.BytesIO()
    plugin.write(report, stream)
    assert not stream.closed, "leave the stream open"
    return stream.getvalue()


def refusal(plugin: ExportPlugin, report: Report) -> str | None:
    """Why the export does not write the report; None if it does."""
    try:
        written(plugin, report)
    except CannotRender as error:
        return str(error)
    return None


def _renamed(value: Any, name: str, new: str) -> Any:
    """The value with another name in its texts."""
    if isinstance(value, str):
        return value.replace(name, new)
    if is_dataclass(value) and not isinstance(value, type):
        held = {each.name: getattr(value, each.name) for each in fields(value) if each.init}
        return replace(value, **{key: _renamed(each, name, new) for key, each in held.items()})
    if isinstance(value, Mapping):
        return {_renamed(key, name, new): _renamed(each, name, new) for key, each in value.items()}
    if isinstance(value, tuple) and type(value) is not tuple:
        return type(value)(*(_renamed(each, name, new) for each in value))
    if isinstance(value, list | tuple | frozenset):
        return type(value)(_renamed(each, name, new) for each in value)
    return value


class ExportSuite:
    """The tests that every export passes.

    forbidden: parts of HOSTILE that the file must not contain as they are, such as `<script>` in HTML."""

    plugin: ClassVar[ExportPlugin]
    forbidden: ClassVar[tuple[str, ...]] = ()

    def due(self, content: bytes) -> Mapping[str, Decimal] | None:
        """The amounts that the file says are due, by team as the file calls it; None if the format has none. What no
        team is billed for may stand beside them, as `__idle__`."""
        raise NotImplementedError("define the method `due` in your class")

    @pytest.fixture
    def found(self) -> Reports:
        return reports(self.plugin.charges)

    def test_its_manifest_is_complete(self) -> None:
        assert self.plugin.reaches, "say what writing a file reads and connects to"
        assert self.plugin.page, "name the page about it"

    def test_it_is_found_by_its_name(self) -> None:
        assert usable(SEAM, ExportPlugin).get(self.plugin.name) is self.plugin, "register the entry point, and install"

    def test_its_ending_is_that_of_no_other_format(self) -> None:
        others = [one for name, one in usable(SEAM, ExportPlugin).items() if name != self.plugin.name]
        assert self.plugin.suffix not in {one.suffix for one in others}, "put a word before it: `journal.csv`"

    def test_the_amounts_are_those_that_are_due(self, found: Reports) -> None:
        for report in (found.month, found.team):
            amounts = self.due(written(self.plugin, report))
            if amounts is None:
                return
            expected = sorted(amount for amount in report.due.values() if amount)
            assert sorted(amount for team, amount in amounts.items() if amount and team != "__idle__") == expected
            assert amounts.get("vision") == report.due["vision"], "each team owes its own amount"
        assert amounts is not None
        assert list(amounts) == ["vision"]

    def test_equal_reports_give_equal_bytes(self, found: Reports) -> None:
        assert written(self.plugin, found.month) == written(self.plugin, found.month)

    def test_a_name_of_a_user_is_text(self, found: Reports) -> None:
        assert HOSTILE in found.month.due
        month = _renamed(found.month, HOSTILE, HOSTILE + "".join(CONTROL))
        if refusal(self.plugin, month):  # a format that writes only the names that its settings have
            month = found.month
        content = written(self.plugin, month)
        if self.plugin.binary:
            return
        text = content.decode(self.plugin.media_type.partition("charset=")[2] or "utf-8")
        assert [control for control in CONTROL if control in text] == []
        assert [part for part in self.forbidden if part in text] == [], "escape names"
        if self.plugin.media_type.startswith("text/csv"):
            assert not any(cell.strip('"').startswith("=") for line in text.splitlines() for cell in line.split(","))

    @pytest.mark.parametrize("which", ["unpriced", "empty"])
    def test_what_is_unknown_is_no_amount(self, found: Reports, which: str) -> None:
        """A report without prices or records is written without amounts, or is refused with the reason."""
        report = getattr(found, which)
        reason = refusal(self.plugin, report)
        assert reason != "", "say what is missing"
        if reason is None:
            assert not any((self.due(written(self.plugin, report)) or {}).values())

    def test_days_that_are_no_month_are_written_or_refused(self, found: Reports) -> None:
        reason = refusal(self.plugin, found.days)
        assert reason != "", "say what is missing"
        assert reason is not None or not self.plugin.charges

    def test_the_accountant_writes_the_same_bytes(self, found: Reports) -> None:
        """In a process of its own, unless it is text of gputally."""
        assert rendering_process.render(self.plugin.name, found.team) == written(self.plugin, found.team)
