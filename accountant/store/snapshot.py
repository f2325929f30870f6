"""One moment of the ledger: every question answered from the same rows, policies and nodes.

A report asks many questions; between two of them others write. What one question found, the next may be answered
from (accountant.store.memory). Not thread-safe: it is one cursor.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from accountant.answers import coverage
from accountant.books.held import Held, Hours, JobName, Peak
from accountant.books.tabled import Tabled
from accountant.ledger import IdlePhases, Lent
from accountant.progress import EpochReport, JobKey
from accountant.store import registers
from accountant.store.database import Cursor
from accountant.store.holdings import held, hours, peaks
from accountant.store.jobs import Extent, extents, jobs_in
from accountant.store.lending import lent
from accountant.store.memory import Memory
from accountant.store.phasing import idle_phases
from accountant.store.pods import pods
from accountant.store.progress import epochs_between, read_epochs
from accountant.store.state import State
from accountant.store.tabulating import tabled
from accountant.store.usage import usage, usage_between
from accountant.store.windows.inservice import gpus_at
from accountant.wire import Dimension, PolicyVersion, UsageLine
from accountant.work.waits import KnownPod


class Snapshot:
    """accountant.ledger.Questions, and pods, jobs and epochs."""

    def __init__(self, cursor: Cursor, state: State) -> None:
        self._cursor = cursor
        self._state = state
        self._memory = Memory()

    def usage(
        self,
        start_ms: int,
        end_ms: int,
        by: Sequence[Dimension],
        where: Mapping[Dimension, Collection[str]] | None = None,
        timezone: str = "UTC",
    ) -> list[UsageLine]:
        return usage(self._cursor, self._state, start_ms, end_ms, by, where, timezone, self._memory)

    def held(self, edges: Sequence[int], timezone: str = "UTC") -> Held:
        """What every holder held in each stretch between two neighbouring edges, which ascend."""
        return held(self._cursor, self._state, edges, timezone)

    def hours(self, start_ms: int, end_ms: int, timezone: str = "UTC") -> Hours:
        """What `usage` says by team, queue and hour, as columns."""
        return hours(self._cursor, self._state, start_ms, end_ms, timezone)

    def tabled(self, edges: Sequence[int], cuts: Sequence[Sequence[Dimension]], timezone: str = "UTC") -> list[Tabled]:
        """What `usage` and `idle_phases` say by each of the cuts and PRICED_BY, in each stretch between two edges."""
        return tabled(self._cursor, self._state, edges, cuts, timezone)

    def peaks(
        self, start_ms: int, end_ms: int, jobs: Collection[tuple[str, str]], timezone: str = "UTC"
    ) -> dict[JobName, Peak]:
        """The most that these jobs, by namespace and name, held and used in any one hour."""
        return peaks(self._cursor, self._state, start_ms, end_ms, jobs, timezone, self._memory)

    def idle_phases(
        self, start_ms: int, end_ms: int, by: Sequence[Dimension], timezone: str = "UTC"
    ) -> list[IdlePhases]:
        return idle_phases(self._cursor, self._state, start_ms, end_ms, by, timezone)

    def lent(self, start_ms: int, end_ms: int, by: Sequence[Dimension], timezone: str = "UTC") -> list[Lent]:
        return lent(self._cursor, self._state, start_ms, end_ms, by, timezone)

    def policies(self, start_ms: int, end_ms: int) -> list[PolicyVersion]:
        known = [rules.version for rules in self._state.policies if rules.version is not None]
        return registers.policies_between(known, start_ms, end_ms)

    def coverage(self, start_ms: int, end_ms: int) -> float:
        return coverage(self.usage(start_ms, end_ms, ()))

    def pods(
        self,
        start_ms: int,
        end_ms: int,
        *,
        of: Collection[JobKey] | None = None,
        waiting: bool = False,
        placed: bool = False,
    ) -> list[KnownPod]:
        """Pods that existed in the span, by cluster and uid. of, waiting, placed: see accountant.store.pods."""
        return pods(self._cursor, self._state, start_ms, end_ms, of=of, waiting=waiting, placed=placed)

    def jobs_in(self, cluster: str, namespace: str) -> frozenset[str]:
        """Jobs (`Kind/name`) that pods of the namespace belonged to."""
        return jobs_in(self._cursor, cluster, namespace)

    def gpus_at(self, start_ms: int, end_ms: int) -> Mapping[tuple[str, str], int]:
        """By cluster and node: how many GPUs were there for a part of the span."""
        return gpus_at(self._state.fleet, start_ms, end_ms)

    def usage_between(
        self,
        edges: Sequence[int],
        by: Sequence[Dimension],
        where: Mapping[Dimension, Collection[str]] | None = None,
        timezone: str = "UTC",
    ) -> list[list[UsageLine]]:
        """`usage` of each stretch between two neighbouring edges, which ascend."""
        return usage_between(self._cursor, self._state, edges, by, where, timezone, self._memory)

    def extents(self, keys: Collection[JobKey]) -> Mapping[JobKey, Extent]:
        """When these jobs held anything; see accountant.store.jobs."""
        return extents(self._cursor, self._state, keys, self._memory)

    def epochs(self, keys: Collection[JobKey]) -> list[EpochReport]:
        """That these jobs reported, by job and instant."""
        return read_epochs(self._cursor, keys)

    def epochs_between(self, start_ms: int, end_ms: int) -> list[EpochReport]:
        """That ended in the span, by job and instant."""
        return epochs_between(self._cursor, start_ms, end_ms)

    def extent(self) -> tuple[int, int]:
        return self._state.fleet.extent

    def newest_by_cluster(self) -> Mapping[str, int]:
        return self._state.fleet.newest_by_cluster

    @property
    def newest_ms(self) -> int:
        """End of the newest record; 0 where nothing is booked."""
        return self._state.fleet.newest_end_ms
