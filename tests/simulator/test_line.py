"""A line of waiting jobs is a sorted list of which only the front is looked at."""

from __future__ import annotations

from bisect import insort

from hypothesis import given, settings
from hypothesis import strategies as st

from fairshare.simulator.engine_state import NEVER, Gang, Line
from tests.effort import examples


@settings(max_examples=examples(40, 400), deadline=None)
@given(st.integers(1, 4), st.lists(st.tuples(st.sampled_from(["join", "leave", "rejoin"]), st.integers(0, 9))))
def test_a_line_is_a_sorted_list_whose_front_is_at_hand(depth: int, steps: list[tuple[str, int]]) -> None:
    gangs = [Gang(number, 0, 1 + number * 7 % 5, 1, 0) for number in range(len(steps))]
    line, plain, gone, submitted = Line(depth), list[int](), list[int](), 0
    for step, which in steps:
        if step == "join":
            line.join(gangs[submitted])
            plain.append(submitted)
            submitted += 1
        elif step == "leave" and plain:
            place = which % min(depth, len(plain))
            line.leave(place)
            gone.append(plain.pop(place))
        elif step == "rejoin" and gone:
            number = gone.pop(which % len(gone))
            line.join(gangs[number])
            insort(plain, number)
        assert [gang.number for gang in line.front()] == plain[:depth]
        assert line.depth() == len(plain[:depth])
        assert line.smallest == min((gang.gpus for gang in line.front()), default=NEVER)
    for number in plain:
        assert line.gangs[0].number == number, "and none behind is lost"
        line.leave(0)
    assert not line.gangs
