"""The demo's cluster: nodes, queues and what goes wrong with them. Data only.

Eight nodes of eight GPUs: four with H100, three with A100, and one more with A100 that the cloud may take back
(pool `spot`). On the last A100 node two GPUs are partitioned by MIG and one is time-sliced; they
serve notebooks and inference. MIG profiles and slice counts: NVIDIA MIG user guide, A100 80GB.
"""

from __future__ import annotations

from fractions import Fraction

from agent.model import Gpu
from agent.simulation.simulated_gpu import A100, H100, MIG_PROFILES, MODELS, make_gpu
from agent.units import MS_PER_DAY, MS_PER_HOUR, MS_PER_MINUTE
from fairshare.simulator.cluster import WHOLE, GpuSpec, NodeSpec, Outage

CLUSTER = "demo"
REGION = "eu-demo-1"
SHARED = "shared"
REPLICAS = 4
"""A time-sliced GPU is offered to the kubelet this many times."""
GEOMETRY = ("3g.40gb", "2g.20gb", "1g.10gb", "1g.10gb")


def nodes() -> tuple[NodeSpec, ...]:
    """The eight nodes, H100 first."""
    partitioned = {5: GEOMETRY, 6: GEOMETRY, 7: (SHARED,) * REPLICAS}
    h100 = [_node(f"h100-{n}", H100.name) for n in range(1, 5)]
    a100 = [_node("a100-1", A100.name), _node("a100-2", A100.name), _node("a100-3", A100.name, partitioned)]
    return (*h100, *a100, _node("spot-1", A100.name, pool="spot"))


def _node(name: str, model: str, shapes: dict[int, tuple[str, ...]] | None = None, pool: str = "") -> NodeSpec:
    gpus = (GpuSpec(f"GPU-{name}-{i}", model, (shapes or {}).get(i, (WHOLE,))) for i in range(8))
    return NodeSpec(name, tuple(gpus), pool or name.split("-")[0])


def devices(node: NodeSpec) -> tuple[Gpu, ...]:
    """The node's GPUs as an agent sees them: slot `index` of a partitioned GPU is the MIG instance at `index`."""
    models = {model.name: model for model in MODELS.values()}
    return tuple(
        make_gpu(spec.uuid, index, models[spec.model], [shape for shape in spec.shapes if shape in MIG_PROFILES])
        for index, spec in enumerate(node.gpus)
    )


def compute_of(shape: str) -> int:
    """Compute slices of a MIG profile, of the seven of its GPU."""
    return MIG_PROFILES[shape][0]


def parts() -> dict[str, Fraction]:
    """How much of a GPU a slot of each shape is."""
    return {SHARED: Fraction(1, REPLICAS)} | {shape: Fraction(compute_of(shape), 7) for shape in GEOMETRY}


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
