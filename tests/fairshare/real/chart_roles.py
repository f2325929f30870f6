"""Installs the chart's roles on a real API server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import helm_python
import yaml

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
