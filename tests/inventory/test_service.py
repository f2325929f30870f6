"""The service with a cluster or after an outage: histories continue, and pods are billed to the right team."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from accountant.composition import Service
from accountant.core.settings import Settings
from accountant.ledger.protocols import Down
from agent.metering.meter import ClosedSet
from agent.upload.spool import Outbox
from agent.upload.uploader import Uploader
from agent.wire import Holder, Owner, PodFacts
from gputally.base.clock import VirtualClock
from gputally.base.errors import ClusterUnavailable
from gputally.kubernetes.api_client import KubernetesApi
from gputally.server.https_server import serve
from gputally.server.tokens_and_grants import sha256
from tests import empty_ledger
from tests.inventory.memory_api_server import FakeApi, node
from tests.moments import present
from tests.usage_records import interval

pytestmark = pytest.mark.usefixtures("logs")


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> FakeApi:
    """An API server in place of the one that the settings name."""
    fake = FakeApi()
    monkeypatch.setattr(KubernetesApi, "connect", classmethod(lambda cls, kubeconfig: fake))
    return fake


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    inventory = tmp_path / "inventory.yaml"
    inventory.write_text("schema: 1\ncluster: prod\nnodes: [{name: n1, pool: mine}]\n")
    return Settings(
        data=tmp_path / "data", auth="off", inventory=inventory, kubernetes={"inventory": True, "cluster": "prod"}
    )


def look(service: Service, clock: VirtualClock) -> tuple[Any, ...]:
    clock.advance(30_000)
    service.maintain()
    return service.ledger.status().nodes


def test_what_the_cluster_says_and_what_is_written_make_one_history(settings, api, clock):
    api.put("Node", node("n1", ready=False))
    with Service(settings, clock) as service:
        assert [(n.pool, n.capacity_type) for n in service.ledger.status().nodes] == [("mine", "")]
        assert service._cluster is not None
        service._cluster.sync()
        (seen,) = look(service, clock)
        assert (seen.pool, seen.capacity_type, [d.end_ms for d in seen.down]) == ("mine", "on-demand", [None])
    # Another process: before it has seen the cluster it goes on with what the ledger knows.
    began = seen.down[0].start_ms
    with Service(settings, clock) as service:
        assert service.ledger.status().nodes == (seen,)
        assert look(service, clock) == (seen,)
        api.put("Node", node("n1", since="2026-10-01T01:00:30Z"))
        assert service._cluster is not None
        service._cluster.sync()
        (back,) = look(service, clock)
        assert back.down == (Down(began, 1_790_816_430_000, "NotReady"),)


def test_a_cluster_that_does_not_answer_stops_nothing(settings, api, clock):
    api.trouble = [ClusterUnavailable("no")] * 1_000
    with Service(settings, clock) as service:
        service.start()
        assert [n.pool for n in look(service, clock)] == ["mine"]


def test_a_cluster_that_cannot_be_found_is_said_at_the_start(tmp_path, clock):
    kubeconfig = tmp_path / "nowhere"
    settings = Settings(data=tmp_path / "data", auth="off", kubernetes={"inventory": True, "kubeconfig": kubeconfig})
    with pytest.raises(ClusterUnavailable, match="no access to a cluster"):
        Service(settings, clock)


START = 1_790_812_800_000  # 2026-10-01T00:00:00Z
MINUTE = 60_000


def minute(number: int, holder: Holder | None) -> ClosedSet:
    busy_us = MINUTE * 500 if holder else None
    return ClosedSet((interval(START + number * MINUTE, "GPU-1", holder, span_ms=MINUTE, busy_us=busy_us),))


INVENTORY = "schema: 1\ncluster: prod\nnamespaces:\n  - {name: vision, team: vision}\n"
POLICY = "queues:\n  - {name: speech, team: speech, refs: ['kai:speech']}\n"


@pytest.mark.parametrize(("queue_ref", "team"), [("kai:speech", "speech"), ("kai:unknown", "vision"), ("", "vision")])
def test_a_pod_that_came_and_went_while_the_accountant_was_down(tmp_path, queue_ref, team):
    clock = VirtualClock(START)
    (tmp_path / "inventory.yaml").write_text(INVENTORY)
    (tmp_path / "policy.yaml").write_text(POLICY)
    (tmp_path / "token").write_text("of-the-agent")
    entry = f"name: n1, token_sha256: {sha256('of-the-agent')}, scopes: [ingest], cluster: prod, node: n1"
    (tmp_path / "tokens.yaml").write_text(f"tokens:\n  - {{{entry}}}\n")
    settings = Settings(
        data=empty_ledger.data(tmp_path / "data"),
        tokens=tmp_path / "tokens.yaml",
        inventory=tmp_path / "inventory.yaml",
        policy=tmp_path / "policy.yaml",
        linger_ms=0,
    )
    outbox = Outbox(tmp_path / "outbox.sqlite", clock, fsync=False)
    uploaders: list[Uploader] = []

    def ship(url: str) -> str:
        uploader = Uploader(outbox, url, "prod", "n1", "boot", tmp_path / "token", clock)
        uploaders.append(uploader)
        result = uploader.ship()
        return result.outcome

    with Service(settings, clock) as service, serve(service.app, "127.0.0.1", 0) as url:
        outbox.append([minute(0, None)], [], None)
        clock.advance(MINUTE)
        assert ship(url) == "accepted"

    # Down. The pod is made, runs for ten minutes, and is gone.
    holder = Holder(kind="pod", uid="u1", namespace="vision", name="train-x", container="main")
    begun = PodFacts(
        seq=0, uid="u1", namespace="vision", name="train-x", node="n1", owners=(Owner("Job", "train"),),
        queue_ref=queue_ref, created_ms=START + MINUTE, started_ms=START + MINUTE, observed_ms=START + MINUTE,
    )  # fmt: skip
    outbox.append([minute(1, holder)], [begun], None)
    outbox.append([minute(number, holder) for number in range(2, 11)], [], None)
    clock.advance(10 * MINUTE)
    assert ship(url) == "retry"
    outbox.append([minute(11, None)], [], None)
    clock.advance(MINUTE)

    with Service(settings, clock) as service, serve(service.app, "127.0.0.1", 0) as url:
        assert ship(url) == "accepted"
        lines = present(service.ledger).usage((START, START + 12 * MINUTE), ("team", "job")).lines()
        assert present(service.ledger).imbalance(START, START + 12 * MINUTE).total_us == 0
    held = {tuple(line.key.values()): line.accounts_gpu_us.allocated // (MINUTE * 1000) for line in lines}
    assert {key: minutes for key, minutes in held.items() if minutes} == {(team, "Job/train"): 10}
    assert sum(line.accounts_gpu_us.total for line in lines) == 12 * MINUTE * 1000
    for uploader in uploaders:
        uploader.close()
    outbox.close()
