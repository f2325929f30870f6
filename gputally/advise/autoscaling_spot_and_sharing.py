"""Computes how many nodes are needed by hour of the week (also as files for autoscalers), which jobs would be cheaper
on spot capacity, and which jobs could share a GPU.

The number of nodes that an hour needs is its mean number of held GPUs, divided by `threshold` times the GPUs of a node,
rounded up. Held GPUs count, not busy ones, because a held GPU cannot be given back. The need of an hour of the week is
the largest need of that hour in any week of the window. The pool's smallest and largest node counts are the minimum and
maximum of these needs. Held time does not show demand that waited because no GPU was free. `PoolAdvice.full_hours`
therefore counts the hours in which nearly all GPUs were held.

Sources: Terraform, "Variable definitions (.tfvars) files" (JSON); Karpenter, NodePool karpenter.sh/v1: `spec.limits`
maps a resource to a quantity.

The optimal interval τ between checkpoints follows Daly's higher order estimate. Its first term is Young's. If a
checkpoint takes δ, and the times between interruptions are exponentially distributed with the mean M, the interval is

    τ = √(2δM) · [1 + ⅓ √(δ/2M) + ⅑ (δ/2M)] − δ    for δ < 2M, else M.

A run of length T then takes this time (Daly's complete model), where R is the time of a restart:

    M · e^(R/M) · (e^((τ+δ)/M) − 1) · T/τ

Sources: J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps", Future Generation
Computer Systems 22 (2006) 303-312; J. W. Young, "A first order approximation to the optimum checkpoint interval",
Communications of the ACM 17 (1974) 530-531.

The candidates for sharing are the report's hints of the kind `slice` (`accountant.reports.savings_hints`). These are
jobs on one GPU that were at most half busy in every hour. Memory is the mean over the held time. The ledger does not
know the peak, so check it before you follow the advice.

Source of models and profiles: NVIDIA Multi-Instance GPU User Guide, "Supported GPUs" and "Supported MIG Profiles"."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from decimal import Decimal
from math import ceil, exp, expm1, floor, sqrt
from typing import TYPE_CHECKING, Any, Literal

import yaml

from accountant.core.periods import hour_of_day
from gputally.base.gpu_model_names import parse_gpu_model
from gputally.base.mig_profiles import mig_sizes, usual_memory_gb
from gputally.base.money import exact_product, exact_sum, gpu_hours
from gputally.base.units import US_PER_HOUR, US_PER_MS

if TYPE_CHECKING:
    from accountant.ledger.protocols import JobKey


THRESHOLD = 0.75
"""Fraction of the GPUs that may be held before another node is needed."""
FULL = 0.98
"""Fraction of a pool's GPUs that must be held for an hour to count as full."""
DAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
HOURS = 24


@dataclass(frozen=True, slots=True, order=True)
class NodePool:
    """A node pool.

    name: the pool's name in the inventory, or the GPU model if the inventory has no pool of the nodes.
    named: True if the name is from the inventory."""

    cluster: str
    name: str
    gpu_model: str
    region: str
    capacity_type: str
    named: bool = True

    @property
    def key(self) -> str:
        """The pool's name for Terraform and Ansible: letters, digits and underscores."""
        return "".join(c if c.isalnum() else "_" for c in self.name.lower()).strip("_") or "gpus"


@dataclass(frozen=True, slots=True)
class NodeHour:
    """One node in one local hour (`2026-10-05T14`).

    up_us: GPU-µs of capacity that was up.
    held_us: GPU-µs of this capacity that were held."""

    pool: NodePool
    node: str
    hour: str
    up_us: int
    held_us: int


@dataclass(frozen=True, slots=True)
class PoolAdvice:
    """The advice for one pool.

    gpus_per_node: the largest of `shapes`.
    nodes_now: the number of nodes in the last hour.
    min_nodes, max_nodes: the smallest and the largest number in `weekly`.
    weekly: needed nodes by hour of the week from Monday 00:00; None if the window has no such hour.
    hours: number of hours of the window in which the ledger has usage of the pool.
    node_hours: node-hours of nodes that were up.
    idle_node_hours: number of hours of nodes in which no GPU was held.
    surplus_node_hours: node-hours beyond the need of their hour of the week.
    full_hours: number of hours in which at least `FULL` of the GPUs were held.
    peak_gpus, mean_gpus: mean number of held GPUs in the busiest hour, and on average.
    shapes: the different numbers of GPUs per node, ascending.
    unit_price: the price of a GPU-hour; None without one.
    saving: the cost of the surplus; None without a price."""

    pool: NodePool
    gpus_per_node: int
    nodes_now: int
    min_nodes: int
    max_nodes: int
    weekly: tuple[int | None, ...]
    hours: int
    node_hours: float
    idle_node_hours: int
    surplus_node_hours: float
    full_hours: int
    peak_gpus: float
    mean_gpus: float
    shapes: tuple[int, ...]
    unit_price: Decimal | None
    saving: Decimal | None


def pool_advice(
    rows: Iterable[NodeHour],
    lengths: Mapping[str, int],
    prices: Mapping[NodePool, Decimal | None],
    threshold: float = THRESHOLD,
) -> tuple[PoolAdvice, ...]:
    """Compute the advice for each pool, sorted by pool.

    lengths: the length of each local hour of the window in milliseconds; hours shorter than 60 minutes are ignored.
    prices: the price of a GPU-hour of each pool; None without one.
    threshold: see `THRESHOLD`.

    Raises ValueError for a threshold outside (0, 1]."""
    if not 0 < threshold <= 1:
        raise ValueError(f"the threshold must be above 0 and at most 1, not {threshold}")
    whole = {hour: ms for hour, ms in lengths.items() if ms >= US_PER_HOUR // US_PER_MS}
    by_pool: dict[NodePool, list[NodeHour]] = {}
    for row in rows:
        if row.hour in whole and row.up_us > 0:
            by_pool.setdefault(row.pool, []).append(row)
    return tuple(
        _advice_for_pool(pool, of_pool, whole, prices.get(pool), threshold) for pool, of_pool in sorted(by_pool.items())
    )


def _advice_for_pool(
    pool: NodePool, rows: Sequence[NodeHour], lengths: Mapping[str, int], price: Decimal | None, threshold: float
) -> PoolAdvice:
    shapes = _shapes(rows, lengths)
    per_node = shapes[-1]
    held: dict[str, int] = {}
    up: dict[str, int] = {}
    nodes: dict[str, set[str]] = {}
    for row in rows:
        held[row.hour] = held.get(row.hour, 0) + row.held_us
        up[row.hour] = up.get(row.hour, 0) + row.up_us
        nodes.setdefault(row.hour, set()).add(row.node)
    gpus = {hour: held[hour] / (lengths[hour] * US_PER_MS) for hour in held}
    needed = {hour: math.ceil(round(count / (threshold * per_node), 9)) for hour, count in gpus.items()}
    weekly: list[int | None] = [None] * (len(DAYS) * HOURS)
    for hour, count in needed.items():
        slot = slot_of(hour)
        weekly[slot] = max(count, weekly[slot] or 0)
    known = [count for count in weekly if count is not None]
    surplus_us = sum(
        max(0, up[hour] - (weekly[slot_of(hour)] or 0) * per_node * lengths[hour] * US_PER_MS) for hour in held
    )
    return PoolAdvice(
        pool=pool,
        gpus_per_node=per_node,
        nodes_now=len(nodes[max(nodes)]),
        min_nodes=min(known),
        max_nodes=max(known),
        weekly=tuple(weekly),
        hours=len(held),
        node_hours=sum(up.values()) / US_PER_HOUR / per_node,
        idle_node_hours=sum(1 for row in rows if not row.held_us),
        surplus_node_hours=surplus_us / US_PER_HOUR / per_node,
        full_hours=sum(1 for hour in held if held[hour] >= FULL * up[hour]),
        peak_gpus=max(gpus.values()),
        mean_gpus=math.fsum(gpus.values()) / len(gpus),
        shapes=shapes,
        unit_price=price,
        saving=None if price is None else exact_product(price, gpu_hours(surplus_us)),
    )


def slot_of(hour: str) -> int:
    """Return the position in the week of a local hour (`2026-10-05T14`); 0 is Monday 00:00."""
    return date.fromisoformat(hour.partition("T")[0]).weekday() * HOURS + hour_of_day(hour)


def _shapes(rows: Sequence[NodeHour], lengths: Mapping[str, int]) -> tuple[int, ...]:
    """Return the different numbers of GPUs per node in the pool, ascending. The number of a node is that of its largest
    hour."""
    most: dict[str, int] = {}
    for row in rows:
        count = max(1, round(row.up_us / (lengths[row.hour] * US_PER_MS)))
        most[row.node] = max(count, most.get(row.node, 0))
    return tuple(sorted(set(most.values())))


FileFormat = Literal["tfvars", "ansible", "karpenter"]
GPU = "nvidia.com/gpu"
VARIABLE = "gpu_node_pools"


def autoscaler_file(file_format: FileFormat, advised: Sequence[PoolAdvice], threshold: float, span: str) -> str:
    """Return the node counts as a file for an autoscaler. span: the window as text, for the comment."""
    return _FORMATS[file_format](advised, threshold, span)


def variables(advised: Sequence[PoolAdvice], threshold: float) -> dict[str, dict[str, Any]]:
    """Return the variables of each pool for Terraform and Ansible. weekly_nodes has 24 counts per weekday; an hour that
    the window does not contain has the largest count."""
    by_key: dict[str, dict[str, Any]] = {}
    for one in advised:
        key = one.pool.key
        if key in by_key:
            key = "_".join(filter(None, (one.pool.cluster, key, one.pool.capacity_type, one.pool.region)))
        by_key[key] = {
            "pool": one.pool.name,
            "gpu_model": one.pool.gpu_model,
            "gpus_per_node": one.gpus_per_node,
            "min_nodes": one.min_nodes,
            "max_nodes": one.max_nodes,
            "utilisation_threshold": threshold,
            "weekly_nodes": {
                day: [one.max_nodes if count is None else count for count in one.weekly[at * HOURS : (at + 1) * HOURS]]
                for at, day in enumerate(DAYS)
            },
        }
    return by_key


def _tfvars(advised: Sequence[PoolAdvice], threshold: float, _span: str) -> str:
    return json.dumps({VARIABLE: variables(advised, threshold)}, indent=2) + "\n"


def _ansible(advised: Sequence[PoolAdvice], threshold: float, span: str) -> str:
    text = yaml.safe_dump(
        {VARIABLE: variables(advised, threshold)}, sort_keys=False, default_flow_style=None, width=120
    )
    return f"# gputally advise autoscaler, {span}\n---\n{text}"


def _karpenter(advised: Sequence[PoolAdvice], threshold: float, span: str) -> str:
    """Return one YAML document for each named pool. It sets only the limit, because a Karpenter NodePool has neither a
    smallest size nor a schedule."""
    parts = [
        f"# gputally advise autoscaler, {span}, at most {threshold:.0%} of a node's GPUs held\n",
        "# kubectl apply --server-side --field-manager=gputally-advise -f FILE   # NodePools that exist\n",
    ]
    for one in advised:
        if not one.pool.named:
            parts.append(f"# {one.pool.name}: the inventory has no node pool of these nodes\n")
            continue
        document = {
            "apiVersion": "karpenter.sh/v1",
            "kind": "NodePool",
            "metadata": {"name": one.pool.name},
            "spec": {"limits": {GPU: str(one.max_nodes * one.gpus_per_node)}},
        }
        parts.append("---\n" + yaml.safe_dump(document, sort_keys=False))
    return "".join(parts)


_FORMATS: dict[FileFormat, Callable[[Sequence[PoolAdvice], float, str], str]] = {
    "tfvars": _tfvars,
    "ansible": _ansible,
    "karpenter": _karpenter,
}

_MOST_EXPONENT = 50.0
"""Largest exponent in Daly's model. A run with a larger exponent would practically never end."""


@dataclass(frozen=True, slots=True)
class RestartAssumptions:
    """Times that the ledger does not contain, in seconds.

    checkpoint_s: time to write a checkpoint.
    restart_s: time from an interruption until the job works again.
    between_s: mean time between interruptions of one node."""

    checkpoint_s: float
    restart_s: float
    between_s: float


@dataclass(frozen=True, slots=True)
class SpotAdvice:
    """The advice to run one job on spot capacity.

    gpu_hours: GPU-hours that the job held on other capacity than spot.
    cost: the cost of these hours.
    spot_cost: the cost of the same hours at the price book's spot price.
    nodes: the largest number of nodes that the job had at once.
    interval_s: the best interval between checkpoints.
    stretch: the factor by which checkpoints and interruptions lengthen the run; None if the run would never end.
    saving: cost - spot_cost × stretch, which can be negative; None if stretch is None."""

    team: str
    cluster: str
    namespace: str
    job: str
    gpu_hours: Decimal
    cost: Decimal
    spot_cost: Decimal
    nodes: int
    interval_s: float
    stretch: float | None
    saving: Decimal | None


def young_interval(checkpoint_s: float, between_s: float) -> float:
    """Return Young's estimate of the best interval between checkpoints, √(2δM), in seconds.

    checkpoint_s: the time to write a checkpoint, δ.
    between_s: the mean time between interruptions, M."""
    return sqrt(2 * checkpoint_s * between_s)


def daly_interval(checkpoint_s: float, between_s: float) -> float:
    """Return Daly's estimate of the best interval between checkpoints, in seconds. For the arguments see
    `young_interval`. Raises ValueError for values that are not above 0."""
    if checkpoint_s <= 0 or between_s <= 0:
        raise ValueError("the checkpoint time and the time between interruptions must be above 0")
    if checkpoint_s >= 2 * between_s:
        return between_s
    part = checkpoint_s / (2 * between_s)
    return young_interval(checkpoint_s, between_s) * (1 + sqrt(part) / 3 + part / 9) - checkpoint_s


def run_overhead(interval_s: float, checkpoint_s: float, restart_s: float, between_s: float) -> float | None:
    """Return the factor by which checkpoints and interruptions lengthen a run (1.1 is a tenth longer), by Daly's
    complete model; None if the run would practically never end."""
    segment, restart = (interval_s + checkpoint_s) / between_s, restart_s / between_s
    if segment + restart > _MOST_EXPONENT:
        return None
    return between_s * exp(restart) * expm1(segment) / interval_s


def job_of(row: Mapping[str, Any]) -> JobKey:
    """Return the key of the job in a row of the report's tables."""
    from accountant.ledger.protocols import JobKey

    return JobKey(row["cluster"], row["namespace"], row["job"])


def spot_advice(
    rows: Iterable[Mapping[str, Any]], nodes_of: Mapping[JobKey, int], assumed: RestartAssumptions
) -> tuple[SpotAdvice, ...]:
    """Return the advice for the jobs that could run on spot capacity, the largest saving first.

    rows: the report's table `spot`.
    nodes_of: the largest number of nodes that a job had at once. An interruption of any of them interrupts the job."""
    advised = [_spot_advice_for_job(row, max(1, nodes_of.get(job_of(row), 1)), assumed) for row in rows]
    return tuple(sorted(advised, key=lambda one: (-(one.saving or 0), one.team, one.cluster, one.namespace, one.job)))


def _spot_advice_for_job(row: Mapping[str, Any], nodes: int, assumed: RestartAssumptions) -> SpotAdvice:
    cost, gross = Decimal(str(row["cost"])), Decimal(str(row["saving_at_most"]))
    between_s = assumed.between_s / nodes
    interval_s = daly_interval(assumed.checkpoint_s, between_s)
    stretch = run_overhead(interval_s, assumed.checkpoint_s, assumed.restart_s, between_s)
    spot_cost = exact_sum([cost, -gross])
    saving = None if stretch is None else exact_sum([cost, -exact_product(spot_cost, Decimal(str(round(stretch, 6))))])
    return SpotAdvice(
        row["team"], *job_of(row), Decimal(str(row["gpu_hours"])), cost, spot_cost, nodes, interval_s,
        stretch, saving,
    )  # fmt: skip


_MIB_PER_GB = 954
"""MiB per GB in the name of a GPU model, which has 10^9 bytes."""
_MOST_REPLICAS = 4
"""Largest number of time-slicing replicas. With more replicas, the waiting times grow faster than the saving."""
Way = Literal["mig", "time-slicing", "none"]


@dataclass(frozen=True, slots=True)
class ModelUse:
    """The GPU model that a job used, and its memory use: the mean over the held time in MiB; None if unknown."""

    gpu_model: str
    memory_mib: float | None


@dataclass(frozen=True, slots=True)
class SharingAdvice:
    """The advice to run one job on a part of a GPU.

    gpu_model: "" if the job ran on several models, or on an unknown one.
    way: the kind of sharing; `none` if the job cannot share a GPU.
    profile: the MIG profile (`1g.10gb`, or `1g` if the memory of the model is unknown); "" without MIG.
    replicas: the number of time-slicing replicas; 0 without time-slicing.
    peak: the busy fraction of the GPU in the busiest hour.
    memory_mib: the mean memory use; None if unknown.
    saving: the largest possible saving; None without a price, or if the job cannot share a GPU.
    reason: why the job cannot share a GPU, or what to check before it does."""

    team: str
    cluster: str
    namespace: str
    job: str
    gpu_model: str
    way: Way
    profile: str
    replicas: int
    peak: float
    memory_mib: float | None
    saving: Decimal | None
    reason: str


def sharing_advice(rows: Iterable[Mapping[str, Any]], uses: Mapping[JobKey, ModelUse]) -> tuple[SharingAdvice, ...]:
    """Return the advice for the jobs that need only a part of a GPU, the largest saving first.

    rows: the report's table `hints`.
    uses: the model and memory use of each job that ran on a single GPU model."""
    advised = [_sharing_advice_for_job(row, uses.get(job_of(row))) for row in rows if row["kind"] == "slice"]
    return tuple(sorted(advised, key=lambda one: (-(one.saving or 0), one.team, one.cluster, one.namespace, one.job)))


def _sharing_advice_for_job(row: Mapping[str, Any], use: ModelUse | None) -> SharingAdvice:
    peak = float(row["peak_busy_gpus"])
    saving = None if row.get("saving_at_most") is None else Decimal(str(row["saving_at_most"]))
    model, memory = (use.gpu_model, use.memory_mib) if use is not None else ("", None)
    way, profile, replicas, reason = _sharing_way(model, memory, peak)
    return SharingAdvice(
        row["team"], *job_of(row), model, way, profile, replicas, peak, memory,
        saving if way != "none" else None, reason,
    )  # fmt: skip


def _sharing_way(model: str, memory: float | None, peak: float) -> tuple[Way, str, int, str]:
    """Return (way, profile, replicas, reason) of the advice for a job. memory: its mean use in MiB; None if unknown."""
    gpu = parse_gpu_model(model)
    if not model:
        return "none", "", 0, "the job ran on several GPU models, or on an unknown one"
    memory_gb = gpu.memory_gb or usual_memory_gb(model)
    whole_mib = memory_gb * _MIB_PER_GB if memory_gb else None
    sizes = mig_sizes(model, memory_gb)
    for size in sizes:
        room = None if whole_mib is None else whole_mib * size.memory
        if size.compute >= ceil(round(peak * size.compute_of, 6)) and (
            memory is None or room is None or memory <= room
        ):
            return "mig", size.name, 0, _memory_note(memory)
    if sizes:
        return "none", "", 0, "its memory needs the whole GPU"
    by_time = floor(1 / peak) if peak > 0 else _MOST_REPLICAS
    by_memory = floor(whole_mib / memory) if whole_mib and memory else by_time
    replicas = min(by_time, by_memory, _MOST_REPLICAS)
    if replicas < 2:
        return "none", "", 0, "its memory needs the whole GPU"
    return "time-slicing", "", replicas, f"{_memory_note(memory)}; time-slicing isolates neither memory nor faults"


def _memory_note(memory: float | None) -> str:
    if memory is None:
        return "the memory use is unknown: check it first"
    return "the memory use is a mean: check its peak first"
