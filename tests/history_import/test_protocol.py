"""Which chunks are left to do, and how their records are numbered."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from accountant.core.claim_overlap import union
from accountant.history_import.import_run import chunks, epoch, first_seq, is_import, source_of, without
from gputally.base.units import MS_PER_HOUR
from tests.effort import examples

DAY = 24 * MS_PER_HOUR
START = 20_700 * DAY


def spans(found):
    return [((one.start_ms - START) // MS_PER_HOUR, (one.end_ms - START) // MS_PER_HOUR) for one in found]


def at(hour):
    return START + hour * MS_PER_HOUR


def test_an_epoch_says_that_it_is_an_import_and_sorts_after_every_agents():
    name = epoch("slurm", START)
    assert is_import(name)
    assert (source_of(name), source_of("0192-a")) == ("slurm", "")
    assert name > "ffffffff-ffff-7fff"


def test_chunks_begin_and_end_at_multiples_of_their_length():
    assert spans(chunks((at(5), at(53)), {}, "prometheus", DAY)) == [(5, 24), (24, 48), (48, 53)]
    assert chunks((at(5), at(5)), {}, "prometheus", DAY) == []
    with pytest.raises(ValueError, match="whole hours"):
        chunks((at(5) + 1, at(9)), {}, "prometheus", DAY)


def test_what_follows_goes_on_with_its_epoch_and_what_lies_before_has_its_own():
    done = {epoch("prometheus", at(24)): [(at(24), at(48))]}
    found = chunks((at(0), at(72)), done, "prometheus", DAY)
    assert spans(found) == [(0, 24), (48, 72)]
    assert [one.epoch for one in found] == [epoch("prometheus", at(0)), epoch("prometheus", at(24))]


@settings(max_examples=examples(13, 80), deadline=None)
@given(st.lists(st.tuples(st.integers(0, 60), st.integers(1, 60)), min_size=1, max_size=5), st.sampled_from([1, 6, 24]))
def test_runs_in_any_order_do_every_hour_once_with_ascending_numbers(wanted, hours):
    done: dict[str, list[tuple[int, int]]] = {}
    last: dict[str, int] = {}
    for begin, length in wanted:
        for one in chunks((at(begin), at(begin + length)), done, "slurm", hours * MS_PER_HOUR):
            assert all(one.end_ms <= low or high <= one.start_ms for of in done.values() for low, high in of)
            assert first_seq(one.start_ms) > last.get(one.epoch, 0)
            last[one.epoch] = first_seq(one.start_ms)
            done.setdefault(one.epoch, []).append((one.start_ms, one.end_ms))
    assert union(span for of in done.values() for span in of) == union((at(b), at(b + n)) for b, n in wanted)


def test_what_agents_metered_is_left_out():
    assert without((0, 10), [(4, 6), (5, 20)]) == [(0, 4)]
