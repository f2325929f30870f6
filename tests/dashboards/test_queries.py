"""Every query of every dashboard parses, names existing metrics and labels, and treats counters as counters."""

from __future__ import annotations

import re
from typing import Any

import promql_parser as pq
import pytest

from accountant.wire.usage_cost_and_job_models import Accounts
from dashboards import grafana_schema, lint, panels_and_variables
from tests.dashboards.conftest import PUBLISHED, SCRAPED, parse, selectors, walk


@pytest.fixture
def trees(dashboard: dict[str, Any]) -> list[tuple[str, Any]]:
    return [(f"{title}: {expr}", parse(expr)) for title, expr in lint.expressions(dashboard)]


def test_every_expression_parses_and_selects_something(trees: list[tuple[str, Any]]) -> None:
    assert len(trees) > 20
    for text, tree in trees:
        assert list(selectors(tree)), text


def test_every_metric_and_label_is_published(trees: list[tuple[str, Any]]) -> None:
    for text, tree in trees:
        for selector, _ in selectors(tree):
            name = selector.name.removeprefix("gputally_")
            assert selector.name.startswith("gputally_"), text
            assert name in PUBLISHED, text
            used = {matcher.name for matcher in selector.matchers.matchers}
            assert used <= PUBLISHED[name] | SCRAPED, f"{text}: {name} has no {used - PUBLISHED[name]}"


def test_grouping_uses_labels_that_the_series_below_it_have(trees: list[tuple[str, Any]]) -> None:
    for text, tree in trees:
        for node, _ in walk(tree):
            if isinstance(node, pq.AggregateExpr) and node.modifier is not None:
                below = set(SCRAPED)
                for selector, _above in selectors(node.expr):
                    below |= PUBLISHED[selector.name.removeprefix("gputally_")]
                assert set(node.modifier.labels) <= below, text


def test_counters_are_read_through_rate_and_summed_afterwards(trees: list[tuple[str, Any]]) -> None:
    for text, tree in trees:
        for selector, above in selectors(tree):
            name = selector.name.removeprefix("gputally_")
            functions = [node.func.name for node in above if isinstance(node, pq.Call)]
            if name.endswith("_total"):
                assert {"rate", "increase"} & set(functions), text
            if {"rate", "increase"} & set(functions):
                assert name.endswith(("_total", "_bucket")), f"{text}: {name} is no counter"
                call = next(
                    i
                    for i, node in enumerate(above)
                    if isinstance(node, pq.Call) and node.func.name in {"rate", "increase"}
                )
                assert any(isinstance(node, pq.AggregateExpr) for node in above[:call]), text
                assert not any(isinstance(node, pq.AggregateExpr) for node in above[call:]), text


def test_variables_ask_for_published_metrics(dashboard: dict[str, Any]) -> None:
    for variable in dashboard["templating"]["list"]:
        if variable["type"] != "query":
            continue
        query, kind = variable["query"]["query"], variable["query"]["qryType"]
        if kind == panels_and_variables.QUERY_RESULT:
            tree = parse(query.removeprefix("query_result(").removesuffix(")"))
            (label,) = re.findall(r'(\w+)="', variable["regex"])
            named = [PUBLISHED[s.name.removeprefix("gputally_")] for s, _ in selectors(tree)]
            assert all(label in labels for labels in named)
            continue
        selector, label = query.removeprefix("label_values(").removesuffix(")").rsplit(", ", 1)
        if selector.startswith("gputally_"):
            assert label in PUBLISHED[selector.split("{")[0].removeprefix("gputally_")]
        else:
            assert label in SCRAPED
            pattern = re.search(r'__name__=~"([^"]+)"', selector)
            assert pattern is not None
            found = {name for name in PUBLISHED if re.fullmatch(pattern[1], f"gputally_{name}")}
            assert found == {"agent_build_info", "accountant_build_info", "fairshare_build_info"}


def test_every_account_of_the_ledger_has_a_colour_of_its_own() -> None:
    assert set(grafana_schema.ACCOUNTS) == set(Accounts.model_fields)
    assert len(set(grafana_schema.ACCOUNTS.values())) == len(grafana_schema.ACCOUNTS)
