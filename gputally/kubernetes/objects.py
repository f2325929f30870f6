"""Defines kinds, field paths, quantities, events and disruption budgets of Kubernetes objects, and the protocol of a
cluster client with its exceptions.

The schedulers' own kinds stand with their adapters. Pure data.

A leaf is a scalar, a list or an empty mapping: lists are atomic here, which holds for every list this
project applies. Paths are tuples of keys. Pure; nothing is changed in place but by `put` and `drop`.

Source of the written form (FieldsV1): Kubernetes API conventions, metadata.managedFields.

Source of the notation: Kubernetes, apimachinery/pkg/api/resource, "Quantity".

Implemented by `gputally.kubernetes.KubernetesCluster` and `gputally.kubernetes.memory_cluster.MemoryCluster`, and by
`fairshare.usage.accountant_client.AccountantClient`; the composition hands them to the Controller. Objects are plain
JSON-like dictionaries. There is deliberately no way to force another value on a field of another owner (law "own only
your fields"); `transfer` takes one over as it stands, when a person asks for it.

The order of the checks is the API server's, its trap included: an eviction whose uid is another pod's has
by then cost the budget one disruption. Source: Kubernetes 1.36, registry/core/pod/rest/eviction.go, and its
answers in our vectors.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import ROUND_HALF_EVEN, Decimal
from math import fsum, isfinite
from typing import Any, Literal, Protocol

from gputally.base.errors import Blocked, Refused

Object = Mapping[str, Any]
"""A Kubernetes object as plain data. Never changed in place by its receiver."""


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of object. namespaced: objects live in namespaces. status: it has a status subresource."""

    api_version: str
    kind: str
    plural: str
    namespaced: bool = False
    status: bool = True

    def path(self, namespace: str = "", name: str = "") -> str:
        """The path of one object, or of all."""
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
    """Every ownable leaf with its value, in document order; identity and what the server sets left out."""
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
    """The value at `path`, None where it or a part of the way is missing or null."""
    value: Any = obj
    for key in path:
        # Nearly all are dicts, and the other question is ten times as slow.
        if value.__class__ is not dict and not isinstance(value, Mapping):
            return None
        value = value.get(key)
    return value


def put(obj: dict[str, Any], path: FieldPath, value: Any) -> None:
    """Set the value at `path`, making the way; whatever is no mapping on the way is replaced."""
    at = obj
    for key in path[:-1]:
        inner = at.get(key)
        if not isinstance(inner, dict):
            inner = at[key] = {}
        at = inner
    at[path[-1]] = value


def drop(obj: dict[str, Any], path: FieldPath) -> None:
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


def dotted_path(path: FieldPath) -> str:
    """`.spec.resources.gpu.overQuotaWeight`, as the API server names a field; odd keys are quoted."""
    return "".join(f".{key}" if key.replace("_", "a").isalnum() else f'["{key}"]' for key in path)


def overlap(one: FieldPath, other: FieldPath) -> bool:
    """Whether one path is the other or leads to it."""
    shorter = min(len(one), len(other))
    return one[:shorter] == other[:shorter]


def to_fields_v1(paths: Iterable[FieldPath]) -> dict[str, Any]:
    """The nested `f:` form of a set of paths."""
    tree: dict[str, Any] = {}
    for path in sorted(paths):
        at = tree
        for key in path:
            at = at.setdefault(f"f:{key}", {})
    return tree


def from_fields_v1(tree: Mapping[str, Any], path: FieldPath = ()) -> set[FieldPath]:
    """The leaf paths of the nested `f:` form; ownership inside lists counts for the list."""
    inner = {key[2:]: part for key, part in tree.items() if key.startswith("f:")}
    if not inner:
        return {path} if path else set()
    return {leaf for key, part in inner.items() for leaf in from_fields_v1(part, (*path, key))}


def without(tree: Mapping[str, Any], paths: Iterable[FieldPath]) -> dict[str, Any]:
    """The `f:` form with `paths`, and what lies below them, taken out; what that leaves empty goes too."""
    return _without(tree, frozenset(paths), ()) or {}


def _without(tree: Mapping[str, Any], paths: frozenset[FieldPath], at: FieldPath) -> dict[str, Any] | None:
    """None where nothing of a tree that had something is left."""
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
"""Compute slices of a GPU that MIG divides; true of every model that has MIG and more than 4 of them."""

_QUANTITY = re.compile(r"([+-]?(?:\d+\.?\d*|\.\d+))(m|u|n|[kMGTPE]i?|Ki|[eE][+-]?\d+)?")
_SUFFIX = {
    "n": 1e-9, "u": 1e-6, "m": 1e-3, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15, "E": 1e18,
    "Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40, "Pi": 2.0**50, "Ei": 2.0**60,
}  # fmt: skip
_MIG = re.compile(r"nvidia\.com/mig-(?:\d+c\.)?(\d+)g\..+")


def quantity(value: object) -> float | None:
    """A Kubernetes quantity as a number >= 0: 4, "4", "500m". None for anything else."""
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
    """GPUs in a list of resources: whole ones, and MIG instances by their compute slices of seven.

    What is no quantity counts as nothing: it is an object of another owner."""
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
    """Fixed-point text without trailing zeros, as a quantity: 0.75 is "0.75", 2.0 is "2"."""
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
"""Taints that take a node out of capacity. Others (a GPU pool's own) only choose who may use it."""


def gpus_of_nodes(nodes: Sequence[Object]) -> float:
    """GPUs (MIG instances by their slices) allocatable on nodes that may be given work.

    As in the books, a node that is not ready, cordoned, or closed by a NoSchedule or NoExecute taint of
    ours or of the node controller is `down`: its GPUs are in no share."""
    return fsum(gpus(look(node, ("status", "allocatable"))) for node in nodes if node_up(node))


def node_up(node: Object) -> bool:
    """Whether a node's GPUs are capacity now."""
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
    """Something a person looking at the object should read. namespace "": a cluster-scoped object.

    Repeating the same (object, reason, message) is one event, not two."""

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
        """One answer. metadata_only: objects without spec and status."""
        ...

    def watch(self, path: str, query: Mapping[str, str], *, metadata_only: bool = False) -> Iterator[bytes]:
        """The lines of a watch, until the server ends it."""
        ...

    def post(self, path: str, body: Mapping[str, object]) -> bytes:
        """Create an object; the answer."""
        ...


class ObjectReader(Protocol):
    """Objects that are read. Every method raises NotFound, Refused or Unavailable of gputally.base.errors."""

    def list(self, kind: Kind, *, fields: str = "") -> Sequence[Object]:
        """All objects of the kind, in every namespace, sorted by (namespace, name). fields: only those that a field
        selector takes, such as `reason=Evict`.

        NotFound when the kind itself (its CRD) is not there."""
        ...

    def get(self, kind: Kind, name: str, namespace: str = "") -> Object:
        """One object."""
        ...


class Objects(ObjectReader, Protocol):
    """Where a target's weights stand, as objects: a Kubernetes API server, or what is made to look like one
    (`fairshare.targets.runai`). Every method raises NotFound, Refused or Unavailable of gputally.base.errors."""

    def apply(self, obj: Object, *, field_manager: str, dry_run: bool = False) -> Object:
        """Server-side apply of the fields in `obj`; returns the object as it then stands (or would stand).

        Fields the manager applied before and now leaves out are removed. A `metadata.resourceVersion`
        makes it conditional. Raises Conflict naming the owners of contested fields; nothing is written."""
        ...

    def transfer(self, obj: Object, *, field_manager: str, dry_run: bool = False) -> Object:
        """Take the fields in `obj` over from their managers, at the values that stand: the one way to take over another
        owner's field, for a person who asks for it. `obj` names its resourceVersion. Raises Conflict where a value is
        another by now; nothing is written."""
        ...


class Cluster(Objects, Protocol):
    """A Kubernetes API server."""

    def apply(self, obj: Object, *, field_manager: str, dry_run: bool = False, subresource: str = "") -> Object:
        """Applies an object, or a subresource of it such as `status`."""
        ...

    def scan(self, kind: Kind, take: Callable[[Object], object]) -> str:
        """Hand every object of the kind to `take`, page by page, keeping none; returns the version to watch from."""
        ...

    def api(self) -> Api:
        """The server's answers as bytes, for `gputally.kubernetes.list_watch`."""
        ...

    def patch(
        self, kind: Kind, name: str, namespace: str, change: Object, *, field_manager: str, dry_run: bool = False
    ) -> Object:
        """Merge `change` into one object, for fields that many write in turn (a Workload's `spec.active`).

        A `metadata.uid` or `metadata.resourceVersion` in it makes it conditional: Conflict where it is another."""
        ...

    def create(self, obj: Object, *, field_manager: str, dry_run: bool = False) -> Object:
        """Make an object, named by the server where it has `metadata.generateName`. Conflict where it exists."""
        ...

    def evict(self, name: str, namespace: str, uid: str, *, grace_s: int | None = None, dry_run: bool = False) -> None:
        """Evict a pod through its disruption budgets; one already on its way out is a success.

        Raises NotFound where it is gone, Blocked where a budget says not now, Conflict where the uid is
        another pod's (which has cost the budget one disruption: compare the uid before), Refused where more
        than one budget claims it."""
        ...

    def event(self, event: Event) -> None:
        """Record an event."""
        ...


BUDGET = Kind("policy/v1", "PodDisruptionBudget", "poddisruptionbudgets", namespaced=True)
_UNGUARDED = frozenset({"Pending", "Succeeded", "Failed"})


def guard(pod: Object, budgets: Sequence[Object]) -> Object | None:
    """The budget that pays for evicting `pod`; None where none does. Raises Blocked or Refused."""
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
    """Whether a label selector takes these labels."""
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
