"""Maps the policy to Kueue's ClusterQueues, Cohorts and LocalQueues, and reports where weights have no effect.

`kueue:NAME` refers to a ClusterQueue, `kueue-cohort:NAME` to a Cohort, `kueue:NAMESPACE/NAME` to a LocalQueue. The
controller writes a queue's weight to the highest of these objects that the queue's refs name: the Cohort, else the
ClusterQueue, else the LocalQueue. If a queue has a Cohort or a ClusterQueue, its LocalQueues only identify its
workloads. When Kueue divides GPUs between the queues of a cohort, or between cohorts, it does not count past usage. The
weights that the controller writes there include it.

Inside a ClusterQueue Kueue counts history itself if admission fair sharing (AFS) is on. A LocalQueue then gets the
configured weight, because history would count twice. Without AFS Kueue does not read the weights of LocalQueues, which
the condition `Effective` reports. The statuses that Kueue's manager writes show whether it reads weights, and its
configuration shows why.

Kueue admits by quota, per resource of a flavor. A Workload holds the GPUs for which it is admitted, and waits for a
flavor that serves it. The quotas of flavors are added up for a queue as a whole only; quotas of the policy by GPU model
are those of the flavors of that model. A queue gets at most those of its
ClusterQueue and Cohorts (see `fairshare.core.admission_quota_tree`), even if the nodes have more GPUs.

The controller writes a weight as fixed-point text, because Kueue refuses a JSON number that is not an integer. A weight
above 0, and every weight of a LocalQueue, is 0.000001 at least.

Source: kubernetes-sigs/kueue ff69552e79ad, apis/kueue/v1beta2 (v1beta1 if only that is served).

The setting that switches fair sharing on depends on the version of Kueue's configuration:

- `v1beta2`: the section `fairSharing`, which must have `preemptionStrategies` and must not have `enable`; otherwise
  the manager exits.
- `v1beta1`: `fairSharing.enable: true`. Without it the manager ignores the section.

In both versions `admissionFairSharing` switches admission fair sharing on, which counts nothing while its
`usageHalfLifeTime` is 0 or unset.

Source: kubernetes-sigs/kueue ff69552e79ad, apis/config, pkg/config (the manager exits at an unknown key)."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from math import fsum, inf
from typing import Any

from accountant.wire.policy_models import Policy, QueuePolicy
from fairshare.core.admission_quota_tree import QuotaTree, total_quota
from fairshare.core.gpu_demand import (
    CHECKPOINT,
    gang_key,
    millis,
    pods_by_gang,
    requested_resources,
    sorted_gangs,
    standings_of,
    with_pods,
)
from fairshare.core.gpu_models import OWN_DECISIONS, model_of_labels
from fairshare.core.queues_and_weights import (
    UNLIMITED,
    Condition,
    Gang,
    Issue,
    Observation,
    Pod,
    PoolChoice,
    Quota,
    Standing,
    TargetQueue,
    Value,
    Weight,
)
from fairshare.core.scheduler_queue_objects import (
    differences,
    in_sync,
    join_texts,
    match,
    owners,
    read_each,
    read_queues,
    target_queue,
)
from fairshare.schedulers.kueue.conditions import REASONS
from fairshare.schedulers.kueue.kinds import CLUSTER_QUEUES, COHORTS, FLAVORS, KINDS, LOCAL_QUEUES, WORKLOADS
from fairshare.schedulers.kueue.section import KueueTarget
from fairshare.schedulers.kueue.stop import DeactivateWorkload, condition_of
from fairshare.targets.weight_plan import Adapter, ObjectQuery, Seen
from gputally.base.units import MS_PER_SECOND
from gputally.base.yaml_file import MAX_CONFIG_CHARACTERS, FileFault, parse
from gputally.kubernetes.mig_parts import NO_NODES, MigParts
from gputally.kubernetes.objects import (
    CONFIG_MAP,
    GPU,
    Kind,
    MigSlices,
    Object,
    counts_gpus,
    duration_s,
    fixed_point,
    gpus,
    quantity,
    value_at,
)

_GROUP_OF_CONFIGURATION = "config.kueue.x-k8s.io"
_VERSIONS = ("v1beta1", "v1beta2")
_NEWEST = _VERSIONS[-1]
_FINAL, _INITIAL = "LessThanOrEqualToFinalShare", "LessThanInitialShare"
_STRATEGIES = ([_FINAL], [_INITIAL], [_FINAL, _INITIAL])
_MARKER = re.compile(r"^---[ \t\r]*(?:#.*)?$", re.MULTILINE)
_LEAST_S = 1e-9
"""Go's shortest duration; a shorter one is zero."""


@dataclass(frozen=True, slots=True)
class Configuration:
    """The settings in Kueue's configuration that decide whether Kueue reads weights.

    version: the document's API version, such as `v1beta2`.
    fair: Kueue reads the weights of ClusterQueues and Cohorts.
    admission: Kueue reads the weights of LocalQueues whose ClusterQueue enables it.
    no_half_life: admission fair sharing has no half-life, so Kueue counts no usage.
    by_creation: a Workload whose pods did not become ready in time keeps its place by age; otherwise it goes behind
        those that were there when it was evicted.
    fault: why the manager does not start with the configuration; "" if no fault is known.
    resource_weights: by resource, how much its usage counts in admission fair sharing; 1 if not named.
    penalty: which part of its requests a Workload adds to its LocalQueue's usage when Kueue admits it.
    sampling_s: time between two samplings of usage."""

    version: str
    fair: bool
    admission: bool
    no_half_life: bool = False
    fault: str = ""
    by_creation: bool = False
    resource_weights: Mapping[str, float] = field(default_factory=dict)
    penalty: float = 0.0
    sampling_s: float = 0.0


CONFIGURATION_KEY = "controller_manager_config.yaml"
"""The only entry of the ConfigMap that Kueue's manager reads."""


def read_configuration(config_maps: Iterable[Object]) -> Configuration | None:
    """Return Kueue's configuration in its ConfigMap; None if there is no ConfigMap, or its text cannot be parsed here
    or is of a version that is unknown here.

    A ConfigMap without the manager's entry is a configuration with a fault, because the manager does not start with it.
    Other entries do not count. Of several documents in the entry, the first counts. What it leaves out is Kueue's
    default, also if it is empty."""
    config_map = next(iter(config_maps), None)
    if config_map is None:
        return None
    text = (config_map.get("data") or {}).get(CONFIGURATION_KEY)
    if text is None:
        return Configuration(_NEWEST, False, False, fault=f"its entry {CONFIGURATION_KEY} is missing")
    try:
        document = parse(_first_document(str(text)), CONFIGURATION_KEY, MAX_CONFIG_CHARACTERS).data
    except FileFault:
        return None
    section = {} if document is None else document
    kind = {"apiVersion": f"{_GROUP_OF_CONFIGURATION}/{_NEWEST}", "kind": "Configuration"}
    head = {key: section.get(key) or default for key, default in kind.items()} if isinstance(section, dict) else {}
    group, _, version = str(head.get("apiVersion")).partition("/")
    if not isinstance(section, dict) or (group, head["kind"]) != (_GROUP_OF_CONFIGURATION, "Configuration"):
        text = f"its entry {CONFIGURATION_KEY} is no Configuration of {_GROUP_OF_CONFIGURATION}"
        return Configuration(_NEWEST, False, False, fault=text)
    if version not in _VERSIONS:
        return None
    by_creation = value_at(section, ("waitForPodsReady", "requeuingStrategy", "timestamp")) == "Creation"
    return replace(_configuration(section, version), by_creation=by_creation)


def _first_document(text: str) -> str:
    """Return the first of several YAML documents; comments before the first marker are none."""
    before, *documents = _MARKER.split(text)
    lines = (line.lstrip() for line in before.split("\n"))
    return documents[0] if documents and all(not line or line.startswith("#") for line in lines) else before


def fair_sharing_lines(version: str) -> str:
    """Return the line that switches fair sharing on in a configuration of this version."""
    if version == "v1beta1":
        return "fairSharing: {enable: true}"
    return f"fairSharing: {{preemptionStrategies: [{_FINAL}, {_INITIAL}]}}"


ADMISSION_LINES = "admissionFairSharing: {usageHalfLifeTime: 168h, usageSamplingInterval: 5m}"
"""The line that switches admission fair sharing on in a configuration of any version."""


def _configuration(document: Mapping[str, Any], version: str) -> Configuration:
    fair, fault = _fair_sharing(version, document.get("fairSharing"))
    admission, gates = document.get("admissionFairSharing"), document.get("featureGates")
    if admission is None:
        return Configuration(version, fair, False, False, fault)
    if not isinstance(admission, Mapping):
        return Configuration(version, False, False, fault="admissionFairSharing is no section")
    seconds = {}
    for key, default, example in (("usageHalfLifeTime", "0", "168h"), ("usageSamplingInterval", "5m", "5m")):
        stated = admission.get(key)
        length_s = duration_s(default if stated is None else str(stated).removeprefix("+"))
        if length_s is None or not isinstance(stated, str | None):
            text = f"admissionFairSharing.{key} is {str(stated)[:40]!r}, not a duration such as {example}"
            return Configuration(version, False, False, fault=text)
        seconds[key] = length_s
    half_life_s, sampling_s = seconds.values()
    switched_off = isinstance(gates, Mapping) and gates.get("AdmissionFairSharing") is False
    no_half_life = half_life_s < _LEAST_S
    weights = admission.get("resourceWeights") or {}
    if not isinstance(weights, Mapping) or not all(_is_number(weight) for weight in weights.values()):
        text = "admissionFairSharing.resourceWeights are no numbers from 0"
        return Configuration(version, False, False, fault=text)
    penalty = 0.0 if no_half_life else 1 - 0.5 ** (sampling_s / half_life_s)
    return Configuration(
        version, fair, not switched_off, no_half_life, fault, resource_weights=weights, penalty=penalty,
        sampling_s=sampling_s,
    )  # fmt: skip


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < inf


def _fair_sharing(version: str, section: object) -> tuple[bool, str]:
    """Return True if Kueue reads weights, and the reason why the manager does not start with the section, else ""."""
    older = version == "v1beta1"
    if section is None:
        return False, ""
    if not isinstance(section, Mapping):
        return False, "fairSharing is no section"
    known = {"preemptionStrategies", "enable"} if older else {"preemptionStrategies"}
    unknown = sorted(str(key) for key in section if key not in known)
    if unknown:
        return False, f"fairSharing.{unknown[0]} is unknown in {version}"
    enable = section.get("enable")
    if older and enable is not True:
        return False, "" if enable in (None, False) else "fairSharing.enable is neither true nor false"
    strategies = section.get("preemptionStrategies")
    if not strategies:
        return older, "" if older else "fairSharing.preemptionStrategies is required"
    if strategies not in _STRATEGIES:
        return False, f"fairSharing.preemptionStrategies are {strategies}"
    return True, ""


QUEUE_PREFIX, COHORT_PREFIX = "kueue", "kueue-cohort"
LEAST = 1e-6
"""The smallest weight that Kueue distinguishes from zero."""
UNSET = 1.0
"""The weight that Kueue uses if none is set."""
REPLACES = "kueue.x-k8s.io/workload-slice-replacement-for"
"""The annotation of an elastic job's new Workload with the namespace/name of the Workload that it will replace."""
_AFS = "UsageBasedAdmissionFairSharing"


class KueueAdapter(Adapter):
    """Reads Kueue's objects, and writes weights to Cohorts, ClusterQueues and LocalQueues."""

    name = "kueue"
    prefixes = (QUEUE_PREFIX, COHORT_PREFIX)
    settings = KueueTarget
    reasons = REASONS
    stop = DeactivateWorkload()

    def reads(self, policy: Policy) -> tuple[ObjectQuery, ...]:
        namespace, _, name = KueueTarget.of(policy).config.partition("/")
        return (
            ObjectQuery(CLUSTER_QUEUES, required=True),
            ObjectQuery(COHORTS),
            ObjectQuery(LOCAL_QUEUES),
            ObjectQuery(WORKLOADS),
            ObjectQuery(FLAVORS),
            ObjectQuery((CONFIG_MAP,), namespace=namespace, name=name),
        )

    def observe(self, policy: Policy, seen: Seen, pods: Sequence[Pod] = (), parts: MigParts = NO_NODES) -> Observation:
        queues = {obj["metadata"]["name"]: obj for obj in _objects(seen, CLUSTER_QUEUES)}
        cohorts = {obj["metadata"]["name"]: obj for obj in _objects(seen, COHORTS)}
        locals_ = {_ref(obj): obj for obj in _objects(seen, LOCAL_QUEUES)}
        workloads = _objects(seen, WORKLOADS)
        owner = owners(policy, QUEUE_PREFIX, COHORT_PREFIX)
        weighted_refs = _weighted_refs(owner)
        weighted_owner = {ref: queue for ref, queue in owner.items() if ref in weighted_refs}
        found = match([*cohorts.values(), *queues.values(), *locals_.values()], weighted_owner, _ref, "Kueue queue")
        configuration = read_configuration(seen.get(CONFIG_MAP, ()))
        pools = _Pools(queues, cohorts, _objects(seen, FLAVORS), parts)
        slices_of = pools.slices
        by_creation = configuration is not None and configuration.by_creation
        alike = _counted_alike(read_each(workloads, lambda obj: tuple(_counts(obj, slices_of, parts)))[0])
        live, unreadable = read_each(
            workloads, lambda obj: _live(obj, slices_of, parts, alike, by_creation=by_creation)
        )
        nodes = pools.quotas(live if any(kind in seen for kind in WORKLOADS) else None)
        quotas, pool_models = QuotaTree(nodes), pools.models(policy)
        lines = _Lines(locals_, queues, configuration, live)
        gangs, stopped, left_out = _gangs(owner, live, locals_, queues, pools, pods, lines)

        demand_of = standings_of(policy, gangs)

        def read(name: str, obj: Object) -> tuple[TargetQueue, Standing] | Issue:
            weight = value_at(obj, ("spec", "fairSharing", "weight"))
            number = None if weight is None else quantity(weight)
            if weight is not None and number is None:
                return Issue(obj["metadata"]["name"], f"spec.fairSharing.weight is {weight!r}")
            kind = _kind_of(obj)
            static = _counts_history(obj, kind, queues, configuration)
            queue = target_queue(obj, kind, number, static=static, unset=UNSET)
            reserved = fsum(_reservations(obj, slices_of).values())
            demand = demand_of.get(name, Standing(reserved, reserved))
            own = pools.names(obj)
            most = fsum(map(quotas.maximum, own)) if own else inf
            return queue, Standing(
                demand.requested,
                demand.allocated,
                UNSET if number is None else number,
                queue.direction,
                most=UNLIMITED if most == inf else most,
            )

        known = read_queues(found, read)
        weighted = {name: found.found[name] for name in known.queues}
        conditions = (
            _effective(policy, configuration, weighted, queues),
            _in_sync(policy, owner, weighted, nodes, quotas, pools, stopped, pool_models),
            *_by_model(policy, pool_models),
        )
        return replace(
            known,
            conditions=conditions,
            gangs=gangs,
            quotas=nodes,
            capacity=_capacity(quotas, [pools.names(obj) for obj in weighted.values()]),
            unreadable=tuple(dict.fromkeys((*unreadable, *left_out))),
            pools={name: tuple(pools.names(obj)) for name, obj in weighted.items()},
            pool_models=pool_models,
        )

    def express(
        self, _policy: Policy, weights: Sequence[Weight], observation: Observation, _gpus: float
    ) -> Mapping[str, Value]:
        """Return the weights with six decimals, and zero only for a weight of zero; a LocalQueue gets at least `LEAST`.

        A LocalQueue under AFS gets the configured weight."""
        values: dict[str, Value] = {}
        for weight in weights:
            queue = observation.queues.get(weight.queue)
            if queue is None:
                continue
            wanted = weight.configured if queue.static else weight.value
            local = queue.kind.kind == "LocalQueue"
            values[weight.queue] = 0.0 if wanted == 0 and not local else max(LEAST, round(wanted, 6))
        return values

    def spec(self, _queue: TargetQueue, value: Value) -> Object:
        return {"fairSharing": {"weight": fixed_point(float(value))}}


def _objects(seen: Seen, kinds: Sequence[Kind]) -> Sequence[Object]:
    return next((seen[kind] for kind in kinds if kind in seen), ())


def _kind_of(obj: Object) -> Kind:
    return next(kind for kind in KINDS if (kind.api_version, kind.kind) == (obj["apiVersion"], obj["kind"]))


def _ref(obj: Object) -> str:
    metadata = obj["metadata"]
    if obj["kind"] == "Cohort":
        return f"{COHORT_PREFIX}:{metadata['name']}"
    name = f"{metadata['namespace']}/{metadata['name']}" if obj["kind"] == "LocalQueue" else metadata["name"]
    return f"{QUEUE_PREFIX}:{name}"


def _full_name(workload: Object) -> str:
    return f"{workload['metadata'].get('namespace', '')}/{workload['metadata']['name']}"


def _weighted_refs(owner: Mapping[str, QueuePolicy]) -> set[str]:
    """Return the refs of each queue at its highest level: Cohort, else ClusterQueue, else LocalQueue."""
    best: dict[str, int] = {}
    for ref, queue in owner.items():
        best[queue.name] = min(best.get(queue.name, 3), _level(ref))
    return {ref for ref, queue in owner.items() if _level(ref) == best[queue.name]}


def _level(ref: str) -> int:
    return 0 if ref.startswith(f"{COHORT_PREFIX}:") else 2 if "/" in ref else 1


def _enables_afs(cluster_queue: Object | None) -> bool:
    return bool(value_at(cluster_queue or {}, ("spec", "admissionScope", "admissionMode")) == _AFS)


def _counts_history(obj: Object, kind: Kind, queues: Mapping[str, Object], configuration: Configuration | None) -> bool:
    """Return True if the object is a LocalQueue whose usage Kueue counts.

    Only the setting of the ClusterQueue decides if Kueue's configuration is unknown, or Kueue runs with an earlier one
    because it does not start with this one."""
    enabled = kind.kind == "LocalQueue" and _enables_afs(queues.get(obj["spec"].get("clusterQueue", "")))
    return enabled and (configuration is None or bool(configuration.fault) or configuration.admission)


def _cohort(obj: Object) -> str:
    """Return the name of the Cohort above a ClusterQueue or Cohort, "" if there is none."""
    spec = obj.get("spec") or {}
    names = ("parentName", "parent") if obj["kind"] == "Cohort" else ("cohortName", "cohort")
    return str(next((spec[name] for name in names if spec.get(name)), ""))


def _title(obj: Object) -> str:
    namespace = obj["metadata"].get("namespace")
    return f"{obj['kind']} {namespace + '/' if namespace else ''}{obj['metadata']['name']}"


SlicesOf = Callable[[str], MigSlices]
"""Returns the compute slices of the GPUs of a flavor."""


def _pool(title: str, flavor: str, resource: str) -> str:
    """Return the name of a queue's quota of one resource of one flavor."""
    return f"{title} ({flavor})" if resource == GPU else f"{title} ({flavor}, {resource})"


def _capacity(quotas: QuotaTree, pools: Sequence[Sequence[str]]) -> float | None:
    """Return the GPUs in the trees of all these pools; None if a queue has none."""
    return total_quota(quotas, chain.from_iterable(pools)) if all(pools) else None


@dataclass(frozen=True, slots=True)
class _Live:
    """An unfinished Workload.

    obj: without the admission if Kueue is evicting it: the quota is free as soon as its pods have ended.
    evicted: whether Kueue is evicting it.
    cluster_queue: the name of the ClusterQueue that admitted it; "" if none did.
    admitted: the GPUs for which it is admitted.
    uses: these GPUs by flavor and resource; both are "" if the admission names no GPU.
    replaces: namespace/name of the Workload that it claims to replace; "" for none.
    owners: its namespace and the uids of its owners.
    pods: the GPUs of one pod of each pod set (`_gpus_of_pods`).
    since_ms: the time by which Kueue orders Workloads of one priority.
    order: its place among the Workloads that wait in one queue.
    not_queued: why Kueue does not consider it for admission, although its queue admits; "" if it does."""

    obj: Object
    evicted: bool
    cluster_queue: str
    admitted: float
    uses: Mapping[tuple[str, str], float]
    replaces: str
    owners: tuple[str, frozenset[str]]
    pods: Mapping[str | None, float]
    since_ms: int | None
    order: tuple[int, int, str]
    not_queued: str


def _live(
    obj: Object, slices_of: SlicesOf, parts: MigParts, alike: Mapping[_Request, float], *, by_creation: bool
) -> _Live | None:
    if _finished(obj):
        return None
    metadata, status = obj["metadata"], obj.get("status") or {}
    evicted = condition_of(obj, "Evicted").get("status") == "True" and status.get("admission") is not None
    if evicted:
        obj = {**obj, "status": {key: value for key, value in status.items() if key != "admission"}}
    pods = _gpus_of_pods(obj, slices_of, parts, alike)
    uses = _admitted(obj, pods, slices_of)
    since_ms = _since_ms(obj, by_creation=by_creation)
    return _Live(
        obj,
        evicted,
        str(value_at(obj, ("status", "admission", "clusterQueue")) or ""),
        fsum(uses.values()),
        uses,
        str(value_at(metadata, ("annotations", REPLACES)) or ""),
        (metadata.get("namespace", ""), frozenset(each["uid"] for each in metadata.get("ownerReferences") or ())),
        pods,
        since_ms,
        (-_priority(obj), since_ms or 0, metadata.get("uid", "")),  # baseCompareFunc in pkg/cache/queue
        "Kueue is evicting it" if evicted else _not_queued(obj),
    )


_NOT_QUEUED = frozenset({"OnHold", "Misconfigured"})
_NEVER_FITS = frozenset({"NoMatchingFlavor", "ExceedsMaxQuota"})
"""Reasons for which Kueue admits a Workload only after it, its queue or a flavor has changed. One that never fits stays
in its queue all the same: in a StrictFIFO queue nothing behind it is admitted."""
GATED_BY = "kueue.x-k8s.io/admission-gated-by"
"""The annotation that keeps a Workload from being considered."""


def _priority(workload: Object) -> int:
    return int(value_at(workload, ("spec", "priority")) or 0)


def _since_ms(workload: Object, *, by_creation: bool) -> int | None:
    """Return the time by which Kueue orders a Workload: that of its creation, or of its eviction by an admission check
    or because its pods did not become ready in time. by_creation: as in `Configuration`.

    Source: Kueue pkg/workload/workload.go, GetQueueOrderTimestamp."""
    evicted = condition_of(workload, "Evicted")
    behind = {"AdmissionCheck"} if by_creation else {"AdmissionCheck", "PodsReadyTimeout"}
    if evicted.get("status") == "True" and evicted.get("reason") in behind:
        return millis(evicted.get("lastTransitionTime"))
    return millis(workload["metadata"].get("creationTimestamp"))


def _cannot_admit(reserved: Mapping[str, Any]) -> str:
    return f"Kueue cannot admit it ({reserved['reason']}: {reserved.get('message')})"


def _not_queued(workload: Object) -> str:
    """Return why Kueue does not consider a Workload, although its queue admits; "" if it does.

    Source: Kueue pkg/workload, IsAdmissible; pkg/cache/queue, backoffWaitingTimeExpired."""
    if value_at(workload, ("metadata", "annotations", GATED_BY)):
        return f"its annotation {GATED_BY} keeps Kueue from admitting it"
    reserved = condition_of(workload, "QuotaReserved")
    if reserved.get("status") == "False" and reserved.get("reason") in _NOT_QUEUED:
        return _cannot_admit(reserved)
    if condition_of(workload, "WaitingForReplacementPods").get("status") == "True":
        return "Kueue waits for replacements of its pods (WaitingForReplacementPods)"
    until = value_at(workload, ("status", "requeueState", "requeueAt"))
    if until or condition_of(workload, "Requeued").get("status") == "False":
        return "Kueue has evicted it and has not queued it again yet" + (f": not before {until}" if until else "")
    return ""


@dataclass(frozen=True, slots=True)
class _FlavorQuota:
    """The quota of one GPU resource of one flavor, in GPUs. borrows, lends: UNLIMITED without a limit."""

    flavor: str
    resource: str
    nominal: float = 0.0
    borrows: float = UNLIMITED
    lends: float = UNLIMITED


def _gpu_quotas(obj: Object, slices_of: SlicesOf) -> Iterator[_FlavorQuota]:
    """Yield the quotas of GPUs of a ClusterQueue or Cohort, in the order in which Kueue tries the flavors."""
    for group in value_at(obj, ("spec", "resourceGroups")) or ():
        for flavor in group.get("flavors") or ():
            for resource in flavor.get("resources") or ():
                name, slices = str(resource.get("name")), slices_of(str(flavor.get("name")))
                if counts_gpus(name):
                    limits = (
                        UNLIMITED if resource.get(key) is None else gpus({name: resource[key]}, slices)
                        for key in ("borrowingLimit", "lendingLimit")
                    )
                    nominal = gpus({name: resource.get("nominalQuota")}, slices)
                    yield _FlavorQuota(str(flavor.get("name")), name, nominal, *limits)


class _Pools:
    """The quotas of GPUs, which Kueue divides by pools: one for each flavor and resource of a ClusterQueue or Cohort.

    selectors: the node labels of each flavor.
    of: the quotas of each ClusterQueue, in the order in which Kueue tries them."""

    def __init__(
        self,
        queues: Mapping[str, Object],
        cohorts: Mapping[str, Object],
        flavors: Iterable[Object],
        parts: MigParts,
    ) -> None:
        self._queues, self._cohorts, self._parts = queues, cohorts, parts
        self.selectors = {
            obj["metadata"]["name"]: tuple(sorted((value_at(obj, ("spec", "nodeLabels")) or {}).items()))
            for obj in flavors
        }
        self.of = {name: tuple(_gpu_quotas(obj, self.slices)) for name, obj in queues.items()}
        self._of_cohorts = {
            name: {(quota.flavor, quota.resource): quota for quota in _gpu_quotas(obj, self.slices)}
            for name, obj in cohorts.items()
        }
        of_queues = {(quota.flavor, quota.resource) for quota in chain.from_iterable(self.of.values())}
        self._keys = sorted(of_queues.union(*self._of_cohorts.values()))

    def slices(self, flavor: str) -> MigSlices:
        """Return the compute slices of the GPUs of a flavor, by the GPU model that its node labels state."""
        return self._parts.selected(dict(self.selectors.get(flavor, ())))

    def names(self, obj: Object) -> list[str]:
        """Return the names of a queue's pools (`_pool`). Every Cohort has all pools."""
        if obj["kind"] == "Cohort":
            return [_pool(_title(obj), *key) for key in self._keys]
        name = obj["metadata"]["name"] if obj["kind"] == "ClusterQueue" else obj["spec"].get("clusterQueue", "")
        return [_pool(f"ClusterQueue {name}", each.flavor, each.resource) for each in self.of.get(name, ())]

    def models(self, policy: Policy) -> dict[str, str]:
        """Return the GPU model of each pool; nothing without quotas by model."""
        if not policy.gpu_models:
            return {}
        of_keys = {
            key: model_of_labels(dict(self.selectors.get(key[0], ())), policy.gpu_models, key[0]) for key in self._keys
        }
        titles = map(_title, (*self._queues.values(), *self._cohorts.values()))
        return {_pool(title, *key): model for title in titles for key, model in of_keys.items()}

    def quotas(self, workloads: Sequence[_Live] | None) -> dict[str, Quota]:
        """Return the quota of each pool.

        workloads: None if they cannot be read; usage is then that of the ClusterQueues' statuses."""
        used: dict[tuple[str, str, str], list[float]] = {}
        for each in workloads or ():
            for (flavor, resource), amount in _known_uses(each, self.of.get(each.cluster_queue, ())).items():
                used.setdefault((each.cluster_queue, flavor, resource), []).append(amount)
        quotas: dict[str, Quota] = {}
        for name, obj in self._queues.items():
            reserved = _reservations(obj, self.slices) if workloads is None else {}
            for quota in self.of[name]:
                key = (quota.flavor, quota.resource)
                taken = reserved.get(key, 0.0) if workloads is None else fsum(used.get((name, *key), ()))
                quotas[_pool(_title(obj), *key)] = _quota(obj, quota, taken)
        return quotas | {
            _pool(_title(obj), *key): _quota(obj, self._of_cohorts[name].get(key) or _FlavorQuota(*key), 0.0)
            for name, obj in self._cohorts.items()
            for key in self._keys
        }


def _quota(obj: Object, own: _FlavorQuota, used: float) -> Quota:
    cohort = _cohort(obj)
    parent = _pool(f"Cohort {cohort}", own.flavor, own.resource) if cohort else ""
    return Quota(parent, own.nominal, used, own.borrows, own.lends)


def _known_uses(workload: _Live, quotas: Sequence[_FlavorQuota]) -> Mapping[tuple[str, str], float]:
    """Return what an admitted Workload uses by flavor and resource. An admission that names no GPU resource, because
    Kueue transforms it into another one, counts for the only GPU quota of the ClusterQueue, if it has just one."""
    unknown = workload.uses.get(("", ""), 0.0)
    known = {key: amount for key, amount in workload.uses.items() if key != ("", "")}
    if unknown and len(quotas) == 1:
        key = (quotas[0].flavor, quotas[0].resource)
        known[key] = known.get(key, 0.0) + unknown
    return known


def _reservations(obj: Object, slices_of: SlicesOf) -> Mapping[tuple[str, str], float]:
    """Return the reserved GPUs in a queue's status, by flavor and resource; empty for a Cohort."""
    return {
        (str(flavor.get("name")), str(resource["name"])): gpus(
            {resource["name"]: resource.get("total")}, slices_of(str(flavor.get("name")))
        )
        for flavor in value_at(obj, ("status", "flavorsReservation")) or ()
        for resource in flavor.get("resources") or ()
    }


def _finished(workload: Object) -> bool:
    return condition_of(workload, "Finished").get("status") == "True"


def _gangs(
    owner: Mapping[str, QueuePolicy],
    workloads: Sequence[_Live],
    locals_: Mapping[str, Object],
    queues: Mapping[str, Object],
    pools: _Pools,
    pods: Sequence[Pod],
    lines: _Lines,
) -> tuple[tuple[Gang, ...], tuple[str, ...], tuple[str, ...]]:
    """Return the Workloads that request GPUs and are not deactivated, sentences on stopped queues, and the Workloads
    that cannot be read.

    A Workload that waits in a stopped queue is left out; the sentence states how many GPUs wait there."""
    members = pods_by_gang(pods)
    live = {_full_name(each.obj): each for each in workloads}
    replaced_by = {
        _full_name(each.obj): previous for each in workloads if (previous := _replaced(each, live)) is not None
    }
    gone = {
        _full_name(previous.obj)
        for name, previous in replaced_by.items()
        if value_at(live[name].obj, ("status", "admission")) is not None
    }
    waiting_gpus: dict[str, float] = {}
    first = _first_in_line([each for each in workloads if _full_name(each.obj) not in gone], locals_, queues, lines)

    def read(obj: Object) -> Gang | None:
        key, spec = _full_name(obj), obj.get("spec") or {}
        queue, cluster_queue = _queue_of(owner, locals_, obj)
        if queue is None or spec.get("active") is False or key in gone:
            return None
        admitted = value_at(obj, ("status", "admission")) is not None
        gang = _gang(live[key], queue.name, replaced_by.get(key))
        if gang.requested <= 0:
            return None
        gang = _with_pools(gang, live[key], cluster_queue, pools.of.get(cluster_queue, ()), pools.selectors)
        halt = None if admitted else _halt(obj, locals_, queues.get(cluster_queue))
        if halt is not None:
            waiting_gpus[halt] = waiting_gpus.get(halt, 0.0) + gang.requested
            return None
        requested, allocated = gang.requested, gang.allocated
        gang = with_pods(gang, () if live[key].evicted else members.get(gang_key(obj), ()))
        if admitted:
            # An admitted Workload holds its GPUs even before its pods exist: Kueue gives them to no other Workload.
            minimum = min(gang.minimum, requested)
            return replace(gang, requested=requested, allocated=allocated, minimum=minimum)
        line, place = lines.of(live[key], cluster_queue)
        ahead = first.get(line)
        held_back, reserved = live[key].not_queued, condition_of(obj, "QuotaReserved")
        if ahead is not None and not held_back and _full_name(ahead.obj) != key:
            title = _title(queues[cluster_queue])
            held_back = f"{title} is a StrictFIFO queue, and Workload {_full_name(ahead.obj)} is before it"
        elif not held_back and reserved.get("status") == "False" and reserved.get("reason") in _NEVER_FITS:
            held_back = _cannot_admit(reserved)
        return replace(gang, held_back=held_back, line="/".join(line), place=place)

    gangs, unreadable = read_each((each.obj for each in workloads), read)
    stopped = (f"{halt}: {amount:g} GPUs that wait there are not counted" for halt, amount in waiting_gpus.items())
    return sorted_gangs(gangs), tuple(sorted(stopped)), unreadable


_Line = tuple[str, str]
"""A ClusterQueue; and one of its LocalQueues where usage decides between these first, and is unknown."""
_Place = tuple[float, int, int, str]
"""Where a Workload stands in its line: by the usage of its LocalQueue, if that counts, then as in `_Live.order`."""


class _Lines:
    """The lines in which Workloads wait. With admission fair sharing, the LocalQueue that used least in proportion to
    its weight is first, before priority and age.

    A LocalQueue's status has the usage of its last sampling. What Kueue has admitted since, and still runs, counts with
    the part of its requests that Kueue adds at once. Kueue also writes the status while it admits, without that part.

    Source: Kueue pkg/cache/queue, queueOrderingFunc; pkg/util/admissionfairsharing, CalculateUsage."""

    def __init__(
        self,
        locals_: Mapping[str, Object],
        queues: Mapping[str, Object],
        configuration: Configuration | None,
        workloads: Iterable[_Live],
    ) -> None:
        self._locals, self._queues = locals_, queues
        self._usage: dict[str, float | None] = {}
        admitted: dict[str, list[Object]] = {}
        for each in workloads:
            if each.cluster_queue:
                admitted.setdefault(_local(each.obj), []).append(each.obj)
        for ref, obj in locals_.items():
            if _counts_history(obj, _kind_of(obj), queues, configuration):
                self._usage[ref] = _usage_over_weight(obj, configuration, admitted.get(ref, ()))

    def of(self, workload: _Live, cluster_queue: str) -> tuple[_Line, _Place]:
        """Return the line of a Workload that waits for this ClusterQueue, and its place."""
        ref = _local(workload.obj)
        usage = self._usage.get(ref, 0.0)
        if usage is None:
            return (cluster_queue, ref), (0.0, *workload.order)
        return (cluster_queue, ""), (usage, *workload.order)


_ADMITTING_S, _ADMITTING_PARTS = 5.0, 20
"""How much older than a LocalQueue's status an admission may be that the status has without its penalty: at most so
many seconds, and such a part of a sampling."""


def _usage_over_weight(local: Object, configuration: Configuration | None, admitted: Iterable[Object]) -> float | None:
    """Return the usage by which Kueue orders the LocalQueues of a ClusterQueue; None if it is unknown. admitted: its
    Workloads with an admission."""
    sampled = value_at(local, ("status", "fairSharing", "admissionFairSharingStatus"))
    if configuration is None or configuration.fault or not isinstance(sampled, Mapping):
        return None
    since_ms = (millis(sampled.get("lastUpdate")) or 0) - MS_PER_SECOND * min(
        _ADMITTING_S, configuration.sampling_s / _ADMITTING_PARTS
    )
    parts = [_weighed(sampled.get("consumedResources"), configuration)]
    for workload in admitted:
        admission = condition_of(workload, "Admitted")
        at_ms = millis(admission.get("lastTransitionTime")) if admission.get("status") == "True" else None
        if at_ms is None or at_ms >= since_ms:
            parts += [
                configuration.penalty * _weighed(each.get("resourceUsage"), configuration)
                for each in value_at(workload, ("status", "admission", "podSetAssignments")) or ()
            ]
    stated = value_at(local, ("spec", "fairSharing", "weight"))
    weight = UNSET if stated is None else quantity(stated)
    if weight is None:
        return None
    return fsum(parts) / weight if weight > 0 else inf


def _weighed(resources: object, configuration: Configuration) -> float:
    """Return amounts of resources as one sum, each in its own unit, such as bytes."""
    amounts = resources if isinstance(resources, Mapping) else {}
    weights = configuration.resource_weights
    return fsum(weights.get(str(name), 1.0) * (quantity(amount) or 0.0) for name, amount in amounts.items())


def _first_in_line(
    workloads: Iterable[_Live], locals_: Mapping[str, Object], queues: Mapping[str, Object], lines: _Lines
) -> Mapping[_Line, _Live]:
    """Return the Workload that each StrictFIFO queue admits next, before any other, also if that needs no GPU."""
    first: dict[_Line, tuple[_Place, _Live]] = {}
    for each in workloads:
        cluster_queue = str(value_at(locals_.get(_local(each.obj), {}), ("spec", "clusterQueue")) or "")
        queue = queues.get(cluster_queue)
        if (
            value_at(queue or {}, ("spec", "queueingStrategy")) == "StrictFIFO"
            and value_at(each.obj, ("status", "admission")) is None
            and value_at(each.obj, ("spec", "active")) is not False
            and not each.not_queued
            and _halt(each.obj, locals_, queue) is None
        ):
            line, place = lines.of(each, cluster_queue)
            if line not in first or place < first[line][0]:
                first[line] = place, each
    return {line: each for line, (_, each) in first.items()}


def _replaced(workload: _Live, live: Mapping[str, _Live]) -> _Live | None:
    """Return the Workload that an elastic job's new Workload replaces; None if it replaces none.

    Users write the annotation that names it, so it counts only between Workloads of one owner in one namespace."""
    previous = live.get(workload.replaces)
    return (
        previous if previous is not None and previous is not workload and previous.owners == workload.owners else None
    )


def _with_pools(
    gang: Gang,
    workload: _Live,
    cluster_queue: str,
    quotas: Sequence[_FlavorQuota],
    selectors: Mapping[str, tuple[tuple[str, str], ...]],
) -> Gang:
    """Return the gang with the quotas that it uses, or of which one must admit it."""
    title = f"ClusterQueue {cluster_queue}"
    if workload.cluster_queue:
        uses = tuple(
            (_pool(title, *key), amount) for key, amount in sorted(_known_uses(workload, quotas).items()) if amount > 0
        )
        return replace(gang, pool=uses[0][0] if uses else "", uses=uses if len(uses) > 1 else ())
    choices = tuple(
        PoolChoice(_pool(title, quota.flavor, quota.resource), selectors.get(quota.flavor, ()))
        for quota in quotas
        if _serves(workload, quota.resource, dict(selectors.get(quota.flavor, ())))
    )
    return replace(gang, pool=choices[0].pool if choices else "", choices=choices)


def _serves(workload: _Live, resource: str, labels: Mapping[str, str]) -> bool:
    """Return whether a flavor can serve all pod sets with GPUs: they request this resource, and no node selector of
    theirs names another value of the flavor's labels.

    Source: Kueue pkg/scheduler/flavorassigner, checkFlavorForPodSets."""
    for pod_set in value_at(workload.obj, ("spec", "podSets")) or ():
        spec = value_at(pod_set, ("template", "spec")) or {}
        if workload.pods.get(pod_set.get("name"), 0.0) <= 0:
            continue
        claims = spec.get("resourceClaims")  # counted for a resource of Kueue's configuration
        if not claims and not any(
            resource in (value_at(container, ("resources", kind)) or {})
            for containers in ("containers", "initContainers")
            for container in spec.get(containers) or ()
            for kind in ("limits", "requests")
        ):
            return False
        selector = spec.get("nodeSelector") or {}
        if any(labels.get(key, value) != value for key, value in selector.items()):
            return False
    return True


def _gang(workload: _Live, queue: str, previous: _Live | None) -> Gang:
    """Read one Workload. previous: the Workload that it will replace; None for none.

    A partially admitted Workload requests only the GPUs for which it is admitted. The next Workload of an elastic job
    requests the GPUs that it adds to the Workload that it replaces."""
    obj = workload.obj
    metadata, spec = obj["metadata"], obj.get("spec") or {}
    sets = spec.get("podSets") or ()
    done = _done(obj)
    requested = fsum(_pod_set(each, _count(each), done, workload.pods) for each in sets)
    least = fsum(_pod_set(each, _count(each, "minCount"), done, workload.pods) for each in sets)
    allocated = workload.admitted
    if value_at(obj, ("status", "admission", "podSetAssignments")):
        requested = allocated
    elif value_at(obj, ("status", "admission")) is None:
        replaced = previous.admitted if previous is not None else 0.0
        requested, least = max(0.0, requested - replaced), max(0.0, least - replaced)
    admission = condition_of(obj, "Admitted")
    owners_ = [each for each in metadata.get("ownerReferences") or () if each.get("kind") != "Pod"]
    return Gang(
        queue,
        _kind_of(obj),
        metadata.get("namespace", ""),
        metadata["name"],
        metadata.get("uid", ""),
        requested,
        allocated,
        min(least, requested) or requested,
        _priority(obj),
        True,
        workload.since_ms,
        millis(admission.get("lastTransitionTime")) if admission.get("status") == "True" else None,
        millis((metadata.get("annotations") or {}).get(CHECKPOINT)),
        job=next((each["name"] for each in owners_ if each.get("controller")), ""),
        topology=next((level for each in sets if (level := value_at(each, ("topologyRequest", "required")))), ""),
    )


PodCounts = Mapping[str | None, int]
"""Numbers of pods by the name of their pod set."""


def _done(workload: Object) -> PodCounts:
    """Return the numbers of completed pods, whose quota Kueue has given to other Workloads."""
    done = value_at(workload, ("status", "reclaimablePods")) or ()
    return {each.get("name"): int(each.get("count") or 0) for each in done}


def _count(pod_set: Mapping[str, Any], which: str = "count") -> int:
    return int(next((pod_set[key] for key in (which, "count") if pod_set.get(key) is not None), 1))


def _pod_set(pod_set: Mapping[str, Any], count: int, done: PodCounts, pods: Mapping[str | None, float]) -> float:
    """Return the GPUs of `count` pods of a pod set, at most of the pods that are not done. pods: as in `_Live`."""
    left = max(0, _count(pod_set) - done.get(pod_set.get("name"), 0))
    return min(count, left) * pods[pod_set.get("name")]


_Request = tuple[str, str]
"""The namespace of a pod set, and what its pods request and claim."""


def _request(workload: Object, spec: Mapping[str, Any]) -> _Request:
    containers = [each.get("resources") for key in ("containers", "initContainers") for each in spec.get(key) or ()]
    asked = json.dumps([spec.get("resourceClaims"), containers], sort_keys=True)
    return workload["metadata"].get("namespace", ""), asked


def _claiming(
    workload: Object, slices_of: SlicesOf, parts: MigParts
) -> Iterator[tuple[Mapping[str, Any], Mapping[str, Any], MigSlices]]:
    """Yield each pod set with its pods' spec, and the compute slices of the GPUs of its flavor."""
    flavors = {
        each.get("name"): next((str(of) for name, of in (each.get("flavors") or {}).items() if counts_gpus(name)), "")
        for each in value_at(workload, ("status", "admission", "podSetAssignments")) or ()
    }
    for each in value_at(workload, ("spec", "podSets")) or ():
        spec = value_at(each, ("template", "spec")) or {}
        flavor = flavors.get(each.get("name"), "")
        yield each, spec, slices_of(flavor) if flavor else parts.selected(spec.get("nodeSelector") or {})


def _counts(workload: Object, slices_of: SlicesOf, parts: MigParts) -> Iterator[tuple[_Request, float]]:
    """Yield what Kueue has counted for one pod of each pod set with claims."""
    for pod_set, spec, slices in _claiming(workload, slices_of, parts):
        if spec.get("resourceClaims"):
            counted = _counted_gpus(workload, pod_set, slices)
            if counted is not None:
                yield _request(workload, spec), counted


def _counted_alike(counts: Iterable[Sequence[tuple[_Request, float]]]) -> Mapping[_Request, float]:
    """Return the GPUs that Kueue counts for one pod with a request, where it counts the same for all such pods."""
    found: dict[_Request, set[float]] = {}
    for request, counted in chain.from_iterable(counts):
        found.setdefault(request, set()).add(counted)
    return {request: min(counted) for request, counted in found.items() if len(counted) == 1}


def _gpus_of_pods(
    workload: Object, slices_of: SlicesOf, parts: MigParts, alike: Mapping[_Request, float]
) -> Mapping[str | None, float]:
    """Return the GPUs of one pod of each pod set, by its name: those that its containers request, or more if Kueue
    counts more for the devices that the pods claim.

    Kueue counts them by its configuration's `deviceClassMappings`. The Workload's status has them from when Kueue first
    considers it. Of equal Workloads it considers one at a time, so until then those of an equal one count.

    alike: as `_counted_alike` returns it.

    Source: Kueue keps/2941-DRA; pkg/workload/workload.go, PropagateResourceRequests."""
    pods: dict[str | None, float] = {}
    for pod_set, spec, slices in _claiming(workload, slices_of, parts):
        counted = _counted_gpus(workload, pod_set, slices) if spec.get("resourceClaims") else 0.0
        if counted is None:
            counted = alike.get(_request(workload, spec), 0.0)
        pods[pod_set.get("name")] = max(gpus(requested_resources(spec), slices), counted)
    return pods


def _counted_gpus(workload: Object, pod_set: Mapping[str, Any], slices: MigSlices) -> float | None:
    """Return the GPUs that Kueue counts for one pod of a pod set: those of its admission, else of its request; None
    until it has counted."""
    name = pod_set.get("name")
    for each in value_at(workload, ("status", "admission", "podSetAssignments")) or ():
        if each.get("name") == name:
            count = _count(pod_set) if each.get("count") is None else _count(each)
            return gpus(each.get("resourceUsage"), slices) / max(1, count)
    for each in value_at(workload, ("status", "resourceRequests")) or ():
        if each.get("name") == name:
            left = _count(pod_set) - _done(workload).get(name, 0)
            return gpus(each.get("resources"), slices) / max(1, left)
    return None


def _admitted(
    workload: Object, pod_gpus: Mapping[str | None, float], slices_of: SlicesOf
) -> Mapping[tuple[str, str], float]:
    """Return the GPUs for which a Workload is admitted, without those of completed pods, by flavor and resource; both
    are "" where the admission names no GPU resource.

    For each pod set these are the admitted number of pods times the GPUs of one pod. The amounts in the admission
    itself count other resources if Kueue transforms GPUs into them; they only divide the GPUs among several flavors.

    pod_gpus: as `_gpus_of_pods` returns them."""
    done = _done(workload)
    sets = {each.get("name"): each for each in value_at(workload, ("spec", "podSets")) or ()}
    held: dict[tuple[str, str], float] = {}
    for assignment in value_at(workload, ("status", "admission", "podSetAssignments")) or ():
        pod_set = sets.get(assignment.get("name"), {})
        pods = _count(assignment) if assignment.get("count") is not None else _count(pod_set)
        left = max(0, pods - done.get(assignment.get("name"), 0))
        amount = left * pod_gpus.get(assignment.get("name"), 0.0)
        usage = assignment.get("resourceUsage") or {}
        flavors = {name: str(flavor) for name, flavor in (assignment.get("flavors") or {}).items() if counts_gpus(name)}
        parts = {name: gpus({name: usage.get(name)}, slices_of(flavor)) for name, flavor in flavors.items()}
        whole = fsum(parts.values())
        for name, flavor in flavors.items():
            part = parts[name] / whole if whole > 0 else 1 / len(flavors)
            held[flavor, name] = held.get((flavor, name), 0.0) + amount * part
        if not flavors and amount:
            held["", ""] = held.get(("", ""), 0.0) + amount
    return held


def _queue_of(
    owner: Mapping[str, QueuePolicy], locals_: Mapping[str, Object], obj: Object
) -> tuple[QueuePolicy | None, str]:
    """Return the policy's queue and the ClusterQueue of a Workload.

    The Workload's LocalQueue identifies the policy's queue, otherwise its ClusterQueue does."""
    local = _local(obj)
    cluster = value_at(obj, ("status", "admission", "clusterQueue")) or value_at(
        locals_.get(local, {}), ("spec", "clusterQueue")
    )
    return owner.get(local) or owner.get(f"{QUEUE_PREFIX}:{cluster}"), str(cluster or "")


def _local(workload: Object) -> str:
    """Return the ref of a Workload's LocalQueue."""
    namespace = workload["metadata"].get("namespace", "")
    return f"{QUEUE_PREFIX}:{namespace}/{value_at(workload, ('spec', 'queueName')) or ''}"


def _halt(workload: Object, locals_: Mapping[str, Object], cluster_queue: Object | None) -> str | None:
    """Return why the Workload's LocalQueue or ClusterQueue admits nothing, whatever the quota; None if they admit."""
    for obj in (locals_.get(_local(workload)), cluster_queue):
        if obj is None:
            continue
        policy = value_at(obj, ("spec", "stopPolicy")) or "None"
        if policy != "None":
            return f"{_title(obj)} admits nothing (stopPolicy {policy})"
        active = condition_of(obj, "Active")
        if active.get("status") == "False":
            return f"{_title(obj)} admits nothing ({active.get('reason')}: {active.get('message')})"
    return None


def _in_sync(
    policy: Policy,
    owner: Mapping[str, QueuePolicy],
    weighted: Mapping[str, Object],
    nodes: Mapping[str, Quota],
    quotas: QuotaTree,
    pools: _Pools,
    stopped: Sequence[str],
    pool_models: Mapping[str, str],
) -> Condition:
    """Return the condition `InSync`: whether quotas, limits and Cohorts of Kueue match the policy. Quotas of several
    flavors add up to the policy's; with quotas by GPU model, those of the flavors of one model do.

    weighted: the object with the weight of each queue of the policy. LocalQueues have no quotas.
    nodes, quotas: all quotas, and their trees."""
    differing: list[str] = []
    unknown: list[str] = []
    cohorts_below: dict[str | None, dict[str, list[str]]] = {}
    for queue in sorted(policy.queues, key=lambda queue: queue.name):
        obj = weighted.get(queue.name)
        if obj is None or obj["kind"] == "LocalQueue":
            continue
        own_pools, cohort = [pool for pool in pools.names(obj) if pool in quotas], _cohort(obj)
        parent = owner.get(f"{COHORT_PREFIX}:{cohort}") if cohort else None
        pairs: list[tuple[str, object, object]] = []
        if own_pools:
            bounded = all(nodes[pool].borrows != UNLIMITED for pool in own_pools)
            pairs.append(("quota", fsum(map(quotas.subtree_quota, own_pools)), queue.deserved))
            limit = fsum(map(quotas.maximum, own_pools)) if not cohort or bounded else UNLIMITED
            if cohort or queue.limit != UNLIMITED:
                pairs.append(("limit", limit, queue.limit))
            for model, own in queue.gpu_models.items():
                of_model = [pool for pool in own_pools if pool_models[pool] == model]
                pairs.append((f"quota of {model}", fsum(map(quotas.subtree_quota, of_model)), own.deserved))
                if own.limit != UNLIMITED:
                    pairs.append((f"limit of {model}", fsum(map(quotas.maximum, of_model)), own.limit))
        else:
            unknown.append(_title(obj))
        if parent is not None or any(ref.startswith(f"{COHORT_PREFIX}:") for ref in _refs(policy, queue.parent)):
            pairs.append(("parent", parent.name if parent else cohort or None, queue.parent))
        elif cohort:
            cohorts_below.setdefault(queue.parent, {}).setdefault(cohort, []).append(queue.name)
        differing += differences(obj["metadata"]["name"], pairs)
    for cohorts in cohorts_below.values():
        if len(cohorts) > 1:
            text = "; ".join(f"{', '.join(names)} in Cohort {cohort}" for cohort, names in sorted(cohorts.items()))
            differing.append(f"siblings in the policy share no Cohort: {text}")
    text = f"{join_texts(unknown)} has no quota of {GPU}: the GPUs that it can get are unknown" if unknown else ""
    return in_sync(differing, stopped, what="quota, limit and parent", unknown=text)


def _by_model(policy: Policy, pool_models: Mapping[str, str]) -> tuple[Condition, ...]:
    """Return the condition `ByModel`, if the policy has quotas by GPU model: whether Kueue has them by its flavors."""
    if not policy.gpu_models:
        return ()
    missing = [model for model in policy.gpu_models if model not in pool_models.values()]
    weighed = sorted(
        {queue.name for queue in policy.queues for own in queue.gpu_models.values() if own.weight is not None}
    )
    if missing:
        text = f"no ResourceFlavor is of {join_texts(missing)}, by its nodeLabels or its name: {OWN_DECISIONS}"
        return (Condition("ByModel", "False", "NoFlavor", text),)
    if weighed:
        text = f"Kueue has one weight for all flavors, and {join_texts(weighed)} weights by model: {OWN_DECISIONS}"
        return (Condition("ByModel", "False", "OneWeight", text),)
    return (Condition("ByModel", "True", "ByFlavor", "Kueue admits and preempts by the quota of each flavor"),)


def _refs(policy: Policy, name: str | None) -> Sequence[str]:
    return next((queue.refs for queue in policy.queues if queue.name == name), ())


def _effective(
    policy: Policy,
    configuration: Configuration | None,
    weighted: Mapping[str, Object],
    queues: Mapping[str, Object],
) -> Condition:
    """Return the condition `Effective`: the worse of those of ClusterQueues and Cohorts, and of LocalQueues."""
    where = KueueTarget.of(policy).config
    shared = {name: obj for name, obj in weighted.items() if obj["kind"] != "LocalQueue"}
    locals_ = [obj for _, obj in sorted(weighted.items()) if obj["kind"] == "LocalQueue"]
    conditions = [_admission_effective(configuration, locals_, queues, where)] if locals_ else []
    if shared or not locals_:
        conditions.append(_shares_effective(configuration, queues.values(), where))
        alone = _without_cohort(policy, shared)
        if alone and conditions[-1].status != "False":
            conditions[-1] = Condition("Effective", "False", "NothingToShare", join_texts(alone))
    worst = min(conditions, key=lambda condition: ("False", "Unknown", "True").index(condition.status))
    messages = dict.fromkeys(each.message for each in conditions if each.status == worst.status)
    return replace(worst, message="; ".join(messages))


def _shares_effective(configuration: Configuration | None, queues: Iterable[Object], where: str) -> Condition:
    """Return the condition of ClusterQueues and Cohorts: True if every ClusterQueue's status has a weighted share.

    where: namespace/name of the ConfigMap with Kueue's configuration."""
    with_status = [obj for obj in queues if obj.get("status")]
    with_share = sum(value_at(obj, ("status", "fairSharing")) is not None for obj in with_status)
    advice = _remedy(where, fair_sharing_lines(configuration.version if configuration else "v1beta2"), configuration)
    if 0 < with_share < len(with_status):
        text = f"only {with_share} of {len(with_status)} ClusterQueues show a weighted share so far"
        return Condition("Effective", "Unknown", "SharesDisagree", text)
    if configuration is not None and configuration.fault:
        return _refused(configuration, where, fair_sharing_lines(configuration.version), runs=with_share > 0)
    if with_share:
        if configuration is not None and not configuration.fair:
            text = f"Kueue reads weights now, and ConfigMap {where} switches that off at its manager's next start"
            return Condition("Effective", "Unknown", "RestartPending", text, advice)
        text = "Kueue divides borrowed GPUs by the controller's weights"
        return Condition("Effective", "True", "FairSharing", text)
    if with_status and configuration is not None and configuration.fair:
        text = f"no ClusterQueue shows a weighted share, though ConfigMap {where} switches fair sharing on"
        return Condition("Effective", "False", "FairSharingOff", f"{text}: restart Kueue's manager", advice)
    if with_status or (configuration is not None and not configuration.fair):
        why = "no ClusterQueue shows a weighted share" if with_status else f"ConfigMap {where} does not switch it on"
        text = f"fair sharing is off in Kueue, which does not read weights ({why})"
        return Condition("Effective", "False", "FairSharingOff", text, advice)
    if configuration is None:
        text = f"Kueue's configuration cannot be read from ConfigMap {where}, and no ClusterQueue has a status"
        return Condition("Effective", "Unknown", "ConfigurationUnread", text)
    return Condition("Effective", "Unknown", "SharesUnseen", "no ClusterQueue has a status: does Kueue's manager run?")


def _refused(configuration: Configuration, where: str, lines: str, *, runs: bool) -> Condition:
    """Return the condition for a configuration with a fault. runs: Kueue shows shares or usage of an earlier start."""
    text = f"Kueue's manager does not start with ConfigMap {where}: {configuration.fault}"
    advice = _remedy(where, lines, configuration)
    return Condition("Effective", "Unknown" if runs else "False", "ConfigurationRefused", text, advice)


def _remedy(where: str, lines: str, configuration: Configuration | None) -> str:
    """Return the commands that change Kueue's configuration, with the lines to write."""
    namespace, _, name = where.partition("/")
    version = f" ({configuration.version})" if configuration is not None else ""
    return (
        f"kubectl -n {namespace} edit configmap {name}, and write in Kueue's Configuration{version}: `{lines}`; then"
        f" kubectl -n {namespace} rollout restart deployment/kueue-controller-manager"
    )


def _without_cohort(policy: Policy, shared: Mapping[str, Object]) -> list[str]:
    """Return a sentence for each object without a Cohort above it, which borrows from no other object.

    A Cohort that is the root of a tree is left out, unless the policy has siblings of its queue."""
    parents = {queue.name: queue.parent for queue in policy.queues}
    siblings: dict[str | None, int] = {}
    for name in shared:
        siblings[parents[name]] = siblings.get(parents[name], 0) + 1
    return [
        f"{_title(obj)} is in no cohort and shares with no other"
        for name, obj in sorted(shared.items())
        if not _cohort(obj) and (obj["kind"] != "Cohort" or siblings[parents[name]] > 1)
    ]


def _admission_effective(
    configuration: Configuration | None, locals_: Sequence[Object], queues: Mapping[str, Object], where: str
) -> Condition:
    """Return the condition of LocalQueues: True if Kueue orders a ClusterQueue's work by their usage over weight."""
    with_afs = [obj for obj in locals_ if _enables_afs(queues.get(obj["spec"].get("clusterQueue", "")))]
    faults = [
        f"{_title(obj)}: its ClusterQueue has no admissionScope, so Kueue does not read its weight"
        for obj in locals_
        if obj not in with_afs
    ]
    no_usage = [
        obj for obj in with_afs if value_at(obj, ("status", "fairSharing", "admissionFairSharingStatus")) is None
    ]
    remedy = ""
    if faults:
        remedy = "write in the spec of its ClusterQueue: `admissionScope: {admissionMode: " + _AFS + "}`"
    elif configuration is not None and configuration.fault:
        return _refused(configuration, where, ADMISSION_LINES, runs=len(no_usage) < len(with_afs))
    elif configuration is not None and (not configuration.admission or configuration.no_half_life):
        missing = "usageHalfLifeTime" if configuration.admission else "admissionFairSharing"
        faults = [f"ConfigMap {where} has no {missing}: Kueue counts no usage of LocalQueues"]
        remedy = _remedy(where, ADMISSION_LINES, configuration)
    if faults:
        return Condition("Effective", "False", "AdmissionFairSharingOff", join_texts(faults), remedy)
    if configuration is None:
        text = f"Kueue's configuration cannot be read from ConfigMap {where}: does it have admissionFairSharing?"
        return Condition("Effective", "Unknown", "ConfigurationUnread", text)
    if no_usage:
        text = f"Kueue shows no usage yet of {join_texts([_title(obj) for obj in no_usage])}: does its manager run?"
        return Condition("Effective", "Unknown", "UsageUnseen", text)
    text = "Kueue admits work in the order of each LocalQueue's usage over its weight"
    return Condition("Effective", "True", "AdmissionFairSharing", text)
