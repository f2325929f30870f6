"""An accountant that also watches a Kubernetes API server."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from accountant.inventory.kubernetes_inventory import ClusterInventory
from gputally.base.clock import VirtualClock
from tests.inventory.memory_api_server import FakeApi, node, pod
from tests.seams.site import Site, site

REFRESH_MS = 30_000
"""How often the accountant asks the API server."""


@dataclass(frozen=True)
class Watched:
    """The objects of the API server, as the accountant sees them."""

    site: Site
    api: FakeApi
    inventory: ClusterInventory

    def show_node(self, name: str, pool: str) -> None:
        self.api.put("Node", node(name, labels={"gputally.dev/pool": pool}))

    def show_pod(self, name: str, owner: tuple[str, str], created_ms: int, scheduled_ms: int, started_ms: int) -> None:
        """Show a running pod of the namespace vision. owner: kind and name of its Kubeflow or batch workload."""
        placed = {"type": "PodScheduled", "status": "True", "lastTransitionTime": written(scheduled_ms)}
        begun = {"name": "main", "state": {"running": {"startedAt": written(started_ms)}}}
        api = "batch/v1" if owner[0] == "Job" else "kubeflow.org/v1"
        status = {"phase": "Running", "conditions": [placed], "containerStatuses": [begun]}
        shown = pod(name, owners=[(api, *owner)], status=status)
        shown["metadata"]["creationTimestamp"] = written(created_ms)
        self.api.put("Pod", shown)

    def read(self) -> None:
        """Let the accountant read the API server now."""
        self.inventory.follow()
        self.site.service.maintain()


def written(at_ms: int) -> str:
    return datetime.fromtimestamp(at_ms // 1000, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


@contextmanager
def watched(folder: Path, now_ms: int, pool: str, **settings: Any) -> Iterator[Watched]:
    """Run an accountant of the cluster prod with one node n1 in a pool, whose namespaces are teams."""
    api, clock = FakeApi(), VirtualClock(now_ms)
    api.put("Namespace", {"metadata": {"name": "vision", "labels": {"gputally.dev/team": "vision"}}})
    api.put("Node", node("n1", labels={"gputally.dev/pool": pool}))
    inventory = ClusterInventory(api, clock, "prod")
    inventory.sync()
    given = {"refresh_seconds": REFRESH_MS // 1000, **settings}
    with site(folder, clock, inventory_source=inventory, **given) as found:
        yield Watched(found, api, inventory)
