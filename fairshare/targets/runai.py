"""Presents Run:ai's projects and departments as objects, and maps the policy to them.

Run:ai owns the Queue objects that its scheduler reads, and undoes what others write there; what it takes is its own
API. `runai:PROJECT` and `runai-department:NAME` refer to the resources of one organisational unit in the policy's
node pool, `runai:PROJECT/POOL` to those in another one. Here they are objects, as `fairshare.targets.runai` makes
them, so that everything else goes as for any target; what we noted on them stands in a ConfigMap, for Run:ai keeps no
notes.

Weights act only where *Over quota weight* is switched on in Run:ai's general settings, and history must not be
counted by a node pool's own time-based fair share as well. What this must not do: read workloads; what a unit asks
for and holds comes from Run:ai, and nothing is preempted here.

Source: Run:ai REST API, organizations/projects and departments ("node pool resources"), node-pools.

Run:ai knows no owner of a field. So what we last wrote is the claim to it: where another value stands than that,
it was set since, and the write is a Conflict, reported and never forced, until a person takes the field over
(`gputally fairshare adopt`). The look and the write are two requests; who comes between them is found at the next.

Notes are written before the weight, with the value that stood till then, so that a crash in between leaves either
of them ours. What this must not do: write any other field, or anything at all in a dry run.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from accountant.wire.policy_models import Policy
from fairshare.core import queue_objects
from fairshare.core.model import Condition, Issue, Observation, Pod, Standing, TargetQueue, Value, Weight
from fairshare.core.queue_objects import has_ref, match, owners
from fairshare.targets.runai_api import DEPARTMENT, PROJECT, RunaiApi
from fairshare.targets.status_conditions import StatusObject
from fairshare.targets.weight_plan import ObjectQuery, Seen, same
from gputally.base.clock import Clock
from gputally.base.errors import Conflict, FairshareError, NotFound
from gputally.kubernetes.objects import CONFIG_MAP, Cluster, Kind, Object, Objects, look, quantity, to_fields_v1

NODE_POOL = Kind("run.ai/v1", "NodePool", "node-pools", status=False)
UNITS = (PROJECT, DEPARTMENT)
WEIGHT = ("spec", "gpu", "overQuotaWeight")
PROJECT_PREFIX, DEPARTMENT_PREFIX = "runai", "runai-department"
NAME = "runai"


class RunaiAdapter:
    """`fairshare.targets.weight_plan.Adapter` for Run:ai."""

    name = NAME
    prefixes = (PROJECT_PREFIX, DEPARTMENT_PREFIX)

    def reads(self, _policy: Policy) -> tuple[ObjectQuery, ...]:
        return (ObjectQuery((PROJECT,), required=True), ObjectQuery((DEPARTMENT,)), ObjectQuery((NODE_POOL,)))

    def mode(self, policy: Policy) -> Literal["off", "dry-run", "enforce"]:
        target = policy.targets.runai
        return target.apply if target.mode != "off" else "off"

    def publishes(self, _policy: Policy) -> bool:
        return True

    def observe(self, policy: Policy, seen: Seen, _pods: Sequence[Pod] = ()) -> Observation:
        default = policy.targets.runai.node_pool
        owner = {_full(ref, default): queue for ref, queue in owners(policy, *self.prefixes).items()}
        units = [obj for kind in UNITS for obj in seen.get(kind, ())]
        found = match(units, owner, ref_of, "Run:ai unit")
        issues = list(found.issues)
        held: dict[str, TargetQueue] = {}
        standings: dict[str, Standing] = {}
        for name, obj in sorted(found.found.items()):
            number = look(obj, WEIGHT)
            weight = None if number is None else quantity(number)
            if number is not None and weight is None:
                issues.append(Issue(obj["metadata"]["name"], f"overQuotaWeight is {number!r}"))
                continue
            held[name] = _target_queue(obj, weight)
            noted = held[name]
            allocated = quantity(look(obj, ("status", "allocated"))) or 0.0
            requested = max(allocated, quantity(look(obj, ("status", "requested"))) or 0.0)
            standings[name] = Standing(requested, allocated, weight, noted.changed_ms, noted.direction)
        pools = {str(look(obj, ("spec", "nodePool"))) for obj in found.found.values()}
        left = {
            obj["metadata"]["name"]: _target_queue(obj, quantity(number))
            for obj in found.strangers
            if queue_objects.carries_annotations(obj) and (number := look(obj, WEIGHT)) is not None
        }
        acts = effective(seen.get(NODE_POOL, ()), pools)
        return Observation(held, standings, tuple(issues), (acts,), left=left)

    def express(
        self, _policy: Policy, weights: Sequence[Weight], _observation: Observation, _gpus: float
    ) -> Mapping[str, Value]:
        """A number, as Run:ai has it; weights matter only relative to siblings'."""
        return {weight.queue: weight.value for weight in weights}

    def patch(self, held: TargetQueue, value: Value | None, annotations: Mapping[str, str]) -> Object:
        assert held.kind is not None, "every unit of Run:ai is shown with its kind"
        metadata: dict[str, Any] = {"name": held.name, "uid": held.uid}
        if annotations:
            metadata["annotations"] = dict(annotations)
        patch: dict[str, Any] = {"apiVersion": held.kind.api_version, "kind": held.kind.kind, "metadata": metadata}
        if value is not None:
            patch["spec"] = {"gpu": {"overQuotaWeight": value}}
        return patch


def ref_of(obj: Object) -> str:
    """`runai:PROJECT/POOL`, the node pool always named."""
    prefix = PROJECT_PREFIX if obj["kind"] == PROJECT.kind else DEPARTMENT_PREFIX
    return f"{prefix}:{look(obj, ('spec', 'unit'))}/{look(obj, ('spec', 'nodePool'))}"


def effective(pools: Sequence[Object], used: set[str]) -> Condition:
    """Whether our weights are the only history that Run:ai sees, in the node pools that are written to."""
    double = sorted(
        pool["metadata"]["name"]
        for pool in pools
        if pool["metadata"]["name"] in used and look(pool, ("spec", "timeBasedFairShare", "enabled")) is True
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


def _target_queue(obj: Object, weight: float | None) -> TargetQueue:
    metadata = obj["metadata"]
    kind = next(kind for kind in UNITS if kind.kind == obj["kind"])
    identity = (metadata["name"], metadata.get("uid", ""), metadata.get("resourceVersion", ""), weight)
    noted = queue_objects.read(metadata.get("annotations") or {})
    if noted is None:
        return TargetQueue(*identity, kind=kind)
    return TargetQueue(*identity, noted.published, noted.base, noted.changed_ms, noted.direction, kind)


ELSEWHERE = "run.ai"
"""Who owns a weight that is not what we last wrote, as far as that can be known."""


class RunaiCluster:
    """`gputally.kubernetes.objects.Objects`. Not made for threads."""

    def __init__(self, api: RunaiApi, cluster: Cluster, namespace: str, name: str) -> None:
        """cluster, namespace, name: where the ConfigMap with our notes is."""
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
            published = note["annotations"][queue_objects.PUBLISHED]
            text = f"{kind.kind} {name}: overQuotaWeight is {standing}, and we wrote {published}"
            raise Conflict(text, ((ELSEWHERE, "gpu.overQuotaWeight"),))
        if dry_run:
            return obj
        annotations = dict(obj["metadata"].get("annotations") or {})
        wanted = look(obj, WEIGHT)
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
        if not same(look(obj, WEIGHT), standing):
            raise Conflict(f"{kind.kind} {obj['metadata']['name']}: overQuotaWeight changed meanwhile: read it again")
        if not dry_run:
            kept = {key: note for key, note in self._notes().items() if key != _key(kind, uid)}
            self._write(kept, field_manager)
        return obj

    def _notes(self) -> dict[str, dict[str, Any]]:
        """By key; what is not ours to understand is left out, and its unit counts as never touched."""
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
                and queue_objects.read(note["annotations"])
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
    noted = queue_objects.read(note["annotations"])
    return noted is not None and (same(standing, noted.published) or same(standing, note.get("also")))


def _unit(kind: Kind, row: Mapping[str, Any], note: Mapping[str, Any] | None) -> Object:
    weight = look(row, ("resources", "gpu", "overQuotaWeight"))
    annotations = dict(note["annotations"]) if note is not None else {}
    contested = note is not None and not _ours(note, weight)
    if note is not None and not contested and same(weight, note.get("also")):
        annotations[queue_objects.PUBLISHED] = f"{weight or 0.0:.15g}"  # the write that was noted has not come
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
    status = {key: look(row, ("quotaStatus", key, "gpu")) for key in ("allocated", "requested")}
    return {
        "apiVersion": kind.api_version, "kind": kind.kind, "metadata": metadata, "spec": spec, "status": status,
    }  # fmt: skip


def _pool(row: Mapping[str, Any]) -> Object:
    history = look(row, ("schedulingConfiguration", "timeBasedFairShare"))
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
    """As a key of a ConfigMap."""
    return f"{kind.kind}.{uid.replace('/', '.')}"


__all__ = ["RunaiApi", "RunaiCluster"]


class RunaiFault(FairshareError):
    """The policy names Run:ai, and its address is not configured."""


@contextmanager
def opened(
    policy: Policy, cluster: Cluster, credentials: Path | None, ca_file: Path | None, where: StatusObject, clock: Clock
) -> Iterator[Mapping[str, Objects]]:
    """By adapter: Run:ai, or nothing where the policy leaves it out. where: our ConfigMap; what is noted on Run:ai's
    units stands beside it. Raises RunaiFault."""
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
