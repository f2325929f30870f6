"""Writes what teams owe for a month as a posting batch for DATEV (Buchungsstapel, EXTF 700, format version 13).

One entry for each team: its amount from the account to the counter-account, with the team's cost centre. A credit is an
entry on the other side, because amounts are positive in this format. A team without a cost centre is refused with its
name, so no amount is lost. Source of the format: developer.datev.de, DATEV-Format, Buchungsstapel."""

from __future__ import annotations

import os
import re
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Final

from pydantic import Field

from accountant.core.errors import CannotRender
from accountant.exports.protocol import ExportPlugin
from gputally.base.untrusted_text import escaped
from gputally.base.yaml_file import FileFault
from gputally.server.config_loading import Model, load_yaml

if TYPE_CHECKING:
    from accountant.reports.report_builder import Report

SETTINGS: Final = "GPUTALLY_DATEV"
"""The environment variable with the path of the settings."""
ENCODING: Final = "windows-1252"
LONGEST_TEXT: Final = 60
_AMOUNT = re.compile(r"\d{1,10},\d{2}")
_COLUMNS = (
    "Umsatz (ohne Soll/Haben-Kz)", "Soll/Haben-Kennzeichen", "WKZ Umsatz", "Kurs", "Basis-Umsatz", "WKZ Basis-Umsatz",
    "Konto", "Gegenkonto (ohne BU-Schlüssel)", "BU-Schlüssel", "Belegdatum", "Belegfeld 1", "Belegfeld 2", "Skonto",
    "Buchungstext", "Postensperre", "Diverse Adressnummer", "Geschäftspartnerbank", "Sachverhalt", "Zinssperre",
    "Beleglink", *(f"Beleginfo - {what} {n}" for n in range(1, 9) for what in ("Art", "Inhalt")),
    "KOST1 - Kostenstelle",
)  # fmt: skip
"""The columns up to the last one that is filled."""
Account = Annotated[int, Field(ge=1, le=999_999_999)]
CostCentre = Annotated[str, Field(pattern=r"^[A-Za-z0-9 ]{1,36}$")]


class DatevSettings(Model):
    """The settings file.

    consultant, client: the numbers of the tax consultant and of the client.
    year_begins: the month, 1 to 12, with which the financial year begins.
    account_length: digits of the general ledger accounts.
    account, counter_account: the account that the teams' cost is booked to, and the one that it is booked from.
    cost_centres: by team; `__idle__` is the capacity that nobody held.
    open_months: whether a month that is not closed is written too; its amounts may still change."""

    consultant: int = Field(ge=1_001, le=9_999_999)
    client: int = Field(ge=1, le=99_999)
    year_begins: int = Field(default=1, ge=1, le=12)
    account_length: int = Field(default=4, ge=4, le=8)
    account: Account
    counter_account: Account
    cost_centres: dict[str, CostCentre]
    open_months: bool = False


def write(report: Report, stream: IO[bytes]) -> None:
    """Writes the batch. Raises CannotRender."""
    settings = _settings()
    if report.statement.month is None:
        raise CannotRender("a posting batch is for a calendar month: ask for a month")
    if report.currency is None:
        raise CannotRender("a posting batch needs amounts, and there is no price book: set `prices: FILE`")
    if report.period not in ("closed", "published") and not settings.open_months:
        raise CannotRender(f"{report.statement.month} may still change: close the month, or set open_months: true")
    first, last = (_day(report, at_ms) for at_ms in (report.start_ms, report.end_ms - 1))
    lines = [_head(report, settings, first, last), list(_COLUMNS)]
    for team, amount in sorted(report.due.items()):
        if amount != Decimal(0):
            lines.append(_entry(report, settings, team, amount, last))
    content = "".join(";".join(line) + "\r\n" for line in lines)
    stream.write(content.encode(ENCODING, "replace"))


def _head(report: Report, settings: DatevSettings, first: date, last: date) -> list[str]:
    closing = report.statement.closing
    made = datetime.fromtimestamp((closing.at_ms if closing is not None else report.end_ms) / 1000, UTC)
    year = date(first.year - (first.month < settings.year_begins), settings.year_begins, 1)
    return [
        _text("EXTF"), "700", "21", _text("Buchungsstapel"), "13", f"{made:%Y%m%d%H%M%S}000", "", _text("RE"),
        _text(""), _text(""), str(settings.consultant), str(settings.client), f"{year:%Y%m%d}",
        str(settings.account_length), f"{first:%Y%m%d}", f"{last:%Y%m%d}", _text(f"GPU {report.statement.month}"),
        _text(""), "1", "0", "0", _text(report.currency or ""), "", _text(""), "", "", _text(""), "", "", _text(""),
        _text(""),
    ]  # fmt: skip


def _entry(report: Report, settings: DatevSettings, team: str, amount: Decimal, day: date) -> list[str]:
    if team not in settings.cost_centres:
        raise CannotRender(f"the team {team!r} has no cost centre: add it to cost_centres in {os.environ[SETTINGS]}")
    figure = f"{abs(amount):.2f}".replace(".", ",")
    if amount != round(amount, 2) or _AMOUNT.fullmatch(figure) is None:
        raise CannotRender(f"{amount} {report.currency} of the team {team!r} is no amount with two decimals")
    filled = {
        "Umsatz (ohne Soll/Haben-Kz)": figure,
        "Soll/Haben-Kennzeichen": _text("S" if amount > 0 else "H"),
        "WKZ Umsatz": _text(report.currency or ""),
        "Konto": str(settings.account),
        "Gegenkonto (ohne BU-Schlüssel)": str(settings.counter_account),
        "Belegdatum": f"{day:%d%m}",
        "Belegfeld 1": _text(f"GPU-{report.statement.month}"),
        "Buchungstext": _text(f"GPU {report.statement.month} {team}"),
        "KOST1 - Kostenstelle": _text(settings.cost_centres[team]),
    }
    return [filled.get(column, "") for column in _COLUMNS]


def _text(text: str) -> str:
    """A text field: in quotation marks, without control characters, and no longer than DATEV allows."""
    return '"' + escaped(text)[:LONGEST_TEXT].replace('"', '""') + '"'


def _day(report: Report, at_ms: int) -> date:
    return datetime.fromtimestamp(at_ms / 1000, UTC).astimezone(report.tz).date()


def _settings() -> DatevSettings:
    place = os.environ.get(SETTINGS)
    if not place:
        raise CannotRender(f"set the environment variable {SETTINGS} to the path of the settings file")
    try:
        return load_yaml(Path(place), DatevSettings)
    except FileFault as fault:
        raise CannotRender(str(fault)) from fault


EXPORT: Final = ExportPlugin(
    name="datev",
    title="DATEV",
    media_type=f"text/csv; charset={ENCODING}",
    suffix="datev.csv",
    write=write,
    reaches=f"reads the file in {SETTINGS}",
    page="README.md",
)
