"""Helm installs and upgrades the chart: random values are generated once."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from typing import Any

import pytest

from tests.chart.conftest import CHART
from tests.chart.real.conftest import Recorder
from tests.deadlines import until
from tests.real.programs import built

pytestmark = pytest.mark.real
RELEASE, AGENTS = "upgrades", "upgrades-agents"
GROUP = "monitoring.coreos.com"
SETTINGS = ("--set", "monitoring.enabled=true", "--set", f"agent.namespace.name={AGENTS}")
MADE = ("gputally-accountant-tls", "gputally-metrics-token")


@pytest.fixture
def helm(recorder: Recorder) -> Iterator[Any]:
    """Run helm in the release's namespace; the release is removed afterwards."""
    for plural, kind in (("servicemonitors", "ServiceMonitor"), ("podmonitors", "PodMonitor")):
        recorder.server.define(GROUP, "v1", plural, kind)
        until(
            lambda name=plural: recorder.server.serves(f"/apis/{GROUP}/v1", name), lambda: "the monitors are not served"
        )

    for space in (RELEASE, AGENTS):
        recorder.make_namespace(space)

    def run(*words: str) -> str:
        program = str(built("clients.sh") / "helm")
        common = ("--namespace", RELEASE, "--kubeconfig", str(recorder.server.kubeconfig))
        done = subprocess.run([program, *words, *common], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    yield run
    run("uninstall", "gputally", "--ignore-not-found")


def test_an_upgrade_keeps_certificate_authority_and_token(recorder: Recorder, helm: Any) -> None:
    def made() -> dict[str, Any]:
        secrets = {name: recorder.send("GET", f"/api/v1/namespaces/{RELEASE}/secrets/{name}")["data"] for name in MADE}
        path = "/api/v1/namespaces/{}/configmaps/gputally-authority"
        maps = {space: recorder.send("GET", path.format(space))["data"] for space in (RELEASE, AGENTS)}
        return {**secrets, **maps}

    helm("install", "gputally", str(CHART), *SETTINGS)
    first = made()
    assert first[RELEASE] == first[AGENTS]
    helm("upgrade", "gputally", str(CHART), *SETTINGS, "--set", "fairshare.replicas=1")
    assert made() == first
    recorder.send("DELETE", f"/api/v1/namespaces/{RELEASE}/secrets/{MADE[0]}")
    helm("upgrade", "gputally", str(CHART), *SETTINGS)
    second = made()
    assert second[RELEASE] == second[AGENTS] != first[RELEASE], "another pair, and its authority with it"
    assert second[MADE[1]] == first[MADE[1]]
