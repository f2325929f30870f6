"""What the cases of the formats share. `cases.py` of a format has by the format's name

- `BEGINS`: the first bytes of its file
- `DUE`: how the amount due is read; the reader gives None if the file does not state it for this month
- `COST`: how the month's cost is read, unless the file never states it; the reader gives None if nothing has a cost
- `AS_TEXT`: what asserts that the names of a report of any days, which are all this one, stand in its file as text"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping
from decimal import Decimal
from typing import Any

from accountant.exports.protocol import exports
from gputally.base.money import exact_sum
from tests.plugin_cases import plugin_cases

TEXT = min((export for export in exports().values() if not export.charges), key=lambda export: export.binary)
"""Some installed format for any days, one of those that take no time if there is one."""


def cases_of(name: str) -> dict[str, Any]:
    """Return what the installed formats have of these ('DUE'), by the format's name."""
    return {form: one for cases in plugin_cases("exports").values() for form, one in getattr(cases, name).items()}


def rows_of(content: bytes) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(content.decode(), newline="")))


def by_team(rows: Iterable[Mapping[str, str]], team: str, amount: str) -> dict[str, Decimal]:
    """Add amounts up by team."""
    found = [(row[team], Decimal(row[amount])) for row in rows]
    return {name: exact_sum(of for one, of in found if one == name) for name in sorted({one for one, _ in found})}
