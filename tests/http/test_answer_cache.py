"""Answers that take long are kept with their instant; what is quick never is."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest

from accountant.api.answer_cache import (
    AHEAD_MS,
    FRESH_MS,
    READING_MS,
    STALEST_MS,
    TIMES_AS_OLD,
    UNSIZED_BYTES,
    Answer,
    AnswerCache,
)
from gputally.base.clock import VirtualClock

AT = 1_800_000_000_000
MOST_BYTES = 256 * 2**20


class Spent:
    """CPU time that passes when somebody says so."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


class Finding:
    """Finds 1, 2, 3 …, each at a price; `found` is set when somebody has."""

    def __init__(self, spent: Spent, price: float) -> None:
        self.spent, self.price, self.times, self.found = spent, price, 0, threading.Event()

    def __call__(self) -> int:
        self.spent.seconds += self.price
        self.times += 1
        self.found.set()
        return self.times


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock(AT)


@pytest.fixture
def spent() -> Spent:
    return Spent()


@pytest.fixture
def answers(clock: VirtualClock, spent: Spent) -> Iterator[AnswerCache]:
    answers = AnswerCache(clock, MOST_BYTES, spent)
    yield answers
    answers.close()


def test_what_is_quick_is_found_every_time(answers: AnswerCache, spent: Spent) -> None:
    find = Finding(spent, 0.01)
    assert [answers.ask("a", find) for _ in range(2)] == [Answer(1, None), Answer(2, None)]


def test_what_takes_long_is_kept_and_says_of_when_it_is(
    answers: AnswerCache, spent: Spent, clock: VirtualClock
) -> None:
    find = Finding(spent, 1.0)
    assert answers.ask("a", find).as_of_ms is None
    clock.advance(FRESH_MS - 1)
    kept = answers.ask("a", find)
    assert (kept.value, kept.as_of_ms) == (1, AT)
    assert answers.ask("b", find).value == 2, "another key is another answer"


@pytest.mark.parametrize(("price", "age_ms"), [(1.0, FRESH_MS), (10.0, TIMES_AS_OLD * 10_000)])
def test_an_old_one_is_shown_while_it_is_found_anew(
    answers: AnswerCache, spent: Spent, clock: VirtualClock, price: float, age_ms: int
) -> None:
    find = Finding(spent, price)
    answers.ask("a", find)
    clock.advance(age_ms)
    assert answers.ask("a", find).value == 1
    assert find.times == 1, "not older than it may be"
    find.found.clear()
    clock.advance(1)
    assert answers.ask("a", find).as_of_ms == AT
    assert find.found.wait(10)
    answers.close()
    assert answers.ask("a", find).value == 2


def test_what_is_too_old_is_not_shown(answers: AnswerCache, spent: Spent, clock: VirtualClock) -> None:
    find = Finding(spent, 1.0)
    answers.ask("a", find)
    clock.advance(STALEST_MS + 1)
    assert answers.ask("a", find).value == 2


def test_two_who_ask_at_once_wait_for_one_finding(answers: AnswerCache, spent: Spent) -> None:
    begun, go = threading.Event(), threading.Event()
    times: list[int] = []

    def find() -> int:
        times.append(1)
        begun.set()
        assert go.wait(10)
        return 7

    with ThreadPoolExecutor(2) as several:
        first = several.submit(answers.ask, "a", find)
        assert begun.wait(10)
        second = several.submit(answers.ask, "a", find)
        go.set()
        assert first.result(10).value == second.result(10).value == 7
    assert len(times) in (1, 2), "the second may come after the first, of which nothing is kept"


def _fails() -> int:
    raise ValueError("no ledger")


def test_a_failure_is_told_and_not_kept(answers: AnswerCache, spent: Spent) -> None:
    with pytest.raises(ValueError, match="no ledger"):
        answers.ask("a", _fails)
    assert answers.ask("a", Finding(spent, 1.0)).value == 1


def test_a_failure_behind_the_readers_back_is_the_next_readers(
    answers: AnswerCache, spent: Spent, clock: VirtualClock
) -> None:
    answers.ask("a", Finding(spent, 1.0))
    clock.advance(FRESH_MS + 1)
    assert answers.ask("a", _fails).value == 1
    answers.close()
    with pytest.raises(ValueError, match="no ledger"):
        answers.ask("a", _fails)


def test_no_more_is_kept_than_fits(answers: AnswerCache, spent: Spent) -> None:
    find = Finding(spent, 1.0)
    most = MOST_BYTES // UNSIZED_BYTES
    for number in range(most + 1):
        answers.ask(number, find)
    assert answers.ask(most, find).as_of_ms == AT
    assert answers.ask(0, find).as_of_ms is None


def test_an_equal_mark_makes_a_kept_answer_one_of_now(answers: AnswerCache, spent: Spent, clock: VirtualClock) -> None:
    find, marks = Finding(spent, 1.0), iter((1, 1, 1, 2, 2))

    def ask() -> Answer[int]:
        return answers.ask("a", find, lambda: next(marks, 2))

    assert ask() == Answer(1, None)
    clock.advance(2 * STALEST_MS)
    assert ask() == Answer(1, None), "as long as nothing changed, however old"
    assert ask() == Answer(2, None), "changed, and too old to be shown"
    assert find.times == 2


def test_while_nobody_reads_little_is_asked_ahead(answers: AnswerCache, spent: Spent, clock: VirtualClock) -> None:
    find = Finding(spent, 0.5)

    def asked_ahead_in(span_ms: int) -> int:
        times = 0
        for _ in range(span_ms // FRESH_MS):
            clock.advance(FRESH_MS)
            if answers.ahead_is_due:
                times += 1
                with answers.ahead():
                    answers.ask("a", find)
        return times

    assert asked_ahead_in(4 * AHEAD_MS) == 4
    answer = answers.ask("a", find)
    assert answer.as_of_ms is not None
    assert clock.wall_ms() - answer.as_of_ms < STALEST_MS
    assert asked_ahead_in(READING_MS) == READING_MS // FRESH_MS, "somebody reads"
    assert asked_ahead_in(4 * AHEAD_MS) == 4, "nobody has come back"


def test_what_is_found_together_is_kept_apart(answers: AnswerCache, spent: Spent, clock: VirtualClock) -> None:
    find = Finding(spent, 1.0)

    def both() -> list[int]:
        return [find(), 10 * find.times]

    answers.ask_together(("a", "b"), both)
    answers.ask_together(("a", "b"), both)
    assert find.times == 1, "both are fresh"
    alone = Finding(spent, 1.0)
    assert answers.ask("a", alone) == Answer(1, AT)
    assert answers.ask("b", alone) == Answer(10, AT)
    clock.advance(FRESH_MS + 1)
    answers.ask_together(("a", "b"), both)
    assert (find.times, alone.times) == (2, 0)
    assert answers.ask("b", alone) == Answer(20, AT + FRESH_MS + 1)


def test_together_too_what_is_quick_is_not_kept_and_an_equal_mark_is_enough(
    answers: AnswerCache, spent: Spent, clock: VirtualClock
) -> None:
    quick, slow = Finding(spent, 0.01), Finding(spent, 1.0)
    answers.ask_together(("a",), lambda: [quick()])
    assert answers.ask("a", quick) == Answer(2, None)
    for _ in range(2):
        answers.ask_together(("b",), lambda: [slow()], lambda: "same")
        clock.advance(2 * STALEST_MS)
    assert slow.times == 1
    answers.ask_together(("b",), lambda: [slow()], lambda: "other")
    assert slow.times == 2
    with pytest.raises(ZeroDivisionError):
        answers.ask_together(("c",), lambda: [1 // 0])


@dataclass(frozen=True)
class Heavy:
    nbytes: int


def test_no_more_is_kept_than_memory_is_meant_for(answers: AnswerCache, spent: Spent) -> None:
    def find() -> Heavy:
        spent.seconds += 1.0
        return Heavy(MOST_BYTES // 3 - UNSIZED_BYTES)

    answers.ask("small", Finding(spent, 1.0))
    for key in "abc":
        answers.ask(key, find)
    for key in ("small", "a"):
        answers.ask(key, find)
    answers.ask("d", find)
    together = Finding(spent, 1.0)
    for _ in range(2):
        answers.ask_together(("e", "f"), lambda: [Heavy(together() * MOST_BYTES + 1), Heavy(MOST_BYTES + 1)])
    assert together.times == 1, "not again before they are due, though they do not fit"
    assert [answers.ask(key, find).as_of_ms for key in ("small", "a", "c", "d")] == [AT] * 4
    assert answers.ask("b", find).as_of_ms is None
    for _ in range(2):
        assert answers.ask("huge", lambda: Heavy(find().nbytes * 4)).as_of_ms is None
    assert answers.ask("b", find).as_of_ms == AT, "what is too large to keep costs nobody else's place"
