"""A real kube-apiserver on the loopback, for the suites that verify what the fakes imitate.

scripts/control-plane.sh builds the programs once from their Go modules and caches them. Each test run has one server,
each test its own namespace."""

from __future__ import annotations

import contextlib
import io
import json
import signal
import subprocess
import urllib.error
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from email.message import Message
from pathlib import Path
from typing import Any

import urllib3
import yaml

from tests.real.programs import built, free_ports, running, wait_ready

ADMIN_TOKEN = "admin-of-the-tests"
PLAIN_TOKEN = "nobody-in-particular"
ANYTHING = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}


@dataclass(frozen=True)
class ApiServer:
    """The server's address and certificate authority, and a kubeconfig for the administrator."""

    url: str
    ca_file: Path
    kubeconfig: Path
    assets: Path
    folder: Path
    again: Callable[[], subprocess.Popen[bytes]]
    """Starts it anew on the same etcd and waits until it is ready; what ran before has to be dead."""
    processes: list[subprocess.Popen[bytes]]
    """Every process that was started; the last one runs."""

    def kubeconfig_for(self, token: str, folder: Path, url: str = "") -> Path:
        """Write a kubeconfig that logs in with `token`. url: of a proxy in front of the server."""
        path = folder / f"kubeconfig-{token[-20:]}"
        path.write_text(yaml.safe_dump(_kubeconfig(url or self.url, self.ca_file, token)))
        return path

    def request(self, method: str, path: str, body: object = None, content_type: str = "application/json") -> Any:
        """Send a request as administrator, and return its answer. On HTTP 429 the request is repeated after the time
        the server names.

        Raises urllib.error.HTTPError for a refusal."""
        busy = urllib3.Retry(5, status_forcelist=[429], allowed_methods=None, raise_on_status=False, backoff_factor=0.2)
        headers = {"Authorization": f"Bearer {ADMIN_TOKEN}", "Content-Type": content_type}
        sent = None if body is None else json.dumps(body).encode()
        with urllib3.PoolManager(ca_certs=str(self.ca_file), retries=busy, timeout=20) as pool:
            answer = pool.request(method, self.url + path, body=sent, headers=headers)
        if answer.status >= 400:
            reason = answer.reason or ""
            raise urllib.error.HTTPError(self.url + path, answer.status, reason, Message(), io.BytesIO(answer.data))
        return json.loads(answer.data)

    def token(self, namespace: str, account: str, audience: str = "https://localhost", pod: str = "") -> str:
        """Return a token of a service account, bound to a pod if one is given."""
        spec: dict[str, Any] = {"audiences": [audience], "expirationSeconds": 3607}
        if pod:
            spec["boundObjectRef"] = {"kind": "Pod", "apiVersion": "v1", "name": pod}
        path = f"/api/v1/namespaces/{namespace}/serviceaccounts/{account}/token"
        return str(self.request("POST", path, {"spec": spec})["status"]["token"])

    def define(
        self,
        group: str,
        version: str,
        plural: str,
        kind: str,
        schema: Mapping[str, Any] = ANYTHING,
        *,
        namespaced: bool = True,
    ) -> None:
        """Define a custom resource that accepts what the schema allows. The server offers it a moment later."""
        served = {"name": version, "served": True, "storage": True, "schema": {"openAPIV3Schema": schema}}
        names = {"plural": plural, "kind": kind, "singular": kind.lower(), "listKind": f"{kind}List"}
        scope = "Namespaced" if namespaced else "Cluster"
        body: dict[str, Any] = {"metadata": {"name": f"{plural}.{group}"}}
        body["spec"] = {"group": group, "scope": scope, "names": names, "versions": [served]}
        if group.endswith(".k8s.io"):
            body["metadata"]["annotations"] = {"api-approved.kubernetes.io": "unapproved, of a test"}
        self.request("POST", "/apis/apiextensions.k8s.io/v1/customresourcedefinitions", body)

    def serves(self, path: str, plural: str) -> bool:
        """Return whether a group's version offers a kind."""
        try:
            return plural in {resource["name"] for resource in self.request("GET", path)["resources"]}
        except urllib.error.HTTPError:
            return False


@contextlib.contextmanager
def api_server(folder: Path, *flags: str) -> Iterator[ApiServer]:
    """Run etcd and kube-apiserver, with further `flags`, until the block ends."""
    programs = built("control-plane.sh")
    etcd_client, etcd_peer, port = free_ports(3)
    key = folder / "service-account.key"
    subprocess.run(["openssl", "genrsa", "-out", str(key), "2048"], check=True, capture_output=True)
    tokens = folder / "tokens.csv"
    tokens.write_text(f'{ADMIN_TOKEN},admin,admin,"system:masters"\n{PLAIN_TOKEN},plain,plain\n')
    etcd_url = f"http://127.0.0.1:{etcd_client}"
    etcd = [
        str(programs / "etcd"),
        f"--data-dir={folder / 'etcd'}",
        f"--listen-client-urls={etcd_url}",
        f"--advertise-client-urls={etcd_url}",
        f"--listen-peer-urls=http://127.0.0.1:{etcd_peer}",
        "--unsafe-no-fsync",
        "--log-level=error",
    ]
    server = [
        str(programs / "kube-apiserver"),
        f"--etcd-servers={etcd_url}",
        f"--secure-port={port}",
        "--bind-address=127.0.0.1",
        f"--cert-dir={folder / 'certs'}",
        "--service-cluster-ip-range=10.0.0.0/24",
        "--service-account-issuer=https://localhost",
        f"--service-account-key-file={key}",
        f"--service-account-signing-key-file={key}",
        "--authorization-mode=RBAC",
        f"--token-auth-file={tokens}",
        "--disable-admission-plugins=ServiceAccount",
        *flags,
    ]
    url = f"https://127.0.0.1:{port}"
    processes: list[subprocess.Popen[bytes]] = []
    with contextlib.ExitStack() as stack:
        stack.enter_context(running(etcd, folder / "etcd.log"))

        def start() -> subprocess.Popen[bytes]:
            """Start the server again on the same etcd and wait until it is ready. The previous process has to have
            ended."""
            log = folder / f"kube-apiserver-{len(processes)}.log"
            process = stack.enter_context(running(server, log))
            wait_ready(f"{url}/readyz", process, log, {"Authorization": f"Bearer {ADMIN_TOKEN}"})
            processes.append(process)
            return process

        start()
        ca_file = folder / "certs" / "apiserver.crt"
        kubeconfig = folder / "kubeconfig"
        kubeconfig.write_text(yaml.safe_dump(_kubeconfig(url, ca_file, ADMIN_TOKEN)))
        yield ApiServer(url, ca_file, kubeconfig, programs, folder, start, processes)


@contextlib.contextmanager
def frozen(server: ApiServer) -> Iterator[None]:
    """Let the API server accept connections without answering until the block ends."""
    server.processes[-1].send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        server.processes[-1].send_signal(signal.SIGCONT)


@contextlib.contextmanager
def killed(server: ApiServer) -> Iterator[None]:
    """Kill the API server, and start it again on the same etcd when the block ends."""
    server.processes[-1].kill()
    server.processes[-1].wait()
    try:
        yield
    finally:
        server.again()


@contextlib.contextmanager
def scheduler(
    server: ApiServer, folder: Path, extenders: list[dict[str, object]] | None = None, *flags: str
) -> Iterator[Path]:
    """Run the real kube-scheduler with these `extenders` and further `flags`. Yields its log."""
    document = {
        "apiVersion": "kubescheduler.config.k8s.io/v1",
        "kind": "KubeSchedulerConfiguration",
        "clientConnection": {"kubeconfig": str(server.kubeconfig)},
        "leaderElection": {"leaderElect": False},
        "podInitialBackoffSeconds": 1,
        "podMaxBackoffSeconds": 1,
        "extenders": extenders or [],
    }
    config = folder / "scheduler.yaml"
    config.write_text(yaml.safe_dump(document))
    command = [str(server.assets / "kube-scheduler"), f"--config={config}", "--secure-port=0", "-v=2", *flags]
    log = folder / "kube-scheduler.log"
    with running(command, log):
        yield log


@contextlib.contextmanager
def controller_manager(server: ApiServer, folder: Path) -> Iterator[None]:
    """Run the real kube-controller-manager, for disruption budgets, owner references and Jobs."""
    command = [
        str(server.assets / "kube-controller-manager"),
        f"--kubeconfig={server.kubeconfig}",
        "--secure-port=0",
        "--leader-elect=false",
        f"--service-account-private-key-file={server.folder / 'service-account.key'}",
    ]
    with running(command, folder / "kube-controller-manager.log"):
        yield


def _kubeconfig(url: str, ca_file: Path, token: str) -> dict[str, object]:
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "tests", "cluster": {"server": url, "certificate-authority": str(ca_file)}}],
        "users": [{"name": "tests", "user": {"token": token}}],
        "contexts": [{"name": "tests", "context": {"cluster": "tests", "user": "tests"}}],
        "current-context": "tests",
    }
