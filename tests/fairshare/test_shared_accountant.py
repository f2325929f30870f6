"""Two clusters, one accountant, queues of the same names: the real controllers over the real accountant's HTTP."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from starlette.testclient import TestClient

from accountant.composition import Service
from accountant.core.settings import Settings
from fairshare.controller.control_loop import Controller
from fairshare.controller.cycle_report import CycleReport, replay_weights
from fairshare.targets.kai import QUEUE
from fairshare.usage.accountant_client import AccountantApi
from gputally.base.clock import VirtualClock
from gputally.kubernetes.memory_cluster import MemoryCluster
from tests import fresh
from tests.fairshare.builders import cluster_of, policy_of, queue_object, shard_object
from tests.fairshare.conftest import NOW_MS
from tests.fairshare.delivered_usage import MINUTE_MS, WINDOW, report

Make = Callable[..., Any]


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock(NOW_MS - NOW_MS % MINUTE_MS)


@pytest.fixture
def service(tmp_path: Path, clock: VirtualClock) -> Iterator[Service]:
    opened = Service(Settings(data=fresh.data(tmp_path / "data"), auth="off", linger_ms=0), clock)
    yield opened
    opened.close()


@pytest.fixture
def client_of(service: Service) -> Iterator[Make]:
    """The controller's client of a cluster, in process."""
    with TestClient(service.app, base_url="http://127.0.0.1") as inside:

        def answer(request: httpx2.Request) -> httpx2.Response:
            found = inside.request(
                request.method, str(request.url), content=request.content, headers=dict(request.headers)
            )
            kept = {"Content-Type": found.headers.get("Content-Type", "")}
            return httpx2.Response(found.status_code, content=found.content, headers=kept)

        yield lambda cluster="": AccountantApi(
            "http://127.0.0.1", cluster=cluster, transport=httpx2.MockTransport(answer)
        )


@pytest.fixture
def controller(client_of: Make, clock: VirtualClock) -> Make:
    """The controller of a cluster with queues a, b and c of weight 1, and that cluster."""

    def make(policy: Any, cluster: str) -> tuple[Controller, MemoryCluster]:
        there: MemoryCluster = cluster_of([*map(queue_object, "abc"), shard_object(kValue=0)])
        return Controller(policy, client_of(cluster), there, clock), there

    return make


@pytest.fixture
def cycle(controller: Make) -> Make:
    """A cycle of a fresh controller, and the weights then."""

    def run(policy: Any, cluster: str) -> tuple[CycleReport, dict[str, float]]:
        mine, there = controller(policy, cluster)
        found = mine.cycle()
        weights = {
            obj["metadata"]["name"]: obj["spec"]["resources"]["gpu"]["overQuotaWeight"] for obj in there.list(QUEUE)
        }
        return found, weights

    return run


def test_what_a_queue_uses_elsewhere_does_not_lower_its_weight_here(
    service: Service, clock: VirtualClock, cycle: Make
) -> None:
    policy = policy_of(window=WINDOW, k=1.0)
    report(service, clock, "prod", {"a": 3, "b": 1})
    cycle(policy, "prod")  # announces the policy, which is in force from then on
    clock.advance(MINUTE_MS)
    alone, weights = cycle(policy, "prod")
    assert alone.hold is None
    assert weights["a"] < weights["b"] < weights["c"]
    report(service, clock, "staging", {"c": 4})
    shared, after = cycle(policy, "prod")
    assert after == weights
    assert shared.window is not None
    assert alone.window is not None
    assert shared.window.cluster == "prod"
    assert shared.window.model_copy(update={"end_ms": 0}) == alone.window.model_copy(update={"end_ms": 0})
    there, weights_there = cycle(policy, "staging")
    assert there.hold is None
    assert weights_there["c"] < weights_there["a"] == weights_there["b"]
    _, mixed = cycle(policy, "")
    assert mixed["c"] < after["c"], "without a name history mixes, as it always did"


def test_decisions_are_kept_apart_and_replay(
    service: Service, clock: VirtualClock, cycle: Make, client_of: Make
) -> None:
    policy = policy_of(window=WINDOW)
    for cluster, held in (("prod", {"a": 3}), ("staging", {"b": 3})):
        report(service, clock, cluster, held)
        cycle(policy, cluster)
    clock.advance(MINUTE_MS)
    told = {cluster: cycle(policy, cluster)[0] for cluster in ("prod", "staging")}
    for cluster, at in told.items():
        found = list(client_of(cluster).decisions(clock.wall_ms(), clock.wall_ms() + 1))
        assert {decision.cluster for decision in found} == {cluster}
        (inputs,) = (decision for decision in found if decision.subject == "*")
        assert replay_weights(policy, inputs).weights == at.targets[0].weights
    everybody = list(client_of().decisions(clock.wall_ms(), clock.wall_ms() + 1))
    assert len(everybody) == sum(len(at.decisions) for at in told.values())


def test_policies_that_count_alike_do_not_contest(service: Service, clock: VirtualClock, controller: Make) -> None:
    """One cluster only tries, with another k: both are counted by the same queues, and neither holds."""
    given = {"prod": {"k": 1.0}, "staging": {"k": 0.5, "apply": "dry-run"}}
    policies = {name: policy_of(window=WINDOW, min_coverage=0.5, **options) for name, options in given.items()}
    controllers = {name: controller(policy, name)[0] for name, policy in policies.items()}
    for name in controllers:
        report(service, clock, name, {"a": 3})
    for minute in range(6):
        held = [each.cycle().hold for each in controllers.values()]
        assert not any(held), minute
        clock.advance(MINUTE_MS)
    assert [told.policy for told in service.ledger.policies(0, clock.wall_ms())] == [*policies.values()], "each once"
    other = policy_of([{"name": "a", "refs": ("kai:b",)}, {"name": "b", "refs": ("kai:a",)}, {"name": "c"}])
    service.ledger.put_policy(other, clock.wall_ms())
    clock.advance(MINUTE_MS)
    for each in controllers.values():
        hold = each.cycle().hold
        assert hold is not None
        assert hold.reason == "PolicyNotInForce", "queues of the same names are made of others"


def test_a_name_that_no_agent_reports_holds_and_says_so(service: Service, clock: VirtualClock, cycle: Make) -> None:
    report(service, clock, "prod", {"a": 3})
    held, weights = cycle(policy_of(window=WINDOW), "production")
    assert held.hold is not None
    assert held.hold.reason == "NoCapacity"
    assert "of cluster 'production': is that what its agents call it?" in held.hold.message
    assert set(weights.values()) == {1}
