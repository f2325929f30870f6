"""Sums as columns of numbers are those of Python's integers and `math.fsum`, whatever their size and order."""

from __future__ import annotations

import random
from collections import defaultdict
from itertools import accumulate

from hypothesis import given, settings
from hypothesis import strategies as st

from accountant.core.window_decay import combine
from accountant.ledger.team_assignment import Assignment
from accountant.storage.query.window_figures import Figures, Found, plus
from accountant.storage.query.window_matrix import Sheet, added_up
from accountant.wire.policy_models import UNASSIGNED, Policy, PolicyVersion, QueuePolicy
from tests.effort import examples

BUCKET = 900_000
REFS = ("kai:a", "kai:b", "kai:c", "")
VALUE = st.one_of(st.integers(0, 10**12), st.integers(0, 2**70))


def rules(**owners: tuple[str, ...]) -> Assignment:
    queues = tuple(QueuePolicy(name=name, refs=refs) for name, refs in owners.items())
    return Assignment(PolicyVersion(version="v", effective_ms=0, policy=Policy(queues=queues)))


APART = rules(left=("kai:a",), right=("kai:b",))
TOGETHER = rules(both=("kai:a", "kai:b", "kai:c"))


@st.composite
def found(draw: st.DrawFn) -> Found:
    refs = draw(st.lists(st.sampled_from(REFS), unique=True))
    of_ref = {ref: Figures(*draw(st.lists(VALUE, min_size=9, max_size=9))) for ref in refs}
    return Found(plus([Figures(lost=draw(VALUE)), *of_ref.values()]), of_ref)


@settings(max_examples=examples(13, 80), deadline=None)
@given(
    stretches=st.lists(st.lists(found(), max_size=3), min_size=1, max_size=6).filter(any),
    decayed=st.booleans(),
    seed=st.randoms(use_true_random=False),
)
def test_a_sheet_adds_up_what_it_was_filled_from(
    stretches: list[list[Found]], decayed: bool, seed: random.Random
) -> None:
    policies = [seed.choice((APART, TOGETHER)) for _ in stretches]
    ages = [seed.random() for _ in stretches] if decayed else None
    starts = list(accumulate(range(len(stretches)), lambda at, _: at + BUCKET, initial=0))
    parts = [
        [((start + number, start + BUCKET), one) for number, one in enumerate(mine)]
        for start, mine in zip(starts, stretches, strict=False)
    ]
    sheet = Sheet(0, most_rows=8)
    other = next(mine[0] for mine in stretches if mine)
    # Other stretches first, and these in another state: nothing of it may remain.
    for _ in range(2):
        added_up(sheet, [[((seed.randrange(50), 99), other)]], [APART], None)
    added_up(sheet, [[(span, other) for span, _ in mine] for mine in parts], policies, ages)
    held = added_up(sheet, parts, policies, ages)
    terms: dict[str, dict[int, int]] = defaultdict(lambda: defaultdict(int))
    for tag, (mine, of) in enumerate(zip(stretches, policies, strict=True)):
        for one in mine:
            for ref, figures in one.by_ref.items():
                terms[of.queue(ref)][tag] += figures.allocated
    leaves = {queue: combine(sorted(own.items()), ages) for queue, own in terms.items()}
    assert {queue: value for queue, value in held.leaves.items() if value} == {q: v for q, v in leaves.items() if v}
    assert held.rows == plus(one.all for mine in stretches for one in mine)
    assert held.lost == [sum(one.all.lost for one in mine) for mine in stretches]
    assert held.energy == [sum(one.all.energy for one in mine) for mine in stretches]


def test_a_row_is_filled_anew_only_for_another_object() -> None:
    of_a = Figures(allocated=5)
    one = Found(of_a, {"kai:a": of_a})
    sheet = Sheet(0)
    assert sheet.rows([((0, 1), one, APART), ((1, 2), one, APART)]) == [0, 1]
    assert sheet.rows([((1, 2), one, TOGETHER)]) == [1]
    assert sheet.queues == ["left", "both"]
    assert sheet.held([0, 1]).tolist() == [[5, 0], [0, 5]]
    none = Found(Figures(), {"": Figures()})
    sheet.rows([((0, 1), none, APART)])
    assert sheet.held([0]).tolist() == [[0, 0, 0]]
    assert sheet.queues[2] == UNASSIGNED


def test_a_stretch_of_no_parts_beside_one_of_two_keeps_its_place() -> None:
    """As many parts as stretches, and none where it could be mistaken for its own."""
    one = Found(Figures(lost=5, energy=7), {})
    held = added_up(Sheet(0), [[], [((0, 1), one), ((1, 6), one)]], [APART, APART], None)
    assert (held.lost, held.energy) == ([0, 10], [0, 14])
