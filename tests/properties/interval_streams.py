"""Generates streams of intervals of two nodes, and computes plainly which intervals count."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

from hypothesis import strategies as st
from msgspec.structs import replace

from accountant.core.claim_overlap import ClaimRank, TimeClaim, resolve_overlaps
from accountant.core.gpu_time_accounts import AccountVector, part, split
from accountant.core.window_decay import age_weights, combine
from accountant.ledger.protocols import Receipt
from accountant.storage.duckdb_ledger import DuckLedger
from accountant.wire.policy_models import Policy, QueuePolicy
from agent.wire import Batch, Gap, UsageInterval
from gputally.base.units import BUCKET_MS
from tests.usage_records import batch, interval, pod_facts, pod_holder

START_MS = 1_790_812_800_000
SPAN_MS = 5 * BUCKET_MS
# A pod runs on one node: the ledger believes the node that spoke of it first, so an order would decide otherwise.
PODS_OF = {"n1": ("a", "b", "c"), "n2": ("d", "e", "f")}
QUEUE_OF = {"a": "left", "b": "right", "d": "left", "e": "right"}
POLICY = Policy(
    queues=(
        QueuePolicy(name="top"),
        QueuePolicy(name="left", parent="top", refs=("kai:left",)),
        QueuePolicy(name="right", parent="top", refs=("kai:right",)),
    )
)


@dataclass(frozen=True)
class Stream:
    """One outbox: its sets in order. A set is a list of rows without numbers."""

    node: str
    epoch: str
    sets: tuple[tuple[UsageInterval, ...], ...]


def shape(
    gpu: str, start: int, end: int, pods: list[str | None], weights: list[int], busy: list[int | None], lost: bool
) -> tuple[UsageInterval, ...]:
    whole = (end - start) * 1000
    edges = [whole * sum(weights[:i]) // sum(weights) for i in range(len(weights) + 1)]
    rows = []
    for i, pod in enumerate(pods):
        capacity = edges[i + 1] - edges[i]
        ratio = busy[i]
        rows.append(
            interval(
                start, gpu, pod_holder(pod) if pod else None, span_ms=end - start, gpu_model="H100",
                capacity_us=capacity, allocated_us=capacity if pod else 0,
                busy_us=None if ratio is None or not pod else capacity * ratio // 97,
                energy_uj=None if ratio is None else capacity * 3 + ratio, method="device",
                health="lost" if lost else "ok",
                gaps=(Gap(start, start + (end - start) // 3, "timeout"),) if ratio == 7 else (),
            )
        )  # fmt: skip
    return tuple(rows)


@st.composite
def streams(draw: st.DrawFn) -> list[Stream]:
    """Generate two nodes whose intervals cover their GPU with gaps, and a third outbox that claims time of the first
    GPU."""
    found = []
    for node, gpu, epoch in (("n1", "g1", "e1"), ("n2", "g2", "e1"), ("n1", "g1", "e0")):
        cuts = sorted(draw(st.sets(st.integers(0, SPAN_MS), min_size=2, max_size=7 if epoch == "e1" else 3)))
        sets = []
        for start, end in pairwise(cuts):
            for begin in range(start, end, BUCKET_MS):
                rows = draw(st.integers(1, 3))
                sets.append(
                    shape(
                        gpu, START_MS + begin, START_MS + min(end, begin + BUCKET_MS),
                        draw(st.lists(st.sampled_from([*PODS_OF[node], None]), min_size=rows, max_size=rows)),
                        draw(st.lists(st.integers(1, 5), min_size=rows, max_size=rows)),
                        draw(st.lists(st.one_of(st.none(), st.integers(0, 120)), min_size=rows, max_size=rows)),
                        draw(st.integers(0, 9)) == 0,
                    )
                )  # fmt: skip
        found.append(Stream(node, epoch, tuple(sets)))
    return found


def batches(stream: Stream, size: int) -> list[Batch]:
    """Return the stream in batches of `size` sets; the facts of all pods come first."""
    told = [
        pod_facts(pod, START_MS, node=stream.node, queue_ref=f"kai:{QUEUE_OF[pod]}" if pod in QUEUE_OF else "")
        for pod in PODS_OF[stream.node]
    ]
    made = [batch((), told, node=stream.node, epoch=stream.epoch)]
    seq = len(told) + 1
    for at in range(0, len(stream.sets), size):
        rows = [row for item in stream.sets[at : at + size] for row in item]
        numbered = tuple(replace(row, seq=seq + i) for i, row in enumerate(rows))
        made.append(replace(made[0], first_seq=seq, facts=(), intervals=numbered))
        seq += len(rows)
    return made


# --- the oracle: every row, cut and added in plain Python -----------------------------------


@dataclass(frozen=True)
class Kept:
    gpu: str
    start_ms: int
    end_ms: int
    rows: tuple[tuple[str | None, AccountVector], ...]


def kept(found: list[Stream]) -> list[Kept]:
    claims: dict[str, list[tuple[TimeClaim, tuple[UsageInterval, ...]]]] = defaultdict(list)
    for stream in found:
        seq = len(PODS_OF[stream.node]) + 1
        for rows in stream.sets:
            rank = ClaimRank(False, stream.epoch, seq, f"c/{stream.node}")
            claims[rows[0].gpu_uuid].append((TimeClaim(rank, rows[0].start_ms, rows[0].end_ms), rows))
            seq += len(rows)
    result = []
    for gpu, known in claims.items():
        spans = resolve_overlaps(claim for claim, _ in known)
        for claim, rows in known:
            cells = [split(row) for row in rows]
            payers = [row.holder.uid if row.holder and row.health == "ok" else None for row in rows]
            for begin, end in spans[claim.rank]:
                for low in range(begin - begin % BUCKET_MS, end, BUCKET_MS):
                    a, b = max(begin, low), min(end, low + BUCKET_MS)
                    held = part(cells, claim.end_ms - claim.start_ms, a - claim.start_ms, b - claim.start_ms)
                    result.append(Kept(gpu, a, b, tuple(zip(payers, held, strict=True))))
    return result


def inside(item: Kept, start: int, end: int) -> list[tuple[str | None, AccountVector]]:
    low, high = max(start, item.start_ms), min(end, item.end_ms)
    if low >= high:
        return []
    cells = part([c for _, c in item.rows], item.end_ms - item.start_ms, low - item.start_ms, high - item.start_ms)
    return [(payer, c) for (payer, _), c in zip(item.rows, cells, strict=True)]


def book(ledger: DuckLedger, group: list[Batch]) -> None:
    for result in ledger.append(group, START_MS + 2 * SPAN_MS):
        assert isinstance(result, Receipt)
        assert result.quarantined == 0


def total(terms: Iterable[tuple[int, int]], at_ms: int, half_life_s: int | None) -> int:
    """Return the decayed sum of (end, whole units) at `at_ms`."""
    ends, values = zip(*found, strict=True) if (found := list(terms)) else ((), ())
    return combine(values, age_weights(ends, at_ms, half_life_s))
