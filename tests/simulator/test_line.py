"""A line of waiting jobs is a sorted list of which only the front is looked at."""

from __future__ import annotations

from bisect import insort

from hypothesis import given, settings
from hypothesis import strategies as st

from fairshare.simulator.engine_state import NOBODY, Line
from tests.effort import examples


@settings(max_examples=examples(40, 400), deadline=None)
@given(st.integers(1, 4), st.lists(st.tuples(st.sampled_from(["join", "leave", "rejoin"]), st.integers(0, 9))))
def test_a_line_is_a_sorted_list_whose_front_is_at_hand(depth: int, steps: list[tuple[str, int]]) -> None:
    gpus = [1 + job * 7 % 5 for job in range(len(steps))]
    line, plain, gone, submitted = Line(depth, gpus), list[int](), list[int](), 0
    for step, which in steps:
        if step == "join":
            line.join(submitted)
            plain.append(submitted)
            submitted += 1
        elif step == "leave" and plain:
            place = which % min(depth, len(plain))
            line.leave(place)
            gone.append(plain.pop(place))
        elif step == "rejoin" and gone:
            job = gone.pop(which % len(gone))
            line.rejoin(job)
            insort(plain, job)
        assert line.jobs == plain[:depth]
        assert line.gangs == [gpus[job] for job in line.jobs]
        assert line.smallest() == min(line.gangs, default=NOBODY)
    for job in plain:
        assert line.jobs[0] == job, "and nobody behind is lost"
        line.leave(0)
    assert not line.jobs
