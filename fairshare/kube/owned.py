"""An object and who owns which of its fields: what server-side apply and updates make of it, without a server.

Fields are owned per manager: who applies a value holds it, the same value is held together, what a manager leaves out
of the next apply goes unless others hold it too, and an update takes over what it changes. Lists are atomic. Whether a
write is allowed at all (versions, kinds, webhooks) is for who keeps the objects.

Source: https://kubernetes.io/docs/reference/using-api/server-side-apply/
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from fairshare.kube.fields import Path, dotted, drop, from_fields_v1, leaves, look, overlap, put, to_fields_v1
from fairshare.kube.kinds import Kind, Object

Owner = tuple[str, str, str]
"""(manager, operation Apply|Update, subresource)."""


@dataclass(slots=True)
class Owned:
    """One object without managedFields, and who owns which leaf."""

    obj: dict[str, Any]
    owners: dict[Owner, set[Path]] = field(default_factory=dict)

    @classmethod
    def read(cls, obj: Object) -> Owned:
        """Fields belong to whom `metadata.managedFields` says, and to nobody where it is missing."""
        taken = copied(dict(obj))
        stored = cls(taken)
        for entry in taken.setdefault("metadata", {}).pop("managedFields", None) or ():
            owner = (entry.get("manager", ""), entry.get("operation", "Update"), entry.get("subresource", ""))
            stored.owners[owner] = {
                path for path in from_fields_v1(entry.get("fieldsV1") or {}) if look(taken, path) is not None
            }
        return stored

    def copy(self) -> Owned:
        return Owned(copied(self.obj), {owner: set(paths) for owner, paths in self.owners.items()})

    def contested(self, me: Owner, wanted: Mapping[Path, Any]) -> tuple[tuple[str, str], ...]:
        """(manager, field) of what somebody else owns and `wanted` gives another value."""
        return tuple(
            sorted(
                (owner[0], dotted(path))
                for owner, paths in self.owners.items()
                if owner != me
                for path in paths
                if any(_clash(self.obj, path, mine, value) for mine, value in wanted.items())
            )
        )

    def apply(self, me: Owner, wanted: Mapping[Path, Any]) -> None:
        """All that `me` wants from now on; nothing of it is contested."""
        mine = self.owners.pop(me, set())
        others = set().union(*self.owners.values())
        for path in sorted(mine - wanted.keys() - others):
            drop(self.obj, path)
        for path, value in wanted.items():
            if not (isinstance(value, Mapping) and isinstance(look(self.obj, path), Mapping)):
                put(self.obj, path, copied(value))
        if wanted:
            self.owners[me] = set(wanted)

    def update(self, me: Owner, old: Mapping[Path, Any], new: Mapping[Path, Any]) -> None:
        """`new` in place of `old`, without conflicts: leaves that change pass to `me`, what is not in it goes."""
        changed = {path for path, value in new.items() if path not in old or old[path] != value}
        gone = old.keys() - new.keys()
        for path in gone:
            drop(self.obj, path)
        for path in changed:
            put(self.obj, path, copied(new[path]))
        self._leave(changed | gone)
        self.owners.setdefault(me, set()).update(changed)

    def hand_over(self, me: Owner, paths: Iterable[Path]) -> None:
        """These fields to `me`, as they stand."""
        taken = set(paths)
        self._leave(taken)
        self.owners[me] = taken

    def _leave(self, paths: set[Path]) -> None:
        for owned in self.owners.values():
            owned.difference_update(paths)

    def settle(self) -> None:
        """Whoever owns nothing any more is no owner."""
        self.owners = {owner: paths for owner, paths in self.owners.items() if paths}

    def shown(self) -> dict[str, Any]:
        """A copy with the ownership written down as the API server does."""
        shown: dict[str, Any] = copied(self.obj)
        if self.owners:
            shown["metadata"]["managedFields"] = [
                {
                    "manager": manager,
                    "operation": operation,
                    **({"subresource": subresource} if subresource else {}),
                    "fieldsType": "FieldsV1",
                    "fieldsV1": to_fields_v1(paths),
                }
                for (manager, operation, subresource), paths in sorted(self.owners.items())
            ]
        return shown


def written(kind: Kind, obj: Object, subresource: str) -> dict[Path, Any]:
    """The leaves of `obj` that a write to `subresource` ("" the object itself) touches."""
    return {
        path: value
        for path, value in leaves(obj).items()
        if not kind.status or (path[0] == "status") == (subresource == "status")
    }


def copied(value: Any) -> Any:
    """Of what JSON can say, which is a tree: a tenth of the time that `copy.deepcopy` takes to look for more."""
    if isinstance(value, dict):
        return {key: copied(part) for key, part in value.items()}
    if isinstance(value, list):
        return [copied(part) for part in value]
    return value


def merged(old: Any, change: Any) -> Any:
    """RFC 7386: mappings merge, null removes, all else replaces."""
    if not isinstance(change, Mapping):
        return copied(change)
    found = dict(old) if isinstance(old, Mapping) else {}
    for key, value in change.items():
        if value is None:
            found.pop(key, None)
        else:
            found[key] = merged(found.get(key), value)
    return found


def _clash(obj: Object, owned: Path, mine: Path, value: Any) -> bool:
    """Whether giving `mine` that value changes `owned`. Adding to a mapping changes nothing of it."""
    if not overlap(owned, mine):
        return False
    if len(mine) > len(owned):
        return not isinstance(look(obj, owned), Mapping)
    return look(obj, mine) != value and not isinstance(value, Mapping)
