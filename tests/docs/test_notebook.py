"""The notebook runs from its first cell to its last against a real accountant, and is committed without outputs."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

import pytest

from accountant.core.settings import Settings
from accountant.wire.policy_models import Decision, Policy, QueuePolicy
from gputally.base.clock import VirtualClock
from tests.usage_records import batch, interval, pod_facts, pod_holder, running_accountant

START_MS = 1_790_812_800_000  # 2026-10-01T00:00Z
HOUR_MS = 3_600_000
DAY_MS = 24 * HOUR_MS
NOTEBOOK = "books-in-pandas.ipynb"


@pytest.fixture
def cells(root: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((root / "docs" / NOTEBOOK).read_text(encoding="utf-8"))["cells"]
    return found


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    """Two days of three GPUs: two teams hold one each, and one is free."""
    facts = [
        pod_facts(
            f"pod-{i}", START_MS, namespace=f"ns{i}", queue_ref=f"kai:q{i}", workload=f"Job/train-{i}",
            created_ms=START_MS, started_ms=START_MS,
        )
        for i in range(2)
    ]  # fmt: skip
    holders = [pod_holder("pod-0", "ns0"), pod_holder("pod-1", "ns1"), None]
    rows = [
        interval(at, f"GPU-{gpu}", holder, span_ms=HOUR_MS, busy_us=1_800_000_000 if holder else 0)
        for at in range(START_MS, START_MS + 2 * DAY_MS, HOUR_MS)
        for gpu, holder in enumerate(holders)
    ]
    policy = Policy(queues=tuple(QueuePolicy(name=f"q{i}", team=f"team-{i}", refs=(f"kai:q{i}",)) for i in range(2)))
    weight = Decision(
        id="d1", at_ms=START_MS + 1, kind="weight", target="kai", subject="q0", mode="dry-run", value=1.5,
        previous=1.0, reason="below its share", policy_version=policy.version(),
    )  # fmt: skip
    clock = VirtualClock(START_MS + 2 * DAY_MS)
    with as_file(files("gputally.demo") / "data" / "price-book.yaml") as prices:
        settings = Settings(data=tmp_path, auth="off", prices=Path(prices))
        with running_accountant(settings, clock, batch(rows, facts)) as (service, address):
            service.ledger.put_policy(policy, START_MS)
            service.ledger.record_decisions([weight], clock.wall_ms())
            yield address


def test_every_cell_runs_and_the_figures_are_the_ledgers(
    cells: list[dict[str, Any]], url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MPLBACKEND", "agg")
    monkeypatch.setenv("GPUTALLY_URL", url)
    monkeypatch.delenv("GPUTALLY_TOKEN_FILE", raising=False)
    names: dict[str, Any] = {}
    shown = []
    for cell in cells:
        if cell["cell_type"] != "code":
            continue
        tree = ast.parse("".join(cell["source"]))
        last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, NOTEBOOK, "exec"), names)  # our own document
        if isinstance(last, ast.Expr):
            shown.append(eval(compile(ast.Expression(last.value), NOTEBOOK, "eval"), names))
    assert names["capacity"].sum() == 3 * 48 * 3_600_000_000
    assert set(names["due"].index) >= {"team-0", "team-1"}
    assert names["idle"].idle_hours.tolist() == [24.0, 24.0]
    assert names["shown"].sum().sum() == 96
    assert len(names["decisions"]) == 1
    assert len(shown) >= 6


def test_it_is_kept_without_outputs(cells: list[dict[str, Any]]) -> None:
    assert all(cell.get("outputs", []) == [] and cell.get("execution_count") is None for cell in cells)
