"""The nodes of a span with what their GPUs did, and which of them a list has, in which order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

from accountant.core.record_age import is_old
from accountant.ledger.protocols import AgentFacts, Down, GpuErrorCount, GpuHealth, Moment, NodeFacts
from accountant.ledger.usage import EarlierSpan, Where, sum_of_usage_lines
from accountant.wire.dimensions import OF_LABELS
from accountant.wire.list_order import in_order
from accountant.wire.option_types import Order
from accountant.wire.usage_cost_and_job_models import Accounts, GpuErrorLine, GpuNeed, UsageLine
from gputally.base.version import is_older, release_order


@dataclass(frozen=True, slots=True)
class Machine:
    """A node during a span, with its known facts.

    gpus: number of GPUs that it had in the span.
    down: why it cannot be used now, "" if it can.
    newest_ms: the end of its newest record; None if unknown.
    agent: what its agent last said of itself; None if unknown.
    outages: when it could not be used in the span, the newest first.
    lost_us: GPU-µs that are `down` because a GPU was lost, while the node itself was up.
    span: which the list shows; errors that were all before or after it are not of it.
    before: its accounts in the span before; None if it is not compared, or nothing is known of its cluster then."""

    cluster: str
    name: str
    models: tuple[str, ...]
    pool: str
    capacity_type: str
    gpus: int
    accounts: Accounts
    down: str
    newest_ms: int | None
    agent: AgentFacts | None
    outages: tuple[Down, ...]
    before: Accounts | None = None
    lost_us: int = 0
    span: tuple[int, int] | None = None

    @property
    def then(self) -> Machine | None:
        """The node with its accounts of the span before; None if it is not compared."""
        return None if self.before is None else replace(self, accounts=self.before)

    @property
    def utilisation(self) -> float | None:
        return self.accounts.utilisation

    @property
    def agent_version(self) -> str | None:
        """The release of its agent; None if unknown."""
        return (self.agent.version or None) if self.agent is not None else None

    @property
    def gpus_told(self) -> tuple[GpuHealth, ...]:
        """What its agent reports of the errors of its GPUs; none if it reports nothing."""
        return (self.agent.gpus or ()) if self.agent is not None else ()

    @property
    def errors(self) -> tuple[GpuErrorLine, ...] | None:
        """The errors of its GPUs in the span, the newest first; None if its agent does not report them."""
        return errors_of(self.gpus_told, self.span) if self.gpus_told else None

    @property
    def errors_unread(self) -> tuple[str, ...]:
        """`KIND: REASON` of kinds of errors of which its agent cannot know."""
        return tuple(sorted({reason for gpu in self.gpus_told for reason in gpu.unread}))

    @property
    def needs(self) -> tuple[GpuNeed, ...]:
        """The actions that faults of its GPUs require."""
        return needs_of(self.gpus_told)

    @property
    def has_older_agent(self) -> bool:
        """Whether its agent is of an earlier release than this program; not if it is unknown."""
        return is_older(self.agent_version or "")

    def is_silent(self, now_ms: int) -> bool:
        """Whether its newest record is too old to describe the present."""
        return self.newest_ms is not None and is_old(self.newest_ms, now_ms)


def errors_of(gpus: Iterable[GpuHealth], span: tuple[int, int] | None = None) -> tuple[GpuErrorLine, ...]:
    """The errors of GPUs, the newest first. span: without those of which it is known that none was in it."""
    start_ms, end_ms = span or (None, None)
    lines = [
        GpuErrorLine(
            gpu=gpu.gpu_uuid, kind=error.kind, count=error.count, since_ms=error.since_ms, last_ms=error.last_ms
        )
        for gpu in gpus
        for error in gpu.errors
        if (start_ms is None or error.last_ms is None or error.last_ms >= start_ms)
        and (end_ms is None or any(at is None or at < end_ms for at in _begun(error)))
    ]
    return tuple(sorted(lines, key=lambda line: (-(line.last_ms or 0), line.gpu, line.kind)))


def _begun(error: GpuErrorCount) -> tuple[int | None, ...]:
    """When errors were: since they are counted, and the newest one, which may be from before."""
    return (error.since_ms,) if error.last_ms is None else (error.since_ms, error.last_ms)


def needs_of(gpus: Iterable[GpuHealth]) -> tuple[GpuNeed, ...]:
    """The actions that faults of GPUs require, by GPU."""
    told = ((gpu.gpu_uuid, *need.partition(": ")) for gpu in gpus for need in gpu.needs)
    return tuple(GpuNeed(gpu=gpu, action=action, cause=cause) for gpu, action, _, cause in told)


def machines(
    ledger: Moment,
    start_ms: int,
    end_ms: int,
    where: Where | None = None,
    timezone: str = "UTC",
    before: EarlierSpan | None = None,
) -> tuple[Machine, ...]:
    """The nodes with records in the span or with facts, sorted by cluster and name.

    where: only nodes with time that matches, and only this time; and nodes without any that the filter names.
    before: an earlier span to compare with; its nodes are listed too."""
    status = ledger.status()
    facts_of = {(node.cluster, node.name): node for node in status.nodes}
    lines: dict[tuple[str, str], list[UsageLine]] = {}
    for line in ledger.usage((start_ms, end_ms), ("cluster", "node", "gpu_model"), where, timezone).lines():
        lines.setdefault((line.key["cluster"], line.key["node"]), []).append(line)
    compared = None if before is None else before.known
    earlier = {
        (line.key["cluster"], line.key["node"]): line.accounts_gpu_us
        for line in (ledger.usage(compared, ("cluster", "node"), where, timezone).lines() if compared else ())
    }
    devices, newest, agents = status.gpus_at(start_ms, end_ms), status.newest_by_node, status.agents
    rows = []
    named = {key for key, fact in facts_of.items() if _is_named(fact, where or {})}
    for key in sorted({*lines, *earlier, *named}):
        fact, of_node = facts_of.get(key), lines.get(key, [])
        whole = sum_of_usage_lines({}, of_node) if of_node else None
        down = next((node.reason for node in reversed(fact.down) if node.end_ms is None), "") if fact else ""
        rows.append(
            Machine(
                *key,
                models=tuple(sorted({line.key["gpu_model"] for line in of_node})),
                pool=fact.pool if fact else "",
                capacity_type=fact.capacity_type if fact else "",
                gpus=devices.get(key, 0),
                accounts=whole.accounts_gpu_us if whole else Accounts(),
                lost_us=max(0, whole.accounts_gpu_us.down - (whole.node_down_us or 0)) if whole else 0,
                down=down,
                newest_ms=newest.get(key),
                agent=agents.get(key),
                outages=tuple(
                    one
                    for one in reversed(fact.down if fact else ())
                    if one.start_ms < end_ms and (one.end_ms is None or one.end_ms > start_ms)
                ),
                span=(start_ms, end_ms),
                before=earlier.get(key, Accounts()) if before is not None and key[0] in before.clusters else None,
            )
        )
    return tuple(rows)


def _is_named(fact: NodeFacts, where: Where) -> bool:
    """Whether the facts of a node alone match a filter."""
    names = {"cluster": fact.cluster, "node": fact.name, **{name: fact.value(name) for name in OF_LABELS}}
    return all(name in names and names[name] in values for name, values in where.items())


class NodeChoice(NamedTuple):
    """Which nodes a list has, and in which order.

    search: a text in CLUSTER/NODE, in any case; "" for all.
    order: by a column of `NODE_ORDERS`; what is unknown is last."""

    search: str = ""
    order: Order = Order("name")


_RANKS: Final[Mapping[str, Callable[[Machine], Any]]] = {
    "name": lambda node: (node.cluster, node.name),
    "cluster": lambda node: node.cluster,
    "pool": lambda node: (node.pool, node.capacity_type) if node.pool else None,
    "capacity_type": lambda node: node.capacity_type or None,
    "model": lambda node: node.models or None,
    "silent": lambda node: node.newest_ms,
    "agent": lambda node: (
        None if node.agent_version is None else (release_order(node.agent_version) or ((), False), node.agent_version)
    ),
    "gpus": lambda node: node.gpus,
    "errors": lambda node: max((error.last_ms or 0 for error in node.errors or ()), default=None),
    "capacity": lambda node: node.accounts.total,
    "held": lambda node: node.accounts.allocated,
    "busy": lambda node: node.accounts.busy,
    "utilisation": lambda node: node.utilisation,
    "idle": lambda node: node.accounts.allocated_idle,
    "unknown": lambda node: node.accounts.allocated_unknown,
    "unallocated": lambda node: node.accounts.unallocated,
    "unmetered": lambda node: node.accounts.unmetered,
    "down": lambda node: node.accounts.down,
}


def chosen(nodes: Sequence[Machine], choice: NodeChoice) -> tuple[Machine, ...]:
    """The chosen nodes, in their order."""
    text = choice.search.casefold()
    found = [node for node in nodes if not text or text in f"{node.cluster}/{node.name}".casefold()]
    column, descending = choice.order
    return tuple(in_order(found, _RANKS[column], descending=descending))
