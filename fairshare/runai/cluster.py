"""Run:ai's units as objects of a cluster, with what we noted on them kept in a ConfigMap of the real one.

Run:ai knows no owner of a field. So what we last wrote is the claim to it: where another value stands than that,
somebody set it since, and the write is a Conflict, reported and never forced, until a person takes the field over
(`gputally fairshare adopt`). The look and the write are two requests; who comes between them is found at the next.

Notes are written before the weight, with the value that stood till then, so that a crash in between leaves either
of them ours. What this must not do: write any other field, or anything at all in a dry run.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from fairshare.adapters.runai import DEPARTMENT, NODE_POOL, PROJECT, UNITS, WEIGHT
from fairshare.errors import Conflict, NotFound
from fairshare.kube import marks
from fairshare.kube.fields import look, to_fields_v1
from fairshare.kube.kinds import CONFIG_MAP, Kind, Object
from fairshare.kube.ports import Cluster
from fairshare.plan import same
from fairshare.runai.api import RunaiApi

ELSEWHERE = "run.ai"
"""Who owns a weight that is not what we last wrote, as far as that can be known."""


class RunaiCluster:
    """`fairshare.kube.ports.Objects`. Not made for threads."""

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
            published = note["annotations"][marks.PUBLISHED]
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
            if isinstance(note, dict) and isinstance(note.get("annotations"), dict) and marks.read(note["annotations"]):
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
    noted = marks.read(note["annotations"])
    return noted is not None and (same(standing, noted.published) or same(standing, note.get("also")))


def _unit(kind: Kind, row: Mapping[str, Any], note: Mapping[str, Any] | None) -> Object:
    weight = look(row, ("resources", "gpu", "overQuotaWeight"))
    annotations = dict(note["annotations"]) if note is not None else {}
    contested = note is not None and not _ours(note, weight)
    if note is not None and not contested and same(weight, note.get("also")):
        annotations[marks.PUBLISHED] = f"{weight or 0.0:.15g}"  # the write that was noted has not come
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
