"""A real kube-apiserver on loopback, for the suites that prove what a fake only claims.

The programs come from scripts/control-plane.sh (built once from Go modules, cached). One server per
test run, one namespace per test.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import yaml

ADMIN_TOKEN = "admin-of-the-tests"
PLAIN_TOKEN = "nobody-in-particular"
READY_SECONDS = 60


@dataclass(frozen=True)
class ApiServer:
    """Where it listens, its certificate authority, and a kubeconfig for the administrator."""

    url: str
    ca_file: Path
    kubeconfig: Path
    assets: Path

    def kubeconfig_for(self, token: str, folder: Path) -> Path:
        """A kubeconfig that logs in with `token`."""
        path = folder / f"kubeconfig-{token}"
        path.write_text(yaml.safe_dump(_kubeconfig(self.url, self.ca_file, token)))
        return path


def assets() -> Path:
    """The folder with the programs. Raises RuntimeError with the end of the build's output."""
    script = Path(__file__).parents[2] / "scripts" / "control-plane.sh"
    built = subprocess.run(["sh", str(script)], capture_output=True, text=True, check=False)
    if built.returncode:
        raise RuntimeError("the control plane could not be built:\n" + built.stderr[-2000:])
    return Path(built.stdout.strip())


@contextlib.contextmanager
def api_server(folder: Path) -> Iterator[ApiServer]:
    """Run etcd and kube-apiserver until the block ends."""
    programs = assets()
    etcd_client, etcd_peer, port = _free_ports(3)
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
    ]
    url = f"https://127.0.0.1:{port}"
    with _running(etcd, folder / "etcd.log"), _running(server, folder / "kube-apiserver.log") as process:
        _wait_ready(url, process, folder / "kube-apiserver.log")
        ca_file = folder / "certs" / "apiserver.crt"
        kubeconfig = folder / "kubeconfig"
        kubeconfig.write_text(yaml.safe_dump(_kubeconfig(url, ca_file, ADMIN_TOKEN)))
        yield ApiServer(url, ca_file, kubeconfig, programs)


@contextlib.contextmanager
def _running(command: list[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, cwd=log.parent)
        try:
            yield process
        finally:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait_ready(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    request = urllib.request.Request(f"{url}/readyz", headers={"Authorization": f"Bearer {ADMIN_TOKEN}"})
    for _ in range(READY_SECONDS * 5):
        with (
            contextlib.suppress(urllib.error.URLError, OSError),
            urllib.request.urlopen(request, timeout=2, context=context) as answer,
        ):
            if answer.status == 200:
                return
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(0.2)  # the pause between two looks, cut short when the server dies
            raise RuntimeError(f"kube-apiserver ended:\n{log.read_text(errors='replace')[-2000:]}")
    raise RuntimeError(f"kube-apiserver is not ready:\n{log.read_text(errors='replace')[-2000:]}")


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [int(each.getsockname()[1]) for each in sockets]


def _kubeconfig(url: str, ca_file: Path, token: str) -> dict[str, object]:
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "tests", "cluster": {"server": url, "certificate-authority": str(ca_file)}}],
        "users": [{"name": "tests", "user": {"token": token}}],
        "contexts": [{"name": "tests", "context": {"cluster": "tests", "user": "tests"}}],
        "current-context": "tests",
    }
