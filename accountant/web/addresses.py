"""Where the pages' figures lead: addresses of lines, acts, jobs and nodes. Pure but for asking the journal."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from urllib.parse import urlencode

from pydantic import TypeAdapter

from accountant.books.statements import Adjustment, Correction
from accountant.journal import Act, Journal
from accountant.periods import Month

_CORRECTIONS = TypeAdapter(tuple[Correction, ...])
_ADJUSTMENT = TypeAdapter(Adjustment)


def to_lines(month: Month, team: str | None) -> Callable[..., str]:
    """The address of a figure's lines, for the month's page, or one team's."""

    def address(**chosen: object) -> str:
        return of_lines(month, chosen | ({"team": team} if team is not None else {}))

    return address


def of_lines(month: Month, query: Mapping[str, object], ending: str = "") -> str:
    """What is None or False is not asked for. ending: of a file's address."""
    given = {
        name: "true" if value is True else str(value)
        for name, value in query.items()
        if value is not None and value is not False
    }
    return f"/month/{month}/lines{ending}" + (f"?{urlencode(given)}" if given else "")


def booked(act: Act) -> tuple[tuple[Correction, ...], tuple[Adjustment, ...]]:
    """What an act brought beside the metered time."""
    if act.kind == "corrected":
        return _CORRECTIONS.validate_json(act.content), ()
    return (), (_ADJUSTMENT.validate_json(act.content),) if act.kind == "adjusted" else ()


def correcting(journal: Journal) -> Mapping[Correction, int]:
    """By which act each correction was booked; of equal ones the last."""
    return {one: act.number for act in journal.acts("corrected") for one in booked(act)[0]}


def adjusting(adjustment: Adjustment) -> int:
    """By which act it was booked: its id ends with the number."""
    return int(adjustment.id.rpartition("-")[2])
