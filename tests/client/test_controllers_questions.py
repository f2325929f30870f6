"""What the controller's commands ask, answered by the real accountant over HTTP."""

from __future__ import annotations

from collections.abc import Iterator
from decimal import Decimal

import pytest

from accountant.core.settings import Limits, Settings
from accountant.wire.policy_models import Decision, Policy
from agent.wire import Batch
from fairshare.explain.what_if_simulation import WhatIfError, history_from_ledger
from fairshare.usage.accountant_client import AccountantApi
from gputally.base.clock import VirtualClock
from tests.price_books import price_book_text
from tests.usage_records import QUARTER_MS, batch, interval, pod_facts, pod_holder, running_accountant

START_MS = 1_790_812_800_000  # 2026-10-01T00:00Z
HOUR_MS = 3_600_000
HOURS, GPUS = 6, 4
POLICY = Policy.model_validate(
    {
        "queues": [{"name": "a", "refs": ["kai:a"]}, {"name": "b", "refs": ["kai:b"]}],
        "budgets": [{"name": "few", "queue": "a", "limit": "5", "exhausted": "no-over-quota"}],
    }
)


PRICES = price_book_text(H100="2.5")


def _holder(hour: int, gpu: int) -> str | None:
    """`a` holds two GPUs in one job all the time, `b` one for the first two hours; the fourth is free."""
    return "a-0" if gpu < 2 else "b-0" if gpu == 2 and hour < 2 else None


def _batch() -> Batch:
    facts = [
        pod_facts(
            name, START_MS, queue_ref=f"kai:{name[0]}", workload=f"Job/{name}", created_ms=START_MS - 600_000,
            scheduled_ms=START_MS,
        )
        for name in ("a-0", "b-0")
    ]  # fmt: skip
    rows = []
    for quarter in range(HOURS * 4):
        for gpu in range(GPUS):
            name = _holder(quarter // 4, gpu)
            holder = pod_holder(name) if name else None
            rows.append(interval(START_MS + quarter * QUARTER_MS, f"GPU-{gpu}", holder))
    return batch(rows, facts)


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AccountantApi]:
    clock = VirtualClock(START_MS + HOURS * HOUR_MS)
    folder = tmp_path_factory.mktemp("data")
    (folder / "prices.yaml").write_text(PRICES)
    settings = Settings(data=folder, auth="off", limits=Limits(page_lines=3), prices=folder / "prices.yaml")
    decisions = [
        Decision(
            id=f"d{i}", at_ms=START_MS + i // 700, kind="weight", target="kai", subject="a", mode="dry-run",
            reason="r", policy_version=POLICY.version(), inputs={"gpus": 0.1 + 0.2},
        )
        for i in range(1_500)
    ]  # fmt: skip
    with running_accountant(settings, clock, _batch()) as (service, url):
        service.ledger.put_policy(POLICY, START_MS)
        service.ledger.record_decisions(decisions, clock.wall_ms())
        with AccountantApi(url) as ours:
            yield ours


def test_the_books_become_the_jobs_that_ran(client: AccountantApi) -> None:
    past = history_from_ledger(client, POLICY, HOURS * 3600, None, START_MS + HOURS * HOUR_MS + 59_000)
    assert past.gpus == GPUS
    assert past.had == [12.0, 2.0]
    jobs = past.workload
    found = zip(jobs.queue, jobs.gpus, jobs.duration_s, jobs.submit_s, strict=True)
    begin = past.from_s - 600  # the wait of ten minutes in which they stood in their queues
    assert sorted(found) == [(0, 2, HOURS * 3600, begin), (1, 1, 2 * 3600, begin)]
    assert not any("begin" in text and "hours into" in text for text in past.assumptions)


def test_before_the_books_begin_there_is_nothing(client: AccountantApi) -> None:
    with pytest.raises(WhatIfError, match="hold no GPU time in the last 5 hours"):
        history_from_ledger(client, POLICY, 5 * 3600, None, START_MS)


def test_decisions_policy_and_budgets_come_back_as_they_were(client: AccountantApi) -> None:
    kept = list(client.decisions(START_MS, START_MS + HOUR_MS))
    assert sorted(int(decision.id[1:]) for decision in kept) == list(range(1_500))
    assert {decision.inputs["gpus"] for decision in kept} == {0.1 + 0.2}
    assert client.policy() == POLICY
    assert [each.version for each in client.policies()] == [POLICY.version()]
    (budget,) = client.budgets()
    assert (budget.name, str(budget.spent), str(budget.limit)) == ("few", "12.000000000", "5")


def test_a_policy_may_measure_cost_or_weigh_models(client: AccountantApi) -> None:
    end, spec = START_MS + HOURS * HOUR_MS, POLICY.window.model_copy(update={"size": HOURS * 3600})
    cost = client.window(spec, "cost", end, 0.98)
    assert (cost.unit, cost.coverage) == ("1e-9 EUR", 1.0)
    assert cost.usage == {"a": 30 * 10**9, "b": 5 * 10**9}
    assert cost.capacity == 60 * 10**9
    weighed = client.window(spec.model_copy(update={"gpu_weights": {"H100": Decimal(3)}}), "allocated", end, 0.98)
    assert weighed.usage == {"a": 36 * HOUR_MS * 1000, "b": 6 * HOUR_MS * 1000}
    assert (weighed.capacity, weighed.gpu_weights) == (72 * HOUR_MS * 1000, {"H100": Decimal(3)})
    with pytest.raises(ValueError, match="this policy measures cost"):
        Policy.model_validate({**POLICY.model_dump(), "measure": "cost", "window": {"gpu_weights": {"H100": 3}}})
