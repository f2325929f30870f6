"""Agents deliver with projected tokens over HTTPS: with the chart's accounts, roles, callers file and certificate, the
real programs, and token reviews of a real API server."""

from __future__ import annotations

import base64
import contextlib
import json
import ssl
import sys
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.chart.real.conftest import AGENTS, RELEASE, Recorder
from tests.deadlines import until
from tests.real.programs import free_ports, running

pytestmark = pytest.mark.real
NODES = ("delivery-1", "delivery-2")
RIGHTS = {"ServiceAccount", "ClusterRole", "ClusterRoleBinding"}


def gputally(*words: str) -> list[str]:
    return [sys.executable, "-m", "gputally", *words]


@dataclass(frozen=True)
class Installed:
    """A running accountant, and files with a token of each program's account."""

    url: str
    folder: Path
    tokens: dict[str, Path]

    def get(self, path: str) -> Any:
        """Send a request with the controller's token and the chart's certificate authority."""
        context = ssl.create_default_context(cafile=str(self.folder / "ca.crt"))
        token = self.tokens["fairshare"].read_text()
        request = urllib.request.Request(self.url + path, headers={"Authorization": f"Bearer {token}"})
        with urllib.request.urlopen(request, timeout=10, context=context) as answer:
            return json.load(answer)

    @contextlib.contextmanager
    def agent(self, name: str, token: str, node: str) -> Iterator[Path]:
        """Run an agent that reports as `node`. Yields its log."""
        (port,) = free_ports(1)
        log = self.folder / f"{name}.log"
        words = (
            "agent", "run", f"--simulated={self.folder / 'scenario.yaml'}", f"--node={node}", f"--port={port}",
            "--cluster=default", "--interval=1", "--sample=0.5", "--ship=1", f"--spool={self.folder / name}",
            f"--url={self.url}", f"--token-file={self.tokens[token]}", f"--ca-file={self.folder / 'ca.crt'}",
        )  # fmt: skip
        with running(gputally(*words), log):
            yield log


@pytest.fixture(scope="module")
def installed(recorder: Recorder, render: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installed]:
    folder = tmp_path_factory.mktemp("delivery")
    manifests = render({"agent": {"namespace": {"name": AGENTS}}})
    for manifest in manifests:
        if manifest["kind"] in RIGHTS:
            recorder.apply(manifest, dry_run=False)
    callers = folder / "callers.yaml"
    callers.write_text(manifests.find("ConfigMap", "accountant-callers")["data"]["callers.yaml"])
    for name, text in manifests.find("Secret", "accountant-tls")["data"].items():
        (folder / name).write_bytes(base64.b64decode(text))
    (folder / "scenario.yaml").write_text("gpus: [{model: H100}]\nevents: []\n")

    def token(account: str, namespace: str, audience: str = "gputally", pod: str = "") -> Path:
        file = folder / f"{account}-{pod}.token"
        file.write_text(recorder.server.token(namespace, f"gputally-{account}", audience, pod))
        return file

    tokens = {"fairshare": token("fairshare", RELEASE), "unbound": token("agent", AGENTS)}
    for node in NODES:
        recorder.send("POST", "/api/v1/nodes", {"metadata": {"name": node}})
        spec = {
            "nodeName": node,
            "serviceAccountName": "gputally-agent",
            "containers": [{"name": "c", "image": "none"}],
        }
        body = {"metadata": {"name": f"agent-of-{node}"}, "spec": spec}
        recorder.send("POST", f"/api/v1/namespaces/{AGENTS}/pods", body)
        tokens[node] = token("agent", AGENTS, pod=f"agent-of-{node}")
    (port,) = free_ports(1)
    own = recorder.server.token(RELEASE, "gputally-accountant")
    (folder / "settings.yaml").write_text(
        f"kubernetes: {{inventory: true, kubeconfig: {recorder.server.kubeconfig_for(own, folder)}}}\n"
    )
    words = (
        "accountant", "serve", f"--config={folder / 'settings.yaml'}", f"--data={folder / 'data'}",
        f"--listen=127.0.0.1:{port}", f"--callers={callers}", f"--tls-cert={folder / 'tls.crt'}",
        f"--tls-key={folder / 'tls.key'}",
    )  # fmt: skip
    log = folder / "accountant.log"
    with running(gputally(*words), log):
        found_here = Installed(f"https://127.0.0.1:{port}", folder, tokens)

        def answers() -> bool:
            with contextlib.suppress(OSError):
                return bool(found_here.get("/v1/gpus/owners") is not None)
            return False

        until(answers, lambda: log.read_text()[-3000:])
        yield found_here


def owners(installed: Installed) -> set[str]:
    """Return the nodes that have, had or claim a GPU."""
    found = installed.get("/v1/gpus/owners")["gpus"]
    return {one["node"] for gpu in found for one in (*gpu["owners"], *gpu["claims"])}


def test_an_agent_reports_for_the_node_of_its_pod_and_for_no_other(installed: Installed) -> None:
    first, second = NODES
    with (
        installed.agent("honest", first, first) as honest,
        installed.agent("liar", first, second) as liar,
        installed.agent("loose", "unbound", second) as loose,
    ):
        until(lambda: first in owners(installed), lambda: honest.read_text()[-3000:])
        until(lambda: "HTTP 403 wrong-origin" in liar.read_text(), lambda: liar.read_text()[-3000:])
        until(lambda: "HTTP 401 unauthenticated" in loose.read_text(), lambda: loose.read_text()[-3000:])
        assert owners(installed) == {first}


def test_who_does_not_trust_the_authority_sends_no_token(installed: Installed) -> None:
    with pytest.raises(OSError, match="CERTIFICATE_VERIFY_FAILED"):
        urllib.request.urlopen(f"{installed.url}/livez", timeout=10)
