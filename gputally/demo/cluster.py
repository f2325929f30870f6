"""The demo's cluster: nodes, queues and what goes wrong with them. Data only.

Eight nodes of eight GPUs: four with H100, three with A100, and one more with A100 that the cloud may take back
(pool `spot`). On the last A100 node two GPUs are partitioned by MIG and one is time-sliced; they
serve notebooks and inference. MIG profiles and slice counts: NVIDIA MIG user guide, A100 80GB.
"""

from __future__ import annotations

from dataclasses import dataclass

from agent.model import Gpu, MigInstance
from agent.units import MS_PER_DAY, MS_PER_HOUR, MS_PER_MINUTE
from fairshare.simulator.cluster import WHOLE, GpuSpec, NodeSpec, Outage

CLUSTER = "demo"
REGION = "eu-demo-1"
H100 = "NVIDIA H100 80GB HBM3"
A100 = "NVIDIA A100-SXM4-80GB"
MEMORY_MIB = 81_920
SHARED = "shared"
REPLICAS = 4
"""A time-sliced GPU is offered to the kubelet this many times."""


@dataclass(frozen=True, slots=True)
class Profile:
    """A MIG profile: compute slices of seven, and memory."""

    name: str
    compute: int
    memory_mib: int


PROFILES = {
    p.name: p for p in (Profile("3g.40gb", 3, 40_192), Profile("2g.20gb", 2, 19_968), Profile("1g.10gb", 1, 9_728))
}
GEOMETRY = ("3g.40gb", "2g.20gb", "1g.10gb", "1g.10gb")


def nodes() -> tuple[NodeSpec, ...]:
    """The eight nodes, H100 first."""
    partitioned = {5: GEOMETRY, 6: GEOMETRY, 7: (SHARED,) * REPLICAS}
    h100 = [_node(f"h100-{n}", H100) for n in range(1, 5)]
    a100 = [_node("a100-1", A100), _node("a100-2", A100), _node("a100-3", A100, partitioned)]
    return (*h100, *a100, _node("spot-1", A100, pool="spot"))


def _node(name: str, model: str, shapes: dict[int, tuple[str, ...]] | None = None, pool: str = "") -> NodeSpec:
    gpus = (GpuSpec(f"GPU-{name}-{i}", model, (shapes or {}).get(i, (WHOLE,))) for i in range(8))
    return NodeSpec(name, tuple(gpus), pool or name.split("-")[0])


def devices(node: NodeSpec) -> tuple[Gpu, ...]:
    """The node's GPUs as an agent sees them; slot `index` of a partitioned GPU is its MIG instance `index`."""
    found = []
    for index, spec in enumerate(node.gpus):
        mig = tuple(
            MigInstance(mig_uuid(spec.uuid, i), shape, i, 0, PROFILES[shape].compute, PROFILES[shape].memory_mib)
            for i, shape in enumerate(spec.shapes)
            if shape in PROFILES
        )
        bus = f"00000000:{0x10 + index:02X}:00.0"
        found.append(Gpu(spec.uuid, index, spec.model, MEMORY_MIB, 7, mig, bool(mig), bus, "580.95.05"))
    return tuple(found)


def mig_uuid(gpu_uuid: str, index: int) -> str:
    """Name of the MIG instance in slot `index`."""
    return f"MIG-{gpu_uuid.removeprefix('GPU-')}-{index}"


def outages(start_ms: int, days: int) -> tuple[Outage, ...]:
    """What breaks in a run of `days`: a node for some hours, the spot node twice, one GPU for a day.

    Placed by the length of the run, so that a short one has its share; hours off the interval grid."""
    span = days * MS_PER_DAY

    def at(part: float) -> int:
        """An instant `part` of the way, moved off every interval's edge."""
        return start_ms + int(span * part) // MS_PER_MINUTE * MS_PER_MINUTE + 7_321

    unit = min(MS_PER_HOUR, span // 96)
    return (
        Outage("node", "h100-3", at(0.40), at(0.40) + 5 * unit + 911_000, "power supply failed"),
        Outage("node", "spot-1", at(0.22), at(0.22) + 3 * unit + 47_000, "spot capacity reclaimed"),
        Outage("node", "spot-1", at(0.71), at(0.71) + 9 * unit + 128_500, "spot capacity reclaimed"),
        Outage("gpu", "GPU-a100-2-4", at(0.55), at(0.55) + 24 * unit + 35_250, "Xid 79: GPU has fallen off the bus"),
    )
