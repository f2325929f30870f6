"""A real Kubernetes API server as `fairshare.ports.Cluster`: the only importer of `kubernetes` here.

Plain REST over the client's own transport (authentication, TLS, token renewal), so that any kind works
without models of it. Writes are server-side apply, never forced. Every answer that is none becomes one
of fairshare.errors with the server's own words.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import urllib3
from kubernetes import client, config

from fairshare.errors import ClusterError, Conflict, NotFound, Refused, Unavailable
from fairshare.ports import Event, Kind, Object

PAGE = 500
"""Objects asked for at a time."""
_NOTE_BYTES = 1024
_OWNER = re.compile(r'conflict with "([^"]*)"')
_APPLY = "application/apply-patch+yaml"
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
    def connect(cls, kinds: Iterable[Kind], kubeconfig: Path | None = None) -> KubernetesCluster:
        """The cluster this pod runs in, else that of the kubeconfig. Raises Unavailable where neither is found."""
        settings = client.Configuration()
        try:
            if kubeconfig is None and _in_cluster():
                config.load_incluster_config(client_configuration=settings)  # type: ignore[no-untyped-call]
            else:
                config.load_kube_config(  # type: ignore[no-untyped-call]
                    config_file=str(kubeconfig) if kubeconfig else None, client_configuration=settings
                )
        except (config.ConfigException, OSError) as error:
            raise Unavailable(f"no cluster: {error}") from error
        return cls(client.ApiClient(settings), kinds)

    def list(self, kind: Kind) -> list[Object]:
        found: list[dict[str, Any]] = []
        token = ""
        while True:
            query = {"limit": str(PAGE), **({"continue": token} if token else {})}
            answer = self._send("GET", _path(kind), query)
            found += answer.get("items") or ()
            token = answer.get("metadata", {}).get("continue") or ""
            if not token:
                break
        for item in found:  # a list leaves out what its kind says
            item.setdefault("apiVersion", kind.api_version)
            item.setdefault("kind", kind.kind)
        return sorted(found, key=lambda obj: (obj["metadata"].get("namespace", ""), obj["metadata"]["name"]))

    def get(self, kind: Kind, name: str, namespace: str = "") -> Object:
        return self._send("GET", _path(kind, namespace, name))

    def apply(self, obj: Object, *, field_manager: str, dry_run: bool = False, subresource: str = "") -> Object:
        metadata = obj["metadata"]
        path = _path(self._kinds[obj["apiVersion"], obj["kind"]], metadata.get("namespace", ""), metadata["name"])
        query = {"fieldManager": field_manager, "fieldValidation": "Strict", **({"dryRun": "All"} if dry_run else {})}
        return self._send("PATCH", f"{path}/{subresource}" if subresource else path, query, obj, _APPLY)

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
            response = self._api.call_api(*request, _request_timeout=self._timeout_s)
            content: bytes = response.read()  # type: ignore[no-untyped-call]
        except (client.ApiException, urllib3.exceptions.HTTPError, OSError) as error:
            raise Unavailable(f"the API server does not answer: {error}".splitlines()[0]) from error
        if not 200 <= response.status < 300:
            raise _error(method, path, response.status, content)
        answer = _decode(content)
        if answer is None:
            raise Unavailable(f"{method} {path}: the answer is not JSON")
        return answer


def _error(method: str, path: str, status: int, content: bytes) -> ClusterError:
    """The server's Status as an exception.

    404 NotFound; 409 Conflict, with the owners of contested fields; 429, 5xx and a gone continue token
    Unavailable; a webhook that cannot be reached is a 500 and so Unavailable; all else Refused."""
    answer = _decode(content) or {}
    text = str(answer.get("message") or content[:200].decode(errors="replace") or "no reason given")
    message = f"{method} {path}: {status}: {' '.join(text.split())}"
    if status == 404:
        return NotFound(message)
    if status == 409:
        owners = [
            (match.group(1), str(cause.get("field", "")))
            for cause in (answer.get("details") or {}).get("causes") or ()
            if (match := _OWNER.search(str(cause.get("message", ""))))
        ]
        return Conflict(message, tuple(sorted(owners)))
    if status in (408, 410, 429) or status >= 500:
        return Unavailable(message)
    return Refused(message)


def _decode(content: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(content)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _path(kind: Kind, namespace: str = "", name: str = "") -> str:
    group = f"/apis/{kind.api_version}" if "/" in kind.api_version else f"/api/{kind.api_version}"
    inside = f"/namespaces/{namespace}" if kind.namespaced and namespace else ""
    return f"{group}{inside}/{kind.plural}" + (f"/{name}" if name else "")


def _micro_time(at_ms: int) -> str:
    """Always with six digits: the API server does not parse a MicroTime without a fraction."""
    return datetime.fromtimestamp(at_ms / 1000, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def _in_cluster() -> bool:
    return Path("/var/run/secrets/kubernetes.io/serviceaccount/token").exists()
