"""What KAI-Scheduler's usage client asks, read from its PromQL.

The text is parsed, never compared: its parts may be wrapped in parentheses and in aggregations such as
`max by (queue_name) (...)`, which our rows, one per queue, do not need. What is not one of the six
questions is refused with the part that is at fault.

Source of the form: KAI-Scheduler pkg/scheduler/cache/usagedb/prometheus/prometheus.go at v0.17:
`sum_over_time((METRIC)[WINDOW:RESOLUTION])`, with a half-life
`sum_over_time((((METRIC) * (0.5^((NOW - time()) / HALF_LIFE))))[WINDOW:RESOLUTION])`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal

import promql_parser as promql

Resource = Literal["gpu", "cpu", "memory"]
MAX_QUERY_CHARACTERS = 4_096
ALLOCATIONS: Mapping[str, Resource] = {
    "kai_queue_allocated_gpus": "gpu",
    "kai_queue_allocated_cpu_cores": "cpu",
    "kai_queue_allocated_memory_bytes": "memory",
}
"""Metrics of KAI's queue controller: what its default settings sum up."""
CAPACITIES: Mapping[str, Resource] = {"nvidia_com_gpu": "gpu", "cpu": "cpu", "memory": "memory"}
"""Values of the label `resource` of kube_node_status_capacity, and of Run:ai's resources_per_nodepool."""
POOL_LABEL = "nodepool"
_OPERATORS = {
    "MatchOp.Equal": "=",
    "MatchOp.NotEqual": "!=",
    "MatchOp.Re": "=~",
    "MatchOp.NotRe": "!~",
}


class UnknownQuery(ValueError):
    """Not one of the questions of KAI's usage client: which part, and what was expected."""


@dataclass(frozen=True, slots=True)
class UsageQuestion:
    """One of the six: allocation per queue, or capacity, of one resource over a sliding window.

    Durations in seconds. reference_s: the instant (seconds since 1970) that decayed samples count fully
    at; None without a half-life. pool: the node pool a capacity is restricted to, if it is."""

    resource: Resource
    of: Literal["allocation", "capacity"]
    window_s: int
    resolution_s: float
    half_life_s: int | None
    reference_s: float | None
    pool: str | None = None


def parse(text: str) -> UsageQuestion:
    """The question in a query. Raises UnknownQuery."""
    if len(text) > MAX_QUERY_CHARACTERS:
        raise UnknownQuery(f"a query of more than {MAX_QUERY_CHARACTERS} characters")
    try:
        outer = _bare(promql.parse(text))
    except ValueError as error:
        raise UnknownQuery(f"not PromQL: {error}") from error
    if not isinstance(outer, promql.Call) or outer.func.name != "sum_over_time":
        raise UnknownQuery("expected sum_over_time(...), as KAI's sliding windows send it")
    inner = _bare(outer.args[0])
    if not isinstance(inner, promql.SubqueryExpr) or inner.offset is not None or inner.at is not None:
        raise UnknownQuery("expected a subquery [window:resolution] in sum_over_time, without offset or @")
    if inner.step is None:
        raise UnknownQuery("the subquery has no resolution")
    metric, reference, half_life = _decayed(_bare(inner.expr))
    resource, of, pool = _metric(metric)
    window = _whole_seconds(inner.range, "the window")
    return UsageQuestion(resource, of, window, inner.step.total_seconds(), half_life, reference, pool)


def _decayed(expression: promql.Expr) -> tuple[promql.Expr, float | None, int | None]:
    """(metric, reference, half-life) of METRIC or METRIC * 0.5^((reference - time()) / half-life)."""
    if not isinstance(expression, promql.BinaryExpr):
        return expression, None, None
    power = _operands(expression, "*")
    base, exponent = _operands(power[1], "^")
    age, half_life = _operands(exponent, "/")
    reference, now = _operands(age, "-")
    if _number(base) != 0.5 or not isinstance(now, promql.Call) or now.func.name != "time":
        raise UnknownQuery("expected a decay of the form 0.5^((now - time()) / half_life)")
    try:
        duration = timedelta(seconds=_number(half_life))
    except (OverflowError, ValueError) as error:
        raise UnknownQuery("the half-life is no duration") from error
    return power[0], _number(reference), _whole_seconds(duration, "the half-life")


def _operands(expression: promql.Expr, operator: str) -> tuple[promql.Expr, promql.Expr]:
    if not isinstance(expression, promql.BinaryExpr) or str(expression.op) != operator:
        raise UnknownQuery("expected METRIC * (0.5^((now - time()) / half_life))")
    return _bare(expression.lhs), _bare(expression.rhs)


def _number(expression: promql.Expr) -> float:
    if not isinstance(expression, promql.NumberLiteral):
        raise UnknownQuery("expected a number in the decay")
    return expression.val


def _whole_seconds(duration: timedelta | None, what: str) -> int:
    seconds = duration.total_seconds() if duration is not None else 0.0
    if seconds < 1 or seconds != int(seconds):
        raise UnknownQuery(f"{what} is not a whole number of seconds above 0: {seconds:g} s")
    return int(seconds)


def _metric(expression: promql.Expr) -> tuple[Resource, Literal["allocation", "capacity"], str | None]:
    while isinstance(expression, promql.AggregateExpr):
        expression = _bare(expression.expr)
    if not isinstance(expression, promql.VectorSelector) or expression.offset is not None:
        raise UnknownQuery("expected one metric, possibly aggregated")
    name = expression.name or ""
    if name in ALLOCATIONS:  # labels of the scrape restrict nothing here: there is one row per queue
        return ALLOCATIONS[name], "allocation", None
    matchers = expression.matchers.matchers
    labels = {matcher.name: matcher.value for matcher in matchers if matcher.op == promql.MatchOp.Equal}
    resource = CAPACITIES.get(labels.get("resource", ""))
    if resource is None:
        raise UnknownQuery(
            f"unknown metric {name!r}: expected one of {', '.join(ALLOCATIONS)}, or a capacity with the label "
            f"resource ({', '.join(CAPACITIES)}) and possibly {POOL_LABEL}"
        )
    for matcher in matchers:
        if matcher.name not in ("resource", POOL_LABEL) or matcher.op != promql.MatchOp.Equal:
            raise UnknownQuery(
                f"unknown selector {matcher.name}{_OPERATORS.get(str(matcher.op), '')}{matcher.value!r} of {name}: a"
                f' capacity is selected by resource="..." and {POOL_LABEL}="..." alone'
            )
    return resource, "capacity", labels.get(POOL_LABEL)


def _bare(expression: promql.Expr) -> promql.Expr:
    while isinstance(expression, promql.ParenExpr):
        expression = expression.expr
    return expression
