"""The status of a ledger as given, for ledgers in memory. That of `tests.fakes.list_ledger` keeps the laws of a status
(tests/moment)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field

from accountant.core.claim_overlap import Span
from accountant.ledger.protocols import AgentFacts, NodeFacts
from accountant.wire.policy_models import PolicyVersion
from gputally.base.units import MS_PER_HOUR, MS_PER_MINUTE


@dataclass(frozen=True)
class FixedStatus:
    """accountant.ledger.protocols.Status.

    gpus: the number that are capacity at any time.
    seen: the GPUs of each node with the span in which they were there.
    content: what the mark is made of."""

    last_act: int = 0
    extent: Span = (0, 0)
    newest_by_cluster: Mapping[str, int] = field(default_factory=dict)
    newest_by_node: Mapping[tuple[str, str], int] = field(default_factory=dict)
    agents: Mapping[tuple[str, str], AgentFacts] = field(default_factory=dict)
    clusters: frozenset[str] = frozenset()
    teams: frozenset[str] = frozenset()
    nodes: tuple[NodeFacts, ...] = ()
    versions: Sequence[PolicyVersion] = ()
    gpus: int = 1
    seen: Mapping[tuple[str, str, str], Span] = field(default_factory=dict)
    content: object = None

    @property
    def newest_ms(self) -> int:
        return self.extent[1]

    def policies(self, start_ms: int, end_ms: int) -> list[PolicyVersion]:
        before = [version for version in self.versions if version.effective_ms <= start_ms]
        return [*before[-1:], *(one for one in self.versions if start_ms < one.effective_ms < end_ms)]

    def watermark(
        self, at_ms: int, min_coverage: float, shard: str | None = None, cluster: str | None = None
    ) -> int | None:
        return at_ms - MS_PER_MINUTE

    def window(self, *question: object, **of: object) -> None:
        """Nothing is in memory."""

    def gpus_at(self, start_ms: int, end_ms: int) -> Mapping[tuple[str, str], int]:
        there = (key for key, (first, last) in self.seen.items() if first < end_ms and last > start_ms)
        return Counter((cluster, node) for cluster, node, _ in there)

    def gpu_hours(self, start_ms: int, end_ms: int, cluster: str | None = None) -> int:
        return (end_ms - start_ms) // MS_PER_HOUR * self.gpus

    def recent_span(self, until_ms: int, length_ms: int) -> Span:
        return until_ms - length_ms, until_ms

    def mark(self, start_ms: int, end_ms: int) -> Hashable:
        return repr(self.content)
