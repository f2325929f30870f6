"""The queries of dashboards and rules, taken apart."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import promql_parser as pq

SCRAPED = {"cluster", "job"}
"""Labels that Prometheus adds to every series: the job, and the external label of a cluster."""

Walked = Iterator[tuple[Any, tuple[Any, ...]]]


def walk(node: Any, above: tuple[Any, ...] = ()) -> Walked:
    """Every node of a syntax tree with the nodes above it, outermost first."""
    yield node, above
    inner = (*above, node)
    match node:
        case pq.AggregateExpr() | pq.ParenExpr() | pq.UnaryExpr() | pq.SubqueryExpr():
            yield from walk(node.expr, inner)
            if isinstance(node, pq.AggregateExpr) and node.param is not None:
                yield from walk(node.param, inner)
        case pq.BinaryExpr():
            yield from walk(node.lhs, inner)
            yield from walk(node.rhs, inner)
        case pq.Call():
            for argument in node.args:
                yield from walk(argument, inner)
        case pq.MatrixSelector():
            yield from walk(node.vector_selector, inner)


def selectors(tree: Any) -> Walked:
    return ((node, above) for node, above in walk(tree) if isinstance(node, pq.VectorSelector))
