"""A line of waiting jobs: first in, first out, of which the scheduler looks at the first few. Changed in place.

Jobs are numbers in the order of their submission. Who may be looked at stands apart from those behind him, so that
neither a look nor a start costs more where thousands wait. Invariants: `jobs` rises, everyone behind is later than
all of them, and nobody is behind while there is room in front. No clock, no I/O.
"""

from __future__ import annotations

from bisect import bisect, insort
from collections import deque
from collections.abc import Sequence

NOBODY = (1 << 30) - 1
"""The smallest gang where nobody waits: more than any pool has."""


class Line:
    """jobs: those within the scan depth. gangs: their GPUs, in step."""

    __slots__ = ("_behind", "_depth", "_gpus", "gangs", "jobs")

    def __init__(self, depth: int, gpus: Sequence[int]) -> None:
        """gpus: of every job of the workload."""
        self.jobs: list[int] = []
        self.gangs: list[int] = []
        self._behind: deque[int] = deque()
        self._depth, self._gpus = depth, gpus

    def smallest(self) -> int:
        """The smallest gang within the scan depth."""
        return min(self.gangs) if self.gangs else NOBODY

    def join(self, job: int) -> bool:
        """At the end; it was submitted later than everyone in the line. Whether it is within the scan depth."""
        if len(self.jobs) < self._depth:
            self.jobs.append(job)
            self.gangs.append(self._gpus[job])
            return True
        self._behind.append(job)
        return False

    def leave(self, place: int) -> None:
        """Who stands at a place within the scan depth goes, and the first behind moves up."""
        del self.jobs[place], self.gangs[place]
        if self._behind:
            job = self._behind.popleft()
            self.jobs.append(job)
            self.gangs.append(self._gpus[job])

    def rejoin(self, job: int) -> None:
        """In the order of submission."""
        if self._behind and job > self.jobs[-1]:
            insort(self._behind, job)
            return
        place = bisect(self.jobs, job)
        self.jobs.insert(place, job)
        self.gangs.insert(place, self._gpus[job])
        if len(self.jobs) > self._depth:
            self._behind.appendleft(self.jobs.pop())
            self.gangs.pop()
