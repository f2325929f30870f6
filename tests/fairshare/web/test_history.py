"""Queue history for the pages: few cached queries, summed up the queue tree."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import pytest

from accountant.wire.policy_models import Decision, Policy
from accountant.wire.usage_cost_and_job_models import Dimension, UsageLine
from fairshare.web.queue_history import CACHED_MS, MOST_CACHED, MOST_NAMED, History
from gputally.base.clock import VirtualClock
from gputally.base.units import MS_PER_HOUR, US_PER_HOUR
from tests.fairshare.web.staging import usage_line

NOW_MS = 1_791_000_000_000 // MS_PER_HOUR * MS_PER_HOUR + 5 * 60_000
MANY = 3 * MOST_NAMED


class Ledger:
    """Each queue held one GPU in every hour but the second, which was not metered; `else` held one too."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, ...] | None] = []

    def usage(
        self,
        start_ms: int,
        end_ms: int,
        by: Sequence[Dimension],
        where: Mapping[Dimension, Sequence[str]] | None = None,
    ) -> Iterator[UsageLine]:
        assert tuple(by) == ("hour",)
        queues = tuple((where or {}).get("queue", ())) or None
        self.asked.append(queues)
        gpus = len([name for name in queues if name != "idle"]) if queues else MANY + 2
        for number, at_ms in enumerate(range(start_ms, end_ms, MS_PER_HOUR)):
            if gpus and number != 1:
                yield usage_line(at_ms, gpus * US_PER_HOUR)

    def decisions(self, start_ms: int, end_ms: int) -> Iterator[Decision]:
        raise AssertionError("decisions are not queried here")


def policy() -> Policy:
    queues: list[dict[str, object]] = [{"name": "org"}, {"name": "idle"}]
    queues += [{"name": f"team-{n}", "parent": "org"} for n in range(MANY)]
    return Policy.model_validate({"schema": 1, "queues": queues})


@pytest.fixture
def books() -> Ledger:
    return Ledger()


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock(NOW_MS)


def test_a_queue_holds_what_all_below_it_hold_and_unknown_hours_are_left_out(
    books: Ledger, clock: VirtualClock
) -> None:
    history = History(books, clock)
    end_ms = NOW_MS // MS_PER_HOUR * MS_PER_HOUR
    hours = [float(end_ms - n * MS_PER_HOUR) for n in (4, 2, 1)]
    assert history.held(policy(), "org", 4) == [(at, MANY + 1.0) for at in hours]
    assert history.held(policy(), "team-7", 4) == [(at, 1.0) for at in hours]
    # Nothing, in hours in which others held something.
    assert history.held(policy(), "idle", 4) == [(at, 0.0) for at in hours]


def test_questions_name_few_queues_and_are_asked_once_in_a_while(books: Ledger, clock: VirtualClock) -> None:
    history = History(books, clock)
    first = history.held(policy(), "org", 4)
    assert all(queues is None or len(queues) <= MOST_NAMED for queues in books.asked)
    named = [name for queues in books.asked for name in queues or ()]
    assert sorted(named) == sorted({"org", *(f"team-{n}" for n in range(MANY))})
    before = len(books.asked)
    assert history.held(policy(), "org", 4) == first
    assert len(books.asked) == before
    history.held(policy(), "team-7", 4)  # which hours are known is known
    assert books.asked[before:] == [("team-7",)]
    clock.advance(CACHED_MS)
    assert history.held(policy(), "org", 4) == first
    assert len(books.asked) == 2 * before + 1


def test_of_more_series_than_are_kept_the_least_recently_used_goes(books: Ledger, clock: VirtualClock) -> None:
    history = History(books, clock)
    for n in range(MOST_CACHED):
        history.held(policy(), f"team-{n}", 1)
    before = len(books.asked)
    history.held(policy(), f"team-{MOST_CACHED - 1}", 1)
    assert books.asked[before:] == []
    history.held(policy(), "team-0", 1)
    assert books.asked[before:] == [("team-0",)]
