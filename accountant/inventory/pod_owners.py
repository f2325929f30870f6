"""Follows the owner references above a pod.

An owner is requested once and cached by uid. Many unknown owners of one kind are fetched as one paged list, which names
all that exist. An owner that may not be read, or no longer exists, ends the chain. The job is then named by the known
part."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import msgspec
from cachetools import LRUCache

from agent.wire import Owner
from gputally.base.errors import ClusterRefused, ClusterUnavailable, NotFound, VersionGone
from gputally.base.untrusted_text import UNDECODABLE
from gputally.kubernetes.list_watch import PAGE, ListMetadata, Metadata, NamedObject, OwnerReference
from gputally.kubernetes.objects import Api
from gputally.kubernetes.pod_queue_labels import queue_keys

MANY = 20
"""If there are more unknown owners of one kind than this, the whole kind is listed."""
REMEMBERED = 200_000
DEPTH = 16
"""Longest chain that is followed; owner references can form a cycle by mistake."""
_KINDS = {"Job": "jobs", "CronJob": "cronjobs", "ReplicaSet": "replicasets", "Deployment": "deployments",
          "StatefulSet": "statefulsets", "DaemonSet": "daemonsets"}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Ref:
    """An owner reference, with the namespace of the object that has it."""

    api_version: str
    kind: str
    name: str
    uid: str
    namespace: str


@dataclass(frozen=True, slots=True)
class OwnerFacts:
    """The facts of an owner. parent: its own owner. labels: its labels that name a queue."""

    parent: Ref | None = None
    labels: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Chain:
    """The owners of a pod, nearest first. labels: the owners' queue labels. If several owners have the same label, the
    value of the nearest one counts."""

    owners: tuple[Owner, ...]
    labels: Mapping[str, str]


class _Page(msgspec.Struct):
    metadata: ListMetadata
    items: list[NamedObject] | None = None


class _Resource(msgspec.Struct):
    name: str
    kind: str
    namespaced: bool


class _Resources(msgspec.Struct):
    resources: list[_Resource]


_resources = msgspec.json.Decoder(_Resources)


class Owners:
    """Reads and caches the owners of pods of one API server. Not thread-safe."""

    def __init__(self, api: Api) -> None:
        self._api = api
        self._known: LRUCache[str, OwnerFacts] = LRUCache(REMEMBERED)
        self._plurals: dict[str, dict[str, _Resource]] = {}
        self._page = msgspec.json.Decoder(_Page)
        self._one = msgspec.json.Decoder(NamedObject)

    def learn(self, refs: Iterable[Ref]) -> None:
        """Fetches what the chains above `refs` need, level by level. Raises ClusterError."""
        level = {ref.uid: ref for ref in refs}
        for _ in range(DEPTH):
            missing = [ref for ref in level.values() if ref.uid not in self._known]
            counts = Counter((ref.api_version, ref.kind) for ref in missing)
            whole = {kind for kind, count in counts.items() if count > MANY and self._list(*kind)}
            for ref in missing:
                if ref.uid not in self._known:
                    # An owner that a complete list does not contain no longer exists.
                    gone = (ref.api_version, ref.kind) in whole
                    self._known[ref.uid] = OwnerFacts() if gone else self._get(ref)
            level = {
                owner_facts.parent.uid: owner_facts.parent
                for ref in level.values()
                if (owner_facts := self._known.get(ref.uid)) is not None and owner_facts.parent is not None
            }
            if not level:
                return

    def chain(self, ref: Ref | None) -> Chain:
        """The chain that begins with `ref`, as far as its owners are cached; empty for None."""
        owners: list[Owner] = []
        labels: dict[str, str] = {}
        while ref is not None and len(owners) < DEPTH:
            owners.append(Owner(kind=ref.kind, name=ref.name, uid=ref.uid))
            above = self._known.get(ref.uid, OwnerFacts())
            labels = {**dict(above.labels), **labels}
            ref = above.parent
        return Chain(tuple(owners), labels)

    def _get(self, ref: Ref) -> OwnerFacts:
        path = self._path(ref.api_version, ref.kind, ref.namespace, ref.name)
        if path is None:
            return OwnerFacts()
        try:
            found = self._one.decode(self._api.get(path, {}, metadata_only=True))
        except (NotFound, ClusterRefused):
            return OwnerFacts()
        except UNDECODABLE as error:
            raise ClusterUnavailable(f"{path}: unexpected answer of the API server: {error}") from error
        # The name may belong to another object by now.
        return owner_facts(found.metadata) if found.metadata.uid == ref.uid else OwnerFacts()

    def _list(self, api_version: str, kind: str) -> bool:
        """Caches all owners of a kind. Returns whether owners that are still unknown do not exist."""
        path = self._path(api_version, kind)
        token = ""
        while path is not None:
            query = {"limit": str(PAGE), **({"continue": token} if token else {})}
            try:
                page = self._page.decode(self._api.get(path, query, metadata_only=True))
            except (NotFound, ClusterRefused, VersionGone):
                return False
            except UNDECODABLE as error:
                raise ClusterUnavailable(f"{path}: unexpected answer of the API server: {error}") from error
            for item in page.items or ():
                self._known[item.metadata.uid] = owner_facts(item.metadata)
            before, token = token, page.metadata.continue_ or ""
            if token and token == before:
                raise ClusterUnavailable(f"{path}: the list does not go on: each page names itself as the next one")
            if not token:
                return len(self._known) < REMEMBERED  # otherwise some of it may have been evicted
        return False

    def _path(self, api_version: str, kind: str, namespace: str = "", name: str = "") -> str | None:
        """The API path; None for a kind that this server does not serve, or that may not be read."""
        group = f"/apis/{api_version}" if "/" in api_version else f"/api/{api_version}"
        plural, namespaced = _KINDS.get(kind) if api_version in ("batch/v1", "apps/v1") else None, True
        if plural is None:
            if group not in self._plurals:
                self._plurals[group] = self._discover(group)
            resource = self._plurals[group].get(kind)
            if resource is None:
                return None
            plural, namespaced = resource.name, resource.namespaced
        inside = f"/namespaces/{namespace}" if namespace and namespaced else ""
        return f"{group}{inside}/{plural}" + (f"/{name}" if name else "")

    def _discover(self, group: str) -> dict[str, _Resource]:
        try:
            found = _resources.decode(self._api.get(group, {}))
        except (NotFound, ClusterRefused):
            return {}
        except UNDECODABLE as error:
            raise ClusterUnavailable(f"{group}: unexpected answer of the API server: {error}") from error
        return {resource.kind: resource for resource in found.resources if "/" not in resource.name}


def nearest(references: Sequence[OwnerReference] | None, namespace: str) -> Ref | None:
    """The controlling owner, otherwise the first; None if there is no owner."""
    if not references:
        return None
    one = next((ref for ref in references if ref.controller), references[0])
    return Ref(one.api_version, one.kind, one.name, one.uid, namespace)


def owner_facts(metadata: Metadata) -> OwnerFacts:
    """The owner and queue labels in an object's metadata."""
    labels = tuple(sorted((k, v) for k, v in (metadata.labels or {}).items() if k in queue_keys()))
    return OwnerFacts(nearest(metadata.owner_references, metadata.namespace), labels)
