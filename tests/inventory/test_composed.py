"""The service with a cluster beside it: it serves whatever the cluster does, and the histories go on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from accountant.composition import Service
from accountant.core.settings import Settings
from accountant.ledger.protocols import Down
from gputally.base.clock import VirtualClock
from gputally.base.errors import Unavailable
from gputally.kubernetes.api_client import KubernetesApi
from tests.inventory.api import FakeApi, node

pytestmark = pytest.mark.usefixtures("logs")


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> FakeApi:
    """In the place of the API server that the settings name."""
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
    return service.ledger.nodes()


def test_what_the_cluster_says_and_what_is_written_make_one_history(
    settings: Settings, api: FakeApi, clock: VirtualClock
) -> None:
    api.put("Node", node("n1", ready=False))
    with Service(settings, clock) as service:
        assert [(n.pool, n.capacity_type) for n in service.ledger.nodes()] == [("mine", "")]
        assert service._cluster is not None
        service._cluster.sync()
        (seen,) = look(service, clock)
        assert (seen.pool, seen.capacity_type, [d.end_ms for d in seen.down]) == ("mine", "on-demand", [None])
    # Another process: before it has seen the cluster it goes on with what the ledger knows.
    began = seen.down[0].start_ms
    with Service(settings, clock) as service:
        assert service.ledger.nodes() == (seen,)
        assert look(service, clock) == (seen,)
        api.put("Node", node("n1", since="2026-10-01T01:00:30Z"))
        assert service._cluster is not None
        service._cluster.sync()
        (back,) = look(service, clock)
        assert back.down == (Down(began, 1_790_816_430_000, "NotReady"),)


def test_a_cluster_that_does_not_answer_stops_nothing(settings: Settings, api: FakeApi, clock: VirtualClock) -> None:
    api.trouble = [Unavailable("no")] * 1_000
    with Service(settings, clock) as service:
        service.start()
        assert [n.pool for n in look(service, clock)] == ["mine"]


def test_a_cluster_that_cannot_be_found_is_said_at_the_start(tmp_path: Path, clock: VirtualClock) -> None:
    kubeconfig = tmp_path / "nowhere"
    settings = Settings(data=tmp_path / "data", auth="off", kubernetes={"inventory": True, "kubeconfig": kubeconfig})
    with pytest.raises(Unavailable, match="no access to a cluster"):
        Service(settings, clock)
