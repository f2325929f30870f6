"""Formats nodes as a table and as records."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final
from zoneinfo import ZoneInfo

from rich.table import Column, Table

from accountant.cli.terminal_tables import changed, compared_with, instant
from accountant.core.periods import utc
from accountant.reports.figure_formatting import no_gpu_errors
from accountant.wire.option_types import NodeOrder
from accountant.wire.usage_cost_and_job_models import Accounts, NodeLine, NodesAnswer
from gputally.base.money import gpu_hours, plain
from gputally.base.number_format import NOTHING, hours, percent
from gputally.base.terminal import figures, table
from gputally.base.untrusted_text import for_cell


@dataclass(frozen=True, slots=True)
class NodeTableColumn:
    """A column of a list of nodes.

    text: of a node, in a time zone.
    record: its column of CSV, and the cell; None for what names the node.
    total: of the accounts of all nodes, if it is a sum."""

    heading: str
    text: Callable[[NodeLine, ZoneInfo], str]
    record: tuple[str, Callable[[NodeLine], object]] | None
    total: Callable[[Accounts], int] | None = None


def _of(heading: str, field: str, account: str) -> NodeTableColumn:
    def gpu_us(accounts: Accounts) -> int:
        found: int = getattr(accounts, account)
        return found

    return NodeTableColumn(
        heading,
        lambda node, _: hours(gpu_us(node.accounts_gpu_us)),
        (field, lambda node: plain(gpu_hours(gpu_us(node.accounts_gpu_us)))),
        gpu_us,
    )


def _text(heading: str, field: str, of: Callable[[NodeLine], str]) -> NodeTableColumn:
    return NodeTableColumn(heading, lambda node, _: of(node) or NOTHING, (field, lambda node: for_cell(of(node))))


def _errors(node: NodeLine, zone: ZoneInfo) -> str:
    """The newest error of a node's GPUs, and what they need."""
    if not node.gpu_errors:
        if node.gpu_errors is None:
            return "unknown"
        return no_gpu_errors([node.gpu_errors_unread]) if node.gpu_errors_unread else "none in this span"
    newest = node.gpu_errors[0]
    last = "" if newest.last_ms is None else f", {instant(newest.last_ms, zone)}"
    needs = "".join(f"; {need.action.replace('_', ' ')}" for need in node.gpu_needs[:1])
    return f"{newest.kind} × {newest.count:,}{last}{needs}"


def _all_errors(node: NodeLine) -> str:
    """The errors of a node's GPUs; "" if they are unknown."""
    if not node.gpu_errors:
        return "" if node.gpu_errors is None or node.gpu_errors_unread else "none"
    return "; ".join(f"{error.gpu} {error.kind}: {error.count}" for error in node.gpu_errors)


COLUMNS: Final[Mapping[NodeOrder, NodeTableColumn]] = {
    "cluster": NodeTableColumn("cluster", lambda node, _: node.cluster or NOTHING, None),
    "pool": _text("pool", "pool", lambda node: node.pool),
    "capacity_type": _text("capacity type", "capacity_type", lambda node: node.capacity_type),
    "model": _text("GPU", "gpu_models", lambda node: ";".join(node.gpu_models)),
    "gpus": NodeTableColumn("GPUs", lambda node, _: f"{node.gpus:,}", ("gpus", lambda node: node.gpus)),
    "silent": NodeTableColumn(
        "newest record",
        lambda node, zone: NOTHING if node.newest_ms is None else instant(node.newest_ms, zone),
        ("newest_record", lambda node: "" if node.newest_ms is None else utc(node.newest_ms)),
    ),
    "agent": NodeTableColumn(
        "agent",
        lambda node, _: "unknown" if node.agent_version is None else node.agent_version,
        ("agent_version", lambda node: for_cell(node.agent_version or "")),
    ),
    "errors": NodeTableColumn("GPU errors", _errors, ("gpu_errors", lambda node: for_cell(_all_errors(node)))),
    "capacity": _of("capacity", "capacity_gpu_hours", "total"),
    "held": _of("held", "held_gpu_hours", "allocated"),
    "busy": _of("busy", "busy_gpu_hours", "busy"),
    "utilisation": NodeTableColumn(
        "utilisation",
        lambda node, _: percent(node.accounts_gpu_us.utilisation),
        ("utilisation", lambda node: "" if (share := node.accounts_gpu_us.utilisation) is None else share),
    ),
    "idle": _of("idle", "idle_gpu_hours", "allocated_idle"),
    "unknown": _of("use unknown", "unknown_gpu_hours", "allocated_unknown"),
    "unallocated": _of("unallocated", "unallocated_gpu_hours", "unallocated"),
    "unmetered": _of("unmetered", "unmetered_gpu_hours", "unmetered"),
    "down": _of("down", "down_gpu_hours", "down"),
}
"""The columns beside the node, by the names of the API's orders."""
_USUAL: Final[tuple[NodeOrder, ...]] = (
    "gpus", "agent", "errors", "capacity", "held", "busy", "utilisation", "idle", "unallocated", "unmetered", "down"
)  # fmt: skip
_MAY_DROP: Final[tuple[NodeOrder, ...]] = (
    "capacity",
    "busy",
    "idle",
    "agent",
    "unmetered",
    "gpus",
    "utilisation",
    "down",
)
_TEXTS: Final = frozenset({"cluster", "pool", "capacity_type", "model", "silent", "agent", "errors"})


def nodes_table(answer: NodesAnswer, zone: ZoneInfo, shown: Sequence[NodeOrder] = ()) -> Table:
    """A table with one node per line, in the order of the answer, and the totals of all pages. shown: the columns; the
    usual ones without any."""
    several = len({node.cluster for node in answer.lines}) > 1
    more = answer.count - len(answer.lines)
    chosen: dict[str, NodeTableColumn] = {name: COLUMNS[name] for name in shown or _USUAL}
    columns = [Column("node", overflow="fold")]
    for name, column in chosen.items():
        columns += [Column(column.heading, overflow="fold")] if name in _TEXTS else figures(
            column.heading, no_wrap=True
        )  # fmt: skip
    totals = [hours(column.total(answer.total_gpu_us)) if column.total else "" for column in chosen.values()]
    before = answer.before
    if before is not None:
        chosen["change"] = NodeTableColumn(
            "change", lambda node, _: changed(_held(node), _held(node.then), before), None
        )
        columns += figures("change", no_wrap=True)
        totals.append(
            changed(
                answer.total_gpu_us.allocated,
                None if before.total_gpu_us is None else before.total_gpu_us.allocated,
                before,
            )
        )
    return table(
        f"GPU-hours of nodes, {instant(answer.start_ms, zone)} to {instant(answer.end_ms, zone)}",
        columns,
        ((_name(node, with_cluster=several), *(column.text(node, zone) for column in chosen.values()))
         for node in answer.lines),
        total=(f"{answer.count:,} node{'s' if answer.count != 1 else ''}", *totals),
        caption="\n".join(filter(None, (
            f"{more:,} more: --limit, --search, --sort" if more else "", answer.note,
            compared_with(before, zone).removeprefix("; "),
        ))),
        may_drop=[COLUMNS[name].heading for name in _MAY_DROP] if not shown else (),
    )  # fmt: skip


def _name(node: NodeLine, *, with_cluster: bool) -> str:
    """The name of a node, with what keeps it from being used, or its silence, and whether its agent is older than the
    accountant."""
    name = "/".join(filter(None, (node.cluster if with_cluster else "", node.node))) or NOTHING
    states = (f"down: {node.down}" if node.down else "silent" if node.silent else "", "older agent" * node.agent_older)
    state = ", ".join(filter(None, states))
    return f"{name} ({state})" if state else name


def _held(node: NodeLine | None) -> int | None:
    return None if node is None else node.accounts_gpu_us.allocated


def node_record(node: NodeLine, shown: Sequence[NodeOrder] = (), *, compare: bool = False) -> dict[str, object]:
    """A node as a row of CSV. Unknown values are empty, and names are safe for spreadsheets. shown: the columns; all
    without any. compare: with the figures of the span before."""
    row: dict[str, object] = {
        "cluster": for_cell(node.cluster), "node": for_cell(node.node), "down_now": for_cell(node.down),
        "silent": node.silent,
    }  # fmt: skip
    for name in shown or COLUMNS:
        part = COLUMNS[name].record
        if part is not None:
            row[part[0]] = part[1](node)
    if compare:
        for name in shown or COLUMNS:
            part = COLUMNS[name].record
            if part is not None and (COLUMNS[name].total is not None or name == "utilisation"):
                row[f"{part[0]}_before"] = "" if node.then is None else part[1](node.then)
    return row
