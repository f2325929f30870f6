"""The register of which node each GPU belonged to: as stored, as shown, and what an admin may move."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence

from accountant.core.errors import CannotMove
from accountant.core.periods import utc
from accountant.ledger.journal import NewAct
from accountant.ledger.protocols import GpuClaim, GpuMove, GpuOwner, GpuOwnership
from accountant.storage.duckdb_engine import Cursor
from accountant.storage.gpu_lifetimes import Fleet, NodeKey
from accountant.storage.write.gpu_ownership import OwnedGpu, Ownership
from accountant.storage.write.record_columns import GpuName


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
        in_table = len(owners)
        last = tenures[owners[-1].node].last_ms if owners and owners[-1].node in tenures else 0
        for node, tenure in sorted(tenures.items(), key=lambda one: (one[1].first_ms, one[0])):
            known = any(one.node == node for one in owners)
            if not owners or (not known and tenure.first_ms >= max(last, owners[-1].from_ms)):
                owners.append(Ownership(node, tenure.first_ms, tenure.first_ms))
                last = tenure.last_ms
        owner = owners[-1]
        first = min(tenure.first_ms for tenure in tenures.values())
        imported = gpu in fleet.own and owner.node not in fleet.own[gpu] and not owner.who
        newest = max(last, owner.from_ms)
        found[name] = OwnedGpu(tuple(owners), first, newest, imported=imported, stored=in_table)
    return found


CLAIMS = 10_000
"""Quarantined records, the newest, that are searched for claims of other nodes."""


def read_claims(cursor: Cursor) -> dict[GpuName, tuple[GpuClaim, ...]]:
    """By GPU the nodes whose records of it were quarantined, by node."""
    found: dict[GpuName, list[GpuClaim]] = defaultdict(list)
    for cluster, uuid, node, records, newest in cursor.rows("gpu_claims", {"limit": CLAIMS}):
        found[cluster, uuid].append(GpuClaim(node=node, records=records, newest_ms=newest))
    return {gpu: tuple(claims) for gpu, claims in found.items()}


def shown(
    owned: Mapping[GpuName, OwnedGpu], claims: Mapping[GpuName, Sequence[GpuClaim]], fleet: Fleet
) -> tuple[GpuOwnership, ...]:
    """The register for people and programs, by cluster and UUID."""
    models = {(gpu.cluster, gpu.uuid): gpu.model for gpu in fleet.gpus.values()}
    return tuple(
        GpuOwnership(
            cluster=gpu[0],
            gpu_uuid=gpu[1],
            gpu_model=models.get(gpu, ""),
            last_ms=one.last_ms,
            owners=tuple(_owners(one.owners)),
            claims=tuple(claim for claim in claims.get(gpu, ()) if claim.node != one.owner.node),
        )
        for gpu, one in sorted(owned.items())
    )


def _owners(steps: Sequence[Ownership]) -> Iterable[GpuOwner]:
    ends = [step.from_ms for step in steps[1:]]
    for step, until in zip(steps, [*ends, None], strict=True):
        yield GpuOwner(
            node=step.node, from_ms=step.from_ms, until_ms=until, recorded_ms=step.at_ms, confirmed_by=step.who
        )


def movable_gpus(
    owned: Mapping[GpuName, OwnedGpu], nodes: Collection[NodeKey], asked: GpuMove, now_ms: int
) -> list[GpuName]:
    """The GPUs that are to be moved. nodes: all that the accountant knows. Raises CannotMove, and then none is to be
    moved."""
    cluster = asked.cluster or _only_cluster({gpu[0] for gpu in owned})
    if (cluster, asked.node) not in nodes:
        raise CannotMove(
            f"cluster {cluster!r} has no node {asked.node!r}: nothing came from it, and no inventory names it"
        )
    chosen = [(cluster, uuid) for uuid in dict.fromkeys(asked.gpus)]
    for gpu in chosen:
        one = owned.get(gpu)
        if one is None:
            raise CannotMove(f"cluster {cluster!r} has no GPU {gpu[1]!r}")
        if one.owner.node == asked.node:
            raise CannotMove(f"GPU {gpu[1]} belongs to node {asked.node!r} already, from {utc(one.owner.from_ms)} on")
        if asked.from_ms is not None and asked.from_ms < one.last_ms:
            raise CannotMove(
                f"GPU {gpu[1]}: node {one.owner.node!r} has records until {utc(one.last_ms)}: move it from then on, "
                "or later"
            )
    if asked.from_ms is not None and asked.from_ms > now_ms:
        raise CannotMove(f"{utc(asked.from_ms)} is yet to come")
    return chosen


def act_of(
    before: Mapping[GpuName, OwnedGpu], after: Mapping[GpuName, OwnedGpu], now_ms: int, who: str, reason: str
) -> NewAct:
    """What the journal keeps of a move."""
    content = [
        {"gpu": gpu[1], "from_node": before[gpu].owner.node, "node": one.owner.node, "from_ms": one.owner.from_ms}
        for gpu, one in sorted(after.items())
    ]
    cluster, node = min(after)[0], content[0]["node"]
    return NewAct(now_ms, "moved", f"{cluster}/{node}", who, reason, json.dumps(content))


def _only_cluster(clusters: Collection[str]) -> str:
    if len(clusters) != 1:
        raise CannotMove(f"name the cluster; the ledger knows {', '.join(map(repr, sorted(clusters))) or 'none'}")
    return next(iter(clusters))
