"""Defines kinds, field paths, quantities, events and disruption budgets of Kubernetes objects, and the protocol of a
cluster client with its exceptions.

The kinds of the schedulers are defined in their adapters. Objects are plain JSON-like dictionaries. A path is a tuple
of keys. A leaf is a scalar, a list or an empty mapping. A list counts as one leaf, as in every list that this project
applies. Only `put` and `drop` change an object in place.

`gputally.kubernetes.api_client.KubernetesCluster` and `gputally.kubernetes.memory_cluster.MemoryCluster` implement the
protocol. It has deliberately no way to force another value on a field of another owner. `transfer` takes a field over
at its present value, at a person's request.

Evictions are checked in the same order as in the API server: if the uid belongs to another pod, the eviction fails but
has already cost the budget one disruption.

Sources: Kubernetes API conventions, metadata.managedFields (FieldsV1); apimachinery/pkg/api/resource, "Quantity";
Kubernetes 1.36, registry/core/pod/rest/eviction.go."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import ROUND_HALF_EVEN, Decimal
from math import fsum, isfinite
from typing import Any, Literal, Protocol

from gputally.base.errors import Blocked, Refused

Object = Mapping[str, Any]
"""A Kubernetes object as plain data. Functions never change an object that they receive."""


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of object.

    namespaced: its objects are in namespaces.
    status: it has a status subresource."""

    api_version: str
    kind: str
    plural: str
    namespaced: bool = False
    status: bool = True

    def path(self, namespace: str = "", name: str = "") -> str:
        """Return the path of one object, or of the list."""
        group = f"/apis/{self.api_version}" if "/" in self.api_version else f"/api/{self.api_version}"
        inside = f"/namespaces/{namespace}" if self.namespaced and namespace else ""
        return f"{group}{inside}/{self.plural}" + (f"/{name}" if name else "")


CONFIG_MAP = Kind("v1", "ConfigMap", "configmaps", namespaced=True, status=False)
NODE = Kind("v1", "Node", "nodes")
POD = Kind("v1", "Pod", "pods", namespaced=True)
PRIORITY_CLASS = Kind("scheduling.k8s.io/v1", "PriorityClass", "priorityclasses", status=False)
EVENT = Kind("events.k8s.io/v1", "Event", "events", namespaced=True, status=False)

FieldPath = tuple[str, ...]

_IDENTITY = frozenset({"apiVersion", "kind"})
_SERVER_SET = frozenset(
    {"name", "namespace", "uid", "resourceVersion", "generation", "creationTimestamp", "managedFields", "selfLink"}
)


def leaves(obj: Mapping[str, Any]) -> dict[FieldPath, Any]:
    """Return every ownable leaf with its value in document order, without identity fields and fields that the server
    sets."""
    found: dict[FieldPath, Any] = {}
    for key, value in obj.items():
        if key == "metadata":
            kept = {name: part for name, part in value.items() if name not in _SERVER_SET}
            _walk(kept, ("metadata",), found)
        elif key not in _IDENTITY:
            _walk(value, (key,), found)
    found.pop(("metadata",), None)
    return found


def _walk(value: Any, path: FieldPath, found: dict[FieldPath, Any]) -> None:
    if isinstance(value, Mapping) and value:
        for key, part in value.items():
            _walk(part, (*path, key), found)
    else:
        found[path] = value


def look(obj: Mapping[str, Any], path: FieldPath) -> Any:
    """Return the value at `path`; None if it or one of its parents is missing or null."""
    value: Any = obj
    for key in path:
        # Most values are dicts, and the isinstance check takes ten times as long.
        if value.__class__ is not dict and not isinstance(value, Mapping):
            return None
        value = value.get(key)
    return value


def put(obj: dict[str, Any], path: FieldPath, value: Any) -> None:
    """Set the value at `path` and create its parents; a parent that is not a mapping is replaced."""
    at = obj
    for key in path[:-1]:
        inner = at.get(key)
        if not isinstance(inner, dict):
            inner = at[key] = {}
        at = inner
    at[path[-1]] = value


def drop(obj: dict[str, Any], path: FieldPath) -> None:
    """Remove the leaf at `path`, and mappings that become empty."""
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


def dotted_path(path: FieldPath) -> str:
    """Format a path as the API server names a field: `.spec.resources.gpu.overQuotaWeight`; unusual keys are quoted."""
    return "".join(f".{key}" if key.replace("_", "a").isalnum() else f'["{key}"]' for key in path)


def overlap(one: FieldPath, other: FieldPath) -> bool:
    """Return whether one path is equal to the other or a parent of it."""
    shorter = min(len(one), len(other))
    return one[:shorter] == other[:shorter]


def to_fields_v1(paths: Iterable[FieldPath]) -> dict[str, Any]:
    """Return the nested `f:` form of a set of paths."""
    tree: dict[str, Any] = {}
    for path in sorted(paths):
        at = tree
        for key in path:
            at = at.setdefault(f"f:{key}", {})
    return tree


def from_fields_v1(tree: Mapping[str, Any], path: FieldPath = ()) -> set[FieldPath]:
    """Return the leaf paths of the nested `f:` form; ownership inside lists counts for the whole list."""
    inner = {key[2:]: part for key, part in tree.items() if key.startswith("f:")}
    if not inner:
        return {path} if path else set()
    return {leaf for key, part in inner.items() for leaf in from_fields_v1(part, (*path, key))}


def without(tree: Mapping[str, Any], paths: Iterable[FieldPath]) -> dict[str, Any]:
    """Return the `f:` form without `paths` and everything below them, and without parts that become empty."""
    return _without(tree, frozenset(paths), ()) or {}


def _without(tree: Mapping[str, Any], paths: frozenset[FieldPath], at: FieldPath) -> dict[str, Any] | None:
    """Return the remaining tree; None if a part that had content becomes empty."""
    kept = {}
    for key, part in tree.items():
        path = (*at, key[2:]) if key.startswith("f:") else (*at, key)
        if path not in paths:
            inner = _without(part, paths, path) if part else part
            if inner is not None:
                kept[key] = inner
    return kept or None if tree else {}


GPU = "nvidia.com/gpu"
SLICES = 7
"""Compute slices of a GPU that MIG divides; this holds for every model with MIG and more than 4 slices."""

_QUANTITY = re.compile(r"([+-]?(?:\d+\.?\d*|\.\d+))(m|u|n|[kMGTPE]i?|Ki|[eE][+-]?\d+)?")
_SUFFIX = {
    "n": 1e-9, "u": 1e-6, "m": 1e-3, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15, "E": 1e18,
    "Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40, "Pi": 2.0**50, "Ei": 2.0**60,
}  # fmt: skip
_MIG = re.compile(r"nvidia\.com/mig-(?:\d+c\.)?(\d+)g\..+")


def quantity(value: object) -> float | None:
    """Parse a Kubernetes quantity as a number >= 0: 4, "4", "500m". None for anything else."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int | float):
        return float(value) if isfinite(value) and value >= 0 else None
    match = _QUANTITY.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        return None
    number, suffix = match.groups()
    if suffix is None or suffix in _SUFFIX:
        amount = float(number) * _SUFFIX.get(suffix or "", 1.0)
    else:
        amount = float(number + suffix)
    return amount if amount >= 0 and isfinite(amount) else None


def gpus(resources: object) -> float:
    """Return the GPUs in a list of resources: whole GPUs, and MIG instances by their compute slices out of seven.

    An invalid quantity counts as 0, because the object belongs to another owner."""
    if not isinstance(resources, Mapping):
        return 0.0
    amounts = []
    for name, text in resources.items():
        instance = _MIG.fullmatch(str(name))
        if name == GPU or instance:
            part = int(instance.group(1)) / SLICES if instance else 1.0
            amounts.append((quantity(text) or 0.0) * part)
    return fsum(amounts)


def fixed_point(value: float, digits: int = 6) -> str:
    """Format a number as a quantity, in fixed-point text without trailing zeros: 0.75 is "0.75", 2.0 is "2"."""
    text = str(Decimal(repr(value)).quantize(Decimal(1).scaleb(-digits), ROUND_HALF_EVEN).normalize())
    return f"{Decimal(text):f}"


CLOSING_TAINTS = frozenset(
    {
        "node.kubernetes.io/not-ready",
        "node.kubernetes.io/unreachable",
        "node.kubernetes.io/unschedulable",
        "node.kubernetes.io/out-of-service",
        "gputally.dev/maintenance",
    }
)
"""Taints that take a node out of capacity. Other taints (such as a GPU pool's own) only restrict which pods may use it.
"""


def gpus_of_nodes(nodes: Sequence[Object]) -> float:
    """Return the allocatable GPUs (MIG instances by their slices) of nodes that accept work.

    As in the ledger, a node is `down` if it is not ready, cordoned, or has a NoSchedule or NoExecute taint of gputally
    or of the node controller: its GPUs are in no share."""
    return fsum(gpus(look(node, ("status", "allocatable"))) for node in nodes if node_up(node))


def node_up(node: Object) -> bool:
    """Return whether a node's GPUs are capacity now."""
    conditions = look(node, ("status", "conditions")) or ()
    ready = any(c.get("type") == "Ready" and c.get("status") == "True" for c in conditions)
    spec = node.get("spec") or {}
    closed = any(
        taint.get("effect") in ("NoSchedule", "NoExecute") and taint.get("key") in CLOSING_TAINTS
        for taint in spec.get("taints") or ()
    )
    return ready and not spec.get("unschedulable") and not closed


__all__ = [
    "CONFIG_MAP",
    "NODE",
    "POD",
    "Api",
    "Cluster",
    "Event",
    "Kind",
    "Object",
    "ObjectReader",
    "Objects",
]


@dataclass(frozen=True, slots=True)
class Event:
    """An event for people who look at the object. namespace "": a cluster-scoped object.

    Repeating the same (object, reason, message) gives one event, not two."""

    kind: Kind
    name: str
    namespace: str
    uid: str
    type: Literal["Normal", "Warning"]
    reason: str
    message: str
    at_ms: int


class Api(Protocol):
    """An API server's answers as bytes. Every call raises gputally.base.errors.ClusterError."""

    def get(self, path: str, query: Mapping[str, str], *, metadata_only: bool = False) -> bytes:
        """Return one answer. metadata_only: objects without spec and status."""
        ...

    def watch(self, path: str, query: Mapping[str, str], *, metadata_only: bool = False) -> Iterator[bytes]:
        """Yield the lines of a watch until the server ends it."""
        ...

    def post(self, path: str, body: Mapping[str, object]) -> bytes:
        """Create an object and return the answer."""
        ...


class ObjectReader(Protocol):
    """Reads objects. Every method raises NotFound, Refused or Unavailable of gputally.base.errors."""

    def list(self, kind: Kind, *, fields: str = "") -> Sequence[Object]:
        """Return all objects of the kind, in every namespace, sorted by (namespace, name). fields: a field selector,
        such as `reason=Evict`.

        Raises NotFound if the kind itself (its CRD) does not exist."""
        ...

    def get(self, kind: Kind, name: str, namespace: str = "") -> Object:
        """Return one object."""
        ...


class Objects(ObjectReader, Protocol):
    """Objects that carry a target's weights: a Kubernetes API server, or a client with the same interface
    (`fairshare.targets.runai`). Every method raises NotFound, Refused or Unavailable of gputally.base.errors."""

    def apply(self, obj: Object, *, field_manager: str, dry_run: bool = False) -> Object:
        """Apply the fields in `obj` by server-side apply; returns the resulting object (or, in a dry run, what it would
        be).

        Fields that the manager applied before and now omits are removed. A `metadata.resourceVersion` makes the write
        conditional. Raises Conflict with the owners of contested fields; then nothing is written."""
        ...

    def transfer(self, obj: Object, *, field_manager: str, dry_run: bool = False) -> Object:
        """Take the fields in `obj` over from their managers, at their present values, at a person's request. This is
        the only way to take another owner's field. `obj` names its resourceVersion. Raises Conflict if a value has
        changed; then nothing is written."""
        ...


class Cluster(Objects, Protocol):
    """A Kubernetes API server."""

    def apply(self, obj: Object, *, field_manager: str, dry_run: bool = False, subresource: str = "") -> Object:
        """Applies an object, or a subresource of it such as `status`."""
        ...

    def scan(self, kind: Kind, take: Callable[[Object], object]) -> str:
        """Pass every object of the kind to `take`, page by page, without keeping them; returns the version to watch
        from."""
        ...

    def api(self) -> Api:
        """Return the interface that gives the server's answers as bytes, for `gputally.kubernetes.list_watch`."""
        ...

    def patch(
        self, kind: Kind, name: str, namespace: str, change: Object, *, field_manager: str, dry_run: bool = False
    ) -> Object:
        """Merge `change` into one object, for fields that several clients write in turn (a Workload's `spec.active`).

        A `metadata.uid` or `metadata.resourceVersion` in it makes the write conditional: Conflict if it differs."""
        ...

    def create(self, obj: Object, *, field_manager: str, dry_run: bool = False) -> Object:
        """Create an object, with a name from the server if it has `metadata.generateName`. Raises Conflict if it
        exists."""
        ...

    def evict(self, name: str, namespace: str, uid: str, *, grace_s: int | None = None, dry_run: bool = False) -> None:
        """Evict a pod if its disruption budgets allow it; a pod that is being deleted is a success.

        Raises NotFound if it is gone, Blocked if a budget does not allow it now, Conflict if the uid belongs to another
        pod (which has cost the budget one disruption: compare the uid first), Refused if more than one budget covers
        it."""
        ...

    def event(self, event: Event) -> None:
        """Record an event."""
        ...


BUDGET = Kind("policy/v1", "PodDisruptionBudget", "poddisruptionbudgets", namespaced=True)
_UNGUARDED = frozenset({"Pending", "Succeeded", "Failed"})


def guard(pod: Object, budgets: Sequence[Object]) -> Object | None:
    """Return the budget that covers the eviction of `pod`; None if none does. Raises Blocked or Refused."""
    metadata = pod["metadata"]
    if metadata.get("deletionTimestamp") or look(pod, ("status", "phase")) in _UNGUARDED:
        return None
    claims = [
        budget
        for budget in budgets
        if budget["metadata"].get("namespace") == metadata.get("namespace")
        and selects(look(budget, ("spec", "selector")) or {}, metadata.get("labels") or {})
    ]
    if len(claims) > 1:
        raise Refused(
            "This pod has more than one PodDisruptionBudget, which the eviction subresource does not support."
        )
    if not claims:
        return None
    if (look(claims[0], ("status", "disruptionsAllowed")) or 0) <= 0:
        raise Blocked("Cannot evict pod as it would violate the pod's disruption budget.")
    return claims[0]


def selects(selector: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    """Return whether a label selector matches these labels."""
    wanted = selector.get("matchLabels") or {}
    if any(labels.get(key) != value for key, value in wanted.items()):
        return False
    for rule in selector.get("matchExpressions") or ():
        value, values = labels.get(rule["key"]), rule.get("values") or ()
        fits = {
            "In": value in values,
            "NotIn": value not in values,
            "Exists": value is not None,
            "DoesNotExist": value is None,
        }
        if not fits[rule["operator"]]:
            return False
    return True
