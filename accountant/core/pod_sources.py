"""Combines what a pod's node and the API server report about it."""

from __future__ import annotations

from msgspec import structs

from agent.wire import PodFacts


def merge_sources(node: PodFacts | None, cluster: PodFacts | None) -> PodFacts:
    """Combines the facts from the pod's node and from the API server.

    Created, scheduled and started are the earliest known instants. Owners and workload come from the API server if it
    has them, the queue from `queue_of`, and labels, end and the reason of a stop from the newer observation that has
    any. Everything else comes from the newer observation."""
    if node is None or cluster is None:
        one = node or cluster
        assert one is not None
        return one
    newer, older = sorted((node, cluster), key=lambda fact: fact.observed_ms, reverse=True)

    def first(name: str) -> int | None:
        return min((at for at in (getattr(newer, name), getattr(older, name)) if at is not None), default=None)

    return structs.replace(
        newer,
        # The node sees only the nearest owner of the pod. The API server sees the whole chain.
        owners=cluster.owners or node.owners,
        workload=cluster.workload or node.workload,
        queue_ref=queue_of(node, cluster),
        labels=newer.labels or older.labels,
        created_ms=first("created_ms"),
        scheduled_ms=first("scheduled_ms"),
        started_ms=first("started_ms"),
        ended_ms=newer.ended_ms if newer.ended_ms is not None else older.ended_ms,
        stop=newer.stop if newer.stop is not None else older.stop,
    )


def queue_of(node: PodFacts | None, cluster: PodFacts | None) -> str:
    """The queue that a pod names. If its node and the API server report different queues, the one that was
    settled first (when the pod was placed) counts; if neither is settled, that of the newer observation.
    `holder_origins.sql` implements the same rule."""
    if cluster is None or not cluster.queue_ref:
        return node.queue_ref if node is not None else ""
    if node is None or node.queue_ref in ("", cluster.queue_ref) or cluster.queue_ref.startswith(f"{node.queue_ref}@"):
        return cluster.queue_ref
    return cluster.queue_ref if _age_rank(cluster) <= _age_rank(node) else node.queue_ref


def _age_rank(fact: PodFacts) -> int:
    """A sort key. Facts with a settled queue come first, the earliest settled one in front. The others follow,
    newest first."""
    settled = getattr(fact, "queue_ms", None)
    return settled if settled is not None else UNSETTLED - fact.observed_ms


UNSETTLED = 9_000_000_000_000_000
"""Later than every instant."""
