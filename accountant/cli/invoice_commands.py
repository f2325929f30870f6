"""Runs `reconcile`: compares the provider's invoice with the books.

The file is read here, where it lies; only sums per kind of item are sent. Which GPU stands behind an instance type
is said in a small file, because no invoice says it:

    schema: 1
    instances:
      - {name: p5.48xlarge, model: H100}
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Literal

import typer
from pydantic import Field
from rich.console import Group, RenderableType

from accountant.api.bookkeeping_models import Reconciled
from accountant.bookkeeping.invoice_reconciliation import MOST_ITEM, Invoice, InvoiceLine
from accountant.cli import terminal_tables
from accountant.cli.connection_options import Printed, ZonedLedger, answer, connected
from accountant.core import periods
from accountant.storage.invoice_file import InvoiceItem, read_invoice
from gputally.server.config_models import Model, load_yaml


class InstanceModel(Model):
    """name: the instance type as the invoice writes it. model: as in the price book."""

    name: str = Field(min_length=1, max_length=200)
    model: str = Field(min_length=1, max_length=200)


class InstanceMap(Model):
    """Instance types and the GPUs in them; what stands nowhere is no GPU of ours."""

    schema_: Literal[1] = Field(alias="schema")
    instances: tuple[InstanceModel, ...] = Field(min_length=1)


def lines(items: list[InvoiceItem], known: InstanceMap) -> tuple[InvoiceLine, ...]:
    """The invoice's lines as the accountant takes them; what costs nothing is left out."""
    models = {entry.name: entry.model for entry in known.instances}
    return tuple(
        InvoiceLine(
            item=item.instance[:MOST_ITEM] or "(no name)",
            gpu_model=models.get(item.instance, ""),
            region=item.region,
            capacity_type=item.capacity_type if item.instance in models else "",
            amount=item.amount,
            currency=item.currency,
        )
        for item in items
        if item.amount
    )


def register_invoices(app: typer.Typer) -> None:
    """Add the command to the program."""
    app.command()(reconcile)


@connected
def reconcile(
    month: Annotated[str, typer.Argument(help="A calendar month: 2026-10.")],
    invoice: Annotated[Path, typer.Option(help="FOCUS or AWS Cost and Usage Report, CSV or Parquet.")],
    instances: Annotated[Path, typer.Option(help="Which GPU an instance type has (YAML).")],
    apply: Annotated[bool, typer.Option("--true-up", help="Price the month by the invoice's rates.")] = False,
    keep: Annotated[bool, typer.Option(help="Keep the invoice with the books, for the month's invoice page.")] = False,
    reason: Annotated[str, typer.Option(help="Why, with --true-up.")] = "",
    output: Printed = "table",
    *,
    at: ZonedLedger,
) -> None:
    """Invoice = teams + idle + unmatched, line by line; with --true-up the month's rates follow the invoice."""
    if apply and not reason.strip():
        raise typer.BadParameter("--true-up needs a --reason")
    try:
        start, end = periods.Month.parse(month).span(at.zone)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    found = lines(read_invoice(invoice, start, end), load_yaml(instances, InstanceMap))
    if not found:
        raise typer.BadParameter(f"{invoice}: charges nothing in {month}")
    body = json.dumps(Invoice(source=invoice.name, lines=found).model_dump(mode="json")).encode()
    query = {"apply": "true" if apply else None, "keep": "true" if keep else None, "reason": reason or None}
    with at.asking() as remote:
        done = remote.send(Reconciled, f"/v1/reconciliation/{month}", body, "application/json", query)
    answer(output, lambda: _shown(done), done, (done.after or done.before).lines)


def _shown(done: Reconciled) -> RenderableType:
    if done.after is None:
        return terminal_tables.reconciliation(done.before)
    booked = terminal_tables.trued_up(done.version or "", done.corrections)
    return Group(terminal_tables.reconciliation(done.before), terminal_tables.reconciliation(done.after), booked)
