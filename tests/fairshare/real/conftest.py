"""One API server for the folder's tests, with the CustomResourceDefinitions of all schedulers, and a cluster in
memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gputally.kubernetes.api_client import KubernetesCluster
from gputally.kubernetes.memory_cluster import MemoryCluster
from gputally.kubernetes.objects import Cluster, Kind
from tests.fairshare.real.chart_roles import install
from tests.fairshare.scheduler_kinds import KINDS
from tests.real.controlplane import ApiServer

Request = Callable[..., Any]
EXTRA = (Kind("coordination.k8s.io/v1", "Lease", "leases", namespaced=True, status=False),)


@pytest.fixture(params=["memory", "real"])
def cluster(request: pytest.FixtureRequest) -> Cluster:
    if request.param == "memory":
        return MemoryCluster((*KINDS, *EXTRA))
    return KubernetesCluster.connect((*KINDS, *EXTRA), request.getfixturevalue("server").kubeconfig)


@pytest.fixture
def real(server: ApiServer) -> KubernetesCluster:
    return KubernetesCluster.connect((*KINDS, *EXTRA), server.kubeconfig)


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    """The name of an object that only this test uses."""
    return "q-" + "".join(c if c.isalnum() else "-" for c in request.node.name.lower())[-50:].strip("-")


@pytest.fixture
def ask(server: ApiServer) -> Request:
    """Return a function that sends a request as administrator."""
    return lambda method, path, body=None, **options: server.request(method, path, body, **options)


@pytest.fixture(scope="session")
def installed(server: ApiServer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A kubeconfig with a token of the controller's service account, whose roles are those of the chart."""
    return install(server, tmp_path_factory.mktemp("installed"), "gputally", {})


@pytest.fixture(scope="session")
def preempting(server: ApiServer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same for a release that may preempt."""
    values = {"fairshare": {"rbac": {"preempt": True}}}
    return install(server, tmp_path_factory.mktemp("preempting"), "preempting", values)
