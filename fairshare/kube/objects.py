"""Kubernetes objects from a YAML file, so that a plan can be tried without a cluster."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from agent.yamlfile import FileFault, Key, Plain, read
from fairshare.kube.ports import Kind, Object


def load_objects(path: Path, kinds: Iterable[Kind]) -> list[Object]:
    """A list of objects, or what `kubectl get -o yaml` prints. Raises FileFault, a line per fault."""
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
            shown = ", ".join(sorted(f"{kind} of {version}" for version, kind in known))
            faults.append(f"{place}: {item.get('kind')} of {item.get('apiVersion')} is none of: {shown}")
        elif not isinstance(metadata, dict) or not isinstance(metadata.get("name"), str):
            faults.append(f"{place}: metadata.name is missing")
        else:
            objects.append(item)
    if faults:
        raise FileFault(faults)
    return objects
