"""One API server for the whole folder, with every scheduler's CustomResourceDefinitions, and a memory beside it."""

from __future__ import annotations

import json
import ssl
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import yaml

from fairshare.cluster import KubernetesCluster
from fairshare.errors import NotFound, Unavailable
from fairshare.kinds import Kind
from fairshare.memory import MemoryCluster
from fairshare.ports import Cluster
from fairshare.targets import KINDS
from tests.real.controlplane import ADMIN_TOKEN, ApiServer, api_server
from tests.shelf import shared

Request = Callable[..., Any]
PATIENCE_S = 30.0
EXTRA = (
    Kind("policy/v1", "PodDisruptionBudget", "poddisruptionbudgets", namespaced=True),
    Kind("coordination.k8s.io/v1", "Lease", "leases", namespaced=True, status=False),
)


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    """With the definitions of KAI, Kueue and Volcano that are read or written, established."""
    with api_server(tmp_path_factory.mktemp("controlplane")) as running, ThreadPoolExecutor(8) as several:
        path = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
        list(several.map(lambda document: send(running, "POST", path, document), _definitions()))
        cluster = KubernetesCluster.connect(KINDS, running.kubeconfig)
        for kind in KINDS:
            until(lambda kind=kind: _served(cluster, kind), f"{kind.kind} is not served")
        yield running


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
    """An object of this test alone."""
    return "q-" + "".join(c if c.isalnum() else "-" for c in request.node.name.lower())[-50:].strip("-")


@pytest.fixture
def ask(server: ApiServer) -> Request:
    """The administrator's own request."""
    return lambda method, path, body=None, **options: send(server, method, path, body, **options)


def send(server: ApiServer, method: str, path: str, body: object = None, content_type: str = "application/json") -> Any:
    request = urllib.request.Request(
        server.url + path,
        None if body is None else json.dumps(body).encode(),
        {"Authorization": f"Bearer {ADMIN_TOKEN}", "Content-Type": content_type},
        method=method,
    )
    context = ssl.create_default_context(cafile=str(server.ca_file))
    with urllib.request.urlopen(request, timeout=10, context=context) as answer:
        return json.load(answer)


def until(done: Callable[[], Any], otherwise: str, patience_s: float = PATIENCE_S) -> Any:
    """Look again and again at programs that have their own time; the truth, as soon as there is one."""
    end = time.monotonic() + patience_s
    while time.monotonic() < end:
        found = done()
        if found:
            return found
        time.sleep(0.05)
    pytest.fail(otherwise)


def _definitions() -> Iterator[dict[str, Any]]:
    """Of kinds that concern us: every further one costs the API server a schema to publish."""
    wanted = {(kind.api_version.partition("/")[0], kind.plural) for kind in KINDS}
    for scheduler in ("kai", "kueue", "volcano"):
        found = 0
        for path in sorted(shared(f"crds/{scheduler}").glob("*.yaml")):
            text = path.read_text()
            if not any(f"name: {plural}.{group}\n" in text for group, plural in wanted):
                continue
            found += 1
            yield yaml.load(text, Loader=yaml.CSafeLoader)  # the C one: megabytes
        assert found, f"no definition of {scheduler}"


def _served(cluster: KubernetesCluster, kind: Kind) -> bool:
    try:
        cluster.list(kind)
    except (NotFound, Unavailable):
        return False
    return True
