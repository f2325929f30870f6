"""The registers that are published beside the figures: what the ledger knows of policies, prices, acts (journal
entries), nodes, epochs, outboxes, pods and decisions, as rows of the lake."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final
from zoneinfo import ZoneInfo

import msgspec

from accountant.bookkeeping.price_book_versions import PriceBooks
from accountant.core.periods import Month, local_date
from accountant.lake import tables
from accountant.lake.own_tables import OwnLedger
from accountant.lake.table_rows import instant
from accountant.ledger.protocols import NodeFacts, ReadableLedger
from agent.wire import PodFacts

Rows = list[dict[str, Any]]
_FAR_MS: Final = 2**53
_EVERY_DECISION: Final = 10**9


def registers(
    ledger: OwnLedger, prices: PriceBooks, name: str, timezone: ZoneInfo
) -> Iterator[tuple[tables.LakeTable, str, Rows]]:
    """Each register, the column that divides it into parts ("": one part), and its rows."""
    yield tables.POLICIES, "", [
        {
            "ledger": name, "version": one.version, "effective": instant(one.effective_ms),
            "effective_ms": one.effective_ms, "policy": one.policy.model_dump_json(),
        }
        for one in ledger.status().policies(0, _FAR_MS)
    ]  # fmt: skip
    yield tables.PRICES, "", list(_prices(prices, name))
    with ledger.moment() as moment:
        acts, epochs = moment.acts(), moment.epochs()
    yield tables.ACTS, "", [
        {
            "ledger": name, "number": act.number, "at": instant(act.at_ms), "at_ms": act.at_ms, "kind": act.kind,
            "subject": act.subject, "who": act.who, "reason": act.reason, "content": act.content,
            "digest": act.digest,
        }
        for act in acts
    ]  # fmt: skip
    newest = ledger.status().newest_by_node
    yield tables.NODES, "", [
        {
            "ledger": name, "cluster": node.cluster, "node": node.name, "pool": node.pool, "region": node.region,
            "capacity_type": node.capacity_type, "facts": msgspec.json.encode(node).decode(),
            "newest_ms": newest.get((node.cluster, node.name)),
        }
        for node in _nodes(ledger)
    ]  # fmt: skip
    yield tables.EPOCHS, "", [
        {
            "ledger": name, "cluster": one.key.cluster, "namespace": one.key.namespace, "job": one.key.job,
            "epoch": one.epoch, "at_ms": one.at_ms, "who": one.who,
        }
        for one in epochs
    ]  # fmt: skip
    yield tables.OUTBOXES, "", [
        {"ledger": name, "cluster": cluster, "node": node, "epoch": epoch, "number": number}
        for (cluster, node, epoch), number in ledger.outboxes().items()
    ]  # fmt: skip
    yield tables.PODS, "month", _pods(ledger, name, timezone)
    yield tables.DECISIONS, "day", _decisions(ledger, name, timezone)


def _nodes(ledger: ReadableLedger) -> Iterator[NodeFacts]:
    """Also the nodes that no inventory lists, of which there are records or an agent's report alone."""
    status = ledger.status()
    facts_of, agents = {(node.cluster, node.name): node for node in status.nodes}, status.agents
    for key in sorted({*facts_of, *agents, *status.newest_by_node}):
        yield facts_of.get(key) or NodeFacts(*key, listed=False, agent=agents.get(key))


def _prices(prices: PriceBooks, name: str) -> Iterator[dict[str, Any]]:
    for version_of in prices.versions:
        for row in version_of.book.rows:
            yield {
                "ledger": name, "price_book": version_of.version, "taken": instant(version_of.at_ms),
                "price_row": row.id, "gpu_model": row.model, "pool": row.pool, "region": row.region,
                "capacity_type": row.capacity_type, "price": row.price, "per": row.per,
                "currency": version_of.book.currency, "row": row.model_dump_json(),
            }  # fmt: skip


def _pods(ledger: ReadableLedger, name: str, timezone: ZoneInfo) -> Rows:
    with ledger.moment() as moment:
        pods = list(moment.pods(0, _FAR_MS, placed=True))
    return [
        {
            "ledger": name,
            "month": str(Month.of(_first_seen_ms(pod.facts), timezone)),
            "cluster": pod.cluster, "uid": pod.facts.uid, "namespace": pod.facts.namespace, "pod": pod.facts.name,
            "job": pod.key.job, "team": pod.team, "queue": pod.queue,
            **{
                name: None if (at := getattr(pod.facts, f"{name}_ms")) is None else instant(at)
                for name in ("created", "scheduled", "started", "ended")
            },
            "facts": msgspec.json.encode(pod.facts).decode(),
        }
        for pod in pods
    ]  # fmt: skip


def _decisions(ledger: ReadableLedger, name: str, timezone: ZoneInfo) -> Rows:
    with ledger.moment() as moment:
        decisions = moment.decisions(0, _FAR_MS, _EVERY_DECISION)
    return [
        {
            "ledger": name, "day": local_date(one.at_ms, timezone), "cluster": one.cluster, "id": one.id,
            "at": instant(one.at_ms), "at_ms": one.at_ms, "kind": one.kind, "subject": one.subject,
            "decision": one.model_dump_json(),
        }
        for one in decisions
    ]  # fmt: skip


def _first_seen_ms(facts: PodFacts) -> int:
    known = (facts.created_ms, facts.scheduled_ms, facts.started_ms)
    return next((at for at in known if at is not None), facts.observed_ms)
