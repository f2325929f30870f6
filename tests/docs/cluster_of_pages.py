"""The cluster for the commands of the pages: a real API server with the schedulers' kinds and the objects that pages
presuppose. Its nodes run nothing."""

from __future__ import annotations

import contextlib
import urllib.error
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import trustme

from gputally.advise.autoscaling_spot_and_sharing import NodePool, PoolAdvice, autoscaler_file
from gputally.kubernetes.objects import GPU, Object
from tests.docs import accountant_of_pages
from tests.fairshare.real_api_server import MERGE, standing
from tests.fairshare.scheduler_kinds import KINDS
from tests.real.controlplane import ApiServer

RELEASE = "gputally"
PROMETHEUS = "http://prometheus:9090"
VOLUME = f"ledger-{RELEASE}-accountant-0"
AGENT = f"{RELEASE}-agent-x7k2p"
STANDS_FOR = {
    "NAMESPACE": RELEASE, "AGENT-POD": AGENT, "NODE": "gpu-01", "LEDGER-PVC": VOLUME, "POD-NAMESPACE": "ml",
    "POD": "train-0", "REGISTRY": "registry.example", "PLATFORM": "gpu-operator",
}  # fmt: skip
GPU_NODE = {"nvidia.com/gpu.present": "true"}
LATENCIES = "\n".join(
    [
        "# TYPE chat_seconds histogram",
        *(
            f'chat_seconds_bucket{{le="{le}"}} {count * part} {(accountant_of_pages.NOW_MS - ago_ms) / 1000:.3f}'
            for le, part in (("0.05", 0), ("0.1", 1), ("+Inf", 1))
            for count, ago_ms in ((100, 240_000), (400, 120_000), (700, 1_000))
        ),
        "# EOF\n",
    ]
)
"""Latencies of the service `chat`: every request took between 50 and 100 ms."""


def furnish(server: ApiServer) -> None:
    """Create the objects that all pages share."""
    runtime = {"metadata": {"name": "nvidia"}, "handler": "nvidia"}
    server.request("POST", "/apis/node.k8s.io/v1/runtimeclasses", runtime)
    server.define("karpenter.sh", "v1", "nodepools", "NodePool", namespaced=False)
    growing = {"metadata": {"name": "fast"}, "provisioner": "csi.example", "allowVolumeExpansion": True}
    server.request("POST", "/apis/storage.k8s.io/v1/storageclasses", growing)


@contextlib.contextmanager
def around(server: ApiServer, *, installed: bool) -> Iterator[None]:
    """Create nodes, queues, waiting pods and the schedulers' configuration for one page, and remove them afterwards.
    installed: the release's namespace exists, with a pod and the ledger's claim."""
    with standing(server, [*accountant_of_pages.objects(), *_waiting(), *_configurations()], KINDS):
        for node in accountant_of_pages.MODELS:
            server.request("PATCH", f"/api/v1/nodes/{node}", {"metadata": {"labels": GPU_NODE}}, MERGE)
        if installed:
            _install(server)
        try:
            yield
        finally:
            _clear(server)


SECRETS = ("tokens.yaml", "me.token", "client.secret")


def stage(folder: Path) -> None:
    """Write the files that the pages name and expect the reader to have, or to make with a command that `make test`
    runs."""
    pool = NodePool("prod", "h100", "NVIDIA H100 80GB HBM3", "", "")
    advised = PoolAdvice(pool, 8, 2, 1, 2, (), 0, 0.0, 0, 0.0, 0, 0.0, 0.0, (8,), None, None)
    (folder / "limits.yaml").write_text(autoscaler_file("karpenter", [advised], 0.75, "two weeks"), "utf-8")
    authority = trustme.CA()
    pair = authority.issue_cert(f"{RELEASE}-accountant.{RELEASE}.svc")
    authority.cert_pem.write_to_path(folder / "ca.crt")
    pair.cert_chain_pems[0].write_to_path(folder / "tls.crt")
    pair.private_key_pem.write_to_path(folder / "tls.key")
    for name in SECRETS:
        (folder / name).write_text(name, "utf-8")


def leave_to_the_page(folder: Path) -> None:
    """Remove the files that the install page has its reader create."""
    for name in (*SECRETS, "ca.crt", "tls.crt", "tls.key", "prices.yaml", "policy.yaml"):
        (folder / name).unlink()


def _waiting() -> Iterator[Object]:
    """A waiting gang of each of two queues: ml/train of vision, serving/chat of serving."""
    for namespace, name, queue in (("ml", "train", "vision"), ("serving", "chat", "serving")):
        group = {"apiVersion": "scheduling.run.ai/v2alpha2", "kind": "PodGroup"}
        yield {
            **group, "metadata": {"name": name, "namespace": namespace}, "spec": {"queue": queue, "minMember": 1},
            "status": {"resourcesStatus": {"requested": {GPU: "1"}, "allocated": {}}},
        }  # fmt: skip
        container = {"name": "c", "image": "none", "resources": {"limits": {GPU: "1"}}}
        metadata = {
            "name": f"{name}-0", "namespace": namespace, "labels": {"kai.scheduler/queue": queue},
            "annotations": {"pod-group-name": name},
        }  # fmt: skip
        spec = {"schedulerName": "kai-scheduler", "containers": [container]}
        yield {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec, "status": {"phase": "Pending"}}


def _configurations() -> Iterator[Object]:
    """The configuration of Kueue and Volcano."""
    for namespace, name, key, text in (
        ("kueue-system", "kueue-manager-config", "controller_manager_config.yaml", "fairSharing: {enable: true}\n"),
        ("volcano-system", "volcano-scheduler-configmap", "volcano-scheduler.conf", "actions: allocate\ntiers: []\n"),
    ):
        metadata = {"name": name, "namespace": namespace}
        yield {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": {key: text}}


def _install(server: ApiServer) -> None:
    server.request("POST", "/api/v1/namespaces", {"metadata": {"name": RELEASE}})
    here = f"/api/v1/namespaces/{RELEASE}"
    pod: dict[str, Any] = {"metadata": {"name": AGENT, "labels": {"app.kubernetes.io/component": "agent"}}}
    pod["spec"] = {"containers": [{"name": "c", "image": "none"}]}  # on no node: nobody there would let it go
    server.request("POST", f"{here}/pods", pod)
    spec = {"accessModes": ["ReadWriteOncePod"], "storageClassName": "fast", "volumeName": "v"}
    spec["resources"] = {"requests": {"storage": "20Gi"}}
    server.request("POST", f"{here}/persistentvolumeclaims", {"metadata": {"name": VOLUME}, "spec": spec})
    bound = {"status": {"phase": "Bound", "capacity": {"storage": "20Gi"}, "accessModes": ["ReadWriteOncePod"]}}
    server.request("PATCH", f"{here}/persistentvolumeclaims/{VOLUME}/status", bound, MERGE)


def _clear(server: ApiServer) -> None:
    """Remove the release and its namespaces by hand, because no namespace controller runs."""
    for namespace in (RELEASE, f"{RELEASE}-agents"):
        here = f"/api/v1/namespaces/{namespace}"
        with contextlib.suppress(urllib.error.HTTPError):
            for claim in server.request("GET", f"{here}/persistentvolumeclaims")["items"]:
                path = f"{here}/persistentvolumeclaims/{claim['metadata']['name']}"
                server.request("PATCH", path, {"metadata": {"finalizers": None}}, MERGE)  # a controller would
            for plural in ("pods", "persistentvolumeclaims", "secrets", "configmaps"):
                server.request("DELETE", f"{here}/{plural}?gracePeriodSeconds=0")
            server.request("DELETE", here)
            server.request("PUT", f"{here}/finalize", {"metadata": {"name": namespace}, "spec": {"finalizers": []}})
