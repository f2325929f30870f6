"""The dashboards as data, and the metrics that the three programs publish."""

from __future__ import annotations

import json
from typing import Any

import promql_parser
import pytest

from dashboards.__main__ import DASHBOARDS
from scripts import reference_pages

PUBLISHED = {name.removeprefix("gputally_"): set(labels) for name, labels in reference_pages.published().items()}
"""Name without the prefix `gputally_` -> the labels that the program itself sets: what docs/metrics.md is made of."""


@pytest.fixture(scope="session")
def published() -> dict[str, set[str]]:
    return PUBLISHED


@pytest.fixture(scope="session", params=sorted(DASHBOARDS))
def dashboard(request: pytest.FixtureRequest) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(DASHBOARDS[request.param]())
    return loaded


WRITTEN = {"$__rate_interval": "4m", "$__range": "24h", "$peak_from": "8", "$peak_to": "18", "$": ""}


def _parse(expression: str) -> Any:
    """The syntax tree of an expression as Grafana would send it."""
    for variable, text in WRITTEN.items():
        expression = expression.replace(variable, text)
    return promql_parser.parse(expression)


@pytest.fixture(scope="session")
def parse() -> Any:
    return _parse
