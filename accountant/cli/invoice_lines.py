"""Turns a provider's invoice into the lines that the accountant compares with the bills."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field
from rich.console import Group, RenderableType

from accountant.api.bookkeeping_models import (
    Reconciled,
)
from accountant.bookkeeping.invoice_reconciliation import MOST_ITEM, InvoiceLine
from accountant.cli import terminal_tables
from gputally.server.config_loading import Model

if TYPE_CHECKING:
    from accountant.storage.invoice_file import InvoiceItem


class InstanceModel(Model):
    """The GPU model of one instance type. name: the instance type in the invoice. model: the model in the price
    book."""

    name: str = Field(min_length=1, max_length=200)
    model: str = Field(min_length=1, max_length=200)


class InstanceMap(Model):
    """The content of the instances file. Items of the invoice that it does not list are no GPUs of the clusters."""

    schema_: Literal[1] = Field(alias="schema")
    instances: tuple[InstanceModel, ...] = Field(min_length=1)


def lines(items: list[InvoiceItem], instance_map: InstanceMap) -> tuple[InvoiceLine, ...]:
    """The lines of an invoice as the accountant accepts them, without lines that cost nothing."""
    models = {entry.name: entry.model for entry in instance_map.instances}
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


def reconciliation_table(result: Reconciled) -> RenderableType:
    if result.after is None:
        return terminal_tables.reconciliation(result.before)
    booked = terminal_tables.trued_up(result.version or "", result.corrections)
    return Group(terminal_tables.reconciliation(result.before), terminal_tables.reconciliation(result.after), booked)
