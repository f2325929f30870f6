"""Maps the policy to Run:ai's projects and departments, and presents them as Kubernetes objects.

Run:ai owns the Queue objects that its scheduler reads, and reverts changes by other clients, so the controller sets
weights with Run:ai's own API. `runai:PROJECT` and `runai-department:NAME` refer to the resources of one organisational
unit in the policy's node pool, and `runai:PROJECT/POOL` to those in another node pool. Because this module presents
them as objects, the rest of the controller treats Run:ai like any other target. Run:ai stores no annotations, so a
ConfigMap holds them.

Weights are effective only if *Over quota weight* is switched on in Run:ai's general settings. The time-based fair share
of a node pool must be off, otherwise history counts twice. Requests and allocations of a unit come from Run:ai. The
controller does not read Run:ai's workloads and preempts none of them.

Source: Run:ai REST API, organizations/projects and departments ("node pool resources"), node-pools.

Run:ai does not record the owner of a field. If the present weight differs from the weight that the controller wrote
last, another client has set it. The write is then a Conflict, which the controller reports and never forces, until an
operator takes the field over (`gputally fairshare adopt`). Reading and writing are two requests; the next cycle finds a
change in between.

The controller writes the annotations before the weight, and they include the weight that it replaces. After a crash in
between, the controller recognises both values as its own. It writes no other field, and a dry run writes nothing.

The controller calls the API as a service account. The client id and secret are files of a mounted Secret, which are
read for every new token and never logged. A token is used until shortly before it expires. HTTPS is required except on
this machine. After 429 or 5xx with a Retry-After in seconds, the controller sends no request for that time, ten minutes
at most.

Source: Run:ai REST API v2.2x and v3.0; `/api/v2/token` is OAuth 2.0's client credentials grant, `/api/v1/token` its
older form."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any
from urllib.parse import quote

import httpx2

from accountant.wire.policy_models import Policy
from fairshare.core import scheduler_queue_objects
from fairshare.core.queues_and_weights import Condition, Issue, Observation, Pod, Standing, TargetQueue, Value
from fairshare.core.scheduler_queue_objects import has_ref, match, owners, read_queues, target_queue
from fairshare.schedulers.runai.conditions import REASONS
from fairshare.schedulers.runai.section import RunaiTarget
from fairshare.targets.status_config_map import StatusObject
from fairshare.targets.weight_plan import Adapter, ObjectQuery, Seen, same
from gputally.base import http_calls
from gputally.base.clock import Clock
from gputally.base.errors import (
    ClusterRefused,
    ClusterUnavailable,
    Conflict,
    FairshareError,
    NotFound,
    without_password,
)
from gputally.base.units import MS_PER_SECOND
from gputally.kubernetes.mig_parts import NO_NODES, MigParts
from gputally.kubernetes.objects import CONFIG_MAP, Cluster, Kind, Object, Objects, quantity, to_fields_v1, value_at

PROJECT = Kind("run.ai/v1", "Project", "projects", status=False)
DEPARTMENT = Kind("run.ai/v1", "Department", "departments", status=False)
NODE_POOL = Kind("run.ai/v1", "NodePool", "node-pools", status=False)
UNITS = (PROJECT, DEPARTMENT)
WEIGHT = ("spec", "gpu", "overQuotaWeight")
PROJECT_PREFIX, DEPARTMENT_PREFIX = "runai", "runai-department"
NAME = "runai"
ANOTHER_CLIENT = "run.ai"
"""The field manager of a weight that differs from the weight that the controller wrote last."""
PAGE = 500
MOST_ROWS = 100_000
MOST_BYTES = 64 * 1024 * 1024
LONGEST_PAUSE_S = 600.0
CLIENT_ID, CLIENT_SECRET = "client-id", "client-secret"
"""Files in the folder of the credentials: the keys of the Secret."""
_LISTS = {PROJECT: "resources", DEPARTMENT: "nodePoolResources"}
"""The field of the API's response that lists the units of a kind."""
_EARLY_MS = 60 * MS_PER_SECOND
_LOCAL = frozenset({"localhost", "127.0.0.1", "::1"})


class RunaiApi:
    """A client of one Run:ai control plane, used as a context manager. Its methods raise ClusterError's subclasses."""

    def __init__(
        self,
        url: str,
        credentials: Path,
        clock: Clock,
        *,
        cluster: str | None = None,
        ca_file: Path | None = None,
        timeout_s: float = 10.0,
        transport: httpx2.BaseTransport | None = None,
    ) -> None:
        """Raises ClusterRefused for an invalid address or invalid certificate authorities.

        credentials: a folder with `client-id` and `client-secret`.
        cluster: the id of the only cluster whose units are read; None: all clusters.
        ca_file: certificate authorities (PEM) that are trusted instead of the system's."""
        parsed = http_calls.address(url, "https://example.run.ai", ClusterRefused)
        if parsed.scheme != "https" and not (parsed.scheme == "http" and parsed.host in _LOCAL):
            raise ClusterRefused(f"{without_password(url)}: use an https address for Run:ai")
        self._url = url.rstrip("/")
        self._credentials = credentials
        self._clock = clock
        self._cluster = cluster
        trusted = http_calls.tls_context_for(parsed, ca_file, ClusterRefused)
        self._timeout_s = timeout_s
        self._http = http_calls.client(trusted, timeout_s, head_s=timeout_s, transport=transport)
        self._token = ""
        self._token_until_ms = 0
        self._paused_until_ms = 0

    def __enter__(self) -> RunaiApi:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._http.close()

    def units(self, kind: Kind) -> Iterator[dict[str, Any]]:
        """Yield the resources of every unit in every node pool.

        The keys of a row: orgUnitId, orgUnitName, nodePoolId, nodePoolName, resources, quotaStatus."""
        query = {"limit": str(PAGE), **({"filterBy": f"clusterId=={self._cluster}"} if self._cluster else {})}
        path = f"/api/v1/org-unit/{kind.plural}/node-pool-resources"
        for offset in range(0, MOST_ROWS, PAGE):
            answer = self._ask("GET", path, query={**query, "offset": str(offset)})
            rows = answer.get(_LISTS[kind]) if isinstance(answer, dict) else None
            if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
                raise ClusterUnavailable(f"{self._url}{path}: the response is not that of Run:ai's API")
            yield from rows
            if len(rows) < PAGE:
                return

    def weight(self, kind: Kind, unit: str, pool: str) -> float | None:
        """Return the present over-quota weight. Raises NotFound for a unit without this node pool."""
        path = f"/api/v1/org-unit/{kind.plural}/{quote(unit, safe='')}"
        resources = value_at(self._ask("GET", path), ("resources",))
        for each in resources if isinstance(resources, list) else ():
            if str(value_at(each, ("nodePool", "id"))) == pool:
                weight = value_at(each, ("gpu", "overQuotaWeight"))
                if weight is not None and quantity(weight) is None:
                    raise ClusterUnavailable(
                        f"{self._url}{path}: overQuotaWeight is {weight!r}, not a number that is 0 or more"
                    )
                return quantity(weight)
        raise NotFound(f"{self._url}{path}: the unit has no node pool {pool}")

    def set_weight(self, kind: Kind, unit: str, pool: str, weight: float) -> None:
        """Set the over-quota weight, and no other field, by a partial update."""
        path = f"/api/v1/org-unit/{kind.plural}/{quote(unit, safe='')}/resources"
        self._ask("PATCH", path, body=[{"nodePool": {"id": pool}, "gpu": {"overQuotaWeight": weight}}])

    def node_pools(self) -> list[dict[str, Any]]:
        answer = self._ask("GET", "/api/v1/node-pools", query={"limit": str(PAGE)})
        return list(answer.get("nodepools") or ()) if isinstance(answer, dict) else []

    def _ask(self, method: str, path: str, *, query: Mapping[str, str] | None = None, body: object = None) -> Any:
        response = self._send(method, path, query=query, body=body, token=self._bearer())
        if response.status_code == 401:
            self._token_until_ms = 0  # the token was revoked: try once more with a new one
            response = self._send(method, path, query=query, body=body, token=self._bearer())
        return self._read(method, path, response)

    def _bearer(self) -> str:
        now_ms = self._clock.monotonic_ms()
        if now_ms < self._token_until_ms:
            return self._token
        client, secret = self._secret(CLIENT_ID), self._secret(CLIENT_SECRET)
        form = {"grant_type": "client_credentials", "client_id": client, "client_secret": secret}
        path = "/api/v2/token"
        response = self._send("POST", path, form=form)
        if response.status_code == 404:
            path = "/api/v1/token"
            older = {"grantType": "client_credentials", "clientId": client, "clientSecret": secret}
            response = self._send("POST", path, body=older)
        answer = self._read("POST", path, response)
        token = (answer.get("access_token") or answer.get("accessToken")) if isinstance(answer, dict) else None
        if not isinstance(token, str) or not token:
            raise ClusterUnavailable(f"{self._url}{path}: the response has no token")
        lifetime_s = answer.get("expires_in") or answer.get("expiresIn")
        lifetime_ms = int(quantity(lifetime_s) or 0) * MS_PER_SECOND
        self._token, self._token_until_ms = token, now_ms + max(0, lifetime_ms - _EARLY_MS)
        return token

    def _secret(self, name: str) -> str:
        path = self._credentials / name
        try:
            return path.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ClusterRefused(f"credentials {path}: {getattr(error, 'strerror', None) or 'not text'}") from error

    def _send(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        body: object = None,
        form: Mapping[str, str] | None = None,
        token: str = "",
    ) -> httpx2.Response:
        if self._clock.monotonic_ms() < self._paused_until_ms:
            raise ClusterUnavailable(
                f"{self._url}: Run:ai is overloaded and asked for a pause (Retry-After), which has not ended"
            )
        headers = {"Accept": "application/json", **({"Authorization": f"Bearer {token}"} if token else {})}
        content = None if body is None else json.dumps(body)
        if content is not None:
            headers["Content-Type"] = "application/json"
        try:
            with self._http.stream(
                method, self._url + path, params=query, content=content, data=form, headers=headers
            ) as response:
                read = http_calls.read_bounded(response, MOST_BYTES, self._timeout_s)
        except httpx2.HTTPError as error:
            raise ClusterUnavailable(f"{self._url}: {http_calls.reason(error)}") from error
        if read is None:
            raise ClusterUnavailable(f"{method} {self._url}{path}: the response is larger than {MOST_BYTES} bytes")
        after = response.headers.get("Retry-After")
        return httpx2.Response(
            response.status_code, headers={"Retry-After": after} if after is not None else None, content=read
        )

    def _read(self, method: str, path: str, response: httpx2.Response) -> Any:
        status, request = response.status_code, f"{method} {self._url}{path}"
        if not response.is_success:
            overloaded = status == 429 or status >= 500
            if overloaded:
                self._pause(response.headers.get("Retry-After"))
            kind = NotFound if status == 404 else ClusterUnavailable if overloaded else ClusterRefused
            raise kind(f"{request}: {status} {_message(response)}")
        try:
            return json.loads(response.content) if response.content else None
        except ValueError as error:
            raise ClusterUnavailable(f"{request}: the response is not JSON") from error

    def _pause(self, retry_after: str | None) -> None:
        if retry_after is not None and retry_after.isascii() and retry_after.isdigit():
            pause_s = min(float(retry_after), LONGEST_PAUSE_S)
            self._paused_until_ms = self._clock.monotonic_ms() + round(pause_s * MS_PER_SECOND)


def _message(response: httpx2.Response) -> str:
    """Return the message in Run:ai's error response, or else the reason phrase of its status."""
    try:
        return str(json.loads(response.content)["message"])[:500]
    except (ValueError, KeyError, TypeError):
        return response.reason_phrase


class RunaiAdapter(Adapter):
    """Reads Run:ai's projects and departments, and writes their over-quota weights."""

    name = NAME
    prefixes = (PROJECT_PREFIX, DEPARTMENT_PREFIX)
    settings = RunaiTarget
    reasons = REASONS
    most_writes = 60  # each write is two requests to a remote service
    managers = MappingProxyType(
        {ANOTHER_CLIENT: "Run:ai: do not set {field} of a {kind} there any more, by hand or by script"}
    )

    @contextmanager
    def opened(
        self, policy: Policy, cluster: Cluster, files: Mapping[str, Path | None], where: StatusObject, clock: Clock, /
    ) -> Iterator[Objects | None]:
        """Yield Run:ai's objects, or None if the policy does not use Run:ai. Raises RunaiFault.

        The notes on Run:ai's units are in a ConfigMap with `-runai` after the name of `where`."""
        target, credentials = RunaiTarget.of(policy), files["runai_credentials"]
        if target.mode == "off" or target.url is None or not has_ref(policy, *self.prefixes):
            yield None
            return
        if credentials is None:
            raise RunaiFault(
                "the policy has queues of Run:ai: give --runai-credentials (or the setting runai_credentials),"
                " a folder with the files client-id and client-secret"
            )
        ca_file = files["runai_ca_file"]
        with RunaiApi(target.url, credentials, clock, cluster=target.cluster, ca_file=ca_file) as api:
            yield RunaiCluster(api, cluster, where.namespace, f"{where.name}-runai")

    def reads(self, _policy: Policy) -> tuple[ObjectQuery, ...]:
        return (ObjectQuery((PROJECT,), required=True), ObjectQuery((DEPARTMENT,)), ObjectQuery((NODE_POOL,)))

    def observe(
        self, policy: Policy, seen: Seen, _pods: Sequence[Pod] = (), _parts: MigParts = NO_NODES
    ) -> Observation:
        default = RunaiTarget.of(policy).node_pool
        owner = {
            ref if "/" in ref else f"{ref}/{default}": queue for ref, queue in owners(policy, *self.prefixes).items()
        }
        units = [obj for kind in UNITS for obj in seen.get(kind, ())]
        found = match(units, owner, ref_of, "Run:ai unit")

        def read(_name: str, obj: Object) -> tuple[TargetQueue, Standing] | Issue:
            number = value_at(obj, WEIGHT)
            weight = None if number is None else quantity(number)
            if number is not None and weight is None:
                return Issue(obj["metadata"]["name"], f"overQuotaWeight is {number!r}")
            queue = target_queue(obj, _kind(obj), weight)
            allocated = quantity(value_at(obj, ("status", "allocated"))) or 0.0
            requested = max(allocated, quantity(value_at(obj, ("status", "requested"))) or 0.0)
            return queue, Standing(requested, allocated, weight, queue.direction)

        observation = read_queues(found, read)
        pools = {str(value_at(obj, ("spec", "nodePool"))) for obj in found.found.values()}
        conditions = (effective(seen.get(NODE_POOL, ()), pools),)
        return replace(observation, conditions=conditions)

    def spec(self, _queue: TargetQueue, value: Value) -> Object:
        return {"gpu": {"overQuotaWeight": value}}


def ref_of(obj: Object) -> str:
    """Return the ref of a unit with its node pool, such as `runai:PROJECT/POOL`."""
    prefix = PROJECT_PREFIX if obj["kind"] == PROJECT.kind else DEPARTMENT_PREFIX
    return f"{prefix}:{value_at(obj, ('spec', 'unit'))}/{value_at(obj, ('spec', 'nodePool'))}"


def effective(pools: Sequence[Object], used: set[str]) -> Condition:
    """Return the condition `Effective`: False if a node pool counts history too, otherwise Unknown.

    used: the names of the node pools whose weights the controller writes."""
    double = sorted(
        pool["metadata"]["name"]
        for pool in pools
        if pool["metadata"]["name"] in used and value_at(pool, ("spec", "timeBasedFairShare", "enabled")) is True
    )
    if double:
        text = f"time-based fair share is on in node pool {', '.join(double)}: switch it off, history is in the weights"
        return Condition("Effective", "False", "HistoryCountedTwice", text)
    text = "switch Over quota weight on in Run:ai's general settings: weights need it, and the API does not show it"
    return Condition("Effective", "Unknown", "SettingNotSeen", text)


class RunaiCluster:
    """Implements `gputally.kubernetes.objects.Objects` for Run:ai's units. Not thread-safe.

    A ConfigMap holds a note for each unit that the controller has written: its annotations, and the other weight that
    the controller recognises as its own after a crash."""

    def __init__(self, api: RunaiApi, cluster: Cluster, namespace: str, name: str) -> None:
        """cluster, namespace, name: identify the ConfigMap with the notes."""
        self._api = api
        self._cluster = cluster
        self._namespace, self._name = namespace, name

    def list(self, kind: Kind, *, fields: str = "") -> Sequence[Object]:
        if kind == NODE_POOL:
            return sorted((_pool(each) for each in self._api.node_pools()), key=lambda obj: obj["metadata"]["name"])
        if kind not in UNITS or fields:
            raise NotFound(f"Run:ai has no {kind.plural}")
        notes = self._notes()
        units = [_unit(kind, row, notes.get(_key(kind, _uid(row)))) for row in self._api.units(kind)]
        return sorted(units, key=lambda obj: str(obj["metadata"]["name"]))

    def get(self, kind: Kind, name: str, namespace: str = "") -> Object:
        found = next((obj for obj in self.list(kind) if obj["metadata"]["name"] == name and not namespace), None)
        if found is None:
            raise NotFound(f"Run:ai has no {kind.kind} {name}")
        return found

    def apply(self, obj: Object, *, field_manager: str, dry_run: bool = False) -> Object:
        kind, uid, name = _kind(obj), obj["metadata"]["uid"], obj["metadata"]["name"]
        notes = self._notes()
        note = notes.get(_key(kind, uid))
        standing = self._api.weight(kind, *_ids(uid))
        if note is not None and not _ours(note, standing):
            published = note["annotations"][scheduler_queue_objects.PUBLISHED]
            text = f"{kind.kind} {name}: overQuotaWeight is {standing}, and the controller wrote {published}"
            raise Conflict(text, ((ANOTHER_CLIENT, "gpu.overQuotaWeight"),))
        if dry_run:
            return obj
        annotations = dict(obj["metadata"].get("annotations") or {})
        wanted = value_at(obj, WEIGHT)
        key = _key(kind, uid)
        changes = wanted is not None and not same(wanted, standing)
        if annotations:
            self._write({**notes, key: {"annotations": annotations, "also": standing}}, field_manager)
        elif note is not None and changes:
            self._write({**notes, key: {**note, "also": wanted}}, field_manager)
        if changes:
            self._api.set_weight(kind, *_ids(uid), float(wanted))
        if not annotations and note is not None:
            self._write({other: kept for other, kept in notes.items() if other != key}, field_manager)
        return obj

    def transfer(self, obj: Object, *, field_manager: str, dry_run: bool = False) -> Object:
        kind, uid = _kind(obj), obj["metadata"]["uid"]
        standing = self._api.weight(kind, *_ids(uid))
        if not same(value_at(obj, WEIGHT), standing):
            raise Conflict(f"{kind.kind} {obj['metadata']['name']}: overQuotaWeight changed meanwhile: read it again")
        if not dry_run:
            others = {key: note for key, note in self._notes().items() if key != _key(kind, uid)}
            self._write(others, field_manager)
        return obj

    def _notes(self) -> dict[str, dict[str, Any]]:
        """Return the valid notes by key. A unit with an invalid note counts as never written."""
        try:
            data = self._cluster.get(CONFIG_MAP, self._name, self._namespace).get("data") or {}
        except NotFound:
            return {}
        notes = {}
        for key, text in data.items():
            try:
                note = json.loads(text)
            except ValueError:
                continue
            if (
                isinstance(note, dict)
                and isinstance(note.get("annotations"), dict)
                and scheduler_queue_objects.read(note["annotations"])
            ):
                notes[key] = note
        return notes

    def _write(self, notes: Mapping[str, Mapping[str, Any]], field_manager: str) -> None:
        document = {
            "apiVersion": CONFIG_MAP.api_version,
            "kind": CONFIG_MAP.kind,
            "metadata": {"name": self._name, "namespace": self._namespace},
            "data": {key: json.dumps(note, sort_keys=True) for key, note in sorted(notes.items())},
        }
        self._cluster.apply(document, field_manager=f"{field_manager}-notes")


def _ours(note: Mapping[str, Any], standing: float | None) -> bool:
    """Return True if the controller wrote the standing weight."""
    recorded = scheduler_queue_objects.read(note["annotations"])
    return recorded is not None and (same(standing, recorded.published) or same(standing, note.get("also")))


def _unit(kind: Kind, row: Mapping[str, Any], note: Mapping[str, Any] | None) -> Object:
    """Return a unit as an object. A weight that another client set is owned by `ANOTHER_CLIENT`."""
    weight = value_at(row, ("resources", "gpu", "overQuotaWeight"))
    annotations = dict(note["annotations"]) if note is not None else {}
    number = quantity(weight)
    contested = note is not None and not _ours(note, number)
    if note is not None and not contested and same(number, note.get("also")):
        annotations[scheduler_queue_objects.PUBLISHED] = f"{number or 0.0:.15g}"  # the announced write did not happen
    owner = {"manager": ANOTHER_CLIENT, "operation": "Update", "fieldsV1": to_fields_v1({WEIGHT})}
    metadata: dict[str, Any] = {
        "name": f"{row.get('orgUnitName')}.{row.get('nodePoolName')}",
        "uid": _uid(row),
        "resourceVersion": f"{weight}",
        "managedFields": [owner] if contested else [],
        **({"annotations": annotations} if annotations else {}),
    }
    spec = {"unit": row.get("orgUnitName"), "nodePool": row.get("nodePoolName"), "gpu": {"overQuotaWeight": weight}}
    status = {key: value_at(row, ("quotaStatus", key, "gpu")) for key in ("allocated", "requested")}
    return {"apiVersion": kind.api_version, "kind": kind.kind, "metadata": metadata, "spec": spec, "status": status}


def _pool(row: Mapping[str, Any]) -> Object:
    metadata = {"name": str(row.get("name"))}
    spec = {"timeBasedFairShare": value_at(row, ("schedulingConfiguration", "timeBasedFairShare"))}
    return {"apiVersion": NODE_POOL.api_version, "kind": NODE_POOL.kind, "metadata": metadata, "spec": spec}


def _kind(obj: Object) -> Kind:
    return PROJECT if obj["kind"] == PROJECT.kind else DEPARTMENT


def _uid(row: Mapping[str, Any]) -> str:
    return f"{row.get('orgUnitId')}/{row.get('nodePoolId')}"


def _ids(uid: str) -> tuple[str, str]:
    unit, _, pool = uid.partition("/")
    return unit, pool


def _key(kind: Kind, uid: str) -> str:
    """Return the ConfigMap's key for a unit; keys have no slashes."""
    return f"{kind.kind}.{uid.replace('/', '.')}"


class RunaiFault(FairshareError):
    """The policy has queues of Run:ai, but no credentials for it are configured."""
