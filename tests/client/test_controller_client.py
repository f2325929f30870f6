"""The controller's requests to a real accountant over HTTP: histories, lost GPUs, use of pods."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from accountant.composition import Service
from accountant.core.settings import Limits, Settings
from accountant.ledger.protocols import Down, Facts, NodeFacts
from accountant.wire.policy_models import Decision, IdleReclaimPolicy, ModelQuota, Policy, WindowSpec
from agent.wire import Batch
from fairshare.core.gpu_models import OTHERS
from fairshare.core.queues_and_weights import Pod
from fairshare.explain.what_if_simulation import WhatIfError, history_from_ledger
from fairshare.preemption.idle_reclaim import is_idle
from fairshare.preemption.preemption_types import Idleness, PodUse
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


@contextmanager
def asking(folder: Path, now_ms: int, *batches: Batch, **settings: Any) -> Iterator[tuple[Service, AccountantApi]]:
    """Run an accountant with these batches, and yield the controller's client of it. Pages have three lines."""
    chosen = Settings(data=folder, auth="off", limits=Limits(page_lines=3), **settings)
    with running_accountant(chosen, VirtualClock(now_ms), *batches) as (service, url), AccountantApi(url) as client:
        yield service, client


def quarters(first: int, many: int = 1) -> tuple[int, int]:
    """Return the span of `many` quarter-hours."""
    return START_MS + first * QUARTER_MS, START_MS + (first + many) * QUARTER_MS


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
    folder = tmp_path_factory.mktemp("data")
    (folder / "prices.yaml").write_text(price_book_text(H100="2.5"))
    decisions = [
        Decision(
            id=f"d{i}", at_ms=START_MS + i // 700, kind="weight", target="kai", subject="a", mode="dry-run",
            reason="r", policy_version=POLICY.version(), inputs={"gpus": 0.1 + 0.2},
        )
        for i in range(1_500)
    ]  # fmt: skip
    now_ms = START_MS + HOURS * HOUR_MS
    with asking(folder, now_ms, _batch(), prices=folder / "prices.yaml") as (service, ours):
        service.ledger.put_policy(POLICY, START_MS)
        service.ledger.record_decisions(decisions, now_ms)
        yield ours


def test_the_books_become_the_jobs_that_ran(client: AccountantApi) -> None:
    past = history_from_ledger(client, POLICY, HOURS * 3600, None, START_MS + HOURS * HOUR_MS + 59_000)
    assert past.gpus == GPUS
    assert past.had == [12.0, 2.0]
    jobs = past.workload
    found = zip(jobs.queue, jobs.gpus, jobs.duration_s, jobs.submit_s, strict=True)
    begin = past.from_s - 600  # the wait of ten minutes in which they stood in their queues
    assert sorted(found) == [(0, 2, HOURS * 3600, begin), (1, 1, 2 * 3600, begin)]
    queues = tuple(queue.model_copy(update={"gpu_models": {"H100": ModelQuota()}}) for queue in POLICY.queues)
    by_model = POLICY.model_copy(update={"queues": queues})
    assert past.of_part(by_model, "H100") == (jobs, GPUS)
    assert past.of_part(by_model, OTHERS)[1] == 0
    assert not any("begin" in text and "hours into" in text for text in past.assumptions)


def test_before_the_books_begin_there_is_nothing(client: AccountantApi) -> None:
    with pytest.raises(WhatIfError, match="the ledger has no GPU time in the last 5 hours"):
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
    end, spec = START_MS + HOURS * HOUR_MS, POLICY.window.model_copy(update={"size": HOURS * 3600, "half_life": None})
    cost = client.window(spec, "cost", end, 0.98)
    assert (cost.unit, cost.coverage) == ("1e-9 EUR", 1.0)
    assert cost.usage == {"a": 30 * 10**9, "b": 5 * 10**9}
    assert cost.capacity == 60 * 10**9
    weighed = client.window(spec.model_copy(update={"gpu_weights": {"H100": Decimal(3)}}), "allocated", end, 0.98)
    assert weighed.usage == {"a": 36 * HOUR_MS * 1000, "b": 6 * HOUR_MS * 1000}
    assert (weighed.capacity, weighed.gpu_weights) == (72 * HOUR_MS * 1000, {"H100": Decimal(3)})
    with pytest.raises(ValueError, match="this policy measures cost"):
        Policy.model_validate({**POLICY.model_dump(), "measure": "cost", "window": {"gpu_weights": {"H100": 3}}})


LOST_QUARTERS = 4
LOST = {"all": {0: 0, 1: 0}, "one": {1: 0}, "late": {0: 3}, "same": {0: 0}}
"""The quarter-hour from which a GPU of each node is lost."""


def _lost_batch(cluster: str, node: str, many: int = LOST_QUARTERS) -> Batch:
    rows = []
    for quarter in range(many):
        for gpu in range(2):
            lost = quarter >= LOST.get(node, {}).get(gpu, LOST_QUARTERS)
            state: dict[str, Any] = {"health": "lost", "busy_us": None} if lost else {"health": "ok"}
            rows.append(interval(START_MS + quarter * QUARTER_MS, f"GPU-{cluster}-{node}-{gpu}", **state))
    return batch(rows, cluster=cluster, node=node, epoch=cluster + node)


@pytest.fixture(scope="module")
def lost_client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AccountantApi]:
    """`drained` was out of service in the third quarter-hour; `silent` has reported nothing since the first."""
    batches = [_lost_batch("c1", node) for node in ("all", "one", "late", "same", "drained")]
    batches += [_lost_batch("c2", "same"), _lost_batch("c1", "silent", many=1)]
    now_ms = START_MS + LOST_QUARTERS * QUARTER_MS
    with asking(tmp_path_factory.mktemp("data"), now_ms, *batches) as (service, ours):
        down = Down(*quarters(2), "cordoned")
        service.ledger.observe(Facts(nodes=(NodeFacts("c1", "drained", down=(down,)),)), now_ms)
        yield ours


@pytest.mark.parametrize(("quarter", "late"), [(2, {}), (3, {"late": 1})])
def test_lost_is_who_was_so_for_the_whole_quarter(
    lost_client: AccountantApi, quarter: int, late: dict[str, int]
) -> None:
    assert lost_client.lost_gpus(*quarters(quarter)) == {"all": 2, "one": 1, **late}


def test_a_part_of_the_span_is_not_enough(lost_client: AccountantApi) -> None:
    assert lost_client.lost_gpus(*quarters(2, 2)) == {"all": 2, "one": 1}


@pytest.mark.parametrize(("passed", "newest"), [(0, None), (1, 1), (4, 4)])
def test_a_window_tells_when_a_gpu_was_lost_last(lost_client: AccountantApi, passed: int, newest: int | None) -> None:
    window = lost_client.window(
        WindowSpec(kind="sliding", size=3_600), "allocated", START_MS + passed * QUARTER_MS, 0.9
    )
    assert window.lost_ms == (0 if newest is None else START_MS + newest * QUARTER_MS)


@pytest.mark.parametrize(("passed", "begun"), [(0, 0), (1, 0), (4, 0), (6, 2)])
def test_a_window_tells_where_the_books_begin_in_it(lost_client: AccountantApi, passed: int, begun: int) -> None:
    for spec in (WindowSpec(kind="sliding", size=3_600), WindowSpec(kind="sliding", size=3_600, half_life=600)):
        window = lost_client.window(spec, "allocated", START_MS + passed * QUARTER_MS, 0.9)
        assert window.since_ms == START_MS + begun * QUARTER_MS


def test_the_books_tell_a_nodes_down_time_from_a_gpus(lost_client: AccountantApi) -> None:
    lines = {line.key["node"]: line for line in lost_client.usage(*quarters(2), ("node",))}
    down = {node: (line.accounts_gpu_us.down, line.node_down_us) for node, line in lines.items()}
    gpu_us = 900_000_000
    assert (down["drained"], down["one"], down["all"]) == ((2 * gpu_us, 2 * gpu_us), (gpu_us, 0), (2 * gpu_us, 0))
    assert (down["silent"], down["late"]) == ((0, 0), (0, 0))


def test_nodes_that_were_ever_metered_are_told_while_they_are_silent_too(lost_client: AccountantApi) -> None:
    assert lost_client.metered_nodes(*quarters(3)) == {"all", "one", "late", "same", "drained", "silent"}


IDLE_QUARTERS = 8
END_MS = START_MS + IDLE_QUARTERS * QUARTER_MS
BUSY_US: dict[str, int | None] = {"idle": 0, "works": 800_000_000, "blind": None, "left": None, "short": 0}
METHODS = {"blind": "allocation", "left": "carried"}


def _idle_batch(cluster: str, names: list[str]) -> Batch:
    """Every pod holds a GPU of its own for two hours; that of `short` was not metered in the first of them."""
    rows = [
        interval(
            START_MS + quarter * QUARTER_MS, f"GPU-{gpu}", pod_holder(name, uid=f"{cluster}-{name}"),
            busy_us=BUSY_US[name], method=METHODS.get(name, "device"),
        )
        for gpu, name in enumerate(names)
        for quarter in range(4 if name == "short" else 0, IDLE_QUARTERS)
    ]  # fmt: skip
    return batch(rows, cluster=cluster, epoch=cluster)


@pytest.fixture(scope="module", params=[1, 2])
def idle_client(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[AccountantApi]:
    """Of one cluster, or of two that both have a pod called `idle`. Pages have three lines."""
    batches = [_idle_batch("c1", list(BUSY_US)), _idle_batch("c2", ["idle"])][: request.param]
    with asking(tmp_path_factory.mktemp("data"), END_MS, *batches) as (service, ours):
        service.ledger.put_policy(Policy.model_validate({"queues": [{"name": "a"}]}), START_MS)
        ours.clusters = request.param  # type: ignore[attr-defined]
        yield ours


def test_only_who_was_measured_idle_is_idle(idle_client: AccountantApi) -> None:
    rule = IdleReclaimPolicy.model_validate({"sustained": "2h", "grace": "30m"})
    spans = []
    for minutes in (120, 30):
        found = idle_client.pod_usage(END_MS - minutes * 60_000, END_MS)
        spans.append({name: PodUse(a.busy, a.allocated_idle, a.allocated_unknown) for (_, name), a in found.items()})
    idleness = Idleness(END_MS, spans[0], spans[1])
    pods = [Pod(name, "ns", name, 1.0, "n", held=True, ready_ms=START_MS) for name in BUSY_US]
    alone = {"idle"} if idle_client.clusters == 1 else set()  # type: ignore[attr-defined]
    assert {pod.name for pod in pods if is_idle(rule, pod, idleness)} == alone
    assert spans[0]["blind"] == spans[0]["left"] == PodUse(0, 0, 2 * 3_600_000_000)
    assert spans[0]["short"] == PodUse(0, 3_600_000_000, 0)


def test_some_pods_are_asked_for_by_name(idle_client: AccountantApi) -> None:
    found = idle_client.pod_usage(START_MS, END_MS, [("ns", "works"), ("ns", "gone"), ("other", "idle")])
    assert {key: held.busy for key, held in found.items()} == {("ns", "works"): IDLE_QUARTERS * 800_000_000}
    many = [("ns", f"p{i}") for i in range(200)] + [("ns", "works")]
    assert idle_client.pod_usage(START_MS, END_MS, many).keys() == {("ns", "works")}
