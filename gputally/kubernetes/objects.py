"""Defines kinds, field paths, quantities, events and disruption budgets of Kubernetes objects, and the protocols of a
cluster client.

Objects are plain JSON-like dictionaries. A path is a tuple of keys. A leaf is a scalar, a list or an empty mapping; a
list counts as one leaf. Only `put` and `drop` change an object in place. The folders of `fairshare.schedulers`
define the kinds of the schedulers.

`gputally.kubernetes.api_client.KubernetesCluster` and `gputally.kubernetes.memory_cluster.MemoryCluster` implement the
protocol `Cluster`. The protocol has deliberately no way to force another value on a field of another owner. `transfer`
takes over a field at its present value, at a person's request.

Evictions are checked in the same order as in the API server: an eviction with the uid of another pod fails after it has
cost the budget one disruption.

Sources: Kubernetes API conventions, metadata.managedFields (FieldsV1); apimachinery/pkg/api/resource, "Quantity";
Kubernetes 1.36, registry/core/pod/rest/eviction.go."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import ROUND_HALF_EVEN, Decimal
from math import fsum
from typing import Any, Literal, Protocol

from gputally.base.errors import Blocked, ClusterRefused
from gputally.base.gpu_model_names import gpu_model_of_node
from gputally.base.mig_profiles import compute_slices, parse_mig_profile
from gputally.base.units import MS_PER_SECOND

Object = Mapping[str, Any]
"""A Kubernetes object as plain data. A function never changes an object that it receives."""


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of object.

    namespaced: True if its objects are in namespaces.
    status: True if it has a status subresource."""

    api_version: str
    kind: str
    plural: str
    namespaced: bool = False
    status: bool = True

    def path(self, namespace: str = "", name: str = "") -> str:
        """Return the API path of an object, or without a name that of the list. Without a namespace, the list has the
        objects of all namespaces."""
        group = f"/apis/{self.api_version}" if "/" in self.api_version else f"/api/{self.api_version}"
        inside = f"/namespaces/{namespace}" if self.namespaced and namespace else ""
        return f"{group}{inside}/{self.plural}" + (f"/{name}" if name else "")


CONFIG_MAP = Kind("v1", "ConfigMap", "configmaps", namespaced=True, status=False)
NODE = Kind("v1", "Node", "nodes")
POD = Kind("v1", "Pod", "pods", namespaced=True)
PRIORITY_CLASS = Kind("scheduling.k8s.io/v1", "PriorityClass", "priorityclasses", status=False)
POD_GROUPS = tuple(
    Kind(f"scheduling.k8s.io/{version}", "PodGroup", "podgroups", namespaced=True)
    for version in ("v1beta1", "v1alpha3", "v1alpha2")
)
"""The groups of pods that the kube-scheduler starts together: v1alpha2 in Kubernetes 1.36, the others in 1.37."""
EVENT = Kind("events.k8s.io/v1", "Event", "events", namespaced=True, status=False)
LEASE = Kind("coordination.k8s.io/v1", "Lease", "leases", namespaced=True, status=False)


def micro_time(at_ms: int) -> str:
    """Format a time as a MicroTime, which needs six decimals. at_ms: UTC milliseconds."""
    return datetime.fromtimestamp(at_ms / MS_PER_SECOND, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


FieldPath = tuple[str, ...]

_IDENTITY = frozenset({"apiVersion", "kind"})
_SERVER_SET = frozenset(
    {"name", "namespace", "uid", "resourceVersion", "generation", "creationTimestamp", "managedFields", "selfLink"}
)


def leaves(obj: Mapping[str, Any]) -> dict[FieldPath, Any]:
    """Return every leaf that a field manager can own, with its value, in document order. The fields that identify the
    object or that the server sets are left out."""
    values: dict[FieldPath, Any] = {}
    for key, value in obj.items():
        if key == "metadata":
            ownable = {name: part for name, part in value.items() if name not in _SERVER_SET}
            _add_leaves(ownable, ("metadata",), values)
        elif key not in _IDENTITY:
            _add_leaves(value, (key,), values)
    values.pop(("metadata",), None)
    return values


def _add_leaves(value: Any, path: FieldPath, values: dict[FieldPath, Any]) -> None:
    if isinstance(value, Mapping) and value:
        for key, part in value.items():
            _add_leaves(part, (*path, key), values)
    else:
        values[path] = value


def value_at(obj: Mapping[str, Any], path: FieldPath) -> Any:
    """Return the value at `path`; None if the value or one of its parents is missing or null."""
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
    """Remove the leaf at `path`, and the parents that become empty."""
    parents = [obj]
    for key in path[:-1]:
        inner = parents[-1].get(key)
        if not isinstance(inner, dict):
            return
        parents.append(inner)
    parents[-1].pop(path[-1], None)
    for depth in range(len(parents) - 1, 0, -1):
        if parents[depth]:
            return
        del parents[depth - 1][path[depth - 1]]


def dotted_path(path: FieldPath) -> str:
    """Format a path as the API server does: `.spec.resources.gpu.overQuotaWeight`, with unusual keys in quotes."""
    return "".join(f".{key}" if key.replace("_", "a").isalnum() else f'["{key}"]' for key in path)


def overlap(one: FieldPath, other: FieldPath) -> bool:
    """Return True if the paths are equal or one is a parent of the other."""
    shorter = min(len(one), len(other))
    return one[:shorter] == other[:shorter]


def to_fields_v1(paths: Iterable[FieldPath]) -> dict[str, Any]:
    """Encode a set of paths as nested `f:` keys (FieldsV1)."""
    tree: dict[str, Any] = {}
    for path in sorted(paths):
        at = tree
        for key in path:
            at = at.setdefault(f"f:{key}", {})
    return tree


def from_fields_v1(tree: Mapping[str, Any], path: FieldPath = ()) -> set[FieldPath]:
    """Decode nested `f:` keys (FieldsV1) to the paths of the leaves. A manager that owns a part of a list counts as the
    owner of the whole list. path: the path of `tree` itself."""
    inner = {key[2:]: part for key, part in tree.items() if key.startswith("f:")}
    if not inner:
        return {path} if path else set()
    return {leaf for key, part in inner.items() for leaf in from_fields_v1(part, (*path, key))}


def without(tree: Mapping[str, Any], paths: Iterable[FieldPath]) -> dict[str, Any]:
    """Return nested `f:` keys (FieldsV1) without these paths and all paths below them, and without parents that become
    empty."""
    return _without(tree, frozenset(paths), ()) or {}


def _without(tree: Mapping[str, Any], paths: frozenset[FieldPath], at: FieldPath) -> dict[str, Any] | None:
    """Return the tree at the path `at` without `paths`; None if it had content and becomes empty."""
    remaining = {}
    for key, part in tree.items():
        path = (*at, key[2:]) if key.startswith("f:") else (*at, key)
        if path not in paths:
            inner = _without(part, paths, path) if part else part
            if inner is not None:
                remaining[key] = inner
    return remaining or None if tree else {}


GPU = "nvidia.com/gpu"

_QUANTITY = re.compile(r"([+-]?(?:\d+(?:\.\d*)?|\.\d+))(?:(n|u|m|k|[MGTPE]|[KMGTPE]i)|([eE][+-]?\d{1,3}))?", re.ASCII)
_SUFFIX = {
    "n": 1e-9, "u": 1e-6, "m": 1e-3, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15, "E": 1e18,
    "Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40, "Pi": 2.0**50, "Ei": 2.0**60,
}  # fmt: skip
MIG = "nvidia.com/mig-"
"""Prefix of the resources of MIG instances, before the profile."""


MOST_QUANTITY = 2.0**63
"""Kubernetes stores no larger quantity. Sums of these amounts stay finite."""


def quantity(value: object) -> float | None:
    """Parse a Kubernetes quantity (4, "4", "500m"). Return None for any other value, a negative one, or one above
    `MOST_QUANTITY`: users write it into annotations that no schema checks."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int | float):
        return float(value) if 0 <= value <= MOST_QUANTITY else None
    match = _QUANTITY.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        return None
    number, suffix, exponent = match.groups(default="")
    amount = float(number + exponent) * _SUFFIX.get(suffix, 1.0)
    return amount if 0 <= amount <= MOST_QUANTITY else None


_DURATION = re.compile(r"(\d+(?:\.\d*)?|\.\d+)(ns|us|µs|μs|ms|s|m|h)", re.ASCII)
_SECONDS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
MOST_DURATION_S = 2**63 / 1e9
"""Go's longest duration."""


def duration_s(text: object) -> float | None:
    """Parse a duration of the Kubernetes API ("1h30m", "0") as seconds. Return None for any other or a negative one."""
    if not isinstance(text, str) or len(text) > 64:
        return None
    parts = _DURATION.findall(text)
    if text != "0" and (not parts or "".join(number + unit for number, unit in parts) != text):
        return None
    seconds = fsum(float(number) * _SECONDS[unit] for number, unit in parts)
    return seconds if seconds <= MOST_DURATION_S else None


MigSlices = Callable[[str], int]
"""Returns the compute slices of a GPU with a MIG profile: for a node `slices_of_node`, and otherwise a method of
`gputally.kubernetes.mig_parts.MigParts`."""


def gpus(resources: object, slices: MigSlices) -> float:
    """Return the number of GPUs among resources (quantity by name). A MIG instance counts as its compute slices divided
    by those of the GPU, which are not the same for every GPU with its profile.

    An invalid value counts as 0, because users and other programs write the object."""
    if not isinstance(resources, Mapping):
        return 0.0
    amounts = []
    for name, text in resources.items():
        profile = str(name).removeprefix(MIG) if str(name).startswith(MIG) else ""
        mig = parse_mig_profile(profile)
        if name == GPU or mig is not None:
            part = mig.gpu_instance / slices(profile) if mig is not None else 1.0
            amounts.append((quantity(text) or 0.0) * part)
    return fsum(amounts)


def counts_gpus(resource: object) -> bool:
    """Return whether an amount of the resource is a number of GPUs, or of parts of them."""
    name = str(resource)
    return name == GPU or (name.startswith(MIG) and parse_mig_profile(name.removeprefix(MIG)) is not None)


def slices_of_node(node: Object) -> MigSlices:
    """Return the compute slices of the GPUs of a node, by its product; by the profile alone if no label states it."""
    return lambda profile: compute_slices(gpu_model_of_node(value_at(node, ("metadata", "labels")) or {}), profile)


def gpus_of_node(node: Object, listed: str = "allocatable") -> float:
    """Return the GPUs that a node lists, in any state. listed: `allocatable` or `capacity`."""
    return gpus(value_at(node, ("status", listed)), slices_of_node(node))


def fixed_point(value: float, digits: int = 6) -> str:
    """Format a number as a quantity without exponent and trailing zeros: 0.75 is "0.75", 2.0 is "2"."""
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
"""Taints that take a node out of capacity. Other taints, such as a GPU pool's own, only restrict which pods may use the
node."""


def gpus_of_nodes(nodes: Sequence[Object]) -> float:
    """Return the number of allocatable GPUs of the nodes that are up (`node_up`)."""
    return fsum(gpus_of_node(node) for node in nodes if node_up(node))


def node_up(node: Object) -> bool:
    """Return True if a node is up, so that its GPUs are capacity.

    As in the ledger, a node is down if it is not ready, is cordoned, or has one of `CLOSING_TAINTS` with the effect
    NoSchedule or NoExecute."""
    conditions = value_at(node, ("status", "conditions")) or ()
    ready = any(c.get("type") == "Ready" and c.get("status") == "True" for c in conditions)
    spec = node.get("spec") or {}
    closed = any(
        taint.get("effect") in ("NoSchedule", "NoExecute") and taint.get("key") in CLOSING_TAINTS
        for taint in spec.get("taints") or ()
    )
    return ready and not spec.get("unschedulable") and not closed


@dataclass(frozen=True, slots=True)
class Event:
    """An event about an object. A cluster records events with the same object, reason and message only once.

    kind, name, namespace, uid: the object; its namespace is "" if it is cluster-scoped.
    at_ms: time of the event in UTC milliseconds."""

    kind: Kind
    name: str
    namespace: str
    uid: str
    type: Literal["Normal", "Warning"]
    reason: str
    message: str
    at_ms: int


class Api(Protocol):
    """A client that returns an API server's answers as bytes. Every method raises gputally.base.errors.ClusterError."""

    def get(self, path: str, query: Mapping[str, str], *, metadata_only: bool = False) -> bytes:
        """Send a GET and return the answer. metadata_only: True for objects without spec and status."""
        ...

    def watch(self, path: str, query: Mapping[str, str], *, metadata_only: bool = False) -> Iterator[bytes]:
        """Watch the objects at `path`. Yield the lines of the answer until the server ends the watch."""
        ...

    def post(self, path: str, body: Mapping[str, object]) -> bytes:
        """Send a POST, which creates an object, and return the answer."""
        ...


class ObjectReader(Protocol):
    """Reads objects. Every method raises NotFound, ClusterRefused or ClusterUnavailable of gputally.base.errors."""

    def list(self, kind: Kind, *, fields: str = "") -> Sequence[Object]:
        """Return all objects of the kind, in every namespace, sorted by (namespace, name). fields: a field selector,
        such as `reason=Evict`.

        Raises NotFound if the kind itself (its CRD) does not exist."""
        ...

    def get(self, kind: Kind, name: str, namespace: str = "") -> Object:
        """Return one object."""
        ...


class Objects(ObjectReader, Protocol):
    """Reads and writes the objects with a scheduler's weights, on a Kubernetes API server or another server. Every
    method raises NotFound, ClusterRefused or ClusterUnavailable of gputally.base.errors."""

    def apply(self, obj: Object, *, field_manager: str, dry_run: bool = False) -> Object:
        """Apply the fields in `obj` by server-side apply. Return the resulting object, in a dry run too.

        Fields that the manager applied earlier and omits now are removed. With a `metadata.resourceVersion`, the write
        fails if the object has another one. Raises Conflict with the owners of contested fields; then nothing is
        written."""
        ...

    def transfer(self, obj: Object, *, field_manager: str, dry_run: bool = False) -> Object:
        """Make `field_manager` the only owner of the fields in `obj`, at their present values. This is done only at a
        person's request, and is the only way to take a field from another owner.

        `obj` must have its resourceVersion. Raises Conflict if a value has changed; then nothing is written."""
        ...


class Cluster(Objects, Protocol):
    """A Kubernetes API server."""

    def apply(self, obj: Object, *, field_manager: str, dry_run: bool = False, subresource: str = "") -> Object:
        """Apply an object as in `Objects`, or one of its subresources, such as `status`."""
        ...

    def scan(self, kind: Kind, visit: Callable[[Object], object]) -> str:
        """Pass every object of the kind to `visit`, page by page. Return the resourceVersion from which a watch can
        continue."""
        ...

    def api(self) -> Api:
        """Return a client of the same server that returns answers as bytes, for `gputally.kubernetes.list_watch`."""
        ...

    def patch(
        self, kind: Kind, name: str, namespace: str, change: Object, *, field_manager: str, dry_run: bool = False
    ) -> Object:
        """Merge `change` into an object, for fields that several clients write in turn, such as a Workload's
        `spec.active`. Return the resulting object.

        Raises Conflict if `change` has a `metadata.uid` or `metadata.resourceVersion` that differs from the
        object's."""
        ...

    def create(self, obj: Object, *, field_manager: str, dry_run: bool = False) -> Object:
        """Create an object and return it. With `metadata.generateName`, the server generates the name. Raises Conflict
        if the object exists."""
        ...

    def evict(self, name: str, namespace: str, uid: str, *, grace_s: int | None = None, dry_run: bool = False) -> None:
        """Evict a pod if its disruption budget allows it. The eviction of a pod that is being deleted succeeds.

        Raises NotFound if the pod is deleted, Blocked if a budget does not allow the eviction at present,
        ClusterRefused if more than one budget covers the pod, and Conflict if the uid belongs to another pod. A
        Conflict has cost the budget one disruption, so compare the uid first."""
        ...

    def event(self, event: Event) -> None:
        """Record an event."""
        ...


BUDGET = Kind("policy/v1", "PodDisruptionBudget", "poddisruptionbudgets", namespaced=True)
_UNPROTECTED_PHASES = frozenset({"Pending", "Succeeded", "Failed"})
"""Phases of pods that the API server evicts without asking a disruption budget."""


def guard(pod: Object, budgets: Sequence[Object]) -> Object | None:
    """Return the disruption budget that covers a pod and allows its eviction; None if the pod needs none. Raises
    Blocked if the budget does not allow the eviction at present, and ClusterRefused if several budgets cover the
    pod."""
    metadata = pod["metadata"]
    if metadata.get("deletionTimestamp") or value_at(pod, ("status", "phase")) in _UNPROTECTED_PHASES:
        return None
    covering = [
        budget
        for budget in budgets
        if budget["metadata"].get("namespace") == metadata.get("namespace")
        and selects(value_at(budget, ("spec", "selector")) or {}, metadata.get("labels") or {})
    ]
    if len(covering) > 1:
        raise ClusterRefused(
            "This pod has more than one PodDisruptionBudget, which the eviction subresource does not support."
        )
    if not covering:
        return None
    if (value_at(covering[0], ("status", "disruptionsAllowed")) or 0) <= 0:
        raise Blocked("Cannot evict pod as it would violate the pod's disruption budget.")
    return covering[0]


def selects(selector: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    """Return True if a label selector matches these labels."""
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
