"""A real API server with the CustomResourceDefinitions of all schedulers, and objects that tests put there."""

from __future__ import annotations

import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from fairshare.core.published_devices import SLICES
from fairshare.schedulers.kai.kinds import CONFIG
from gputally.base.errors import ClusterUnavailable, NotFound
from gputally.kubernetes.api_client import KubernetesCluster
from gputally.kubernetes.objects import CONFIG_MAP, NODE, POD_GROUPS, PRIORITY_CLASS, Kind, Object
from tests.deadlines import until
from tests.fairshare.scheduler_kinds import KINDS
from tests.real.controlplane import ApiServer, api_server
from tests.shared_files import shared

MERGE = "application/merge-patch+json"
_LABEL = "standing"
"""The one field that its maker owns: of an object without any owner, the server says that a manager
`before-first-apply` owns all."""


@contextmanager
def served(folder: Path) -> Iterator[ApiServer]:
    """Run a server on which the definitions of the KAI, Kueue and Volcano kinds in use are established."""
    with api_server(folder) as running, ThreadPoolExecutor(8) as several:
        path = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
        list(several.map(lambda document: running.request("POST", path, document), definitions()))
        cluster = KubernetesCluster.connect(KINDS, running.kubeconfig)
        for kind in _present(KINDS):
            until(lambda kind=kind: _served(cluster, kind), f"{kind.kind} is not served")
        yield running


def _present(kinds: Sequence[Kind]) -> list[Kind]:
    """Return the kinds without those of Kubernetes that a server of today does not serve by itself."""
    return [kind for kind in kinds if kind not in (*SLICES[1:], *POD_GROUPS)]


@contextmanager
def standing(server: ApiServer, objects: Sequence[Object], kinds: Sequence[Kind]) -> Iterator[KubernetesCluster]:
    """Create the objects with their status, yield a client of `kinds`, and delete the objects afterwards.

    The managers in `metadata.managedFields` own the fields; without it no manager does, as with
    `MemoryCluster.load`."""
    for kind in _present(kinds):
        if not kind.namespaced and kind != PRIORITY_CLASS:  # what earlier tests left would compete
            server.request("DELETE", f"{_group(kind)}/{kind.plural}")
        elif kind.kind in (
            "Command",
            CONFIG_MAP.kind,
        ):  # a status with weights of an earlier test would be gone on with
            for left in server.request("GET", f"{_group(kind)}/{kind.plural}")["items"]:
                server.request("DELETE", _path(kind, left["metadata"]["name"], left["metadata"]["namespace"]))
    known = {(kind.api_version, kind.kind): kind for kind in kinds}
    with ExitStack() as after:
        for obj in objects:
            kind = known[obj["apiVersion"], obj["kind"]]
            after.callback(_delete, server, _path(kind, obj["metadata"]["name"], obj["metadata"].get("namespace", "")))
            _put(server, kind, obj)
        yield KubernetesCluster.connect(kinds, server.kubeconfig)


@dataclass(frozen=True, slots=True)
class Others:
    """Another client of a real API server, with the `put` and `delete` of `MemoryCluster`."""

    server: ApiServer

    def put(self, obj: Object, *, field_manager: str, subresource: str = "") -> Any:
        """Replace an object, whatever its version."""
        kind = next(each for each in KINDS if (each.api_version, each.kind) == (obj["apiVersion"], obj["kind"]))
        path = _path(kind, obj["metadata"]["name"], obj["metadata"].get("namespace", ""))
        stands = self.server.request("GET", path)["metadata"]
        metadata = {**obj["metadata"], "resourceVersion": stands["resourceVersion"], "uid": stands["uid"]}
        query = f"/{subresource}?fieldManager={field_manager}" if subresource else f"?fieldManager={field_manager}"
        return self.server.request("PUT", path + query, {**obj, "metadata": metadata})

    def delete(self, kind: Kind, name: str, namespace: str = "") -> None:
        self.server.request("DELETE", _path(kind, name, namespace))


def _put(server: ApiServer, kind: Kind, obj: Object) -> None:
    namespace = obj["metadata"].get("namespace", "")
    if namespace:
        try:
            server.request("POST", "/api/v1/namespaces", {"metadata": {"name": namespace}})
        except urllib.error.HTTPError as error:
            if error.code != 409:
                raise
    path = _path(kind, obj["metadata"]["name"], namespace)
    metadata = {**obj["metadata"], "labels": {**obj["metadata"].get("labels", {}), _LABEL: "true"}}
    others = metadata.pop("managedFields", [])
    server.request("POST", path.rpartition("/")[0], {**obj, "metadata": metadata})
    if kind.status and obj.get("status"):
        server.request("PATCH", f"{path}/status", {"status": obj["status"]}, MERGE)
    if kind == NODE:
        server.request("PATCH", path, {"spec": {"taints": []}}, MERGE)  # the server's own, until a node is ready
    owned = {"f:metadata": {"f:labels": {f"f:{_LABEL}": {}}}}
    entry = {"apiVersion": kind.api_version, "fieldsType": "FieldsV1"}
    owners = [entry | owner for owner in ({"manager": "test", "operation": "Update", "fieldsV1": owned}, *others)]
    server.request("PATCH", path, {"metadata": {"managedFields": owners}}, MERGE)


def _group(kind: Kind) -> str:
    return f"/apis/{kind.api_version}" if "/" in kind.api_version else f"/api/{kind.api_version}"


def _path(kind: Kind, name: str, namespace: str) -> str:
    inside = f"namespaces/{namespace}/" if kind.namespaced else ""
    return f"{_group(kind)}/{inside}{kind.plural}/{name}"


def _delete(server: ApiServer, path: str) -> None:
    try:
        server.request("DELETE", path)
    except urllib.error.HTTPError as error:
        if error.code != 404:  # the case may have put others in its place
            raise


def definitions() -> Iterator[dict[str, Any]]:
    """Return the definitions of the kinds in use only, because each further schema costs the API server time."""
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
    yield _without_schema(CONFIG)


def _without_schema(kind: Kind) -> dict[str, Any]:
    """Return a definition that accepts every field, for a kind whose own definition is not available."""
    group, _, version = kind.api_version.partition("/")
    schema = {"openAPIV3Schema": {"type": "object", "x-kubernetes-preserve-unknown-fields": True}}
    names = {"plural": kind.plural, "kind": kind.kind, "listKind": f"{kind.kind}List", "singular": kind.kind.lower()}
    served = {"name": version, "served": True, "storage": True, "schema": schema, "subresources": {"status": {}}}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{kind.plural}.{group}"},
        "spec": {
            "group": group,
            "names": names,
            "scope": "Namespaced" if kind.namespaced else "Cluster",
            "versions": [served],
        },
    }


def _served(cluster: KubernetesCluster, kind: Kind) -> bool:
    try:
        cluster.list(kind)
    except (NotFound, ClusterUnavailable):
        return False
    return True
