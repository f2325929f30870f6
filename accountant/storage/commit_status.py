"""The status of one commit, from the `State` of it: no table is read, so taking one costs nothing.

What takes long to derive (`extent`, `newest_by_cluster`, `clusters`) is computed once for all commits that change no
GPU's lifetime (accountant.storage.gpu_lifetimes)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from accountant.core.claim_overlap import Span
from accountant.ledger.protocols import AgentFacts, NodeFacts, Status
from accountant.ledger.team_assignment import policies_between
from accountant.prices.price_book import PriceBook
from accountant.storage.gpu_lifetimes import gpus_at
from accountant.storage.ledger_state import Mark, State
from accountant.storage.query.window_query import Windows, watermark
from accountant.wire.policy_models import Measure, PolicyVersion, UsageWindow, WindowSpec
from gputally.base.units import MS_PER_HOUR


@dataclass(frozen=True, slots=True)
class CommitStatus(Status):
    """accountant.ledger.protocols.Status of a ledger in DuckDB."""

    _state: State
    _windows: Windows

    @property
    def extent(self) -> Span:
        return self._state.fleet.extent

    @property
    def newest_ms(self) -> int:
        return self._state.fleet.newest_end_ms

    @property
    def newest_by_cluster(self) -> Mapping[str, int]:
        return self._state.fleet.newest_by_cluster

    @property
    def newest_by_node(self) -> Mapping[tuple[str, str], int]:
        return self._state.fleet.newest_by_node

    @property
    def agents(self) -> Mapping[tuple[str, str], AgentFacts]:
        known = self._state.fleet.nodes.items()
        return {key: node.agent for key, node in known if node.agent is not None}

    @property
    def clusters(self) -> frozenset[str]:
        return self._state.fleet.clusters

    @property
    def teams(self) -> frozenset[str]:
        queues = self._state.policies[-1].queues.values() if self._state.policies else ()
        spaces = self._state.fleet.namespaces.values()
        named = {q.team for q in queues if q.team} | {s.team for s in spaces} | {t for s in spaces for t in s.teams}
        return frozenset(named - {""})

    @property
    def nodes(self) -> tuple[NodeFacts, ...]:
        known = self._state.fleet.nodes
        return tuple(known[key] for key in sorted(known) if known[key].listed)

    @property
    def last_act(self) -> int:
        return self._state.acts

    @property
    def archived_act(self) -> int:
        """The number of the newest act in the archive; 0 without one."""
        return self._state.archived_registers.get("act", 0)

    @property
    def parts(self) -> int:
        """The number of archive parts that the ledger has recorded."""
        return self._state.parts

    def policies(self, start_ms: int, end_ms: int) -> list[PolicyVersion]:
        known = [rules.version for rules in self._state.policies if rules.version is not None]
        return policies_between(known, start_ms, end_ms)

    def watermark(
        self, at_ms: int, min_coverage: float, shard: str | None = None, cluster: str | None = None
    ) -> int | None:
        return watermark(self._state.fleet, at_ms, min_coverage, shard, cluster)

    def window(
        self,
        spec: WindowSpec,
        at_ms: int,
        measure: Measure,
        min_coverage: float,
        *,
        book: PriceBook | None = None,
        shard: str | None = None,
        cluster: str | None = None,
    ) -> UsageWindow | None:
        return self._windows.window(None, self._state, spec, at_ms, measure, min_coverage, book, shard, cluster)

    def gpus_at(self, start_ms: int, end_ms: int) -> Mapping[tuple[str, str], int]:
        return gpus_at(self._state.fleet, start_ms, end_ms)

    def gpu_hours(self, start_ms: int, end_ms: int, cluster: str | None = None) -> int:
        fleet = self._state.fleet
        if cluster is not None and cluster not in fleet.clusters:
            return 0
        lives = fleet.census_of(cluster).lives().items()
        return (
            sum(max(0, min(end, end_ms) - max(begin, start_ms)) * count for (begin, end), count in lives) // MS_PER_HOUR
        )

    def recent_span(self, until_ms: int, length_ms: int) -> Span:
        """The span of exactly this length that ends at `until_ms`."""
        return until_ms - length_ms, until_ms

    def mark(self, start_ms: int, end_ms: int) -> Mark:
        """See accountant.storage.ledger_state."""
        return self._state.changes.mark(start_ms, end_ms, self._state.fleet.census)
