"""From ids back to names, for the few that an answer holds."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from accountant.store import columns
from accountant.store.database import Cursor


@dataclass(frozen=True, slots=True)
class DeviceName:
    node: str
    gpu_model: str
    profile: str


NO_DEVICE = DeviceName("", "", "")


@dataclass(frozen=True, slots=True)
class HolderName:
    """job: the workload the pod belongs to, else the holder itself, `Pod/<name>`."""

    cluster: str
    namespace: str
    name: str
    queue_ref: str
    job: str


def devices(cursor: Cursor) -> Mapping[int, DeviceName]:
    rows = cursor.run("SELECT id, node, gpu_model, profile FROM device")
    return {row[0]: DeviceName(*row[1:]) for row in rows}


def holders(cursor: Cursor, ids: Collection[int]) -> Mapping[int, HolderName]:
    if not ids:
        return {}
    rows = cursor.rows("holder_names", incoming=columns.table(columns.ID, [(i,) for i in sorted(ids)]))
    return {
        number: HolderName(cluster, namespace, name, queue_ref, workload or f"{kind.capitalize()}/{name or uid}")
        for number, cluster, kind, uid, namespace, name, queue_ref, workload in rows
    }
