"""The pages' commands that need a cluster, run as written: with kubectl and helm, a real API server and, for latencies,
a real Prometheus. Commands that need a node with running pods are marked `kubelet` and do not run."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator

import pytest
from kubernetes.config import kube_config

from gputally.kubernetes.scheduler_plugins import schedulers
from tests.docs import cluster_of_pages
from tests.docs.code_blocks import PAGES, with_commands
from tests.docs.page_commands import Shell, follow
from tests.fairshare.real_api_server import served
from tests.real.controlplane import ApiServer
from tests.real.programs import built
from tests.real.prometheus import backfill, prometheus

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif("kai" not in schedulers(), reason="the pages show this scheduler"),
]
INSTALL = "docs/install.md"
"""The page runs as a whole, from a checkout without the files that it names."""
HELM = ("helm", "--namespace", cluster_of_pages.RELEASE)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    with served(tmp_path_factory.mktemp("controlplane")) as running:
        cluster_of_pages.furnish(running)
        yield running


@pytest.fixture(scope="module")
def latencies(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("prometheus")
    backfill(cluster_of_pages.LATENCIES, folder)
    with prometheus(folder) as running:
        yield running.url


@pytest.fixture
def desk(shell: Shell, server: ApiServer, monkeypatch: pytest.MonkeyPatch) -> Shell:
    """A shell whose kubectl, helm and gputally use that API server and no other."""
    monkeypatch.setattr(kube_config, "KUBE_CONFIG_DEFAULT_LOCATION", str(server.kubeconfig))
    clients = built("clients.sh")
    shell.environ |= {
        "KUBECONFIG": str(server.kubeconfig),
        "HOME": str(shell.folder),
        "PATH": f"{clients}{os.pathsep}{os.environ['PATH']}",
    }
    cluster_of_pages.stage(shell.folder)
    return shell


def typed(desk: Shell, *words: str) -> None:
    """Run the commands that a page presupposes."""
    environ = {**os.environ, **desk.environ}
    done = subprocess.run(words, cwd=desk.folder, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("page", with_commands("cluster"))
def test_the_commands_of_the_page_run_on_a_cluster(
    page: str, desk: Shell, server: ApiServer, request: pytest.FixtureRequest
) -> None:
    commands = "".join(block.text for block in PAGES[page] if block.mark == "cluster")
    stands_for = dict(cluster_of_pages.STANDS_FOR)
    if cluster_of_pages.PROMETHEUS in commands:
        stands_for[cluster_of_pages.PROMETHEUS] = request.getfixturevalue("latencies")
    installs = "helm install" in commands
    with cluster_of_pages.around(server, installed=not installs):
        if not installs and ("helm" in commands or "deployment" in commands):
            values = ("--values", "helm/gputally/examples/kai.yaml")
            typed(desk, *HELM, "install", cluster_of_pages.RELEASE, "helm/gputally", *values)
        try:
            marks: list[str | None] = ["cluster"]
            if page == INSTALL:
                cluster_of_pages.leave_to_the_page(desk.folder)
                marks.append(None)
            otherwise = follow(page, marks, desk, stands_for)
        finally:
            typed(desk, *HELM, "uninstall", cluster_of_pages.RELEASE, "--ignore-not-found")
    assert otherwise == [], "\n\n".join(otherwise)
