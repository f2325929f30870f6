"""Presents Run:ai's projects and departments as objects, and maps the policy to them.

Run:ai owns the Queue objects that its scheduler reads, and reverts changes by others, so weights are set with its own
API. `runai:PROJECT` and `runai-department:NAME` refer to the resources of one organisational unit in the policy's node
pool, and `runai:PROJECT/POOL` to those in another node pool. This module presents them as objects, so that the rest of
the controller treats Run:ai like any other target. Run:ai stores no annotations, so they are kept in a ConfigMap.

Weights are effective only if *Over quota weight* is switched on in Run:ai's general settings. The time-based fair share
of a node pool must be off, otherwise history counts twice. Workloads are not read: requests and holdings of a unit come
from Run:ai, and nothing is preempted here.

Source: Run:ai REST API, organizations/projects and departments ("node pool resources"), node-pools.

Run:ai does not record who owns a field. If the present weight differs from the one that was last written, another
client has set it. The write is then a Conflict, which is reported and never forced, until a person takes the field over
(`gputally fairshare adopt`). Reading and writing are two requests. A change in between is found in the next cycle.

The annotations are written before the weight and include the weight that it replaces, so after a crash in between both
values are recognised as the controller's. No other field is written, and a dry run writes nothing at all.

The API is called as a service account. Its client id and secret are files of a mounted Secret. They are read for every
new token and never logged. The token is kept until shortly before it expires. HTTPS is required except on this machine.
After 429 or 503 with Retry-After no request is sent for that time.

Source: Run:ai REST API v2.2x and v3.0; `/api/v2/token` is OAuth 2.0's client credentials grant, `/api/v1/token` its
older form."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import quote

import httpx2

from accountant.wire.policy_models import Policy
from fairshare.core import queue_annotations
from fairshare.core.queue_annotations import has_ref, match, owners, read_queues, target_queue
from fairshare.core.queues_and_weights import Condition, Issue, Observation, Pod, Standing, TargetQueue, Value
from fairshare.targets.status_config_map import StatusObject
from fairshare.targets.weight_plan import Adapter, ObjectQuery, Seen, same
from gputally.base import http_calls
from gputally.base.clock import Clock
from gputally.base.errors import Conflict, FairshareError, NotFound, Refused, Unavailable
from gputally.base.units import MS_PER_SECOND
from gputally.kubernetes.objects import CONFIG_MAP, Cluster, Kind, Object, Objects, quantity, to_fields_v1, value_at

PROJECT = Kind("run.ai/v1", "Project", "projects", status=False)


DEPARTMENT = Kind("run.ai/v1", "Department", "departments", status=False)


PAGE = 500
MOST_ROWS = 100_000
MOST_BYTES = 64 * 1024 * 1024
LONGEST_QUIET_S = 600.0
CLIENT_ID, CLIENT_SECRET = "client-id", "client-secret"
"""Files of the credentials' folder: keys of the Secret."""
_LISTS = {PROJECT: "resources", DEPARTMENT: "nodePoolResources"}
_EARLY_MS = 60 * MS_PER_SECOND
_LOCAL = frozenset({"localhost", "127.0.0.1", "::1"})


class RunaiApi:
    """A client of one control plane. Close it, or use it as a context manager. Raises ClusterError's kinds."""

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
        """credentials: a folder with `client-id` and `client-secret`.
        cluster: id; only its units are read.
        ca_file: authorities (PEM) trusted instead of the system's.

        Raises Refused for an invalid address or authorities."""
        try:
            parsed = httpx2.URL(url)
        except httpx2.InvalidURL as error:
            raise Refused(f"not an address: {url!r}: {error}") from error
        if parsed.scheme != "https" and not (parsed.scheme == "http" and parsed.host in _LOCAL):
            raise Refused(f"{url}: Run:ai is reached over https only")
        self._url = url.rstrip("/")
        self._credentials = credentials
        self._clock = clock
        self._cluster = cluster
        trusted = http_calls.tls_context_for(parsed, ca_file, Refused)
        self._http = http_calls.client(trusted, timeout_s, transport=transport)
        self._token = ""
        self._token_until_ms = 0
        self._quiet_until_ms = 0

    def __enter__(self) -> RunaiApi:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._http.close()

    def units(self, kind: Kind) -> Iterator[dict[str, Any]]:
        """Yield every unit's resources in every node pool: orgUnitId, orgUnitName, nodePoolId, nodePoolName, resources,
        quotaStatus."""
        query = {"limit": str(PAGE), **({"filterBy": f"clusterId=={self._cluster}"} if self._cluster else {})}
        path = f"/api/v1/org-unit/{kind.plural}/node-pool-resources"
        for offset in range(0, MOST_ROWS, PAGE):
            answer = self._ask("GET", path, query={**query, "offset": str(offset)})
            rows = answer.get(_LISTS[kind]) if isinstance(answer, dict) else None
            if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
                raise Unavailable(f"{self._url}{path}: the answer is not one of Run:ai's API")
            yield from rows
            if len(rows) < PAGE:
                return

    def weight(self, kind: Kind, unit: str, pool: str) -> float | None:
        """Return the present over-quota weight. Raises NotFound for a unit without this node pool."""
        path = f"/api/v1/org-unit/{kind.plural}/{quote(unit, safe='')}"
        answer = self._ask("GET", path)
        for each in (answer.get("resources") or ()) if isinstance(answer, dict) else ():
            if str((each.get("nodePool") or {}).get("id")) == pool:
                found = (each.get("gpu") or {}).get("overQuotaWeight")
                return None if found is None else float(found)
        raise NotFound(f"{self._url}{path}: it has no node pool {pool}")

    def set_weight(self, kind: Kind, unit: str, pool: str, weight: float) -> None:
        """Change this one field, as a partial update."""
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
            raise Unavailable(f"{self._url}{path}: no token in the answer")
        lasts = answer.get("expires_in") or answer.get("expiresIn")
        lasts_ms = int(lasts) * MS_PER_SECOND if isinstance(lasts, int | float) else 0
        self._token, self._token_until_ms = token, now_ms + max(0, lasts_ms - _EARLY_MS)
        return token

    def _secret(self, name: str) -> str:
        path = self._credentials / name
        try:
            return path.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise Refused(f"credentials {path}: {getattr(error, 'strerror', None) or 'not text'}") from error

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
        if self._clock.monotonic_ms() < self._quiet_until_ms:
            raise Unavailable(f"{self._url}: it asked for a pause")
        headers = {"Accept": "application/json", **({"Authorization": f"Bearer {token}"} if token else {})}
        content = None if body is None else json.dumps(body)
        if content is not None:
            headers["Content-Type"] = "application/json"
        try:
            return self._http.request(
                method, self._url + path, params=query, content=content, data=form, headers=headers
            )
        except httpx2.HTTPError as error:
            raise Unavailable(f"{self._url}: {http_calls.reason(error)}") from error

    def _read(self, method: str, path: str, response: httpx2.Response) -> Any:
        status = response.status_code
        if status == 429 or status >= 500:
            self._be_quiet(response.headers.get("Retry-After"))
        if not response.is_success:
            kinds = {404: NotFound} if status == 404 else {}
            kind = kinds.get(status, Unavailable if status == 429 or status >= 500 else Refused)
            raise kind(f"{method} {self._url}{path}: {status} {_words(response)}")
        if len(response.content) > MOST_BYTES:
            raise Unavailable(f"{method} {self._url}{path}: the answer is larger than {MOST_BYTES} bytes")
        try:
            return json.loads(response.content) if response.content else None
        except ValueError as error:
            raise Unavailable(f"{method} {self._url}{path}: the answer is not JSON") from error

    def _be_quiet(self, retry_after: str | None) -> None:
        if retry_after is not None and retry_after.isascii() and retry_after.isdigit():
            wait_s = min(float(retry_after), LONGEST_QUIET_S)
            self._quiet_until_ms = self._clock.monotonic_ms() + round(wait_s * MS_PER_SECOND)


def _words(response: httpx2.Response) -> str:
    """Return Run:ai's own message, if there is one."""
    try:
        return str(json.loads(response.content)["message"])[:500]
    except (ValueError, KeyError, TypeError):
        return response.reason_phrase


NODE_POOL = Kind("run.ai/v1", "NodePool", "node-pools", status=False)
UNITS = (PROJECT, DEPARTMENT)
WEIGHT = ("spec", "gpu", "overQuotaWeight")
PROJECT_PREFIX, DEPARTMENT_PREFIX = "runai", "runai-department"
NAME = "runai"


class RunaiAdapter(Adapter):
    """The adapter for Run:ai."""

    name = NAME
    prefixes = (PROJECT_PREFIX, DEPARTMENT_PREFIX)

    def reads(self, _policy: Policy) -> tuple[ObjectQuery, ...]:
        return (ObjectQuery((PROJECT,), required=True), ObjectQuery((DEPARTMENT,)), ObjectQuery((NODE_POOL,)))

    def observe(self, policy: Policy, seen: Seen, _pods: Sequence[Pod] = ()) -> Observation:
        default = policy.targets.runai.node_pool
        owner = {_full(ref, default): queue for ref, queue in owners(policy, *self.prefixes).items()}
        units = [obj for kind in UNITS for obj in seen.get(kind, ())]
        found = match(units, owner, ref_of, "Run:ai unit")

        def read(_name: str, obj: Object) -> tuple[TargetQueue, Standing] | Issue:
            number = value_at(obj, WEIGHT)
            weight = None if number is None else quantity(number)
            if number is not None and weight is None:
                return Issue(obj["metadata"]["name"], f"overQuotaWeight is {number!r}")
            held = target_queue(obj, _kind(obj), weight)
            allocated = quantity(value_at(obj, ("status", "allocated"))) or 0.0
            requested = max(allocated, quantity(value_at(obj, ("status", "requested"))) or 0.0)
            return held, Standing(requested, allocated, weight, held.changed_ms, held.direction)

        known = read_queues(found, read)
        pools = {str(value_at(obj, ("spec", "nodePool"))) for obj in found.found.values()}
        acts = effective(seen.get(NODE_POOL, ()), pools)
        return Observation(known.held, known.standings, known.issues, (acts,), left=known.left)

    def spec(self, _held: TargetQueue, value: Value) -> Object:
        return {"gpu": {"overQuotaWeight": value}}


def ref_of(obj: Object) -> str:
    """`runai:PROJECT/POOL`, the node pool always named."""
    prefix = PROJECT_PREFIX if obj["kind"] == PROJECT.kind else DEPARTMENT_PREFIX
    return f"{prefix}:{value_at(obj, ('spec', 'unit'))}/{value_at(obj, ('spec', 'nodePool'))}"


def effective(pools: Sequence[Object], used: set[str]) -> Condition:
    """Return whether gputally's weights are Run:ai's only history, in the node pools that are written to."""
    double = sorted(
        pool["metadata"]["name"]
        for pool in pools
        if pool["metadata"]["name"] in used and value_at(pool, ("spec", "timeBasedFairShare", "enabled")) is True
    )
    if double:
        text = f"time-based fair share is on in node pool {', '.join(double)}: switch it off, history is in the weights"
        return Condition("Effective", "False", "HistoryCountedTwice", text)
    text = (
        "weights act where Over quota weight is switched on in Run:ai's general settings, which its API does not tell"
    )
    return Condition("Effective", "Unknown", "SettingNotSeen", text)


def _full(ref: str, default: str) -> str:
    return ref if "/" in ref else f"{ref}/{default}"


ELSEWHERE = "run.ai"
"""The owner of a weight that differs from the last written one, as far as it can be known."""


class RunaiCluster:
    """A `gputally.kubernetes.objects.Objects`. Not thread-safe."""

    def __init__(self, api: RunaiApi, cluster: Cluster, namespace: str, name: str) -> None:
        """cluster, namespace, name: of the ConfigMap with the controller's notes."""
        self._api = api
        self._cluster = cluster
        self._namespace, self._name = namespace, name

    def list(self, kind: Kind, *, fields: str = "") -> Sequence[Object]:
        if kind == NODE_POOL:
            return sorted((_pool(each) for each in self._api.node_pools()), key=lambda obj: obj["metadata"]["name"])
        if kind not in UNITS or fields:
            raise NotFound(f"Run:ai has no {kind.plural}")
        notes = self._notes()
        found = [_unit(kind, row, notes.get(_key(kind, _uid(row)))) for row in self._api.units(kind)]
        return sorted(found, key=lambda obj: str(obj["metadata"]["name"]))

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
            published = note["annotations"][queue_annotations.PUBLISHED]
            text = f"{kind.kind} {name}: overQuotaWeight is {standing}, and we wrote {published}"
            raise Conflict(text, ((ELSEWHERE, "gpu.overQuotaWeight"),))
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
            self._write({each: kept for each, kept in notes.items() if each != key}, field_manager)
        return obj

    def transfer(self, obj: Object, *, field_manager: str, dry_run: bool = False) -> Object:
        kind, uid = _kind(obj), obj["metadata"]["uid"]
        standing = self._api.weight(kind, *_ids(uid))
        if not same(value_at(obj, WEIGHT), standing):
            raise Conflict(f"{kind.kind} {obj['metadata']['name']}: overQuotaWeight changed meanwhile: read it again")
        if not dry_run:
            kept = {key: note for key, note in self._notes().items() if key != _key(kind, uid)}
            self._write(kept, field_manager)
        return obj

    def _notes(self) -> dict[str, dict[str, Any]]:
        """Return the notes by key; invalid ones are left out, and their units count as never written."""
        try:
            data = self._cluster.get(CONFIG_MAP, self._name, self._namespace).get("data") or {}
        except NotFound:
            return {}
        found = {}
        for key, text in data.items():
            try:
                note = json.loads(text)
            except ValueError:
                continue
            if (
                isinstance(note, dict)
                and isinstance(note.get("annotations"), dict)
                and queue_annotations.read(note["annotations"])
            ):
                found[key] = note
        return found

    def _write(self, notes: Mapping[str, Mapping[str, Any]], field_manager: str) -> None:
        document = {
            "apiVersion": CONFIG_MAP.api_version,
            "kind": CONFIG_MAP.kind,
            "metadata": {"name": self._name, "namespace": self._namespace},
            "data": {key: json.dumps(note, sort_keys=True) for key, note in sorted(notes.items())},
        }
        self._cluster.apply(document, field_manager=f"{field_manager}-notes")


def _ours(note: Mapping[str, Any], standing: float | None) -> bool:
    noted = queue_annotations.read(note["annotations"])
    return noted is not None and (same(standing, noted.published) or same(standing, note.get("also")))


def _unit(kind: Kind, row: Mapping[str, Any], note: Mapping[str, Any] | None) -> Object:
    weight = value_at(row, ("resources", "gpu", "overQuotaWeight"))
    annotations = dict(note["annotations"]) if note is not None else {}
    contested = note is not None and not _ours(note, weight)
    if note is not None and not contested and same(weight, note.get("also")):
        annotations[queue_annotations.PUBLISHED] = f"{weight or 0.0:.15g}"  # the announced write did not happen
    path = {WEIGHT}
    managers = [{"manager": ELSEWHERE, "operation": "Update", "fieldsV1": to_fields_v1(path)}] if contested else []
    metadata: dict[str, Any] = {
        "name": f"{row.get('orgUnitName')}.{row.get('nodePoolName')}",
        "uid": _uid(row),
        "resourceVersion": f"{weight}",
        "managedFields": managers,
        **({"annotations": annotations} if annotations else {}),
    }
    spec = {"unit": row.get("orgUnitName"), "nodePool": row.get("nodePoolName"), "gpu": {"overQuotaWeight": weight}}
    status = {key: value_at(row, ("quotaStatus", key, "gpu")) for key in ("allocated", "requested")}
    return {
        "apiVersion": kind.api_version, "kind": kind.kind, "metadata": metadata, "spec": spec, "status": status,
    }  # fmt: skip


def _pool(row: Mapping[str, Any]) -> Object:
    history = value_at(row, ("schedulingConfiguration", "timeBasedFairShare"))
    spec = {"timeBasedFairShare": history}
    return {
        "apiVersion": NODE_POOL.api_version, "kind": NODE_POOL.kind, "metadata": {"name": str(row.get("name"))},
        "spec": spec,
    }  # fmt: skip


def _kind(obj: Object) -> Kind:
    return PROJECT if obj["kind"] == PROJECT.kind else DEPARTMENT


def _uid(row: Mapping[str, Any]) -> str:
    return f"{row.get('orgUnitId')}/{row.get('nodePoolId')}"


def _ids(uid: str) -> tuple[str, str]:
    unit, _, pool = uid.partition("/")
    return unit, pool


def _key(kind: Kind, uid: str) -> str:
    """The key of a ConfigMap for this object."""
    return f"{kind.kind}.{uid.replace('/', '.')}"


class RunaiFault(FairshareError):
    """The policy names Run:ai, and its address is not configured."""


@contextmanager
def opened(
    policy: Policy, cluster: Cluster, credentials: Path | None, ca_file: Path | None, where: StatusObject, clock: Clock
) -> Iterator[Mapping[str, Objects]]:
    """Yield the objects by adapter: Run:ai, or nothing if the policy does not use it. where: the controller's
    ConfigMap; the notes on Run:ai's units are in a ConfigMap beside it. Raises RunaiFault."""
    target = policy.targets.runai
    if target.mode == "off" or target.url is None or not has_ref(policy, *RunaiAdapter.prefixes):
        yield {}
        return
    if credentials is None:
        raise RunaiFault(
            "the policy has queues of Run:ai: give --runai-credentials (or the setting runai_credentials),"
            " a folder with the files client-id and client-secret"
        )
    with RunaiApi(target.url, credentials, clock, cluster=target.cluster, ca_file=ca_file) as api:
        yield {NAME: RunaiCluster(api, cluster, where.namespace, f"{where.name}-runai")}
