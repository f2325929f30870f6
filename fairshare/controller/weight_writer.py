"""Applies planned weights, releases them, and adopts a field that another manager owns.

Writes are independent: one that is contested or refused does not stop the others. If the API server does not answer,
the remaining writes are not tried. Writes above the limit of one cycle wait for the next. The largest changes go first,
and those on which others depend. A lost lease stops all writes at once, because the new leader may already be writing.

The controller never forces a write. A field of another owner stays contested until that owner releases it, or until
`gputally fairshare adopt` transfers it. The transfer does not change the value. The first weight published afterwards
records it as the base. A GitOps tool that still has the field in its manifests overwrites it at its next sync, and
`advice` says what to change there."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from accountant.wire.policy_models import Policy
from fairshare.controller.cycle_report import Outcome, Result
from fairshare.core.queue_annotations import has_ref, say
from fairshare.core.queues_and_weights import Condition, Observation, TargetQueue
from fairshare.targets import ADAPTERS
from fairshare.targets.weight_plan import FIELD_MANAGER, Adapter, Apply, look_at, object_key, release, same, show
from gputally.base.errors import ClusterError, Conflict, NotFound, Refused, Unavailable
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

MOST_WRITES = 500
"""Maximum number of writes of one target in one cycle."""
MOST_WRITES_AT: Mapping[str, int] = {"runai": 60}
"""The limit if every write is two requests to a remote service."""
WELL: frozenset[Result] = frozenset({"applied", "would-apply", "deferred"})
_RESULTS: dict[type[ClusterError], Result] = {
    Conflict: "contested",
    Refused: "refused",
    NotFound: "gone",
    Unavailable: "unavailable",
}
_REASONS: dict[Result, str] = {"contested": "Contested", "refused": "Refused", "gone": "NotFound"}


def carry_out(
    cluster: Objects,
    applies: Sequence[Apply],
    *,
    dry_run: bool,
    leading: Callable[[], bool] = lambda: True,
    most: int = MOST_WRITES,
) -> tuple[Outcome, ...]:
    """Make the writes in the order of `applies`; their size only decides which are deferred."""
    now = set(sorted(range(len(applies)), key=lambda i: (applies[i].order, -_size(applies[i]), i))[:most])
    outcomes: list[Outcome] = []
    silent = False
    for i, apply in enumerate(applies):
        if silent:
            outcomes.append(Outcome(apply, "unavailable", "not tried: the API server does not answer"))
        elif i not in now:
            outcomes.append(Outcome(apply, "deferred", f"more than {most} writes in one cycle: the next one goes on"))
        elif not leading():
            outcomes.append(Outcome(apply, "deferred", "no longer the leader"))
        else:
            outcomes.append(_one(cluster, apply, dry_run))
            silent = outcomes[-1].result == "unavailable"
    return tuple(outcomes)


def _size(apply: Apply) -> float:
    """Return the relative change; a first value or a text counts as large."""
    old, new = apply.previous, apply.value
    if not isinstance(old, int | float) or not isinstance(new, int | float) or not old:
        return float("inf")
    return abs(new - old) / old


def _one(cluster: Objects, apply: Apply, dry_run: bool) -> Outcome:
    try:
        cluster.apply(apply.patch, field_manager=apply.field_manager, dry_run=dry_run)
    except ClusterError as error:
        result: Result = next((name for kind, name in _RESULTS.items() if isinstance(error, kind)), "refused")
        return Outcome(apply, result, str(error))
    return Outcome(apply, "would-apply" if dry_run else "applied")


def available(outcomes: Sequence[Outcome]) -> Condition:
    """Return whether the target accepts writes."""
    failed = [outcome for outcome in outcomes if outcome.result not in WELL]
    if failed:
        first = failed[0].result
        text = say([outcome.detail for outcome in failed])
        contested = [outcome.apply for outcome in failed if outcome.result == "contested"]
        advice = _advice(contested) if first == "contested" else ""
        return Condition("Available", "False", _REASONS.get(first, "Unavailable"), text + advice)
    return Condition("Available", "True", "Writable", "the target takes our weights")


def _advice(contested: Sequence[Apply]) -> str:
    """Return how the owner of a field can release it."""
    filled_in = [each for each in contested if each.default is not None and same(each.previous, each.default)]
    if len(filled_in) < len(contested):
        return (
            "; leave the weight out of that manager's manifest, or take it over with `gputally fairshare adopt`:"
            " a field has one owner"
        )
    return (
        f"; {show(filled_in[0].default)} is the default of the CRD, which the API server books to the creator of an"
        " object that states none: if the manifest has no weight, nothing is to be left out of it. Take the field over"
        " with `gputally fairshare adopt`"
    )


def with_ownership_verdict(conditions: Sequence[Condition], outcomes: Sequence[Outcome]) -> tuple[Condition, ...]:
    """Return the adapter's conditions, with `Effective` set to False if another manager owns a field, because its
    weight has no effect."""
    contested = sorted({outcome.apply.name for outcome in outcomes if outcome.result == "contested"})
    if not contested:
        return tuple(conditions)
    text = f"another manager owns the field on {say(contested)}, so the controller's weight has no effect"
    return tuple(
        Condition("Effective", "False", "FieldNotOurs", text)
        if condition.type == "Effective" and condition.status != "False"
        else condition
        for condition in conditions
    )


def reasons(observation: Observation, outcomes: Sequence[Outcome]) -> Mapping[str, str]:
    """Return why a target is degraded: reason to messages."""
    found: dict[str, list[str]] = {}
    for condition in observation.conditions:
        if condition.type in ("Effective", "Readable") and condition.status == "False":
            found.setdefault(condition.reason, []).append(condition.message)
    for outcome in outcomes:
        if outcome.result not in WELL:
            found.setdefault(outcome.result, []).append(outcome.detail)
    return {reason: say(texts) for reason, texts in sorted(found.items())}


def release_weights(
    policy: Policy,
    cluster: Cluster,
    adapters: Sequence[Adapter] = ADAPTERS,
    *,
    clusters: Mapping[str, Objects] | None = None,
    dry_run: bool = False,
    left_behind: bool = False,
    others: Sequence[Policy] = (),
) -> tuple[Outcome, ...]:
    """Restore the base weight of every changed object of the policy's targets.

    clusters: by adapter, as for the Controller.
    left_behind: only objects that no queue of the policy refers to any more.
    others: policies that publish to the same cluster, whose objects are not changed.

    Raises ClusterError if a target cannot be read."""
    planned: list[tuple[Objects, Sequence[Apply]]] = []
    for adapter, there in _of_policy(policy, adapters, clusters, cluster):
        theirs = {object_key(held) for other in others for held in look_at(adapter, other, there).held.values()}
        applies = release(adapter, look_at(adapter, policy, there), left_behind=left_behind, theirs=theirs)
        planned.append((there, applies))
    return tuple(each for there, applies in planned for each in carry_out(there, applies, dry_run=dry_run))


OURS = "gputally.dev/"
_ADVICE = {
    "argocd": (
        "Argo CD: in the Application, under spec.ignoreDifferences, add {{group: {group}, kind: {kind}, "
        "managedFieldsManagers: [" + FIELD_MANAGER + "]}}, and RespectIgnoreDifferences=true to syncOptions"
    ),
    "run.ai": "Run:ai: do not set {field} of a {kind} there any more, by hand or by script",
    "kustomize-controller": "Flux: leave {field} out of the manifest, or annotate the object with "
    "kustomize.toolkit.fluxcd.io/ssa: IfNotPresent",
    "helm-controller": "Flux: leave {field} out of the chart's values, or list it under spec.driftDetection.ignore",
}


@dataclass(frozen=True, slots=True)
class Adoption:
    """An object of which a field was, or would be, taken over.

    owners: its former managers.
    group: the group of its API.
    default: its value is the schema's default."""

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
    adapters: Sequence[Adapter],
    *,
    queue: str | None = None,
    clusters: Mapping[str, Objects] | None = None,
    dry_run: bool = False,
) -> tuple[Adoption, ...]:
    """Take over every published field that has another owner (of `queue` only, if given). clusters: by adapter, for a
    target that is not in `cluster`.

    Raises ClusterError if a target cannot be read."""
    found: list[Adoption] = []
    for adapter, there in _of_policy(policy, adapters, clusters, cluster):
        if adapter.mode(policy) != "off" and adapter.publishes(policy):
            for name, held in sorted(look_at(adapter, policy, there).held.items()):
                if queue in (None, name) and held.weight is not None:
                    found += _take_over(adapter, there, name, held, dry_run)
    return tuple(found)


def _of_policy(
    policy: Policy, adapters: Sequence[Adapter], clusters: Mapping[str, Objects] | None, cluster: Objects
) -> Iterator[tuple[Adapter, Objects]]:
    """The adapters of the targets that the policy refers to, and where their objects are."""
    for adapter in adapters:
        if has_ref(policy, *adapter.prefixes):
            yield adapter, (clusters or {}).get(adapter.name, cluster)


def _take_over(adapter: Adapter, cluster: Objects, queue: str, held: TargetQueue, dry_run: bool) -> Iterator[Adoption]:
    standing = cluster.get(held.kind, held.name, held.namespace)
    annotations = standing["metadata"].get("annotations") or {}
    ours = {key: text for key, text in annotations.items() if key.startswith(OURS)}
    wanted = _as_it_stands(adapter.patch(held, held.weight, ours), standing)
    foreign = _foreign(standing, wanted)
    if not foreign:
        return
    result: Result = "would-apply" if dry_run else "applied"
    detail = ""
    try:
        cluster.transfer(wanted, field_manager=FIELD_MANAGER, dry_run=dry_run)
    except ClusterError as error:
        result, detail = "contested" if isinstance(error, Conflict) else "refused", str(error)
    field = ", ".join(sorted({path for paths in foreign.values() for path in paths}))
    yield Adoption(
        adapter.name,
        queue,
        held.kind.kind,
        held.name,
        field,
        tuple(sorted(foreign)),
        result,
        detail,
        held.kind.api_version.partition("/")[0],
        held.default is not None and same(held.weight, held.default),
    )


def _as_it_stands(patch: Object, standing: Object) -> Object:
    """Return the patch's fields with the object's own values, in the object's notation (`750m` stays `750m`)."""
    wanted: dict[str, Any] = copy.deepcopy(dict(patch))
    for path in leaves(patch):
        put(wanted, path, value_at(standing, path))
    wanted["metadata"]["resourceVersion"] = standing["metadata"].get("resourceVersion", "")
    return wanted


def _foreign(standing: Object, wanted: Object) -> Mapping[str, set[str]]:
    """Return other managers that own a field of `wanted`, with those fields."""
    paths = list(leaves(wanted))
    owners: dict[str, set[str]] = {}
    for entry in standing["metadata"].get("managedFields") or ():
        manager = entry.get("manager", "")
        if manager == FIELD_MANAGER or entry.get("subresource"):
            continue
        owned = from_fields_v1(entry.get("fieldsV1") or {})
        shared = {dotted_path(path) for path in paths if any(overlap(path, mine) for mine in owned)}
        if shared:
            owners[manager] = shared
    return owners


def advice(adoption: Adoption) -> tuple[str, ...]:
    """Return what to change in the tools that had the field, so that they do not overwrite it."""
    lines = []
    if adoption.default:
        lines.append(
            f"{adoption.field} of {adoption.kind} {adoption.name} has the CRD's default: where the manifest does not"
            " state it, nothing is to be changed there"
        )
    for owner in adoption.owners:
        text = next((text for name, text in _ADVICE.items() if owner.startswith(name)), None)
        told = text or f"{owner}: leave {{field}} out of what it applies"
        lines.append(told.format(group=adoption.group, kind=adoption.kind, field=adoption.field))
    return tuple(lines)
