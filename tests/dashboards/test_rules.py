"""Alerts and recording rules as data: names, expressions, texts, and a runbook section for each alert."""

from __future__ import annotations

import re
from pathlib import Path

import promql_parser as pq
import pytest
import yaml

from dashboards import prometheus_rules
from dashboards.prometheus_rules import Alert, RecordingRule
from tests.dashboards.conftest import PUBLISHED, SCRAPED, parse, selectors, walk

RUNBOOKS = Path(__file__).parents[2] / "docs" / "runbooks.md"
RULES = [*prometheus_rules.RECORDS, *prometheus_rules.ALERTS]
DURATION = re.compile(r"\d+[mh]")
BY_PROMETHEUS = {"instance"}
"""Labels that Prometheus adds to a series."""


@pytest.fixture(params=RULES, ids=lambda rule: rule.name)
def rule(request: pytest.FixtureRequest) -> RecordingRule | Alert:
    chosen: RecordingRule | Alert = request.param
    return chosen


@pytest.fixture(params=prometheus_rules.ALERTS, ids=lambda alert: alert.name)
def alert(request: pytest.FixtureRequest) -> Alert:
    chosen: Alert = request.param
    return chosen


def sections() -> dict[str, str]:
    """Return the text below each heading of the third level."""
    parts = re.split(r"^#{2,3} (.+)$", RUNBOOKS.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def test_an_expression_asks_for_what_is_published_or_recorded(rule: RecordingRule | Alert) -> None:
    recorded = {record.name for record in prometheus_rules.RECORDS}
    for selector, _ in selectors(parse(rule.expr)):
        if selector.name not in recorded:
            name = selector.name.removeprefix("gputally_")
            assert name in PUBLISHED
            assert {m.name for m in selector.matchers.matchers} <= PUBLISHED[name] | SCRAPED


def test_grouping_uses_labels_that_there_are(rule: RecordingRule | Alert) -> None:
    levels = {
        record.name: set(record.name.split(":")[0].split("_")) | {"gpu_model"} for record in prometheus_rules.RECORDS
    }
    for node, _ in walk(parse(rule.expr)):
        if isinstance(node, pq.AggregateExpr) and node.modifier is not None:
            below = SCRAPED | BY_PROMETHEUS
            for selector, _above in selectors(node.expr):
                below = below | levels.get(selector.name, set())
                below = below | PUBLISHED.get(selector.name.removeprefix("gputally_"), set())
            assert set(node.modifier.labels) <= below, rule.expr


def test_a_recorded_name_is_level_metric_operation() -> None:
    names = [record.name for record in prometheus_rules.RECORDS]
    assert len(set(names)) == len(names)
    for name in names:
        assert re.fullmatch(r"[a-z_]+:gputally_[a-z_]+:[a-z0-9_]+", name)


def test_an_alert_says_what_it_means_in_a_sentence_and_how_bad_it_is(alert: Alert) -> None:
    assert re.fullmatch(r"Gputally[A-Z]\w+", alert.name)
    assert DURATION.fullmatch(alert.wait)
    assert not alert.summary.endswith(".")
    assert len(re.sub(r"{{[^}]*}}", "12345", alert.summary)) <= 72
    assert alert.description.endswith(".")


def test_what_an_alert_names_is_a_label_that_it_keeps(alert: Alert) -> None:
    used = set(re.findall(r"\$labels\.(\w+)", alert.summary + alert.description))
    kept: set[str] = set()
    for node, _ in walk(parse(alert.expr)):
        if isinstance(node, pq.AggregateExpr) and node.modifier is not None:
            kept |= set(node.modifier.labels)
    for record in prometheus_rules.RECORDS:
        kept |= set(record.name.split(":")[0].split("_")) if record.name in alert.expr else set()
    assert used <= kept


def test_every_alert_has_a_runbook_that_says_what_it_means_how_to_check_and_what_mends_it(alert: Alert) -> None:
    text = sections()[alert.name]
    assert [word for word in ("**Meaning.**", "**Check.**", "**Remedy.**") if word not in text] == []
    assert alert.runbook.endswith(f"#{alert.name.lower()}")


def test_no_runbook_is_of_an_alert_that_is_gone() -> None:
    assert {name for name in sections() if name.startswith("Gputally")} == {
        alert.name for alert in prometheus_rules.ALERTS
    }


def test_the_file_is_yaml_with_every_rule_once() -> None:
    document = yaml.safe_load(prometheus_rules.render_rules())
    names = [rule.get("record", rule.get("alert")) for group in document["groups"] for rule in group["rules"]]
    assert names == [rule.name for group in prometheus_rules.GROUPS for rule in group.rules]
    assert prometheus_rules.render_rules() == prometheus_rules.render_rules()
