"""Calls a Kubernetes API server: reads, watches, reviews, server-side apply, evictions and events.

The calls are plain REST over the transport of the Kubernetes client (authentication, TLS, token renewal), so any kind
of object works without a model class. Every failure raises a gputally.base.errors.ClusterError with the server's
message.

`KubernetesApi` returns the answers as bytes and changes no object. `KubernetesCluster` reads and writes objects; it
never forces a write. `Inspector` also reads the cluster's API versions, access rights and time."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any, Self

import urllib3
import yaml
from kubernetes import client, config

from gputally.base.errors import (
    Blocked,
    ClusterError,
    ClusterRefused,
    ClusterUnavailable,
    Conflict,
    NotFound,
    VersionGone,
)
from gputally.kubernetes.leader_election import LeaseTimes
from gputally.kubernetes.list_watch import PAGE
from gputally.kubernetes.objects import (
    LEASE,
    POD,
    Api,
    Event,
    Kind,
    Object,
    dotted_path,
    leaves,
    micro_time,
    value_at,
    without,
)

_JSON = "application/json"
_METADATA = f"{_JSON};as=PartialObjectMetadata;g=meta.k8s.io;v=v1"
_METADATA_LIST = f"{_JSON};as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"
_CHUNK = 64 * 1024
MOST_ANSWER_BYTES = 256 * 2**20
"""Largest answer; a page has at most `PAGE` objects."""
_SLOWEST = 64 * 1024
"""Bytes a second that an answer must bring at least, once the time limit of its request is over."""
MOST_LINE_BYTES = 8 * 2**20
"""Longest line of a watch; an object in etcd is at most 1.5 MiB."""
_IN_CLUSTER = Path("/var/run/secrets/kubernetes.io/serviceaccount/token")


def in_cluster() -> bool:
    """Return True if this process runs in a pod with a service account."""
    return _IN_CLUSTER.exists()


def _connect(kubeconfig: Path | None, retries: int = 1) -> client.ApiClient:
    """Return a client of the cluster in a kubeconfig. None: the cluster in which this pod runs or, outside a pod, the
    cluster in the default kubeconfig. Raises ClusterUnavailable if there is no such configuration.

    retries: how often a request is repeated that did not reach the server, and a read that was not answered. urllib3
        would repeat three times, and each repetition has the whole time limit of the request again."""
    settings = client.Configuration()
    # Retry-After is in the exception: the caller decides whether it waits.
    settings.retries = urllib3.Retry(retries, respect_retry_after_header=False)
    try:
        if kubeconfig is None and in_cluster():
            config.load_incluster_config(client_configuration=settings)  # type: ignore[no-untyped-call]
        else:
            config.load_kube_config(  # type: ignore[no-untyped-call]
                config_file=str(kubeconfig) if kubeconfig else None, client_configuration=settings
            )
    except (config.ConfigException, OSError, yaml.YAMLError, *_OTHER_YAML) as error:
        raise ClusterUnavailable(f"no access to a cluster: {_config_fault(kubeconfig, error)}") from error
    api = client.ApiClient(settings)
    api.rest_client.pool_manager.pool_classes_by_scheme = {"http": _HttpPool, "https": _HttpsPool}
    return api


_OTHER_YAML = (AttributeError, KeyError, TypeError, ValueError)
"""What the library raises for a YAML file of another form."""


def _config_fault(kubeconfig: Path | None, error: Exception) -> str:
    """Return what is wrong with a configuration, and which option or variable names another one."""
    named = str(kubeconfig or config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION)
    paths = [named] if kubeconfig else named.split(config.kube_config.ENV_KUBECONFIG_PATH_SEPARATOR)
    here = any(Path(path).expanduser().exists() for path in paths if path)
    if isinstance(error, (yaml.YAMLError, *_OTHER_YAML)):
        what = f"{named} is not a kubeconfig file"
    else:
        what = str(error) if here or (kubeconfig is None and in_cluster()) else f"no kubeconfig file at {named}"
    return f"{what}; name one with --kubeconfig (a server's setting kubeconfig) or in the variable KUBECONFIG"


_PATIENCE = 2
"""The headers of an answer may take this many times as long as the next part of them."""


class _HeadInTime(urllib3.connection.HTTPConnection):
    """A connection on which the headers of an answer have a time limit, however steadily they arrive. The time limit of
    a socket alone begins anew with every byte."""

    def getresponse(self) -> urllib3.response.HTTPResponse:  # type: ignore[override]
        if self.sock is None or self.timeout is None:
            return super().getresponse()
        limit = threading.Timer(_PATIENCE * self.timeout, _shut_down, [self.sock])
        limit.daemon = True
        limit.start()
        try:
            return super().getresponse()
        finally:
            limit.cancel()


class _TlsHeadInTime(_HeadInTime, urllib3.connection.HTTPSConnection):
    """The same over TLS."""


class _HttpPool(urllib3.HTTPConnectionPool):
    ConnectionCls = _HeadInTime


class _HttpsPool(urllib3.HTTPSConnectionPool):
    ConnectionCls = _TlsHeadInTime


def _shut_down(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):  # already closed
        socket.socket.shutdown(connection, socket.SHUT_RDWR)


def _request(
    api: client.ApiClient,
    method: str,
    path: str,
    query: Mapping[str, str],
    body: Mapping[str, object] | None,
    timeout_s: float | tuple[float, float],
    *,
    accept: str = _JSON,
    content_type: str = _JSON,
) -> Any:
    """Send a request and return the unread response, whatever its status. Raises ClusterUnavailable."""
    request = api.param_serialize(
        method,
        path,
        query_params=list(query.items()),
        header_params={"Accept": accept, **({"Content-Type": content_type} if body is not None else {})},
        body=body,
        auth_settings=["BearerToken"],
    )
    try:
        return api.call_api(*request, _request_timeout=timeout_s)
    except (client.ApiException, urllib3.exceptions.HTTPError, OSError) as error:
        raise _no_answer(error) from error


def _lines(stream: Any, path: str) -> Iterator[bytes]:
    """Yield the lines of a watch as they arrive. Raises ClusterUnavailable for a line that is longer than
    `MOST_LINE_BYTES`."""
    rest = b""
    for chunk in stream.stream(_CHUNK, decode_content=True):
        *lines, rest = (rest + chunk).split(b"\n")
        if len(rest) > MOST_LINE_BYTES:
            raise ClusterUnavailable(f"GET {path}: a line of the watch is longer than {MOST_LINE_BYTES} bytes")
        yield from (line for line in lines if line.strip())


def _content(
    api: client.ApiClient,
    method: str,
    path: str,
    query: Mapping[str, str],
    body: Mapping[str, object] | None,
    timeout_s: float | tuple[float, float],
    *,
    accept: str = _JSON,
    content_type: str = _JSON,
) -> bytes:
    """Return the content of a successful answer. Raises ClusterError."""
    response = _request(api, method, path, query, body, timeout_s, accept=accept, content_type=content_type)
    content = _read(
        response.response, f"{method} {path}", timeout_s if isinstance(timeout_s, float | int) else timeout_s[1]
    )
    if not 200 <= response.status < 300:
        raise error_of(method, path, response.status, content, response.headers)
    return content


def _read(response: Any, what: str, most_s: float) -> bytes:
    """Read the whole content. A server that sends a byte now and then does not extend the time limit. Raises
    Unavailable."""
    content, began = bytearray(), time.monotonic()
    try:
        while part := response.read1(_CHUNK, decode_content=True):
            content += part
            if len(content) > MOST_ANSWER_BYTES:
                response.close()
                raise ClusterUnavailable(f"{what}: the answer has more than {MOST_ANSWER_BYTES} bytes")
            if time.monotonic() - began > most_s + len(content) / _SLOWEST:
                response.close()
                raise ClusterUnavailable(f"the API server does not answer: {what}: no whole answer within {most_s:g} s")
    except (urllib3.exceptions.HTTPError, OSError) as error:
        raise _no_answer(error) from error
    return bytes(content)


def _no_answer(error: Exception) -> ClusterUnavailable:
    lines = str(error).strip().splitlines()
    return ClusterUnavailable(f"the API server does not answer: {lines[0] if lines else type(error).__name__}")


class KubernetesApi:
    """The `gputally.kubernetes.objects.Api` of the API server behind `api`. Thread-safe."""

    def __init__(self, api: client.ApiClient, *, timeout_s: float = 30.0, watch_s: float = 330.0) -> None:
        """Create a client.

        timeout_s: time limit of a request, which is repeated once if it only reads.
        watch_s: longest time without data after which a watch fails. It is longer than the time after which the server
            ends a watch."""
        self._api = api
        self._timeout_s = timeout_s
        self._watch_s = watch_s

    @classmethod
    def connect(cls, kubeconfig: Path | None = None) -> KubernetesApi:
        """Return a client of the cluster in a kubeconfig. None: the cluster in which this pod runs or, outside a pod,
        the cluster in the default kubeconfig. Raises ClusterUnavailable if there is no such configuration."""
        return cls(_connect(kubeconfig))

    def get(self, path: str, query: Mapping[str, str], *, metadata_only: bool = False) -> bytes:
        accept = _accept(metadata_only, "limit" in query)
        return _content(self._api, "GET", path, query, None, self._timeout_s, accept=accept)

    def post(self, path: str, body: Mapping[str, object]) -> bytes:
        return _content(self._api, "POST", path, {}, body, self._timeout_s)

    def watch(self, path: str, query: Mapping[str, str], *, metadata_only: bool = False) -> Iterator[bytes]:
        accept, timeout_s = _accept(metadata_only, False), (10.0, self._watch_s)
        response = _request(self._api, "GET", path, {**query, "watch": "true"}, None, timeout_s, accept=accept)
        try:
            if not 200 <= response.status < 300:
                refusal = _read(response.response, f"GET {path}", self._timeout_s)
                raise error_of("GET", path, response.status, refusal, response.headers)
            yield from _lines(response.response, path)
        except (urllib3.exceptions.HTTPError, OSError) as error:
            raise _no_answer(error) from error
        finally:
            # Without this, the next request on the connection would read the rest of the watch.
            response.response.close()


def _accept(metadata_only: bool, listing: bool) -> str:
    """Return the Accept header of a request. The media types of an object and of a list differ, and the server answers
    406 to the wrong one.

    listing: True if the request is for a list."""
    return _JSON if not metadata_only else _METADATA_LIST if listing else _METADATA


_OWNER = re.compile(r'conflict with "([^"]*)"')


def error_of(method: str, path: str, status: int, content: bytes, headers: Mapping[str, str]) -> ClusterError:
    """Return the exception for an error response.

    - 404: NotFound.
    - 409: Conflict, with the owners of contested fields.
    - 410: VersionGone.
    - 408, 429 and 5xx: Unavailable. The server answers 500 if it cannot reach a webhook.
    - 429 to an eviction, which a disruption budget does not allow at present: Blocked.
    - 500 without a reason to an eviction, because several disruption budgets cover the pod: Refused.
    - All others: Refused."""
    answer = decode(content) or {}
    text = str(answer.get("message") or content[:200].decode(errors="replace") or "the server gives no reason")
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
    if status == 410:
        return VersionGone(message)
    evicting = path.endswith("/eviction")
    if evicting and status == 500 and not answer.get("reason"):
        return ClusterRefused(message)  # more than one budget selects the pod: waiting does not help
    if evicting and status == 429:
        return Blocked(message, _seconds(headers))
    if status in (408, 429) or status >= 500:
        return ClusterUnavailable(message, _seconds(headers))
    return ClusterRefused(message)


def decode(content: bytes) -> dict[str, Any] | None:
    """Decode a JSON object. Return None if the content is not a JSON object."""
    try:
        value = json.loads(content)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _seconds(headers: Mapping[str, str]) -> float | None:
    """Return the Retry-After header in seconds; None if it is missing or a date."""
    text = next((value for name, value in headers.items() if name.lower() == "retry-after"), "")
    return float(text) if text.isdigit() else None


_NOTE_BYTES = 1024
_APPLY = "application/apply-patch+yaml"
_MERGE = "application/merge-patch+json"


class KubernetesCluster:
    """The `gputally.kubernetes.objects.Cluster` of the API server behind `api`."""

    def __init__(
        self,
        api: client.ApiClient,
        kinds: Iterable[Kind],
        *,
        timeout_s: float = 10.0,
        reporter: str = "gputally-fairshare",
    ) -> None:
        """Create a client.

        kinds: the kinds of the objects that it writes.
        timeout_s: time limit of a request, which is repeated once if it only reads.
        reporter: the name of this instance in events."""
        self._api = api
        self._kinds = {(kind.api_version, kind.kind): kind for kind in kinds}
        self._timeout_s = timeout_s
        self._reporter = reporter

    @classmethod
    def connect(
        cls, kinds: Iterable[Kind], kubeconfig: Path | None = None, *, timeout_s: float = 10.0, retries: int = 1
    ) -> Self:
        """Return a client that writes objects of these kinds. For `kubeconfig` see `KubernetesApi.connect`, for
        `retries` `_connect`. Raises ClusterUnavailable."""
        return cls(_connect(kubeconfig, retries), kinds, timeout_s=timeout_s)

    def list(self, kind: Kind, *, fields: str = "") -> list[Object]:
        objects: list[Object] = []
        self._read_pages(kind, objects.append, {"fieldSelector": fields} if fields else {})
        return sorted(objects, key=lambda obj: (obj["metadata"].get("namespace", ""), obj["metadata"]["name"]))

    def scan(self, kind: Kind, visit: Callable[[Object], object]) -> str:
        return self._read_pages(kind, visit, {})

    def _read_pages(self, kind: Kind, visit: Callable[[Object], object], selectors: Mapping[str, str]) -> str:
        """Pass every object of the kind to `visit`. Return the resourceVersion of the list."""
        token = ""
        while True:
            query = {"limit": str(PAGE), **selectors, **({"continue": token} if token else {})}
            answer = self._send("GET", kind.path(), query)
            for item in answer.get("items") or ():  # items of a list have no kind
                item.setdefault("apiVersion", kind.api_version)
                item.setdefault("kind", kind.kind)
                visit(item)
            metadata = answer.get("metadata", {})
            before, token = token, metadata.get("continue") or ""
            if token and token == before:
                raise ClusterUnavailable(
                    f"{kind.path()}: the list does not go on: each page names itself as the next one"
                )
            if not token:
                return str(metadata.get("resourceVersion") or "")

    def api(self) -> Api:
        return KubernetesApi(self._api)

    def get(self, kind: Kind, name: str, namespace: str = "") -> Object:
        return self._send("GET", kind.path(namespace, name))

    def apply(self, obj: Object, *, field_manager: str, dry_run: bool = False, subresource: str = "") -> Object:
        return self._apply(obj, {"fieldManager": field_manager, **_dry(dry_run)}, subresource)

    def transfer(self, obj: Object, *, field_manager: str, dry_run: bool = False) -> Object:
        metadata = obj["metadata"]
        if not metadata.get("resourceVersion"):
            raise ValueError("an object to transfer has no metadata.resourceVersion")
        kind = self._kinds[obj["apiVersion"], obj["kind"]]
        name, namespace = metadata["name"], metadata.get("namespace", "")
        present = self.get(kind, name, namespace)
        fields = leaves(obj)
        changed = [dotted_path(path) for path, value in fields.items() if value_at(present, path) != value]
        if changed:
            raise Conflict(f"{kind.kind} {name}: {', '.join(changed)} changed meanwhile: read the object again")
        shared = self._apply(obj, {"fieldManager": field_manager, **_dry(dry_run)})
        if dry_run:
            return shared
        # Applying the present value only adds this manager as an owner beside the others, and forcing would not change
        # that. So this method removes the fields from the other managers' entries in managedFields, which every client
        # with the right to write the object may edit. The apply comes first, because the API server gives fields
        # without an owner to the manager `before-first-apply`.
        entries = [
            {**entry, "fieldsV1": without(entry.get("fieldsV1") or {}, fields)}
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
        kind = self._kinds[obj["apiVersion"], obj["kind"]]
        path = kind.path(metadata.get("namespace", ""), metadata["name"])
        path = f"{path}/{subresource}" if subresource else path
        return self._send("PATCH", path, {**query, "fieldValidation": "Strict"}, obj, _APPLY)

    def patch(
        self, kind: Kind, name: str, namespace: str, change: Object, *, field_manager: str, dry_run: bool = False
    ) -> Object:
        query = {"fieldManager": field_manager, "fieldValidation": "Strict", **_dry(dry_run)}
        return self._send("PATCH", kind.path(namespace, name), query, change, _MERGE)

    def create(self, obj: Object, *, field_manager: str, dry_run: bool = False) -> Object:
        kind = self._kinds[obj["apiVersion"], obj["kind"]]
        query = {"fieldManager": field_manager, "fieldValidation": "Strict", **_dry(dry_run)}
        return self._send("POST", kind.path(obj["metadata"].get("namespace", "")), query, obj)

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
        self._send("POST", f"{POD.path(namespace, name)}/eviction", {}, body)

    def event(self, event: Event) -> None:
        """Create an event. Its name contains a digest of its content, so the server answers `AlreadyExists` to a
        repeated event, which counts as success."""
        namespace = event.namespace or "default"
        text = "\n".join((event.kind.kind, event.namespace, event.name, event.reason, event.message))
        body = {
            "apiVersion": "events.k8s.io/v1",
            "kind": "Event",
            "metadata": {
                "name": f"{event.name[:200]}.{hashlib.sha256(text.encode()).hexdigest()[:16]}",
                "namespace": namespace,
            },
            "eventTime": micro_time(event.at_ms),
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
        content = _content(self._api, method, path, query or {}, body, self._timeout_s, content_type=content_type)
        answer = decode(content)
        if answer is None:
            raise ClusterUnavailable(f"{method} {path}: the answer is not JSON")
        return answer


def connect_for_election(kubeconfig: Path | None, times: LeaseTimes) -> KubernetesCluster:
    """Return the client of an election, which itself repeats failed requests. Raises ClusterUnavailable."""
    return KubernetesCluster.connect((LEASE,), kubeconfig, timeout_s=times.request_s, retries=0)


def _dry(dry_run: bool) -> dict[str, str]:
    return {"dryRun": "All"} if dry_run else {}


_REVIEWS = "/apis/authorization.k8s.io/v1"


class Inspector(KubernetesCluster):
    """A client that also reads API versions, access rights and the server's time. Every method raises
    gputally.base.errors.ClusterError."""

    def served(self, groups: Iterable[str]) -> dict[tuple[str, str], tuple[str, ...]]:
        """Return the served versions of each resource in these API groups, by (group, plural), the preferred version
        first. The core group is ""."""
        known = {group["name"]: group for group in self._send("GET", "/apis").get("groups") or ()}
        served: dict[tuple[str, str], tuple[str, ...]] = {}
        for group in dict.fromkeys(groups):
            versions = [each["version"] for each in known.get(group, {}).get("versions") or ()] if group else ["v1"]
            for version in versions:
                path = f"/apis/{group}/{version}" if group else f"/api/{version}"
                for resource in self._resources(path):
                    key = group, resource
                    served[key] = (*served.get(key, ()), version)
        return served

    def _resources(self, path: str) -> list[str]:
        try:
            resources = self._send("GET", path).get("resources") or ()
        except NotFound:  # removed since the groups were listed
            return []
        return [str(resource["name"]) for resource in resources if "/" not in resource["name"]]

    def may(self, attributes: Mapping[str, str], user: str = "", groups: Iterable[str] = ()) -> bool:
        """Return True if a user has an access right. To review another user, this client needs the right to create a
        SubjectAccessReview.

        attributes: resourceAttributes of an access review (group, resource, subresource, verb, name, namespace).
        user, groups: the user and its groups; "" for this client's own user."""
        spec: dict[str, Any] = {"resourceAttributes": dict(attributes)}
        kind = "SelfSubjectAccessReview"
        if user:
            kind, spec = "SubjectAccessReview", {**spec, "user": user, "groups": list(groups)}
        body = {"apiVersion": "authorization.k8s.io/v1", "kind": kind, "spec": spec}
        answer = self._send("POST", f"{_REVIEWS}/{kind.lower()}s", {}, body)
        return bool((answer.get("status") or {}).get("allowed"))

    def caller(self) -> str:
        """Return this client's user name at the API server. Source: SelfSubjectReview, Kubernetes 1.28."""
        body = {"apiVersion": "authentication.k8s.io/v1", "kind": "SelfSubjectReview"}
        answer = self._send("POST", "/apis/authentication.k8s.io/v1/selfsubjectreviews", {}, body)
        return str(((answer.get("status") or {}).get("userInfo") or {}).get("username") or "")

    def server_ms(self) -> int:
        """Return the server's time in UTC milliseconds, which is exact to a second."""
        response = _request(self._api, "GET", "/version", {}, None, self._timeout_s)
        text = next((value for name, value in response.response.headers.items() if name.lower() == "date"), "")
        response.response.drain_conn()
        try:
            return round(parsedate_to_datetime(text).timestamp() * 1000)
        except ValueError as error:
            raise ClusterUnavailable(f"the API server's answer has no valid Date header: {text!r}") from error
