"""The register of which node each GPU belonged to, as stored."""

from __future__ import annotations

from collections import defaultdict

from accountant.store.database import Cursor
from accountant.store.fleet import Fleet
from accountant.store.writing.incoming import GpuName
from accountant.store.writing.ownership import OwnedGpu, Ownership


def read_owners(cursor: Cursor, fleet: Fleet) -> dict[GpuName, OwnedGpu]:
    """By GPU. What the table lacks, in ledgers of earlier releases and those rebuilt from an archive, the records tell:
    a node that reported a GPU after all records of its owner took it over."""
    stored: dict[GpuName, list[Ownership]] = defaultdict(list)
    rows = cursor.run("SELECT cluster, gpu_uuid, node, from_ms, at_ms, who FROM gpu_owner ORDER BY from_ms, at_ms")
    for cluster, uuid, node, from_ms, at_ms, who in rows:
        stored[cluster, uuid].append(Ownership(node, from_ms, at_ms, who))
    found: dict[GpuName, OwnedGpu] = {}
    for gpu, tenures in fleet.tenures.items():
        name = (fleet.gpus[gpu].cluster, fleet.gpus[gpu].uuid)
        owners = stored.pop(name, [])
        last = tenures[owners[-1].node].last_ms if owners and owners[-1].node in tenures else 0
        for node, tenure in sorted(tenures.items(), key=lambda one: (one[1].first_ms, one[0])):
            known = any(one.node == node for one in owners)
            if not owners or (not known and tenure.first_ms >= max(last, owners[-1].from_ms)):
                owners.append(Ownership(node, tenure.first_ms, tenure.first_ms))
                last = tenure.last_ms
        owner = owners[-1]
        first = min(tenure.first_ms for tenure in tenures.values())
        imported = gpu in fleet.own and owner.node not in fleet.own[gpu] and not owner.who
        found[name] = OwnedGpu(tuple(owners), first, max(last, owner.from_ms), imported=imported)
    return found
