"""What kube-state-metrics said of the pods that held GPUs, as facts of the ledger. Pure.

Names of labels come without their punctuation; those that may say whose a pod is are known, and written back
(`accountant.importing.series.pod_label_names`). A queue counts under the same rule as everywhere (agent.queues).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from accountant.importing.asked import Asked
from accountant.importing.placing import Demand
from accountant.importing.series import Labels, Observed, PodName, of, pod_label_names, pod_of
from accountant.inventory import workloads
from agent.queues import queue_ref
from agent.units import MS_PER_SECOND
from agent.wire import Owner, PodFacts

_ABOVE = (("ReplicaSet", "replicaset"), ("Job", "job_name"))
"""Kinds that kube-state-metrics knows the owner of, and the label that names them."""


def facts_of(
    node: str, wanted: Sequence[Demand], asked: Asked, seen: Observed, scheduler: str, team_labels: Sequence[str] = ()
) -> tuple[PodFacts, ...]:
    """Of the pods that held something of a node in this chunk, by uid; `seq` is 0.

    team_labels: further labels to keep."""
    index = _Index(seen, team_labels)
    held: dict[str, tuple[PodName, dict[str, int]]] = {}
    counted = set()
    for demand in wanted:
        who = demand.holder
        _, requests = held.setdefault(who.uid, ((who.namespace, who.name), {}))
        if not asked.deaf and (who.uid, who.container, demand.pool) not in counted:
            counted.add((who.uid, who.container, demand.pool))
            requests[demand.pool] = requests.get(demand.pool, 0) + demand.count
    return tuple(index.fact(node, uid, pod, requests, seen, scheduler) for uid, (pod, requests) in sorted(held.items()))


class _Index:
    """The tables of names, by pod."""

    def __init__(self, seen: Observed, team_labels: Sequence[str]) -> None:
        self._names = pod_label_names(team_labels)
        self._team_labels = frozenset(team_labels)
        self._labels = _by_pod(seen.pod_labels)
        self._owners = _by_pod(seen.owners)
        self._info = _by_pod(seen.pods)
        self._schedulers = _by_pod(seen.schedulers)
        self._starts = {_key(labels): round(value * MS_PER_SECOND) for labels, value in seen.starts}
        self._ends = {_key(labels): round(value * MS_PER_SECOND) for labels, value in seen.ends}
        self._above: dict[tuple[str, str, str], Owner] = {}
        for labels in seen.upper_owners:
            for kind, name in _ABOVE:
                if (own := of(labels, name)) and (owner := _owner(labels)) is not None:
                    self._above[of(labels, "namespace"), kind, own] = owner

    def fact(
        self, node: str, uid: str, pod: PodName, requests: Mapping[str, int], seen: Observed, scheduler: str
    ) -> PodFacts:
        written = self._of(self._labels, pod, uid)
        labels = {key: written[name] for name, key in self._names.items() if written.get(name)}
        chain = self._chain(pod, uid)
        placed_by = of(self._of(self._schedulers, pod, uid), "name") or scheduler
        started = self._starts.get((pod, uid), self._starts.get((pod, "")))
        return PodFacts(
            seq=0,
            uid=uid,
            namespace=pod[0],
            name=pod[1],
            node=node,
            labels={key: value for key, value in labels.items() if key in self._team_labels},
            owners=chain,
            workload=workloads.job(chain, labels),
            queue_ref=queue_ref(pod[0], placed_by, labels),
            requests={name: str(count) for name, count in sorted(requests.items())},
            scheduled_ms=started,
            started_ms=started,
            ended_ms=self._ends.get((pod, uid), self._ends.get((pod, ""))),
            observed_ms=seen.grid.end_ms,
        )

    def _chain(self, pod: PodName, uid: str) -> tuple[Owner, ...]:
        nearest = _owner(self._of(self._owners, pod, uid)) or _created_by(self._of(self._info, pod, uid))
        if nearest is None:
            return ()
        above = self._above.get((pod[0], nearest.kind, nearest.name))
        return (nearest,) if above is None else (nearest, above)

    @staticmethod
    def _of(table: Mapping[tuple[PodName, str], Labels], pod: PodName, uid: str) -> Labels:
        return table.get((pod, uid)) or table.get((pod, "")) or {}


def _key(labels: Labels) -> tuple[PodName, str]:
    return pod_of(labels), of(labels, "uid")


def _by_pod(table: Sequence[Labels]) -> dict[tuple[PodName, str], Labels]:
    return {_key(labels): labels for labels in table}


def _owner(labels: Labels) -> Owner | None:
    """The controller that a series of owners names; `<none>` is kube-state-metrics' word for nobody."""
    kind, name = of(labels, "owner_kind"), of(labels, "owner_name")
    if not kind or not name or kind == "<none>" or of(labels, "owner_is_controller") == "false":
        return None
    return Owner(kind, name)


def _created_by(labels: Labels) -> Owner | None:
    kind, name = of(labels, "created_by_kind"), of(labels, "created_by_name")
    return Owner(kind, name) if kind and name and kind != "<none>" else None
