"""Runs the commands for months, prices, corrections, credits, deliveries, owners of GPUs, retired GPUs and the
provider's invoice.

Each calls a running accountant (or, with --db, opens a stopped ledger; `deliveries` has no --db), prints the resulting
state, and shows in one line why the accountant refused.

`reconcile` compares the provider's invoice with the bills. It reads the invoice locally and sends only sums per kind of
item. A small file says which GPU an instance type has, because invoices do not:

    schema: 1
    instances:
      - {name: p5.48xlarge, model: H100}
"""

from __future__ import annotations

import json
from datetime import UTC
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from typer import Argument, Option

from accountant.cli.connection_options import Books, Printed, Server, ZonedLedger, chosen_order, print_answer
from accountant.wire.listed_tables import ADJUSTMENTS, CORRECTIONS, GPUS, PRICES, ListedTable
from accountant.wire.option_types import ORDER_HELP
from gputally.base.command_options import refuse_ignored, with_option_groups
from gputally.base.errors import CannotStart

if TYPE_CHECKING:
    from gputally.base.accountant_connection import Query

app = typer.Typer(add_completion=False, rich_markup_mode=None)
Month = Annotated[str, Argument(help="A calendar month: 2026-10.")]
Reason = Annotated[str, Option(help="Reason, which the audit trail records.")]

Search = Annotated[str, Option(help="Only rows with this text, in any case.")]
Most = Annotated[int | None, Option(min=1, help="Number of rows to show (default: all).")]


def _sorting(table: ListedTable) -> Any:
    """The option by which a list is sorted."""
    return Option(help=f"{ORDER_HELP} Columns: {', '.join(table.columns)}. Default: the list's own order.")


def _asked(table: ListedTable, search: str, sort: str | None, limit: int | None) -> Query:
    """The parameters of a list. Raises BadParameter."""
    order = None if sort is None else chosen_order(sort, table.orders)
    return {"search": search or None, "sort": order, "limit": None if limit is None else str(limit)}


BookedIn = Annotated[str | None, Argument(help="Only those booked in this month: 2026-10 (default: all).")]
Approver = Annotated[str, Option(help="The person who approved it, who must not be you.")]


@app.command()
@with_option_groups
def months(output: Printed = "table", *, at: Books) -> None:
    """List every month with its status and hash."""
    from accountant.api.bookkeeping_models import Period
    from accountant.cli import terminal_tables

    all_months = at.ask(tuple[Period, ...], "/v1/periods")
    print_answer(output, all_months, terminal_tables.periods)


@app.command()
@with_option_groups
def close(
    month: Month,
    acknowledge: Annotated[
        list[str] | None,
        Option(
            help="Objection to accept: grace, unpriced, quarantined, coverage or proposals (repeatable, with --reason)."
        ),
    ] = None,
    reason: Reason = "",
    preview: Annotated[
        bool, Option("--preview", help="Only list what is still open or unknown of the month, and close nothing.")
    ] = False,
    output: Printed = "table",
    *,
    at: Books,
) -> None:
    """Close a month, so that its statement never changes. Refused while there are objections."""
    from accountant.api.bookkeeping_models import Period
    from accountant.cli import terminal_tables

    if preview:
        refuse_ignored("with --preview", "acknowledge", "reason")
        found = at.ask(Period, f"/v1/periods/{month}")
        print_answer(output, found, terminal_tables.checklist, found.checklist)
        return
    period = at.act(Period, f"/v1/periods/{month}/close", {"reason": reason, "acknowledge": acknowledge or []})
    print_answer(output, period, lambda row: terminal_tables.periods([row]))


@app.command()
@with_option_groups
def reopen(month: Month, reason: Reason, output: Printed = "table", *, at: Books) -> None:
    """Reopen the newest closed month, before it is published."""
    from accountant.api.bookkeeping_models import Period
    from accountant.cli import terminal_tables

    period = at.act(Period, f"/v1/periods/{month}/reopen", {"reason": reason})
    print_answer(output, period, lambda row: terminal_tables.periods([row]))


@app.command()
@with_option_groups
def publish(month: Month, reason: Reason = "", output: Printed = "table", *, at: Books) -> None:
    """Publish a closed month. It cannot be reopened afterwards."""
    from accountant.api.bookkeeping_models import Period
    from accountant.cli import terminal_tables

    period = at.act(Period, f"/v1/periods/{month}/publish", {"reason": reason})
    print_answer(output, period, lambda row: terminal_tables.periods([row]))


@app.command()
@with_option_groups
def draft(month: Month, reason: Reason = "", output: Printed = "table", *, at: Books) -> None:
    """Keep what an open month charges now, so that `changes` can tell later what changed since."""
    from accountant.api.bookkeeping_models import DraftLine
    from accountant.cli import terminal_tables

    kept = at.act(DraftLine, f"/v1/periods/{month}/drafts", {"reason": reason})
    print_answer(output, kept, lambda one: terminal_tables.draft(one, at.zone))


@app.command()
@with_option_groups
def changes(
    month: Month,
    since: Annotated[
        str | None,
        Option(help="The newest draft at this instant or before: 7d, a date or RFC 3339 (default: the newest)."),
    ] = None,
    output: Printed = "table",
    *,
    at: Books,
) -> None:
    """Show what changed a month since its draft, by team and cause."""
    from accountant.api.bookkeeping_models import ChangesAnswer
    from accountant.cli import terminal_tables

    found = at.ask(ChangesAnswer, f"/v1/periods/{month}/changes", {"since": since})
    print_answer(output, found, lambda one: terminal_tables.changes(one, at.zone), found.changes)


@app.command()
@with_option_groups
def proposals(
    act: Annotated[
        Literal["list", "take", "refuse"], Argument(help="List proposals, accept one (take) or refuse it.")
    ] = "list",
    month: Annotated[str, Argument(help="The closed month that the proposal changes: 2026-10.")] = "",
    proposal: Annotated[str, Argument(help="The id of the proposal, as the list shows it.")] = "",
    reason: Reason = "",
    output: Printed = "table",
    *,
    at: Books,
) -> None:
    """List late changes of closed months with their effect by team; accept (take) or refuse one."""
    from accountant.api.bookkeeping_models import BookedCorrection, WaitingProposal
    from accountant.cli import terminal_tables

    if act != "list" and not (month and proposal):
        raise typer.BadParameter(f"{act} needs the month and the id of the proposal: `proposals` lists both")
    if act == "refuse" and not reason.strip():
        raise typer.BadParameter("refuse needs a --reason")
    if act == "list":
        refuse_ignored("without take or refuse", "proposal", "reason")
    path = f"/v1/periods/{month}/proposals"
    if act == "take":
        booked = at.act(tuple[BookedCorrection, ...], f"{path}/{proposal}/take", {"reason": reason})
        print_answer(output, booked, terminal_tables.corrections)
    elif act == "refuse":
        refused = (at.act(WaitingProposal, f"{path}/{proposal}/refuse", {"reason": reason}),)
        print_answer(output, refused, lambda rows: terminal_tables.proposals(rows, refused=True))
    else:
        waiting = at.ask(tuple[WaitingProposal, ...], path if month else "/v1/proposals")
        print_answer(output, waiting, terminal_tables.proposals)


@app.command()
@with_option_groups
def correct(output: Printed = "table", *, at: Books) -> None:
    """Accept every proposal: book all late changes of closed months."""
    from accountant.api.bookkeeping_models import BookedCorrection
    from accountant.cli import terminal_tables

    booked = at.act(tuple[BookedCorrection, ...], "/v1/corrections", {})
    print_answer(output, booked, terminal_tables.corrections)


@app.command()
@with_option_groups
def corrections(
    month: BookedIn = None,
    search: Search = "",
    sort: Annotated[str | None, _sorting(CORRECTIONS)] = None,
    limit: Most = None,
    output: Printed = "table",
    *,
    at: Books,
) -> None:
    """List corrections of closed months, each with the month that it corrects and the month in which it is booked."""
    from accountant.api.bookkeeping_models import BookedCorrection
    from accountant.cli import terminal_tables

    booked = at.ask(
        tuple[BookedCorrection, ...],
        "/v1/corrections",
        {"booked_in": month, **_asked(CORRECTIONS, search, sort, limit)},
    )
    print_answer(output, booked, terminal_tables.corrections)


@app.command()
@with_option_groups
def adjust(
    month: Annotated[str, Argument(help="The month to which it belongs: 2026-10.")],
    team: Annotated[str, Option(help="Team whose account is credited or charged.")],
    amount: Annotated[str, Option(help="Amount; negative for a credit: --amount=-125.50.")],
    reason: Reason,
    approved_by: Approver,
    yes: Annotated[bool, Option("--yes", help="Book it (default: show what it would change).")] = False,
    output: Printed = "table",
    *,
    at: Books,
) -> None:
    """Show what an approved credit or charge would change, for example for a failed node; with --yes, book it."""
    from accountant.api.bookkeeping_models import AdjustmentPreview, BookedAdjustment
    from accountant.cli import terminal_tables

    body = {"month": month, "team": team, "amount": amount, "reason": reason, "approved_by": approved_by}
    if not yes:
        print_answer(
            output, at.act(AdjustmentPreview, "/v1/adjustments/preview", body), terminal_tables.adjustment_preview
        )
        return
    booked = at.act(BookedAdjustment, "/v1/adjustments", body)
    print_answer(output, booked, lambda row: terminal_tables.adjustments([row]))


@app.command()
@with_option_groups
def credit(
    node: Annotated[str, Argument(help="The node that failed.")],
    start: Annotated[str, Option(help="Start of the failure: a date, RFC 3339 or epoch ms.")],
    end: Annotated[str, Option(help="End of the failure, exclusive.")],
    cluster: Annotated[str | None, Option(help="Cluster of the node, if several have a node of that name.")] = None,
    share: Annotated[str, Option(help="Part of the billed amount to credit: 0.5 is half.")] = "1",
    apply: Annotated[bool, Option("--apply", help="Book the credit (default: show it).")] = False,
    reason: Reason = "",
    approved_by: Approver = "",
    output: Printed = "table",
    *,
    at: Books,
) -> None:
    """Show what each team was billed for a node; with --apply, credit these amounts."""
    from accountant.api.bookkeeping_models import BookedAdjustment, Credit
    from accountant.cli import terminal_tables

    if apply and not (reason.strip() and approved_by.strip()):
        raise typer.BadParameter("--apply needs a --reason and --approved-by")
    body = {"node": node, "start": start, "end": end, "share": share} | ({"cluster": cluster} if cluster else {})
    if not apply:
        refuse_ignored("without --apply", "reason", "approved_by")
        preview = at.act(Credit, "/v1/credits/preview", body)
        print_answer(output, preview, terminal_tables.credit, preview.lines)
        return
    body |= {"reason": reason, "approved_by": approved_by}
    print_answer(output, at.act(tuple[BookedAdjustment, ...], "/v1/credits", body), terminal_tables.adjustments)


@app.command()
@with_option_groups
def adjustments(
    month: BookedIn = None,
    search: Search = "",
    sort: Annotated[str | None, _sorting(ADJUSTMENTS)] = None,
    limit: Most = None,
    output: Printed = "table",
    *,
    at: Books,
) -> None:
    """List approved credits and charges."""
    from accountant.api.bookkeeping_models import BookedAdjustment
    from accountant.cli import terminal_tables

    booked = at.ask(
        tuple[BookedAdjustment, ...],
        "/v1/adjustments",
        {"booked_in": month, **_asked(ADJUSTMENTS, search, sort, limit)},
    )
    print_answer(output, booked, terminal_tables.adjustments)


@app.command()
@with_option_groups
def reprice(
    month: Month,
    prices: Annotated[Path, Option(help="File of the new price book (YAML).")],
    apply: Annotated[bool, Option("--apply", help="Put the price book in force (default: show the changes).")] = False,
    reason: Reason = "",
    output: Printed = "table",
    *,
    at: Books,
) -> None:
    """Show how another price book changes a month; with --apply put it in force.

    Open months then have its prices. If MONTH is closed, it is corrected; other closed months are not."""
    from rich.console import Group

    from accountant.api.bookkeeping_models import RepricingResult
    from accountant.bookkeeping.price_book_versions import PriceDiff
    from accountant.cli import terminal_tables

    try:
        content = prices.read_bytes()
    except OSError as error:
        raise CannotStart(f"{prices}: {error.strerror}") from error
    if apply and not reason.strip():
        raise typer.BadParameter("--apply needs a --reason")
    if not apply:
        refuse_ignored("without --apply", "reason")
    with at.connection() as remote:
        if not apply:
            preview = remote.send(PriceDiff, "/v1/prices/preview", content, "application/yaml", {"month": month})
            print_answer(output, preview, terminal_tables.price_diff, preview.changes)
            return
        result = remote.send(
            RepricingResult, "/v1/prices", content, "application/yaml", {"month": month, "reason": reason}
        )
    booked = terminal_tables.in_force(result.difference.version_after, result.corrections)
    changes = terminal_tables.price_diff(result.difference)
    print_answer(output, result, lambda _: Group(changes, booked), result.difference.changes)


@app.command()
@with_option_groups
def prices(
    search: Search = "",
    sort: Annotated[str | None, _sorting(PRICES)] = None,
    limit: Most = None,
    output: Printed = "table",
    *,
    at: Books,
) -> None:
    """List every price book that was in force, and who put it in force."""
    from accountant.api.bookkeeping_models import PriceVersion
    from accountant.cli import terminal_tables

    versions = at.ask(tuple[PriceVersion, ...], "/v1/prices/versions", _asked(PRICES, search, sort, limit))
    print_answer(output, versions, lambda versions: terminal_tables.price_versions(versions, UTC))


@app.command()
@with_option_groups
def gpus(
    act: Annotated[Literal["owners", "move"], Argument(help="Show owners, or move GPUs.")] = "owners",
    node: Annotated[str, Option(help="owners: only GPUs that this node had or claims; move: the new owner.")] = "",
    gpu: Annotated[list[str] | None, Option(help="UUID of one GPU (repeatable with move).")] = None,
    cluster: Annotated[str, Option(help="Cluster of the GPUs; move needs it if there are several.")] = "",
    moved: Annotated[bool, Option("--moved", help="owners: only GPUs with several owners or claims.")] = False,
    since: Annotated[str, Option(help="move: when they moved (default: after the owner's newest record).")] = "",
    reason: Annotated[str, Option(help="move: reason, which the audit trail records.")] = "",
    search: Annotated[str, Option(help="owners: only GPUs whose UUID, cluster or present node has this text.")] = "",
    sort: Annotated[str | None, _sorting(GPUS)] = None,
    limit: Annotated[int | None, Option(min=1, help="owners: number of GPUs to show (default: all).")] = None,
    output: Printed = "table",
    *,
    at: Books,
) -> None:
    """Show the nodes to which each GPU belonged, or confirm that GPUs moved to another node."""
    from accountant.api.bookkeeping_models import GpuOwners
    from accountant.cli import terminal_tables
    from accountant.ledger.protocols import GpuOwnership

    uuids = gpu or []
    if act == "move":
        if not (node and uuids and reason.strip()):
            raise typer.BadParameter("move needs --node, --gpu and --reason")
        refuse_ignored("with move", "moved", "search", "sort", "limit")
        body = {"cluster": cluster, "node": node, "gpus": uuids, "since": since, "reason": reason}
        ownerships = at.act(tuple[GpuOwnership, ...], "/v1/gpus/move", body)
    else:
        if len(uuids) > 1:
            raise typer.BadParameter("owners accepts only one --gpu: leave the option out to list all GPUs")
        refuse_ignored("without move", "since", "reason")
        query = {"cluster": cluster, "node": node, "gpu": uuids[0] if uuids else "", "moved": str(moved).lower(),
                 **_asked(GPUS, search, sort, None)}  # fmt: skip
        ownerships, after = (), ""
        with at.connection() as remote:
            while True:
                page = remote.ask(GpuOwners, "/v1/gpus/owners", {**query, "after": after})
                ownerships += page.gpus
                if page.next_after is None or (limit is not None and len(ownerships) >= limit):
                    break
                after = page.next_after
        ownerships = ownerships[:limit]
    print_answer(output, ownerships, terminal_tables.gpu_owners)


@app.command()
@with_option_groups
def retire(
    reason: Reason,
    node: Annotated[str, Option(help="Node all of whose GPUs are retired.")] = "",
    gpu: Annotated[list[str] | None, Option(help="UUID of a GPU to retire (repeatable).")] = None,
    cluster: Annotated[str, Option(help="Cluster of the GPUs; alone: all GPUs of this cluster.")] = "",
    since: Annotated[str, Option(help="When their capacity ends: a date or RFC 3339 (default: now).")] = "",
    output: Printed = "table",
    *,
    at: Books,
) -> None:
    """Retire GPUs that were removed permanently. Their unmetered time until then stays unmetered."""
    from accountant.cli import terminal_tables
    from accountant.ledger.protocols import RetiredDevice

    body = {"cluster": cluster, "node": node, "gpus": gpu or [], "since": since, "reason": reason}
    devices = at.act(tuple[RetiredDevice, ...], "/v1/gpus/retire", body)
    print_answer(output, devices, terminal_tables.retired)


@app.command()
@with_option_groups
def deliveries(
    again: Annotated[str | None, Option(help="Key of a delivery to send again; needs a reason.")] = None,
    reason: Reason = "",
    output: Printed = "table",
    *,
    at: Server,
) -> None:
    """List automatic reports and notices, newest first, with the outcome of each delivery."""
    from accountant.api.bookkeeping_models import DeliveryState
    from accountant.cli import terminal_tables

    if again is not None and not reason:
        raise typer.BadParameter("--again needs a --reason")
    if again is None:
        refuse_ignored("without --again", "reason")
    else:
        at.act(DeliveryState, "/v1/deliveries/again", {"key": again, "reason": reason})
    states = at.ask(tuple[DeliveryState, ...], "/v1/deliveries")
    print_answer(output, states, terminal_tables.deliveries)


@app.command()
@with_option_groups
def reconcile(
    month: Annotated[str, Argument(help="A calendar month: 2026-10.")],
    invoice: Annotated[Path, Option(help="Invoice: FOCUS or AWS Cost and Usage Report, as CSV or Parquet.")],
    instances: Annotated[Path, Option(help="File with the GPU model of each instance type (YAML).")],
    apply: Annotated[bool, Option("--true-up", help="Put the rates of the invoice in force for the month.")] = False,
    keep: Annotated[bool, Option(help="Store the invoice, so that the page of the month shows it.")] = False,
    reason: Reason = "",
    output: Printed = "table",
    *,
    at: ZonedLedger,
) -> None:
    """Compare an invoice with the bills line by line: invoice = teams + idle + unmatched. With --true-up, the month
    gets the rates of the invoice."""
    from accountant.api.bookkeeping_models import Reconciled
    from accountant.bookkeeping.invoice_reconciliation import Invoice
    from accountant.cli.invoice_lines import InstanceMap, lines, reconciliation_table
    from accountant.core import periods
    from accountant.storage.invoice_file import read_invoice  # imports duckdb
    from gputally.server.config_loading import load_yaml

    if apply and not reason.strip():
        raise typer.BadParameter("--true-up needs a --reason")
    if not (apply or keep):
        refuse_ignored("without --true-up or --keep", "reason")
    try:
        start, end = periods.Month.parse(month).span(at.zone)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    invoice_lines = lines(read_invoice(invoice, start, end), load_yaml(instances, InstanceMap))
    if not invoice_lines:
        raise typer.BadParameter(f"{invoice}: no line of the invoice has a cost in {month}")
    body = json.dumps(Invoice(source=invoice.name, lines=invoice_lines).model_dump(mode="json")).encode()
    query = {"apply": "true" if apply else None, "keep": "true" if keep else None, "reason": reason or None}
    with at.connection() as remote:
        result = remote.send(Reconciled, f"/v1/reconciliation/{month}", body, "application/json", query)
    print_answer(output, result, reconciliation_table, (result.after or result.before).lines)
