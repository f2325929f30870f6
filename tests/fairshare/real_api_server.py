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
from gputally.base.errors import ClusterUnavailable, NotFound
from gputally.kubernetes.api_client import KubernetesCluster
from gputally.kubernetes.objects import CONFIG_MAP, NODE, POD_GROUPS, PRIORITY_CLASS, Kind, Object
from gputally.kubernetes.scheduler_plugins import schedulers
from gputally.testing.fake_scheduler import NAME, POD_GROUP, QUEUE, SETUP, definition
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
    """Run a server on which the definitions of the schedulers' kinds in use are established."""
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
    """Return the definitions of the kinds in use only, because each further schema costs the API server time. A kind
    whose own definition is not available accepts every field."""
    missing = {f"{kind.plural}.{kind.api_version.partition('/')[0]}": kind for kind in KINDS if _custom(kind)}
    found = set()
    for path in sorted(shared("crds").glob("*/*.yaml")):
        text = path.read_text()
        name = next((name for name in missing if f"name: {name}\n" in text), None)
        if name is not None:
            found.add(missing.pop(name))
            yield yaml.load(text, Loader=yaml.CSafeLoader)  # the C one: megabytes
    for scheduler in schedulers().values():
        if scheduler.name != NAME and scheduler.kinds:
            assert any(kind in found for versions in scheduler.kinds for kind in versions), scheduler.name
    own = (QUEUE, SETUP, POD_GROUP)
    yield from (definition(kind) if kind in own else _without_schema(kind) for kind in missing.values())


def _custom(kind: Kind) -> bool:
    """Whether a kind is no kind of Kubernetes itself."""
    return "." in kind.api_version.partition("/")[0] and not kind.api_version.partition("/")[0].endswith(".k8s.io")


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
