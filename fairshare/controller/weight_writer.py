"""Writes planned weights to the cluster, restores base weights, and takes over a field that another manager owns.

Writes are independent: a refused write, or one to a field of another manager, does not stop the others. If the API
server does not answer, the remaining writes are not tried. The number of writes in a cycle is limited. Writes on which
others depend have precedence, then the largest changes; the others wait for the next cycle. A lost lease stops all
further writes, because the new leader may already be writing.

The controller never forces a write. The API server rejects a write to a field of another manager until that manager
releases the field, or until `gputally fairshare adopt` transfers it. The transfer does not change the value, which the
first published weight then records as the base weight. A GitOps tool that still has the field in its manifests
overwrites it at its next sync, and `advice` returns what to change there."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from accountant.wire.policy_models import Policy
from fairshare.controller.cycle_report import Result, WriteOutcome
from fairshare.core.queues_and_weights import Condition, ConditionReason, Observation, TargetQueue
from fairshare.core.scheduler_queue_objects import CONTROLLER, has_ref, join_texts
from fairshare.targets.installed import adapters
from fairshare.targets.weight_plan import (
    FIELD_MANAGER,
    MOST_WRITES,
    Adapter,
    Apply,
    look_at,
    object_key,
    release,
    same,
    show,
)
from gputally.base.errors import ClusterError, ClusterRefused, ClusterUnavailable, Conflict, NotFound
from gputally.kubernetes.objects import (
    Cluster,
    Object,
    Objects,
    dotted_path,
    from_fields_v1,
    leaves,
    overlap,
    put,
    value_at,
)

NO_RIVALS: Mapping[str, str] = MappingProxyType({})
_NOT_FAILED: frozenset[Result] = frozenset({"applied", "would-apply", "deferred"})
_RESULTS: dict[type[ClusterError], Result] = {
    Conflict: "contested",
    ClusterRefused: "refused",
    NotFound: "gone",
    ClusterUnavailable: "unavailable",
}
_REASONS: dict[Result, str] = {
    "contested": "Contested",
    "refused": "Refused",
    "gone": "NotFound",
    "unavailable": "Unavailable",
}
"""Reasons of failed writes, in the condition `Available` and in the reasons of a degraded target."""


def write_weights(
    cluster: Objects,
    applies: Sequence[Apply],
    *,
    dry_run: bool,
    leading: Callable[[], bool] = lambda: True,
    most: int = MOST_WRITES,
) -> tuple[WriteOutcome, ...]:
    """Make the writes in the order of `applies`, and return their outcomes.

    dry_run: the API server checks the writes and changes nothing.
    leading: returns whether this replica still holds the Lease.
    most: the largest number of writes. Of more writes, the last by `Apply.order` are deferred, and of the same order
        those with the smallest changes."""
    chosen = set(sorted(range(len(applies)), key=lambda i: (applies[i].order, -applies[i].size, i))[:most])
    outcomes: list[WriteOutcome] = []
    unavailable = False
    for i, apply in enumerate(applies):
        if unavailable:
            outcomes.append(WriteOutcome(apply, "unavailable", "not tried: the API server does not answer"))
        elif i not in chosen:
            outcomes.append(WriteOutcome(apply, "deferred", f"more than {most} writes: the next cycle makes the rest"))
        elif not leading():
            outcomes.append(WriteOutcome(apply, "deferred", "no longer the leader"))
        else:
            outcomes.append(_write(cluster, apply, dry_run))
            unavailable = outcomes[-1].result == "unavailable"
    return tuple(outcomes)


def _write(cluster: Objects, apply: Apply, dry_run: bool) -> WriteOutcome:
    try:
        cluster.apply(apply.patch, field_manager=apply.field_manager, dry_run=dry_run)
    except ClusterError as error:
        result: Result = next((name for kind, name in _RESULTS.items() if isinstance(error, kind)), "refused")
        return WriteOutcome(apply, result, str(error))
    return WriteOutcome(apply, "would-apply" if dry_run else "applied")


def rival_controllers(observation: Observation, name: str) -> Mapping[str, str]:
    """Return the queues whose weight another controller wrote, each with that controller's name.

    name: this controller's NAMESPACE/LEASE; "" without a Lease, when nothing is known of others."""
    return {
        queue: found.controller
        for queue, found in sorted(observation.queues.items())
        if name and found.controller not in ("", name)
    }


def _contested_text(rivals: Mapping[str, str]) -> str:
    names = join_texts(sorted(set(rivals.values())))
    return (
        f"controller {names} writes the weights of {join_texts(list(rivals))}: end it there with `gputally fairshare"
        " release`, or take its weights over with `gputally fairshare adopt`"
    )


def available(outcomes: Sequence[WriteOutcome], rivals: Mapping[str, str] = NO_RIVALS) -> Condition:
    """Return the condition `Available`, which is True if the target accepted all writes.

    rivals: see `rival_controllers`."""
    if rivals:
        return Condition("Available", "False", _REASONS["contested"], _contested_text(rivals))
    failed = [outcome for outcome in outcomes if outcome.result not in _NOT_FAILED]
    if failed:
        first = failed[0].result
        text = join_texts([outcome.detail for outcome in failed])
        contested = [outcome.apply for outcome in failed if outcome.result == "contested"]
        advice = _release_advice(contested) if first == "contested" else ""
        return Condition("Available", "False", _REASONS[first], text + advice)
    return Condition("Available", "True", "Writable", "the target accepts the weights")


def _release_advice(contested: Sequence[Apply]) -> str:
    """Return how the owner of a field can release it."""
    defaulted = [apply for apply in contested if apply.default is not None and same(apply.previous, apply.default)]
    if len(defaulted) < len(contested):
        return (
            "; leave the weight out of that manager's manifest, or take it over with `gputally fairshare adopt`:"
            " a field has one owner"
        )
    return (
        f"; {show(defaulted[0].default)} is the default of the CRD. The API server records the creator of the object as"
        " its owner, even if the manifest has no weight. Take the field over with `gputally fairshare adopt`"
    )


FIELD_NOT_OURS = ConditionReason(
    "Effective",
    "False",
    "FieldNotOurs",
    "another field manager owns the weight's field",
    "leave the weight out of that manager's manifest, or `gputally fairshare adopt`",
)


def with_ownership_verdict(conditions: Sequence[Condition], outcomes: Sequence[WriteOutcome]) -> tuple[Condition, ...]:
    """Return the adapter's conditions, with `Effective` set to False if another manager owns a field, because the
    controller's weight then has no effect."""
    contested = sorted({outcome.apply.name for outcome in outcomes if outcome.result == "contested"})
    if not contested:
        return tuple(conditions)
    text = f"another manager owns the field on {join_texts(contested)}, so the controller's weight has no effect"
    return tuple(
        Condition("Effective", "False", "FieldNotOurs", text)
        if condition.type == "Effective" and condition.status != "False"
        else condition
        for condition in conditions
    )


def degraded_reasons(
    observation: Observation, outcomes: Sequence[WriteOutcome], rivals: Mapping[str, str] = NO_RIVALS
) -> Mapping[str, str]:
    """Return why a target is degraded, as messages by reason; empty if it works."""
    messages: dict[str, list[str]] = {_REASONS["contested"]: [_contested_text(rivals)]} if rivals else {}
    for condition in observation.conditions:
        if condition.type in ("Effective", "Readable") and condition.status == "False":
            messages.setdefault(condition.reason, []).append(condition.message)
    for outcome in outcomes:
        if outcome.result not in _NOT_FAILED:
            messages.setdefault(_REASONS[outcome.result], []).append(outcome.detail)
    return {reason: join_texts(texts) for reason, texts in sorted(messages.items())}


def release_weights(
    policy: Policy,
    cluster: Cluster,
    *,
    clusters: Mapping[str, Objects] | None = None,
    dry_run: bool = False,
    left_behind: bool = False,
    others: Sequence[Policy] = (),
    unread: Callable[[str, ClusterError], None] | None = None,
) -> tuple[WriteOutcome, ...]:
    """Restore the base weight of every changed object of the policy's targets.

    clusters: by adapter, the client for a target that is not in `cluster`.
    left_behind: restore only objects to which no queue of the policy refers any more.
    others: policies that publish to the same cluster, whose objects are not changed.
    unread: called with the name of each target that cannot be read, whose objects then stay as they are.

    Raises ClusterError if a target cannot be read and `unread` is not given."""
    planned: list[tuple[Objects, Sequence[Apply]]] = []
    for adapter, client in _adapters_of(policy, clusters, cluster):
        try:
            theirs = {
                object_key(queue) for other in others for queue in look_at(adapter, other, client).queues.values()
            }
            applies = release(adapter, look_at(adapter, policy, client), left_behind=left_behind, theirs=theirs)
        except ClusterError as error:
            if unread is None:
                raise
            unread(adapter.name, error)
        else:
            planned.append((client, applies))
    return tuple(outcome for client, applies in planned for outcome in write_weights(client, applies, dry_run=dry_run))


ANNOTATION_PREFIX = "gputally.dev/"
_ADVICE = {
    "argocd": (
        "Argo CD: in the Application, under spec.ignoreDifferences, add {{group: {group}, kind: {kind}, "
        "managedFieldsManagers: [" + FIELD_MANAGER + "]}}, and RespectIgnoreDifferences=true to syncOptions"
    ),
    "kustomize-controller": "Flux: leave {field} out of the manifest, or annotate the object with "
    "kustomize.toolkit.fluxcd.io/ssa: IfNotPresent",
    "helm-controller": "Flux: leave {field} out of the chart's values, or list it under spec.driftDetection.ignore",
}


@dataclass(frozen=True, slots=True)
class Adoption:
    """An object of which a field was, or would be, taken over.

    owners: the field's former managers.
    group: the object's API group.
    default: whether the field has the schema's default."""

    target: str
    queue: str
    kind: str
    name: str
    field: str
    owners: tuple[str, ...]
    result: Result
    detail: str = ""
    group: str = ""
    default: bool = False


def adopt(
    policy: Policy,
    cluster: Objects,
    *,
    queue: str | None = None,
    clusters: Mapping[str, Objects] | None = None,
    name: str = "",
    dry_run: bool = False,
) -> tuple[Adoption, ...]:
    """Take over every published field that has another owner, and the weights of another controller, which the
    controller that runs next then writes.

    name: NAMESPACE/LEASE of the controller that is to write the weights.
    queue: take over only fields of this queue; None for all.
    clusters: by adapter, the client for a target that is not in `cluster`.

    Raises ClusterError if a target cannot be read."""
    adoptions: list[Adoption] = []
    for adapter, client in _adapters_of(policy, clusters, cluster):
        if adapter.mode(policy) != "off" and adapter.publishes(policy):
            for of_policy, target_queue in sorted(look_at(adapter, policy, client).queues.items()):
                if queue in (None, of_policy) and target_queue.weight is not None:
                    adoptions += _take_over(adapter, client, of_policy, target_queue, name, dry_run)
    return tuple(adoptions)


def _adapters_of(
    policy: Policy, clusters: Mapping[str, Objects] | None, cluster: Objects
) -> Iterator[tuple[Adapter, Objects]]:
    """Yield the adapter of each target to which the policy refers, and the client of its objects."""
    for adapter in adapters():
        if has_ref(policy, *adapter.prefixes):
            yield adapter, (clusters or {}).get(adapter.name, cluster)


def _take_over(
    adapter: Adapter, cluster: Objects, name: str, queue: TargetQueue, controller: str, dry_run: bool
) -> Iterator[Adoption]:
    """Take over the field of one object, and yield the adoption; nothing if no other manager or controller has it."""
    obj = cluster.get(queue.kind, queue.name, queue.namespace)
    annotations = obj["metadata"].get("annotations") or {}
    own_annotations = {
        key: text for key, text in annotations.items() if key.startswith(ANNOTATION_PREFIX) and key != CONTROLLER
    }
    patch = _with_present_values(adapter.patch(queue, queue.weight, own_annotations), obj)
    owners = _other_owners(obj, patch)
    rival = queue.controller if queue.controller != controller else ""
    if not owners and not rival:
        return
    result: Result = "would-apply" if dry_run else "applied"
    detail = ""
    try:
        taken = cluster.transfer(patch, field_manager=FIELD_MANAGER, dry_run=dry_run) if owners else obj
        if rival:
            # The same manager applies the fields without the annotation, so that the server removes it.
            version = {"resourceVersion": taken["metadata"].get("resourceVersion", "")}
            without = {**patch, "metadata": {**patch["metadata"], **version}}
            cluster.apply(without, field_manager=FIELD_MANAGER, dry_run=dry_run)
    except ClusterError as error:
        result, detail = "contested" if isinstance(error, Conflict) else "refused", str(error)
    yield Adoption(
        target=adapter.name,
        queue=name,
        kind=queue.kind.kind,
        name=queue.name,
        field=", ".join(sorted({path for paths in owners.values() for path in paths})) or "weight",
        owners=tuple(sorted([*owners, *([f"controller {rival}"] if rival else [])])),
        result=result,
        detail=detail,
        group=queue.kind.api_version.partition("/")[0],
        default=queue.default is not None and same(queue.weight, queue.default),
    )


def _with_present_values(patch: Object, obj: Object) -> Object:
    """Return the patch with the object's present values, in the object's notation (`750m` stays `750m`)."""
    result: dict[str, Any] = copy.deepcopy(dict(patch))
    for path in leaves(patch):
        put(result, path, value_at(obj, path))
    result["metadata"]["resourceVersion"] = obj["metadata"].get("resourceVersion", "")
    return result


def _other_owners(obj: Object, patch: Object) -> Mapping[str, set[str]]:
    """Return the other managers that own fields of the patch, each with those fields."""
    paths = list(leaves(patch))
    owners: dict[str, set[str]] = {}
    for entry in obj["metadata"].get("managedFields") or ():
        manager = entry.get("manager", "")
        if manager == FIELD_MANAGER or entry.get("subresource"):
            continue
        managed = from_fields_v1(entry.get("fieldsV1") or {})
        shared = {dotted_path(path) for path in paths if any(overlap(path, other) for other in managed)}
        if shared:
            owners[manager] = shared
    return owners


def advice(adoption: Adoption) -> tuple[str, ...]:
    """Return what to change in the tools that owned the field, so that they do not overwrite it."""
    lines = []
    if adoption.default:
        lines.append(
            f"{adoption.field} of {adoption.kind} {adoption.name} has the CRD's default: a manifest without this field"
            " needs no change"
        )
    known = {**_ADVICE, **next((each.managers for each in adapters() if each.name == adoption.target), {})}
    for owner in adoption.owners:
        text = next((text for name, text in known.items() if owner.startswith(name)), None)
        text = text or f"{owner}: leave {{field}} out of what it applies"
        lines.append(text.format(group=adoption.group, kind=adoption.kind, field=adoption.field))
    return tuple(lines)
