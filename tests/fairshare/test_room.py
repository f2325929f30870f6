"""Running sums of free GPUs and limits equal a full recount."""

from __future__ import annotations

from math import fsum

from hypothesis import given, settings
from hypothesis import strategies as st

from accountant.wire.policy_models import PreemptionPolicy
from fairshare.preemption.claims_and_placement import FreeGpus
from fairshare.preemption.reclaim_rules_and_limits import DAY_MS, HOUR_MS, Budget, PastPreemption
from tests.effort import examples
from tests.fairshare.preemption_cases import NOW_MS

NODES = ("n0", "n1", "n2")
AMOUNTS = st.sampled_from([1.0, 2.0, 4.0, 0.5, 1 / 7, 3 / 7, 0.1])
PARTS = st.lists(st.dictionaries(st.sampled_from([*NODES, "elsewhere"]), AMOUNTS, max_size=2), max_size=6)


@settings(max_examples=examples(60, 2_000), deadline=None)
@given(
    st.fixed_dictionaries(dict.fromkeys(NODES, st.sampled_from([0.0, 1.0, 2.5, -1.0]))),
    st.lists(AMOUNTS, max_size=4) | st.builds(lambda size, n: [size] * n, AMOUNTS, st.integers(1, 5)),
    PARTS,
    st.sets(st.integers(0, 5)),
    st.none() | st.sets(st.sampled_from(NODES)),
)
def test_a_trial_answers_as_the_room_would(
    free: dict[str, float],
    sizes: list[float],
    parts: list[dict[str, float]],
    out: set[int],
    nodes: set[str] | None,
) -> None:
    total = fsum(sizes) or 2.0
    room = FreeGpus(free)
    trial = room.trial(sizes, total, nodes)
    for number, part in enumerate(parts):
        trial.add(number, part)
    kept = dict(enumerate(parts))
    for number in sorted(out & kept.keys()):
        given = FreeGpus(free)
        del kept[number]
        for part in kept.values():
            given.add(part)
        assert trial.fits(without=number) == given.place(sizes, total, nodes)
        trial.take_out(number)
        assert trial.fits() == trial.fits(without=None)
    assert room.place((), 0.0)
    given = FreeGpus(free)
    for part in kept.values():
        given.add(part)
    assert trial.fits() == given.place(sizes, total, nodes)


@settings(max_examples=examples(60, 2_000), deadline=None)
@given(
    st.lists(
        st.builds(
            PastPreemption,
            st.sampled_from([NOW_MS - each for each in (0, 1, HOUR_MS - 1, HOUR_MS, DAY_MS - 1, DAY_MS, -5)]),
            st.sampled_from(["Gang/ns/a", "Gang/ns/b", "Gang/ns/c"]),
            st.just("q"),
            st.sampled_from(["x", "y"]),
            st.just(1.0),
            st.sampled_from([0.1, 0.2, 0.3, 1e15, 7.0]),
        ),
        max_size=8,
    ),
    st.integers(0, 8),
)
def test_limits_are_those_of_everything_that_was_stopped(past: list[PastPreemption], known: int) -> None:
    rules = PreemptionPolicy(cool_down=0, per_team=3, per_cluster=4, lost_gpu_hours=0)
    budget = Budget(rules, past[:known], NOW_MS)
    other = budget.copy()
    for each in past[known:]:
        budget.spend(each)
    lost = fsum(each.lost_gpu_hours for each in past if each.at_ms > NOW_MS - DAY_MS)
    hour = {(each.key, each.at_ms) for each in past if each.at_ms > NOW_MS - HOUR_MS}
    theirs = {(each.key, each.at_ms) for each in past if each.at_ms > NOW_MS - HOUR_MS and each.team == "x"}
    denial = budget.refusal("Gang/ns/new", "x", 1.0)
    assert denial is not None
    if len(theirs) >= 3:
        assert denial.reason.startswith(f"{len(theirs)} workloads of team x")
    elif len(hour) >= 4:
        assert denial.reason.startswith(f"{len(hour)} workloads of the cluster")
    else:
        assert denial.reason.startswith(f"{lost:.1f} GPU-hours of work were lost")
    if known == 0:
        fresh = other.refusal("Gang/ns/new", "x", 1.0)
        assert fresh is not None
        assert fresh.reason.startswith("0.0 GPU-hours")
