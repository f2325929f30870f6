"""The dashboards as data, the metrics that the three programs publish, and a parser of their queries."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import promql_parser as pq
import pytest

from dashboards.__main__ import DASHBOARDS
from scripts import reference_pages

PUBLISHED = {name.removeprefix("gputally_"): set(labels) for name, labels in reference_pages.published().items()}
"""Name without the prefix `gputally_` -> the labels that the program itself sets: what metrics.txt is made of."""
SCRAPED = {"cluster", "job"}
"""Labels that Prometheus adds to every series: the job, and the external label of a cluster."""

WRITTEN = {"$__rate_interval": "4m", "$__range": "24h", "$peak_from": "8", "$peak_to": "18", "$": ""}
Walked = Iterator[tuple[Any, tuple[Any, ...]]]


def parse(expression: str) -> Any:
    """Parse an expression as Grafana would send it."""
    for variable, text in WRITTEN.items():
        expression = expression.replace(variable, text)
    return pq.parse(expression)


def walk(node: Any, above: tuple[Any, ...] = ()) -> Walked:
    """Yield every node of a syntax tree with the nodes above it, outermost first."""
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


@pytest.fixture(scope="session", params=sorted(DASHBOARDS))
def dashboard(request: pytest.FixtureRequest) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(DASHBOARDS[request.param]())
    return loaded
