"""Simulates an API server in memory with server-side apply, for the demo, for plans without a cluster, and for tests.

The simulated server behaves like a real one in these points:

- Each field is owned by managers. Applying another value to another manager's field raises a Conflict, which names the
  manager, and changes nothing. Applying the same value shares the ownership.
- Fields that a manager omits from its next apply are removed, unless another manager owns them too.
- An apply creates a missing object. The status is written only through its subresource.
- `resourceVersion` changes with every change, and `generation` with the spec. A stale resourceVersion is a Conflict.
- A dry run returns the same answer and stores nothing.

The simulated server has no wall clock, validates no schemas, and runs no controllers. An `admit` function replaces
webhooks. A list counts as one field. The server is not thread-safe.

Source: https://kubernetes.io/docs/reference/using-api/server-side-apply/"""

from __future__ import annotations

import uuid
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from pathlib import Path
from typing import Any

import msgspec

from gputally.base.errors import ClusterRefused, Conflict, NotFound, VersionGone
from gputally.base.yaml_file import FileFault, Key, Plain, read
from gputally.kubernetes.objects import (
    BUDGET,
    POD,
    Api,
    Event,
    FieldPath,
    Kind,
    Object,
    dotted_path,
    drop,
    from_fields_v1,
    guard,
    leaves,
    overlap,
    put,
    to_fields_v1,
    value_at,
)

Owner = tuple[str, str, str]
"""(manager, operation Apply|Update, subresource)."""


@dataclass(slots=True)
class Owned:
    """An object without managedFields, and the leaves that each manager owns."""

    obj: dict[str, Any]
    owners: dict[Owner, set[FieldPath]] = field(default_factory=dict)

    @classmethod
    def read(cls, obj: Object) -> Owned:
        """Create it from an object. The managers in `metadata.managedFields` own the fields; without managedFields, the
        fields have no owner."""
        plain = json_copy(dict(obj))
        stored = cls(plain)
        for entry in plain.setdefault("metadata", {}).pop("managedFields", None) or ():
            owner = (entry.get("manager", ""), entry.get("operation", "Update"), entry.get("subresource", ""))
            stored.owners[owner] = {
                path for path in from_fields_v1(entry.get("fieldsV1") or {}) if value_at(plain, path) is not None
            }
        return stored

    def copy(self) -> Owned:
        return Owned(json_copy(self.obj), {owner: set(paths) for owner, paths in self.owners.items()})

    def contested(self, me: Owner, wanted: Mapping[FieldPath, Any]) -> tuple[tuple[str, str], ...]:
        """Return (manager, field) for each field that another manager owns and that applying `wanted` would change."""
        return tuple(
            sorted(
                (owner[0], dotted_path(path))
                for owner, paths in self.owners.items()
                if owner != me
                for path in paths
                if any(_changes(self.obj, path, mine, value) for mine, value in wanted.items())
            )
        )

    def apply(self, me: Owner, wanted: Mapping[FieldPath, Any]) -> None:
        """Set the fields in `wanted` and make `me` an owner of them, as by server-side apply. None of them may be
        contested. Fields that `me` alone owned and omits now are removed."""
        mine = self.owners.pop(me, set())
        others = set().union(*self.owners.values())
        for path in sorted(mine - wanted.keys() - others):
            drop(self.obj, path)
        for path, value in wanted.items():
            if not (isinstance(value, Mapping) and isinstance(value_at(self.obj, path), Mapping)):
                put(self.obj, path, json_copy(value))
        if wanted:
            self.owners[me] = set(wanted)

    def update(self, me: Owner, old: Mapping[FieldPath, Any], new: Mapping[FieldPath, Any]) -> None:
        """Replace the leaves `old` by `new` without checking for conflicts. `me` becomes the only owner of the changed
        leaves. Leaves that `new` lacks are removed."""
        changed = {path for path, value in new.items() if path not in old or old[path] != value}
        gone = old.keys() - new.keys()
        for path in gone:
            drop(self.obj, path)
        for path in changed:
            put(self.obj, path, json_copy(new[path]))
        self._disown(changed | gone)
        self.owners.setdefault(me, set()).update(changed)

    def set_only_owner(self, me: Owner, paths: Iterable[FieldPath]) -> None:
        """Make `me` the only owner of these fields, with their present values."""
        fields = set(paths)
        self._disown(fields)
        self.owners[me] = fields

    def _disown(self, paths: set[FieldPath]) -> None:
        for owned in self.owners.values():
            owned.difference_update(paths)

    def drop_empty_owners(self) -> None:
        """Remove managers that own no field."""
        self.owners = {owner: paths for owner, paths in self.owners.items() if paths}

    def with_managed_fields(self) -> dict[str, Any]:
        """Return a copy of the object with managedFields, as the API server returns it."""
        obj: dict[str, Any] = json_copy(self.obj)
        if self.owners:
            obj["metadata"]["managedFields"] = [
                {
                    "manager": manager,
                    "operation": operation,
                    **({"subresource": subresource} if subresource else {}),
                    "fieldsType": "FieldsV1",
                    "fieldsV1": to_fields_v1(paths),
                }
                for (manager, operation, subresource), paths in sorted(self.owners.items())
            ]
        return obj


def writable_leaves(kind: Kind, obj: Object, subresource: str) -> dict[FieldPath, Any]:
    """Return the leaves of `obj` that a write to a subresource changes. subresource: "" for the object itself."""
    return {
        path: value
        for path, value in leaves(obj).items()
        if not kind.status or (path[0] == "status") == (subresource == "status")
    }


def json_copy(value: Any) -> Any:
    """Copy JSON-like data in a tenth of the time of `copy.deepcopy`."""
    if isinstance(value, dict):
        return {key: json_copy(part) for key, part in value.items()}
    if isinstance(value, list):
        return [json_copy(part) for part in value]
    return value


def merged(old: Any, change: Any) -> Any:
    """Return `old` after a JSON merge patch (RFC 7386): mappings merge, null removes, other values replace."""
    if not isinstance(change, Mapping):
        return json_copy(change)
    result = dict(old) if isinstance(old, Mapping) else {}
    for key, value in change.items():
        if value is None:
            result.pop(key, None)
        else:
            result[key] = merged(result.get(key), value)
    return result


def _changes(obj: Object, owned: FieldPath, mine: FieldPath, value: Any) -> bool:
    """Return True if setting the field `mine` to `value` would change the field `owned`. Adding a key to a mapping is
    no change of the mapping."""
    if not overlap(owned, mine):
        return False
    if len(mine) > len(owned):
        return not isinstance(value_at(obj, owned), Mapping)
    return value_at(obj, mine) != value and not isinstance(value, Mapping)


LOG_LENGTH = 1_000
"""Number of changes that are kept for watches."""
_Key = tuple[str, str, str, str]
"""(apiVersion, kind, namespace, name)."""


class MemoryCluster:
    """A `gputally.kubernetes.objects.Cluster` in memory. `put` and `delete` simulate other clients. `events` is for
    tests."""

    def __init__(
        self,
        kinds: Iterable[Kind],
        objects: Iterable[Object] = (),
        *,
        admit: Callable[[Object], str | None] | None = None,
    ) -> None:
        """Create a server.

        kinds: the kinds that it serves.
        objects: the objects to load (see `load`).
        admit: replaces the admission webhooks: it returns the reason why an object is refused, or None."""
        self._kinds = {(kind.api_version, kind.kind): kind for kind in kinds}
        self._store: dict[_Key, Owned] = {}
        self._version = 0
        self._forgotten = 0
        self._log: deque[tuple[int, _Key, str, Object]] = deque(maxlen=LOG_LENGTH)
        self._admit = admit
        self._events: dict[tuple[str, str, str, str, str], Event] = {}
        self.load(objects)

    @property
    def events(self) -> tuple[Event, ...]:
        """Each distinct event, in the order in which it was first recorded, with the time at which it was last
        recorded."""
        return tuple(self._events.values())

    def load(self, objects: Iterable[Object]) -> None:
        """Store objects unchanged, with their status. Raises NotFound for a kind that is not served.

        The managers in `metadata.managedFields` own the fields; without managedFields, the fields have no owner."""
        for obj in objects:
            kind = self._kind_of(obj)
            self._commit(self._key(kind, obj), Owned.read(obj), None)

    def list(self, kind: Kind, *, fields: str = "") -> list[Object]:
        self._check(kind)
        path, _, value = fields.partition("=")
        return [
            stored.with_managed_fields()
            for key, stored in sorted(self._store.items())
            if key[:2] == (kind.api_version, kind.kind)
            and (not fields or value_at(stored.obj, tuple(path.split("."))) == value)
        ]

    def get(self, kind: Kind, name: str, namespace: str = "") -> Object:
        self._check(kind)
        return self._find((kind.api_version, kind.kind, namespace, name)).with_managed_fields()

    def apply(self, obj: Object, *, field_manager: str, dry_run: bool = False, subresource: str = "") -> Object:
        kind = self._kind_of(obj)
        key = self._key(kind, obj)
        before = self._store.get(key)
        if before is None and subresource:
            self._find(key)
        self._match_version(key, before, obj)
        wanted = {path: value for path, value in writable_leaves(kind, obj, subresource).items() if value is not None}
        after = before.copy() if before is not None else Owned(_blank(kind, key))
        me: Owner = (field_manager, "Apply", subresource)
        if contested := after.contested(me, wanted):
            parts = "; ".join(f'conflict with "{manager}": {path}' for manager, path in contested)
            count = f"{len(contested)} conflict{'s' if len(contested) > 1 else ''}"
            raise Conflict(f"{_text(key)}: Apply failed with {count}: {parts}", contested)
        after.apply(me, wanted)
        return self._finish(key, after, before, dry_run)

    def scan(self, kind: Kind, visit: Callable[[Object], object]) -> str:
        for obj in self.list(kind):
            visit(obj)
        return str(self._version)

    def api(self) -> Api:
        return _MemoryApi(self)

    def changes(self, kind: Kind, version: int) -> tuple[str, Sequence[tuple[str, Object]]]:
        """Return the present version, and (type, object) of each change of the kind since `version`. Raises VersionGone
        if the changes are forgotten."""
        self._check(kind)
        if version < self._forgotten:
            raise VersionGone(f"{kind.kind}: too old resource version: {version}")
        wanted = (kind.api_version, kind.kind)
        newest = takewhile(lambda logged: logged[0] > version, reversed(self._log))
        since = [(change, obj) for _, key, change, obj in newest if key[:2] == wanted]
        return str(self._version), since[::-1]

    def forget(self) -> None:
        """Forget all changes, as etcd does after some time. A watch from an earlier version then raises VersionGone."""
        self._log.clear()
        self._forgotten = self._version

    def transfer(self, obj: Object, *, field_manager: str, dry_run: bool = False) -> Object:
        kind = self._kind_of(obj)
        key = self._key(kind, obj)
        if not obj["metadata"].get("resourceVersion"):
            raise ValueError("an object to transfer has no metadata.resourceVersion")
        before = self._find(key)
        self._match_version(key, before, obj)
        fields = leaves(obj)
        changed = [dotted_path(path) for path, value in fields.items() if value_at(before.obj, path) != value]
        if changed:
            raise Conflict(f"{_text(key)}: {', '.join(changed)} changed meanwhile: read the object again")
        after = before.copy()
        after.set_only_owner((field_manager, "Apply", ""), fields)
        return self._finish(key, after, before, dry_run)

    def patch(
        self, kind: Kind, name: str, namespace: str, change: Object, *, field_manager: str, dry_run: bool = False
    ) -> Object:
        self._check(kind)
        key = (kind.api_version, kind.kind, namespace, name)
        before = self._find(key)
        self._match_version(key, before, change)
        return self.put(merged(before.obj, change), field_manager=field_manager, dry_run=dry_run)

    def create(self, obj: Object, *, field_manager: str, dry_run: bool = False) -> Object:
        kind = self._kind_of(obj)
        created = json_copy(dict(obj))
        prefix = created["metadata"].pop("generateName", "")
        if prefix and not created["metadata"].get("name"):
            created["metadata"]["name"] = f"{prefix}{self._version + 1:05d}"
        key = self._key(kind, created)
        if key in self._store:
            raise Conflict(f"{_text(key)} already exists")
        return self.put(created, field_manager=field_manager, dry_run=dry_run)

    def evict(self, name: str, namespace: str, uid: str, *, grace_s: int | None = None, dry_run: bool = False) -> None:
        """Delete the pod at once and ignore `grace_s`, because there is no kubelet."""
        if grace_s is not None and grace_s < 0:
            raise ClusterRefused("deleteOptions.gracePeriodSeconds: Invalid value: must be greater than or equal to 0")
        pod = self.get(POD, name, namespace)
        budget = guard(pod, self.list(BUDGET) if (BUDGET.api_version, BUDGET.kind) in self._kinds else ())
        if budget is not None and not dry_run:
            spent = {**budget["status"], "disruptionsAllowed": budget["status"]["disruptionsAllowed"] - 1}
            self.put({**budget, "status": spent}, field_manager="kube-apiserver", subresource="status")
        if pod["metadata"].get("uid") != uid:
            raise Conflict(f"Pod {namespace}/{name}: the UID in the precondition ({uid}) does not match the pod's")
        if not dry_run:
            self.delete(POD, name, namespace)

    def put(self, obj: Object, *, field_manager: str, subresource: str = "", dry_run: bool = False) -> Object:
        """Replace an object without checking for conflicts, as `kubectl edit` and some controllers do.

        `field_manager` becomes the only owner of every changed leaf. Leaves that `obj` lacks are removed."""
        kind = self._kind_of(obj)
        key = self._key(kind, obj)
        before = self._store.get(key)
        self._match_version(key, before, obj)
        after = before.copy() if before is not None else Owned(_blank(kind, key))
        old, new = writable_leaves(kind, after.obj, subresource), writable_leaves(kind, obj, subresource)
        after.update((field_manager, "Update", subresource), old, new)
        return self._finish(key, after, before, dry_run)

    def delete(self, kind: Kind, name: str, namespace: str = "") -> None:
        self._check(kind)
        key = (kind.api_version, kind.kind, namespace, name)
        deleted = self._find(key)
        del self._store[key]
        self._version += 1
        self._remember(key, "DELETED", deleted)

    def event(self, event: Event) -> None:
        same = (event.kind.kind, event.namespace, event.name, event.reason, event.message)
        first = self._events.get(same, event)
        self._events[same] = replace(first, at_ms=event.at_ms)

    def _match_version(self, key: _Key, before: Owned | None, obj: Object) -> None:
        """Raise Conflict if `obj` has another uid or resourceVersion than the stored object."""
        wanted = obj.get("metadata", {})
        stored = before.obj["metadata"] if before is not None else {}
        if wanted.get("uid") and wanted["uid"] != stored.get("uid"):
            raise Conflict(f"{_text(key)}: the object is not the one that was read: it has another uid, or is deleted")
        if wanted.get("resourceVersion") and wanted["resourceVersion"] != stored.get("resourceVersion"):
            raise Conflict(
                f"{_text(key)}: the object has been modified; please apply your changes to the latest version"
            )

    def _finish(self, key: _Key, after: Owned, before: Owned | None, dry_run: bool) -> Object:
        """Store the object, unless it is refused or this is a dry run. Return it as the API server does. Raises
        ClusterRefused."""
        after.drop_empty_owners()
        refusal = self._admit(after.with_managed_fields()) if self._admit else None
        if refusal:
            raise ClusterRefused(f"{_text(key)}: admission webhook denied the request: {refusal}")
        if not dry_run:
            self._commit(key, after, before)
        return after.with_managed_fields()

    def _commit(self, key: _Key, after: Owned, before: Owned | None) -> None:
        if before is not None and (after.obj, after.owners) == (before.obj, before.owners):
            return
        self._version += 1
        metadata = after.obj["metadata"]
        metadata["resourceVersion"] = str(self._version)
        metadata.setdefault("uid", str(uuid.uuid5(uuid.NAMESPACE_OID, f"{key}{self._version}")))
        if before is None:
            metadata.setdefault("generation", 1)
        elif after.obj.get("spec") != before.obj.get("spec"):
            metadata["generation"] += 1
        self._store[key] = after
        change = "ADDED" if before is None else "MODIFIED"
        self._remember(key, change, after)

    def _remember(self, key: _Key, change: str, changed: Owned) -> None:
        if len(self._log) == LOG_LENGTH:
            self._forgotten = self._log[0][0]
        self._log.append((self._version, key, change, changed.with_managed_fields()))

    def _find(self, key: _Key) -> Owned:
        stored = self._store.get(key)
        if stored is None:
            raise NotFound(f"{_text(key)} not found")
        return stored

    def _check(self, kind: Kind) -> None:
        if (kind.api_version, kind.kind) not in self._kinds:
            raise NotFound(f"the server has no resource {kind.plural} in {kind.api_version}")

    def kind_at(self, path: str) -> Kind:
        """Return the kind whose objects are listed at this path. Raises NotFound."""
        kind = next((kind for kind in self._kinds.values() if kind.path() == path), None)
        if kind is None:
            raise NotFound(f"the server has nothing at {path}")
        return kind

    def _kind_of(self, obj: Object) -> Kind:
        kind = self._kinds.get((obj.get("apiVersion", ""), obj.get("kind", "")))
        if kind is None:
            raise NotFound(f"the server has no kind {obj.get('kind')} in {obj.get('apiVersion')}")
        return kind

    @staticmethod
    def _key(kind: Kind, obj: Object) -> _Key:
        metadata = obj.get("metadata", {})
        if not metadata.get("name"):
            raise ClusterRefused(f"{kind.kind}: metadata.name is missing")
        return kind.api_version, kind.kind, metadata.get("namespace", "") if kind.namespaced else "", metadata["name"]


class _MemoryApi:
    """The `gputally.kubernetes.objects.Api` of a MemoryCluster. A watch ends after the present changes."""

    def __init__(self, cluster: MemoryCluster) -> None:
        self._cluster = cluster

    def get(self, path: str, _query: Mapping[str, str], *, metadata_only: bool = False) -> bytes:
        items: list[Object] = []
        version = self._cluster.scan(self._cluster.kind_at(path), items.append)
        answered = [{"metadata": obj["metadata"]} for obj in items] if metadata_only else items
        return msgspec.json.encode({"metadata": {"resourceVersion": version}, "items": answered})

    def watch(self, path: str, query: Mapping[str, str], *, metadata_only: bool = False) -> Iterator[bytes]:
        version, changes = self._cluster.changes(self._cluster.kind_at(path), int(query["resourceVersion"] or 0))
        for change, obj in (*changes, ("BOOKMARK", {"metadata": {"resourceVersion": version}})):
            answered = {"metadata": obj["metadata"]} if metadata_only else obj
            yield msgspec.json.encode({"type": change, "object": answered})

    def post(self, path: str, _body: Mapping[str, object]) -> bytes:
        raise ClusterRefused(f"POST {path}: a cluster in memory supports no reviews")


def _blank(kind: Kind, key: _Key) -> dict[str, Any]:
    metadata = {"name": key[3], **({"namespace": key[2]} if kind.namespaced else {})}
    return {"apiVersion": kind.api_version, "kind": kind.kind, "metadata": metadata}


def _text(key: _Key) -> str:
    return f"{key[1]} {key[2] + '/' if key[2] else ''}{key[3]}"


def load_objects(path: Path, kinds: Iterable[Kind]) -> list[Object]:
    """Read a YAML file with a list of objects, or with the output of `kubectl get -o yaml`. Raises FileFault with a
    line per fault, for example for an object whose kind is not in `kinds`."""
    document = read(path)
    root: tuple[Key, ...] = ()
    items: Plain = document.data
    if isinstance(items, dict) and "items" in items:
        root, items = ("items",), items["items"]
    if not isinstance(items, list):
        raise FileFault([f"{document.place(root)}: expected a list of objects"])
    known = {(kind.api_version, kind.kind) for kind in kinds}
    objects: list[Object] = []
    faults: list[str] = []
    for at, item in enumerate(items):
        place = document.place((*root, at))
        if not isinstance(item, dict):
            faults.append(f"{place}: expected an object")
            continue
        metadata = item.get("metadata")
        if (item.get("apiVersion"), item.get("kind")) not in known:
            names = ", ".join(sorted(f"{kind} of {version}" for version, kind in known))
            faults.append(f"{place}: {item.get('kind')} of {item.get('apiVersion')} is none of: {names}")
        elif not isinstance(metadata, dict) or not isinstance(metadata.get("name"), str):
            faults.append(f"{place}: metadata.name is missing")
        else:
            objects.append(item)
    if faults:
        raise FileFault(faults)
    return objects
