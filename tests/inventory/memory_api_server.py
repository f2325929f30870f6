"""A small Kubernetes API server in memory: paged lists with versions, and watches from a log that answer 410 once it is
cut."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from accountant.inventory.kubernetes_inventory import ClusterInventory
from gputally.base.clock import VirtualClock
from gputally.base.errors import ClusterRefused, ClusterUnavailable, NotFound, VersionGone

Object = dict[str, Any]
PATHS = {
    "Pod": "/api/v1/pods", "Node": "/api/v1/nodes", "Namespace": "/api/v1/namespaces",
    "Job": "/apis/batch/v1/jobs", "CronJob": "/apis/batch/v1/cronjobs", "ReplicaSet": "/apis/apps/v1/replicasets",
    "Deployment": "/apis/apps/v1/deployments", "Fleet": "/apis/acme.io/v1/fleets",
    "KaiGroup": "/apis/scheduling.run.ai/v2alpha2/podgroups",
    "VolcanoGroup": "/apis/scheduling.volcano.sh/v1beta1/podgroups",
    "LaneGroup": "/apis/lanes.example.com/v1/lanes",
    "LocalQueue": "/apis/kueue.x-k8s.io/v1beta1/localqueues", "Workload": "/apis/kueue.x-k8s.io/v1beta2/workloads",
    "ClusterQueue": "/apis/kueue.x-k8s.io/v1beta1/clusterqueues", "Cohort": "/apis/kueue.x-k8s.io/v1beta2/cohorts",
}  # fmt: skip

SCHEDULERS = {"LaneGroup", "KaiGroup", "VolcanoGroup", "LocalQueue", "Workload", "ClusterQueue", "Cohort"}


@dataclass
class FakeApi:
    """gputally.kubernetes.objects.Api in memory. trouble: failures to raise, one for each request; None for no failure.
    served: its kinds."""

    objects: dict[str, dict[str, Object]] = field(default_factory=dict)
    version: int = 1
    oldest: int = 0
    log: list[tuple[int, str, str, Object]] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)
    trouble: list[Exception | None] = field(default_factory=list)
    served: set[str] = field(default_factory=lambda: set(PATHS) - SCHEDULERS)
    reviews: dict[str, list[Object]] = field(default_factory=dict)

    def put(self, kind: str, obj: Object) -> Object:
        """Create or replace an object. Its uid derives from its name."""
        meta = obj.setdefault("metadata", {})
        meta.setdefault("uid", f"{kind}-{meta.get('namespace', '')}-{meta['name']}")
        self.version += 1
        meta["resourceVersion"] = str(self.version)
        held = self.objects.setdefault(kind, {})
        event = "MODIFIED" if meta["uid"] in held else "ADDED"
        self.log.append((self.version, kind, event, json.loads(json.dumps(obj))))
        held[meta["uid"]] = obj
        return obj

    def drop(self, kind: str, name: str) -> None:
        held = self.objects[kind]
        uid = next(uid for uid, obj in held.items() if obj["metadata"]["name"] == name)
        self.version += 1
        self.log.append((self.version, kind, "DELETED", {**held.pop(uid)}))

    def forget(self) -> None:
        """Invalidate all continue tokens and versions."""
        self.oldest = self.version + 1
        self.version += 1

    def get(self, path: str, query: Mapping[str, str], *, metadata_only: bool = False) -> bytes:
        self._asked("GET " + path + ("?" + query["continue"] if "continue" in query else ""))
        if path == "/apis/acme.io/v1":
            fleets = [{"name": name, "kind": "Fleet", "namespaced": False} for name in ("fleets", "fleets/status")]
            return json.dumps({"resources": fleets}).encode()
        for kind, place in PATHS.items():
            if path == place and kind in self.served:
                return self._page(kind, query, metadata_only)
            group, plural = place.rsplit("/", 1)
            parts = path.split("/")
            if path.startswith(group) and len(parts) > 2 and parts[-2] == plural:
                for obj in self.objects.get(kind, {}).values():
                    if obj["metadata"]["name"] == parts[-1]:
                        return json.dumps(_shown(obj, metadata_only)).encode()
        raise NotFound(f"GET {path}: 404: not found")

    def watch(self, path: str, query: Mapping[str, str], *, metadata_only: bool = False) -> Iterator[bytes]:
        self._asked("WATCH " + path)
        kind = next(kind for kind, place in PATHS.items() if place == path)
        since = int(query["resourceVersion"])
        if since < self.oldest:
            status = {"kind": "Status", "code": 410, "message": "too old resource version"}
            yield json.dumps({"type": "ERROR", "object": status}).encode()
            return
        for version, of, event, obj in self.log:
            if of == kind and version > since:
                yield json.dumps({"type": event, "object": _shown(obj, metadata_only)}).encode()
        bookmark = {"kind": kind, "metadata": {"resourceVersion": str(self.version)}}
        yield json.dumps({"type": "BOOKMARK", "object": bookmark}).encode()

    def post(self, path: str, body: Mapping[str, object]) -> bytes:
        self._asked("POST " + path)
        self.reviews.setdefault(path, []).append(dict(body))
        raise ClusterRefused(f"POST {path}: 403: forbidden")

    def _page(self, kind: str, query: Mapping[str, str], metadata_only: bool) -> bytes:
        begin, version = 0, self.version
        if "continue" in query:
            begin, version = (int(part) for part in query["continue"].split("@"))
            if version < self.oldest:
                raise VersionGone(f"GET {kind}: 410: the continue token is too old")
        every = sorted(self.objects.get(kind, {}).values(), key=lambda obj: obj["metadata"]["uid"])
        end = begin + int(query["limit"])
        more = {"continue": f"{end}@{version}"} if end < len(every) else {}
        items = [_shown(obj, metadata_only) for obj in every[begin:end]]
        return json.dumps({"metadata": {"resourceVersion": str(version), **more}, "items": items}).encode()

    def _asked(self, what: str) -> None:
        self.requests.append(what)
        failure = self.trouble.pop(0) if self.trouble else None
        if failure is not None:
            raise failure


def _shown(obj: Object, metadata_only: bool) -> Object:
    return {"metadata": obj["metadata"]} if metadata_only else obj


UNREACHABLE = ClusterUnavailable("the API server does not answer: connection refused")


def pod(name: str, namespace: str = "vision", gpus: int = 1, **changes: Any) -> Object:
    """Build a pod of one container. changes: labels, annotations, owners, node, scheduler, status, spec."""
    owners = [
        {"apiVersion": api, "kind": kind, "name": named, "uid": f"{kind}-{namespace}-{named}", "controller": True}
        for api, kind, named in changes.pop("owners", ())
    ]
    meta = {
        "name": name, "namespace": namespace, "uid": f"uid-{namespace}-{name}", "labels": changes.pop("labels", {}),
        "annotations": changes.pop("annotations", {}), "creationTimestamp": "2026-10-01T00:00:00Z",
        "ownerReferences": owners, "managedFields": [{"manager": "kubectl", "fieldsV1": {"f:spec": {}}}],
    }  # fmt: skip
    limits = {"cpu": "4", **({"nvidia.com/gpu": str(gpus)} if gpus else {})}
    spec = {
        "nodeName": changes.pop("node", "n1"), "schedulerName": changes.pop("scheduler", "default-scheduler"),
        "containers": [{"name": "main", "image": "i", "resources": {"limits": limits, "requests": limits}}],
        **changes.pop("spec", {}),
    }  # fmt: skip
    return {"metadata": meta, "spec": spec, "status": changes.pop("status", {"phase": "Running"})}


def owner(
    kind: str, name: str, namespace: str = "vision", above: tuple[str, str, str] | None = None, **meta: Any
) -> Object:
    refs = [
        {"apiVersion": api, "kind": of, "name": named, "uid": f"{of}-{namespace}-{named}"}
        for api, of, named in ([] if above is None else [above])
    ]
    uid = f"{kind}-{namespace}-{name}"
    return {"metadata": {"name": name, "namespace": namespace, "uid": uid, "ownerReferences": refs, **meta}}


def node(name: str, *, ready: bool = True, since: str = "2026-10-01T00:10:00Z", **changes: Any) -> Object:
    return {
        "metadata": {"name": name, "labels": changes.pop("labels", {"cloud.google.com/gke-nodepool": "a3"})},
        "spec": changes.pop("spec", {}),
        "status": {
            "capacity": changes.pop("capacity", {"nvidia.com/gpu": "8", "cpu": "96"}),
            "conditions": [{"type": "Ready", "status": str(ready), "lastTransitionTime": since}],
            "images": [{"names": ["registry/image"], "sizeBytes": 1}],
        },
    }


def thing(name: str, spec: dict[str, Any], owners: tuple[str, ...] = (), **status: Any) -> dict[str, Any]:
    """Build an object of a scheduler. owners: uids of Jobs that own it."""
    refs = [{"apiVersion": "batch/v1", "kind": "Job", "name": "j", "uid": uid, "controller": True} for uid in owners]
    return {
        "metadata": {"name": name, "namespace": "vision", "ownerReferences": refs}, "spec": spec, "status": status
    }  # fmt: skip


def refs(inventory: ClusterInventory, clock: VirtualClock) -> dict[str, str]:
    """Return the queue of each pod that is told, by its name."""
    facts = inventory.read(clock.wall_ms()).pods
    inventory.taken()
    return {fact.name: fact.queue_ref for _, fact in facts}
