"""Which jobs there were, and when they held GPUs."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from accountant.progress import JobKey
from accountant.store.database import Cursor, statement
from accountant.store.memory import Memory
from accountant.store.state import State
from accountant.store.writing import columns

_FEW = 500
"""Jobs that the engine is told by name."""
Extent = tuple[int, int]
"""[first, last) of holding anything, in UTC ms; rounded outwards to the hour where that is over."""


def extents(
    cursor: Cursor, state: State, keys: Collection[JobKey], memory: Memory | None = None
) -> Mapping[JobKey, Extent]:
    """Of these jobs over all time; one that never held anything is not in it. memory: of the moment."""
    of = _held_for(cursor, keys, memory)
    table = columns.table(columns.ID, [(number,) for number in sorted(of)])
    found: dict[JobKey, Extent] = {}
    for payer, low, high in cursor.rows("held_between", {"low": min(state.unfolded, default=0)}, incoming=table):
        first, last = found.get(of[payer], (low, high))
        found[of[payer]] = min(first, low), max(last, high)
    return found


def _held_for(cursor: Cursor, keys: Collection[JobKey], memory: Memory | None) -> dict[int, JobKey]:
    """The jobs by the holders that were of them."""
    wanted = frozenset(keys)
    if memory is not None and len(wanted) <= _FEW:
        few = memory.named(cursor, {key.job for key in wanted}, (), ())
        if few is not None:
            told = {number: JobKey(name.cluster, name.namespace, name.job) for number, name in few.items()}
            return {number: key for number, key in told.items() if key in wanted}
    asked = {"clusters": sorted({key.cluster for key in keys})}
    only = ""
    if len(wanted) <= _FEW:
        asked |= {"namespaces": sorted({key.namespace for key in keys}), "jobs": sorted({key.job for key in keys})}
        only = "WHERE list_contains($namespaces, namespace) AND list_contains($jobs, job)"
    sql = statement("holder_jobs").format(names=statement("holder_names"), only=only)
    return {number: key for number, *names in cursor.run(sql, asked) if (key := JobKey(*names)) in wanted}


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
