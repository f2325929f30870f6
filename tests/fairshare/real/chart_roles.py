"""Installs the chart's roles on a real API server, and creates KAI queues with the fields that KAI's controller
writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import helm_python
import yaml

from fairshare.schedulers.kai.kinds import QUEUE
from gputally.kubernetes.api_client import KubernetesCluster
from gputally.kubernetes.objects import Cluster
from tests.fairshare.builders import queue_object
from tests.real.controlplane import ApiServer

CHART = Path(__file__).parents[3] / "helm" / "gputally"
RBAC = "/apis/rbac.authorization.k8s.io/v1"


def install(server: ApiServer, folder: Path, space: str, values: dict[str, Any]) -> Path:
    """Install the chart's roles for the controller, and return a kubeconfig with a token of its service account."""
    files = helm_python.Chart.load(CHART).render(values, name="gputally", namespace=space)
    texts = [text for path, text in sorted(files.items()) if path.endswith(".yaml")]
    manifests = [manifest for text in texts for manifest in yaml.safe_load_all(text) if manifest]
    ours = [manifest for manifest in manifests if "fairshare" in manifest["metadata"]["name"]]
    paths = {
        "ServiceAccount": f"/api/v1/namespaces/{space}/serviceaccounts",
        "ClusterRole": f"{RBAC}/clusterroles",
        "ClusterRoleBinding": f"{RBAC}/clusterrolebindings",
        "Role": f"{RBAC}/namespaces/{space}/roles",
        "RoleBinding": f"{RBAC}/namespaces/{space}/rolebindings",
    }
    server.request("POST", "/api/v1/namespaces", {"metadata": {"name": space}})
    made = [(m["kind"], m["metadata"]["name"]) for m in ours if m["kind"] in paths]
    for manifest in ours:
        if manifest["kind"] in paths:
            server.request("POST", paths[manifest["kind"]], manifest)
    assert sorted(kind for kind, _ in made) == sorted(paths)
    account = next(name for kind, name in made if kind == "ServiceAccount")
    request = {"spec": {"audiences": ["https://localhost"]}}
    answer = server.request("POST", f"{paths['ServiceAccount']}/{account}/token", request)
    return server.kubeconfig_for(answer["status"]["token"], folder)


def add_queues(real: Cluster, *names: str, weight: float | None = None) -> None:
    """Create KAI queues; a weight of None is left unset."""
    for name in names:
        wanted = queue_object(name, weight=weight)
        real.apply({k: v for k, v in wanted.items() if k != "status"}, field_manager="gitops")
        real.apply({**wanted, "spec": {"resources": {"gpu": {}}}}, field_manager="kai", subresource="status")


def weights_of(real: KubernetesCluster, *names: str) -> list[float]:
    return [real.get(QUEUE, name)["spec"]["resources"]["gpu"].get("overQuotaWeight", 0) for name in names]
