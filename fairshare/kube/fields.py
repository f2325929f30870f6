"""Field ownership as server-side apply keeps it: leaf paths of plain objects, set, removed, and written down.

A leaf is a scalar, a list or an empty mapping: lists are atomic here, which holds for every list this
project applies. Paths are tuples of keys. Pure; nothing is changed in place but by `put` and `drop`.

Source of the written form (FieldsV1): Kubernetes API conventions, metadata.managedFields.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

Path = tuple[str, ...]

_IDENTITY = frozenset({"apiVersion", "kind"})
_SERVER_SET = frozenset(
    {"name", "namespace", "uid", "resourceVersion", "generation", "creationTimestamp", "managedFields", "selfLink"}
)


def leaves(obj: Mapping[str, Any]) -> dict[Path, Any]:
    """Every ownable leaf with its value, in document order; identity and what the server sets left out."""
    found: dict[Path, Any] = {}
    for key, value in obj.items():
        if key == "metadata":
            kept = {name: part for name, part in value.items() if name not in _SERVER_SET}
            _walk(kept, ("metadata",), found)
        elif key not in _IDENTITY:
            _walk(value, (key,), found)
    found.pop(("metadata",), None)
    return found


def _walk(value: Any, path: Path, found: dict[Path, Any]) -> None:
    if isinstance(value, Mapping) and value:
        for key, part in value.items():
            _walk(part, (*path, key), found)
    else:
        found[path] = value


def look(obj: Mapping[str, Any], path: Path) -> Any:
    """The value at `path`, None where it or a part of the way is missing or null."""
    value: Any = obj
    for key in path:
        # Nearly all are dicts, and the other question is ten times as slow.
        if value.__class__ is not dict and not isinstance(value, Mapping):
            return None
        value = value.get(key)
    return value


def put(obj: dict[str, Any], path: Path, value: Any) -> None:
    """Set the value at `path`, making the way; whatever is no mapping on the way is replaced."""
    at = obj
    for key in path[:-1]:
        inner = at.get(key)
        if not isinstance(inner, dict):
            inner = at[key] = {}
        at = inner
    at[path[-1]] = value


def drop(obj: dict[str, Any], path: Path) -> None:
    """Remove the leaf at `path`, and the mappings that this leaves empty."""
    way = [obj]
    for key in path[:-1]:
        inner = way[-1].get(key)
        if not isinstance(inner, dict):
            return
        way.append(inner)
    way[-1].pop(path[-1], None)
    for depth in range(len(way) - 1, 0, -1):
        if way[depth]:
            return
        del way[depth - 1][path[depth - 1]]


def dotted(path: Path) -> str:
    """`.spec.resources.gpu.overQuotaWeight`, as the API server names a field; odd keys are quoted."""
    return "".join(f".{key}" if key.replace("_", "a").isalnum() else f'["{key}"]' for key in path)


def overlap(one: Path, other: Path) -> bool:
    """Whether one path is the other or leads to it."""
    shorter = min(len(one), len(other))
    return one[:shorter] == other[:shorter]


def to_fields_v1(paths: Iterable[Path]) -> dict[str, Any]:
    """The nested `f:` form of a set of paths."""
    tree: dict[str, Any] = {}
    for path in sorted(paths):
        at = tree
        for key in path:
            at = at.setdefault(f"f:{key}", {})
    return tree


def from_fields_v1(tree: Mapping[str, Any], path: Path = ()) -> set[Path]:
    """The leaf paths of the nested `f:` form; ownership inside lists counts for the list."""
    inner = {key[2:]: part for key, part in tree.items() if key.startswith("f:")}
    if not inner:
        return {path} if path else set()
    return {leaf for key, part in inner.items() for leaf in from_fields_v1(part, (*path, key))}


def without(tree: Mapping[str, Any], paths: Iterable[Path]) -> dict[str, Any]:
    """The `f:` form with `paths`, and what lies below them, taken out; what that leaves empty goes too."""
    return _without(tree, frozenset(paths), ()) or {}


def _without(tree: Mapping[str, Any], paths: frozenset[Path], at: Path) -> dict[str, Any] | None:
    """None where nothing of a tree that had something is left."""
    kept = {}
    for key, part in tree.items():
        path = (*at, key[2:]) if key.startswith("f:") else (*at, key)
        if path not in paths:
            inner = _without(part, paths, path) if part else part
            if inner is not None:
                kept[key] = inner
    return kept or None if tree else {}
