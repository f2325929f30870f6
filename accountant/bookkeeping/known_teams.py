"""Knows which teams there are, so that a name that nothing has used yet can be refused or warned of."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import structlog

from accountant.bookkeeping.month_closing import ClosedMonths
from accountant.core.periods import local_date, zone
from accountant.ledger.protocols import ReadableLedger
from accountant.wire.policy_models import IDLE, UNASSIGNED
from gputally.base.clock import Clock
from gputally.base.instants import midnight_ms
from gputally.base.near_names import nearest, shown


class KnownTeams:
    """The teams of a ledger.

    timezone: the time zone of the months.
    books: returns the state after all acts."""

    def __init__(self, ledger: ReadableLedger, clock: Clock, timezone: str, books: Callable[[], ClosedMonths]) -> None:
        self._ledger, self._clock, self._zone, self._books = ledger, clock, zone(timezone), books

    def known(self) -> frozenset[str]:
        """Every team that a record, a policy, an adjustment, a queue or a namespace names, now or in the past."""
        now, status = self._clock.wall_ms(), self._ledger.status()
        first, newest = status.extent
        # A lake accepts only spans that begin at a whole hour, as midnight does.
        start = midnight_ms(local_date(first, self._zone), self._zone)
        in_records: set[str] = set()
        if newest:
            with self._ledger.moment(start, now) as moment:
                in_records = {team for (team,) in moment.usage((start, now), ("team",)).row_keys()}
        in_policies = {
            queue.team for version in status.policies(0, now + 1) for queue in version.policy.queues if queue.team
        }
        adjusted = {adjustment.team for adjustment in self._books().adjustments}
        return frozenset(in_records | in_policies | adjusted | status.teams) - {IDLE, UNASSIGNED, ""}

    def unknown(self, teams: Iterable[str]) -> dict[str, str]:
        """What to tell about each of these teams that nothing names."""
        unchecked = {*teams} - {IDLE, UNASSIGNED} - self._ledger.status().teams
        known = self.known() if unchecked else frozenset()
        return {team: f"no team {shown(team)} is known{nearest(team, known)}" for team in sorted(unchecked - known)}

    def warn_of_unknown(self, what: str, teams: Iterable[str | None]) -> None:
        """Log teams that nothing names, unless no team is known at all, as in a new ledger. what: names them."""
        unknown = self.unknown(team for team in teams if team is not None)
        if unknown and self.known():
            structlog.get_logger("accountant.teams").warning(
                "unknown_teams_named", what=what, teams=sorted(unknown), reasons=[*unknown.values()]
            )
