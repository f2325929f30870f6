"""Take a weight's field over from the manager that owns it, because a person asked for it.

The controller never forces: a field of somebody else's stays contested until he lets go of it, or until
`gputally fairshare adopt` hands it over. The value does not change by that; the first weight published
afterwards notes it as the base. A GitOps tool that still has the field in its manifests takes it back at its
next sync: `advice` says what to tell it.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from accountant.wire import Policy
from fairshare.errors import ClusterError, Conflict
from fairshare.kube.fields import dotted, from_fields_v1, leaves, look, overlap, put
from fairshare.kube.kinds import Object
from fairshare.kube.looking import look_at
from fairshare.kube.mapping import referred
from fairshare.kube.ports import Objects
from fairshare.model import Held
from fairshare.plan import FIELD_MANAGER, Adapter, same
from fairshare.report import Result

OURS = "gputally.dev/"
_ADVICE = {
    "argocd": (
        "Argo CD: in the Application, under spec.ignoreDifferences, add {{group: {group}, kind: {kind}, "
        "managedFieldsManagers: [" + FIELD_MANAGER + "]}}, and RespectIgnoreDifferences=true to syncOptions"
    ),
    "run.ai": "Run:ai: whoever sets {field} of a {kind} there, by hand or by script, has to leave it out from now on",
    "kustomize-controller": "Flux: leave {field} out of the manifest, or annotate the object with "
    "kustomize.toolkit.fluxcd.io/ssa: IfNotPresent",
    "helm-controller": "Flux: leave {field} out of the chart's values, or list it under spec.driftDetection.ignore",
}


@dataclass(frozen=True, slots=True)
class Adoption:
    """One object of which a field was, or would be, taken over. owners: managers that had it. group: of its API.
    default: its value is the one that the schema fills in."""

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
    """Every field we publish that somebody else owns (of `queue` alone, if given). clusters: by adapter, for a target
    that is not in `cluster`.

    Raises ClusterError where a target cannot be read."""
    found: list[Adoption] = []
    for adapter in adapters:
        if referred(policy, *adapter.prefixes) and adapter.mode(policy) != "off" and adapter.publishes(policy):
            there = (clusters or {}).get(adapter.name, cluster)
            observation = look_at(adapter, policy, there)
            for name, held in sorted(observation.held.items()):
                if queue in (None, name) and held.kind is not None and held.weight is not None:
                    found += _take_over(adapter, there, name, held, dry_run)
    return tuple(found)


def _take_over(adapter: Adapter, cluster: Objects, queue: str, held: Held, dry_run: bool) -> Iterator[Adoption]:
    assert held.kind is not None
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
    """The patch's fields with the object's own values, written as they are there (`750m` stays `750m`)."""
    wanted: dict[str, Any] = copy.deepcopy(dict(patch))
    for path in leaves(patch):
        put(wanted, path, look(standing, path))
    wanted["metadata"]["resourceVersion"] = standing["metadata"].get("resourceVersion", "")
    return wanted


def _foreign(standing: Object, wanted: Object) -> Mapping[str, set[str]]:
    """Managers other than us that own a field of `wanted`, with those fields."""
    paths = list(leaves(wanted))
    owners: dict[str, set[str]] = {}
    for entry in standing["metadata"].get("managedFields") or ():
        manager = entry.get("manager", "")
        if manager == FIELD_MANAGER or entry.get("subresource"):
            continue
        owned = from_fields_v1(entry.get("fieldsV1") or {})
        shared = {dotted(path) for path in paths if any(overlap(path, mine) for mine in owned)}
        if shared:
            owners[manager] = shared
    return owners


def advice(adoption: Adoption) -> tuple[str, ...]:
    """What to change in the tools that had the field, so that they do not take it back."""
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
