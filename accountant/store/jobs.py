"""Which jobs there were, and when they held GPUs."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from accountant.progress import JobKey
from accountant.store import columns
from accountant.store.database import Cursor
from accountant.store.names import holders
from accountant.store.state import State
from accountant.wire import Dimension

_FEW = 500
Extent = tuple[int, int]
"""[first, last) of holding anything, in UTC ms; rounded outwards to the hour where that is over."""


def extents(cursor: Cursor, state: State, keys: Collection[JobKey]) -> Mapping[JobKey, Extent]:
    """Of these jobs over all time; one that never held anything is not in it."""
    clusters = sorted({key.cluster for key in keys})
    ids = {row[0] for row in cursor.run("SELECT id FROM holder WHERE list_contains(?, cluster)", [clusters])}
    wanted = frozenset(keys)
    of = {
        number: key
        for number, name in holders(cursor, ids, where=_few(keys)).items()
        if (key := JobKey(name.cluster, name.namespace, name.job)) in wanted
    }
    table = columns.table(columns.ID, [(number,) for number in sorted(of)])
    found: dict[JobKey, Extent] = {}
    for payer, low, high in cursor.rows("held_between", {"low": min(state.unfolded, default=0)}, incoming=table):
        first, last = found.get(of[payer], (low, high))
        found[of[payer]] = min(first, low), max(last, high)
    return found


def _few(keys: Collection[JobKey]) -> Mapping[Dimension, Collection[str]] | None:
    """A filter that keeps these jobs and not many others; None where looking at all is as good."""
    if len(keys) > _FEW:
        return None
    return {"namespace": {key.namespace for key in keys}, "job": {key.job for key in keys}}


def jobs_in(cursor: Cursor, cluster: str, namespace: str) -> frozenset[str]:
    """Jobs (`Kind/name`) that pods of the namespace belonged to."""
    rows = cursor.rows("jobs_in", {"cluster": cluster, "namespace": namespace})
    return frozenset(job for (job,) in rows)


def job_of(cursor: Cursor, cluster: str, uid: str) -> JobKey | None:
    """The job of a pod; None for a pod that nobody has told of."""
    rows = cursor.rows("job_of", {"cluster": cluster, "uid": uid})
    if not rows:
        return None
    namespace, name, workload = rows[0]
    return JobKey(cluster, namespace, workload or f"Pod/{name}")
