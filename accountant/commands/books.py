"""Commands that act on the books: months, prices, credits, corrections.

Each asks a running accountant (or, with --db, one on a stopped ledger), prints what stands then, and says in
one line why the books refused.
"""

from __future__ import annotations

from datetime import UTC
from pathlib import Path
from typing import Annotated

import typer
from pydantic import RootModel
from rich.console import Console

from accountant.api.adjustments import BookedAdjustment, BookedCorrection
from accountant.api.credits import Credit
from accountant.api.periods import Period
from accountant.api.prices import PriceVersion, Repriced
from accountant.commands import tables
from accountant.commands.asking import Zoned, connected
from accountant.repricing import PriceDiff
from accountant.serving import CannotStart

Month = Annotated[str, typer.Argument(help="A calendar month: 2026-10.")]
Reason = Annotated[str, typer.Option(help="Why, for whoever reads the books later.")]


class _Periods(RootModel[tuple[Period, ...]]):
    pass


class _Corrections(RootModel[tuple[BookedCorrection, ...]]):
    pass


class _Adjustments(RootModel[tuple[BookedAdjustment, ...]]):
    pass


class _Versions(RootModel[tuple[PriceVersion, ...]]):
    pass


def register(app: typer.Typer) -> None:
    """Add the commands to the program."""
    for command in (months, close, reopen, publish, correct, corrections, adjust, credit, adjustments, reprice, prices):
        app.command()(command)


@connected
def months(*, at: Zoned) -> None:
    """Every month, whether it is open or closed, and its hash."""
    with at.asking() as remote:
        found = remote.ask(_Periods, "/v1/periods")
    _print(tables.periods(found.root))


@connected
def close(
    month: Month,
    acknowledge: Annotated[
        list[str] | None, typer.Option(help="grace, unpriced, quarantined or coverage (repeatable); needs a reason.")
    ] = None,
    reason: Reason = "",
    *,
    at: Zoned,
) -> None:
    """Close a month: its statement never changes again. Refused while something stands against it."""
    with at.asking() as remote:
        body = {"reason": reason, "acknowledge": acknowledge or []}
        _print(tables.periods([remote.act(Period, f"/v1/periods/{month}/close", body)]))


@connected
def reopen(
    month: Month,
    reason: Reason,
    *,
    at: Zoned,
) -> None:
    """Open the newest closed month again, before it is published."""
    with at.asking() as remote:
        _print(tables.periods([remote.act(Period, f"/v1/periods/{month}/reopen", {"reason": reason})]))


@connected
def publish(
    month: Month,
    reason: Reason = "",
    *,
    at: Zoned,
) -> None:
    """A closed month goes out; it cannot be opened again."""
    with at.asking() as remote:
        _print(tables.periods([remote.act(Period, f"/v1/periods/{month}/publish", {"reason": reason})]))


@connected
def correct(*, at: Zoned) -> None:
    """Book what late facts changed about closed months, now instead of at the next hour."""
    with at.asking() as remote:
        _print(tables.corrections(remote.act(_Corrections, "/v1/corrections", {}).root))


@connected
def corrections(
    month: Annotated[str | None, typer.Argument(help="Booked in this month (default: all).")] = None,
    *,
    at: Zoned,
) -> None:
    """Corrections of closed months, with the month they are about and the one they are booked in."""
    with at.asking() as remote:
        _print(tables.corrections(remote.ask(_Corrections, "/v1/corrections", {"booked_in": month}).root))


@connected
def adjust(
    month: Annotated[str, typer.Argument(help="The month it is about: 2026-10.")],
    team: Annotated[str, typer.Option(help="Whose account.")],
    amount: Annotated[str, typer.Option(help="Negative for a credit: --amount=-125.50")],
    reason: Reason,
    approved_by: Annotated[str, typer.Option(help="Who approved it: somebody else than you.")],
    *,
    at: Zoned,
) -> None:
    """Book an approved credit or charge, for example for a failed node."""
    body = {"month": month, "team": team, "amount": amount, "reason": reason, "approved_by": approved_by}
    with at.asking() as remote:
        _print(tables.adjustments([remote.act(BookedAdjustment, "/v1/adjustments", body)]))


@connected
def credit(
    node: Annotated[str, typer.Argument(help="The node that failed.")],
    start: Annotated[str, typer.Option(help="From when: a date, RFC 3339 or epoch ms.")],
    end: Annotated[str, typer.Option(help="Until when.")],
    cluster: Annotated[str | None, typer.Option(help="Where several have a node of that name.")] = None,
    share: Annotated[str, typer.Option(help="Of what was billed: 0.5 is half.")] = "1",
    book: Annotated[bool, typer.Option("--book", help="Book it; without it, only show.")] = False,
    reason: Reason = "",
    approved_by: Annotated[str, typer.Option(help="Who approved it: somebody else than you.")] = "",
    *,
    at: Zoned,
) -> None:
    """Show what teams were billed for a node; with --book, credit it to them."""
    if book and not (reason.strip() and approved_by.strip()):
        raise typer.BadParameter("--book needs a --reason and --approved-by")
    body = {"node": node, "start": start, "end": end, "share": share} | ({"cluster": cluster} if cluster else {})
    with at.asking() as remote:
        if not book:
            _print(tables.credit(remote.act(Credit, "/v1/credits/preview", body)))
            return
        done = remote.act(_Adjustments, "/v1/credits", {**body, "reason": reason, "approved_by": approved_by})
    _print(tables.adjustments(done.root))


@connected
def adjustments(
    month: Annotated[str | None, typer.Argument(help="Booked in this month (default: all).")] = None,
    *,
    at: Zoned,
) -> None:
    """Approved credits and charges."""
    with at.asking() as remote:
        _print(tables.adjustments(remote.ask(_Adjustments, "/v1/adjustments", {"booked_in": month}).root))


@connected
def reprice(
    month: Month,
    book: Annotated[Path, typer.Option(help="The price book that shall be in force.")],
    apply: Annotated[bool, typer.Option("--apply", help="Take it into force; without it, only show.")] = False,
    reason: Reason = "",
    *,
    at: Zoned,
) -> None:
    """Show what another price book changes about a month; with --apply take it into force.

    Open months are priced by it from then on; a closed month is corrected by it."""
    try:
        content = book.read_bytes()
    except OSError as error:
        raise CannotStart(f"{book}: {error.strerror}") from error
    if apply and not reason.strip():
        raise typer.BadParameter("--apply needs a --reason")
    with at.asking() as remote:
        if not apply:
            _print(
                tables.price_diff(
                    remote.send(PriceDiff, "/v1/prices/preview", content, "application/yaml", {"month": month})
                )
            )
            return
        done = remote.send(Repriced, "/v1/prices", content, "application/yaml", {"month": month, "reason": reason})
    _print(tables.price_diff(done.difference))
    _print(f"in force: {done.difference.version_after}; {done.corrections} correction lines booked")


@connected
def prices(*, at: Zoned) -> None:
    """Every price book that was in force, and who put it there."""
    with at.asking() as remote:
        _print(tables.price_versions(remote.ask(_Versions, "/v1/prices/versions").root, UTC))


def _print(what: object) -> None:
    Console(highlight=False).print(what)
