"""The commands of the install page, all of them in order, on a real API server, timed.

They run from the top until the accountant's page has true figures, and then one file for each later step. Two nodes are
names with the labels of real ones. tests/real/pods.py plays their kubelet; the agent's GPUs are its simulated source.
Everything else comes from the chart: arguments, files, accounts, roles, tokens, certificates."""

from __future__ import annotations

import contextlib
import json
import os
import ssl
import time
import urllib.error
import urllib.request
from base64 import b64encode
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gputally.kubernetes.objects import GPU
from tests.deadlines import until
from tests.docs import cluster_of_pages
from tests.docs.code_blocks import COMMANDS, PAGES, ROOT, CodeBlock, steps
from tests.docs.conftest import FOLDERS
from tests.docs.page_commands import Shell, put
from tests.fairshare.real_api_server import MERGE, served
from tests.real.controlplane import ApiServer
from tests.real.pods import LocalPod, selected
from tests.real.programs import built, free_ports

pytestmark = pytest.mark.real
PAGE, SPACE = "docs/install.md", "gputally"
TEN_MINUTES_S = 600
FIRST_FIGURES_S = 60 + 30
"""Seconds of an interval and a delivery by the chart's defaults, which the test shortens."""
NODES = {
    "gpu-operator": {"nvidia.com/gpu.present": "true"},
    "gke": {"cloud.google.com/gke-gpu-driver-version": "latest"},
    "cpu": {"kubernetes.io/os": "linux"},
}
SCENARIO = """
gpus: [{model: H100}, {model: H100}]
events:
  - {after_ms: 0, place: {gpu: 0, namespace: vision, pod: train-0, utilisation_ppm: 930000, memory_mib: 61440}}
"""


class Reader:
    """Runs the page's commands, and plays the nodes where they are needed."""

    def __init__(self, server: ApiServer, folder: Path, nodes: contextlib.ExitStack) -> None:
        self.server, self.folder, self.nodes = server, folder, nodes
        self.took_s = 0.0
        (self.port,) = free_ports(1)
        environ = {
            "KUBECONFIG": str(server.kubeconfig), "HOME": str(folder), "COLUMNS": "160",
            "PATH": f"{built('clients.sh')}{os.pathsep}{os.environ['PATH']}",
        }  # fmt: skip
        self.shell = Shell(folder, environ, in_process=False)
        self.said: dict[str, str] = {}
        self.accountant: LocalPod | None = None
        self.log: Path | None = None

    def section(self, title: str) -> None:
        """Run every command under a heading."""
        for block in _blocks(title):
            put(self.folder, block)
            if block.language in COMMANDS:
                for step in steps(block):
                    self.type(step.command)

    def type(self, command: str) -> None:
        """Run a command of the page. A command for a node is carried out here instead."""
        if any(words in command for words in ("rollout status", "helm test", "port-forward")):
            return  # the accountant listens on this machine already
        command = command.replace("REGISTRY", "registry.example").replace("127.0.0.1:8080", f"127.0.0.1:{self.port}")
        if "fairshare plan" in command:  # windows end at a whole minute: a reader is slower than the first one
            until(lambda: self.shell.run(command).code == 0, lambda: self.shell.run(command).printed, 120)
        began = time.monotonic()
        done = self.shell.run(command)
        self.took_s += time.monotonic() - began
        assert done.code == 0, f"{command}\n{done.printed}"
        self.said[command.split(" --")[0]] = done.printed

    def start(self) -> None:
        """Do the work of the scheduler and the kubelets for the installed workloads."""
        for node, labels in NODES.items():
            self.server.request("POST", "/api/v1/nodes", {"metadata": {"name": node, "labels": labels}})
            offered = {"cpu": "64", "memory": "512Gi", "pods": "110", **({} if node == "cpu" else {GPU: "2"})}
            ready = [{"type": "Ready", "status": "True"}]
            status = {"status": {"capacity": offered, "allocatable": offered, "conditions": ready}}
            self.server.request("PATCH", f"/api/v1/nodes/{node}/status", status, MERGE)
            # The controller of nodes would take `not-ready` away.
            self.server.request("PATCH", f"/api/v1/nodes/{node}", {"spec": {"taints": None}}, MERGE)
        self.start_accountant("gputally-accountant-0")
        path = f"/apis/apps/v1/namespaces/{SPACE}"
        meter = self.server.request("GET", f"{path}/daemonsets/gputally-agent")
        (self.folder / "scenario.yaml").write_text(SCENARIO)
        spec = meter["spec"]["template"]["spec"]
        assert spec["runtimeClassName"] == "nvidia", "the cluster of the pages has this RuntimeClass"
        chosen = [node for node, labels in NODES.items() if selected(spec["affinity"], labels)]
        assert chosen == ["gpu-operator", "gke"]
        for node in chosen:
            (port,) = free_ports(1)
            instead: dict[str, str | None] = {
                r"^--kubelet-socket=.*": f"--simulated={self.folder / 'scenario.yaml'}",
                r"^--url=.*": f"--url=https://localhost:{self.port}",
                r"^--interval=.*": "--interval=1", r"^--sample=.*": "--sample=0.5", r"^--ship=.*": "--ship=1",
                r"^--port=.*": f"--port={port}",
                r"^--privilege=.*": "--api-url=off",  # the pods of a scenario are on no API server
            }  # fmt: skip
            agent = LocalPod(self.server, self.folder / "pods" / node, meter, f"gputally-agent-{node}", node, instead)
            self.nodes.enter_context(agent.run())

    def start_accountant(self, name: str) -> None:
        """Start a pod of the StatefulSet as it is now."""
        path = f"/apis/apps/v1/namespaces/{SPACE}/statefulsets/gputally-accountant"
        workload = self.server.request("GET", path)
        ledger = {"name": "ledger", "emptyDir": {}}  # of the claim that its controller makes
        workload["spec"]["template"]["spec"]["volumes"].append(ledger)
        listen = {r"^--listen=.*": f"--listen=127.0.0.1:{self.port}"}
        pod = LocalPod(self.server, self.folder / "pods" / name, workload, name, "cpu", listen)
        own = self.server.kubeconfig_for(pod.token("https://localhost"), self.folder)
        pod.more = {"GPUTALLY_ACCOUNTANT_KUBERNETES__KUBECONFIG": str(own)}
        self.accountant = pod
        self.ended = self.nodes.enter_context(contextlib.ExitStack())
        self.log = self.ended.enter_context(pod.run())

    def restart_accountant(self) -> None:
        """Restart the accountant as the StatefulSet's controller does after an upgrade, with an empty ledger."""
        self.ended.close()
        self.start_accountant("gputally-accountant-0-upgraded")

    def accepted(self, file: str) -> int:
        """Return the status of a request with this file's token; 0 if there is no answer."""
        try:
            self._ask("/v1/periods", "Bearer " + (self.folder / file).read_text().strip())
            return 200
        except urllib.error.HTTPError as error:
            return error.code
        except OSError:
            return 0

    def pages(self, path: str) -> str:
        """Request a page as a browser does, with the token as password."""
        token = (self.folder / "me.token").read_text().strip()
        return self._ask(path, "Basic " + b64encode(f"me:{token}".encode()).decode())

    def _ask(self, path: str, authorization: str) -> str:
        context = ssl.create_default_context(cafile=str(self.folder / "ca.crt"))
        url = f"https://127.0.0.1:{self.port}{path}"
        asked = urllib.request.Request(url, headers={"Authorization": authorization})
        with urllib.request.urlopen(asked, timeout=20, context=context) as answer:
            return str(answer.read().decode())

    def usage(self) -> list[dict[str, Any]]:
        """Send the page's own query; returns nothing while the accountant is down or has no record."""
        words = "gputally accountant usage --by gpu_model,namespace --token-file me.token --output json"
        done = self.shell.run(words)
        return list(json.loads(done.printed)["lines"]) if done.code == 0 and done.printed.startswith("{") else []


def _blocks(title: str) -> Iterator[CodeBlock]:
    """Return the blocks of a section of the page."""
    lines = (ROOT / PAGE).read_text("utf-8").splitlines()
    begin = lines.index(f"## {title}") + 1
    end = next((n for n, line in enumerate(lines[begin:], begin + 1) if line.startswith("## ")), len(lines) + 1)
    yield from (block for block in PAGES[PAGE] if begin < block.line < end)


@pytest.fixture
def reader(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reader]:
    for name in FOLDERS:
        (tmp_path / name).symlink_to(ROOT / name)
    with served(tmp_path_factory.mktemp("controlplane")) as server, contextlib.ExitStack() as nodes:
        cluster_of_pages.furnish(server)
        yield Reader(server, tmp_path, nodes)


def test_from_nothing_to_true_figures_and_one_file_for_each_later_step(reader: Reader) -> None:
    reader.section("1. Install")
    installed = time.monotonic()
    reader.start()
    reader.section("2. Wait for the pods")
    commands = [step for block in _blocks("3. See the figures") for step in steps(block) if block.language in COMMANDS]
    for step in commands[:-1]:
        reader.type(step.command)
    reader.shell.environ |= {
        "GPUTALLY_URL": f"https://127.0.0.1:{reader.port}", "GPUTALLY_CA_FILE": str(reader.folder / "ca.crt"),
    }  # fmt: skip
    log = reader.log
    assert log is not None
    rows = until(lambda: len(found := reader.usage()) > 1 and found, lambda: log.read_text()[-3000:], 120)
    reader.type(commands[-1].command)
    figures_s = reader.took_s + time.monotonic() - installed + FIRST_FIGURES_S
    assert figures_s < TEN_MINUTES_S
    held = {row["key"]["namespace"]: row["accounts_gpu_us"] for row in rows}
    assert set(held) == {"", "vision"}
    allocated = held["vision"]["busy"] + held["vision"]["allocated_idle"]
    assert held["vision"]["busy"] == pytest.approx(0.93 * allocated, rel=0.02), "as the scenario has it"
    assert held[""]["unallocated"] == pytest.approx(allocated, rel=0.02), "the other GPU of each node"
    assert "Example prices." in reader.pages("/")

    reader.section("4. Your prices")
    assert reader.accountant is not None
    reader.accountant.mount()  # the kubelet's next look
    until(lambda: "Example prices." not in reader.pages("/prices"), lambda: reader.pages("/prices"))
    assert "contract" in reader.pages("/prices")

    for title in ("5. Your policy", "6. Enforce"):
        reader.section(title)
    tokens, *_ = (block for block in _blocks("People and tokens") if block.language in COMMANDS)
    for step in steps(tokens):
        reader.type(step.command)
    assert reader.accepted("admin.token") == 401
    reader.restart_accountant()
    until(lambda: reader.accepted("admin.token") == 200, lambda: reader.log.read_text()[-3000:] if reader.log else "")
    config = reader.server.request("GET", f"/api/v1/namespaces/{SPACE}/configmaps/gputally-fairshare-policy")
    assert "apply: enforce" in config["data"]["policy.yaml"]
    prices = reader.server.request("GET", f"/api/v1/namespaces/{SPACE}/configmaps/gputally-accountant-prices")
    assert "contract" in prices["data"]["prices.yaml"], "a later step keeps the earlier ones"
    print(f"\n{figures_s:.0f} s to the first true figures, {FIRST_FIGURES_S} s of them the first interval and delivery")
