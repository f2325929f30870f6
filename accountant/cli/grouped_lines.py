"""Searches, sorts and shortens the lines of usage and of cost, as `--search`, `--sort` and `--limit` ask."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from decimal import Decimal
from typing import Any, Final, TypeVar

from accountant.cli.connection_options import Grouping, chosen_order
from accountant.wire.dimensions import OF_TIME
from accountant.wire.list_order import in_order
from accountant.wire.option_types import Order, Orders
from accountant.wire.policy_models import IDLE, UNASSIGNED
from accountant.wire.usage_cost_and_job_models import CostAnswer, CostLine, UsageAnswer, UsageLine
from gputally.base.money import sum_if_known
from gputally.base.number_format import NOTHING

NAMES: Final = {IDLE: "(unallocated)", UNASSIGNED: "(unassigned)", "": NOTHING}
"""Text for the special names of teams and queues."""
Figure = int | Decimal | None
Line = TypeVar("Line", bound=UsageLine | CostLine)
Answer = TypeVar("Answer", UsageAnswer, CostAnswer)

_OF_USAGE: Final[Mapping[str, Callable[[UsageLine], Figure]]] = {
    "busy": lambda line: line.accounts_gpu_us.busy,
    "idle": lambda line: line.accounts_gpu_us.allocated_idle,
    "unknown": lambda line: line.accounts_gpu_us.allocated_unknown,
    "held": lambda line: line.accounts_gpu_us.allocated,
    "unallocated": lambda line: line.accounts_gpu_us.unallocated,
    "unmetered": lambda line: line.accounts_gpu_us.unmetered,
    "down": lambda line: line.accounts_gpu_us.down,
    "total": lambda line: line.accounts_gpu_us.total,
}
_OF_COST: Final[Mapping[str, Callable[[CostLine], Figure]]] = {
    "cost": lambda line: line.cost,
    "gpu_hours": lambda line: line.gpu_us,
    "unpriced": lambda line: line.unpriced_gpu_us,
}


def usage_order(wanted: Grouping) -> Order | None:
    """The order that `--sort` asks for; None: in the order of time, and of equal time the largest first. Raises
    BadParameter."""
    return _order(wanted, _OF_USAGE)


def cost_order(wanted: Grouping) -> Order | None:
    """As `usage_order`."""
    return _order(wanted, _OF_COST)


def _order(wanted: Grouping, figures: Mapping[str, Any]) -> Order | None:
    by = tuple(filter(None, wanted.by.split(",")))
    orders = Orders((*by, *figures), frozenset(by))
    return orders.read(chosen_order(wanted.sort, orders)) if wanted.sort else None


def usage_lines(answer: UsageAnswer, wanted: Grouping, order: Order | None) -> UsageAnswer:
    """The answer with the lines that the search leaves, sorted."""
    found = _found(answer.lines, wanted.search)
    return answer.model_copy(update={"lines": _sorted(found, order, _OF_USAGE, ("held",))})


def cost_lines(answer: CostAnswer, wanted: Grouping, order: Order | None) -> CostAnswer:
    """The answer with the lines that the search leaves, sorted, and their totals."""
    found = _found(answer.lines, wanted.search)
    changed: dict[str, Any] = {"lines": _sorted(found, order, _OF_COST, ("cost", "gpu_hours"))}
    if wanted.search:
        changed["total"] = sum_if_known(line.cost for line in found)
        changed["total_amount"] = sum_if_known(line.amount for line in found)
        changed["unpriced_gpu_us"] = sum(line.unpriced_gpu_us for line in found)
    return answer.model_copy(update=changed)


def shortened(answer: Answer, limit: int | None) -> Answer:
    """The answer with its first lines alone. limit: None for all."""
    return answer if limit is None else answer.model_copy(update={"lines": answer.lines[:limit]})


def _found(lines: tuple[Line, ...], search: str) -> tuple[Line, ...]:
    text = search.casefold()

    def has(line: Line) -> bool:
        return any(text in NAMES.get(name, name).casefold() for name in line.key.values())

    return tuple(line for line in lines if has(line)) if text else lines


def _sorted(
    lines: tuple[Line, ...],
    order: Order | None,
    figures: Mapping[str, Callable[[Line], Figure]],
    usual: tuple[str, ...],
) -> tuple[Line, ...]:
    """The lines in an order. Names of days and hours sort by time, and what is unknown comes last."""

    def size(line: Line, column: str) -> tuple[bool, int | Decimal]:
        figure = figures[column](line)
        return figure is None, -(figure or 0)

    found = sorted(
        lines,
        key=lambda line: (
            *(value for name, value in line.key.items() if name in OF_TIME), *(size(line, name) for name in usual),
            *line.key.values(),
        ),
    )  # fmt: skip
    if order is None:
        return tuple(found)
    rank: Callable[[Line], Any] = figures.get(order.column) or (lambda line: line.key.get(order.column, ""))
    return tuple(in_order(found, rank, descending=order.descending))
