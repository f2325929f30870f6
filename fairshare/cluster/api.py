"""A Kubernetes API server as `fairshare.kube.ports.Cluster`.

Plain REST over the client's own transport (authentication, TLS, token renewal), so that any kind works
without models of it. Writes are server-side apply, never forced. Every answer that is none becomes one
of fairshare.errors with the server's own words.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

import urllib3
from kubernetes import client, config

from fairshare.cluster.answers import decode, error_of
from fairshare.errors import Conflict, Unavailable
from fairshare.kube.fields import dotted, leaves, look, without
from fairshare.kube.kinds import POD, Kind, Object
from fairshare.kube.ports import Change, Event

PAGE = 500
"""Objects asked for at a time."""
_NOTE_BYTES = 1024
_APPLY = "application/apply-patch+yaml"
_MERGE = "application/merge-patch+json"
_JSON = "application/json"


class KubernetesCluster:
    """Talks to the API server behind `api`."""

    def __init__(
        self,
        api: client.ApiClient,
        kinds: Iterable[Kind],
        *,
        timeout_s: float = 10.0,
        reporter: str = "gputally-fairshare",
    ) -> None:
        """kinds: those that will be written. reporter: names this instance in events."""
        self._api = api
        self._kinds = {(kind.api_version, kind.kind): kind for kind in kinds}
        self._timeout_s = timeout_s
        self._reporter = reporter

    @classmethod
    def connect(cls, kinds: Iterable[Kind], kubeconfig: Path | None = None, *, timeout_s: float = 10.0) -> Self:
        """The cluster this pod runs in, else that of the kubeconfig. Raises Unavailable where neither is found."""
        settings = client.Configuration()
        try:
            if kubeconfig is None and in_cluster():
                config.load_incluster_config(client_configuration=settings)  # type: ignore[no-untyped-call]
            else:
                config.load_kube_config(  # type: ignore[no-untyped-call]
                    config_file=str(kubeconfig) if kubeconfig else None, client_configuration=settings
                )
        except (config.ConfigException, OSError) as error:
            raise Unavailable(f"no cluster: {error}") from error
        return cls(client.ApiClient(settings), kinds, timeout_s=timeout_s)

    def list(self, kind: Kind, *, fields: str = "") -> list[Object]:
        found: list[Object] = []
        self._pages(kind, found.append, {"fieldSelector": fields} if fields else {})
        return sorted(found, key=lambda obj: (obj["metadata"].get("namespace", ""), obj["metadata"]["name"]))

    def scan(self, kind: Kind, take: Callable[[Object], object]) -> str:
        return self._pages(kind, take, {})

    def _pages(self, kind: Kind, take: Callable[[Object], object], wanted: Mapping[str, str]) -> str:
        token = ""
        while True:
            query = {"limit": str(PAGE), **wanted, **({"continue": token} if token else {})}
            answer = self._send("GET", _path(kind), query)
            for item in answer.get("items") or ():  # a list leaves out what its kind says
                item.setdefault("apiVersion", kind.api_version)
                item.setdefault("kind", kind.kind)
                take(item)
            metadata = answer.get("metadata", {})
            token = metadata.get("continue") or ""
            if not token:
                return str(metadata.get("resourceVersion") or "")

    def watch(self, kind: Kind, version: str, timeout_s: float) -> Iterator[Change]:
        query = {
            "watch": "1",
            "resourceVersion": version,
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(max(1, round(timeout_s))),
        }
        path = _path(kind)
        response = self._open("GET", path, query, None, _JSON, timeout_s + self._timeout_s)
        stream = response.response
        try:
            if not 200 <= response.status < 300:
                raise error_of("GET", path, response.status, response.read(), response.headers)
            rest = b""
            for chunk in stream.stream(65_536, decode_content=True):
                *lines, rest = (rest + chunk).split(b"\n")
                for line in lines:
                    change = decode(line) if line.strip() else None
                    if change is not None:
                        yield _change(path, change)
        except (urllib3.exceptions.HTTPError, OSError) as error:
            raise Unavailable(f"GET {path}: the watch broke off: {error}".splitlines()[0]) from error
        finally:
            stream.close()

    def get(self, kind: Kind, name: str, namespace: str = "") -> Object:
        return self._send("GET", _path(kind, namespace, name))

    def apply(self, obj: Object, *, field_manager: str, dry_run: bool = False, subresource: str = "") -> Object:
        return self._apply(obj, {"fieldManager": field_manager, **_dry(dry_run)}, subresource)

    def transfer(self, obj: Object, *, field_manager: str, dry_run: bool = False) -> Object:
        metadata = obj["metadata"]
        if not metadata.get("resourceVersion"):
            raise ValueError("a transfer names the version whose values it keeps")
        kind = self._kinds[obj["apiVersion"], obj["kind"]]
        name, namespace = metadata["name"], metadata.get("namespace", "")
        standing = self.get(kind, name, namespace)
        taken = leaves(obj)
        changed = [dotted(path) for path, value in taken.items() if look(standing, path) != value]
        if changed:
            raise Conflict(f"{kind.kind} {name}: {', '.join(changed)} changed meanwhile: read it again")
        shared = self._apply(obj, {"fieldManager": field_manager, **_dry(dry_run)})
        if dry_run:
            return shared
        # Applying a value that stands only makes us an owner beside the others, and forcing would not change
        # that. So their entries lose the fields: whoever may write an object may edit its managedFields. In
        # this order: an object whose fields nobody owns is given to `before-first-apply`.
        entries = [
            {**entry, "fieldsV1": without(entry.get("fieldsV1") or {}, taken)}
            if entry.get("manager") != field_manager and not entry.get("subresource")
            else entry
            for entry in shared["metadata"].get("managedFields") or ()
        ]
        entries = [entry for entry in entries if entry.get("fieldsV1")]
        version = shared["metadata"]["resourceVersion"]
        change = {"metadata": {"resourceVersion": version, "managedFields": entries}}
        return self.patch(kind, name, namespace, change, field_manager=field_manager)

    def _apply(self, obj: Object, query: Mapping[str, str], subresource: str = "") -> Object:
        metadata = obj["metadata"]
        path = _path(self._kinds[obj["apiVersion"], obj["kind"]], metadata.get("namespace", ""), metadata["name"])
        path = f"{path}/{subresource}" if subresource else path
        return self._send("PATCH", path, {**query, "fieldValidation": "Strict"}, obj, _APPLY)

    def patch(
        self, kind: Kind, name: str, namespace: str, change: Object, *, field_manager: str, dry_run: bool = False
    ) -> Object:
        query = {"fieldManager": field_manager, "fieldValidation": "Strict", **_dry(dry_run)}
        return self._send("PATCH", _path(kind, namespace, name), query, change, _MERGE)

    def create(self, obj: Object, *, field_manager: str, dry_run: bool = False) -> Object:
        kind = self._kinds[obj["apiVersion"], obj["kind"]]
        query = {"fieldManager": field_manager, "fieldValidation": "Strict", **_dry(dry_run)}
        return self._send("POST", _path(kind, obj["metadata"].get("namespace", "")), query, obj)

    def evict(self, name: str, namespace: str, uid: str, *, grace_s: int | None = None, dry_run: bool = False) -> None:
        options: dict[str, Any] = {"preconditions": {"uid": uid}, **({"dryRun": ["All"]} if dry_run else {})}
        if grace_s is not None:
            options["gracePeriodSeconds"] = grace_s
        body = {
            "apiVersion": "policy/v1",
            "kind": "Eviction",
            "metadata": {"name": name, "namespace": namespace},
            "deleteOptions": options,
        }
        self._send("POST", f"{_path(POD, namespace, name)}/eviction", {}, body)

    def event(self, event: Event) -> None:
        """Named by its content: the same again is answered `AlreadyExists`, which is as good."""
        namespace = event.namespace or "default"
        text = "\n".join((event.kind.kind, event.namespace, event.name, event.reason, event.message))
        body = {
            "apiVersion": "events.k8s.io/v1",
            "kind": "Event",
            "metadata": {
                "name": f"{event.name[:200]}.{hashlib.sha256(text.encode()).hexdigest()[:16]}",
                "namespace": namespace,
            },
            "eventTime": _micro_time(event.at_ms),
            "type": event.type,
            "reason": event.reason,
            "action": "PublishWeights",
            "note": event.message.encode()[:_NOTE_BYTES].decode(errors="ignore"),
            "regarding": {
                "apiVersion": event.kind.api_version,
                "kind": event.kind.kind,
                "name": event.name,
                **({"namespace": event.namespace} if event.namespace else {}),
                **({"uid": event.uid} if event.uid else {}),
            },
            "reportingController": "gputally.dev/fairshare",
            "reportingInstance": self._reporter,
        }
        try:
            self._send("POST", f"/apis/events.k8s.io/v1/namespaces/{namespace}/events", {}, body)
        except Conflict:
            return

    def _send(
        self,
        method: str,
        path: str,
        query: Mapping[str, str] | None = None,
        body: Object | None = None,
        content_type: str = _JSON,
    ) -> dict[str, Any]:
        response = self._open(method, path, query, body, content_type, self._timeout_s)
        try:
            content: bytes = response.read()
        except (urllib3.exceptions.HTTPError, OSError) as error:
            raise Unavailable(f"the API server does not answer: {error}".splitlines()[0]) from error
        if not 200 <= response.status < 300:
            raise error_of(method, path, response.status, content, response.headers)
        answer = decode(content)
        if answer is None:
            raise Unavailable(f"{method} {path}: the answer is not JSON")
        return answer

    def _open(
        self,
        method: str,
        path: str,
        query: Mapping[str, str] | None,
        body: Object | None,
        content_type: str,
        timeout_s: float,
    ) -> Any:
        headers = {"Accept": _JSON, **({"Content-Type": content_type} if body is not None else {})}
        try:
            request = self._api.param_serialize(
                method,
                path,
                query_params=list((query or {}).items()),
                header_params=headers,
                body=body,
                auth_settings=["BearerToken"],
            )
            return self._api.call_api(*request, _request_timeout=timeout_s)
        except (client.ApiException, urllib3.exceptions.HTTPError, OSError) as error:
            raise Unavailable(f"the API server does not answer: {error}".splitlines()[0]) from error


def _dry(dry_run: bool) -> dict[str, str]:
    return {"dryRun": "All"} if dry_run else {}


def _change(path: str, event: Mapping[str, Any]) -> Change:
    obj = event.get("object") or {}
    if event.get("type") == "ERROR":
        raise error_of("GET", path, int(obj.get("code") or 500), json.dumps(obj).encode(), {})
    return Change(event["type"], obj)


def _path(kind: Kind, namespace: str = "", name: str = "") -> str:
    group = f"/apis/{kind.api_version}" if "/" in kind.api_version else f"/api/{kind.api_version}"
    inside = f"/namespaces/{namespace}" if kind.namespaced and namespace else ""
    return f"{group}{inside}/{kind.plural}" + (f"/{name}" if name else "")


def _micro_time(at_ms: int) -> str:
    """Always with six digits: the API server does not parse a MicroTime without a fraction."""
    return datetime.fromtimestamp(at_ms / 1000, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def in_cluster() -> bool:
    return Path("/var/run/secrets/kubernetes.io/serviceaccount/token").exists()
