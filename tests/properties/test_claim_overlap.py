"""Each instant of a GPU belongs to the claim with the lowest rank that covers it."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from accountant.core.claim_overlap import ClaimRank, TimeClaim, resolve_overlaps

DAY = 86_400


def claims_of(spans: list[tuple[int, int, int]]) -> list[TimeClaim]:
    return [
        TimeClaim(ClaimRank(origin, "epoch", seq), start, start + length)
        for seq, (origin, start, length) in enumerate(spans)
    ]


@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 30), st.integers(0, 9)), max_size=14).map(claims_of),
    st.randoms(use_true_random=False),
)
def test_an_instant_belongs_to_the_lowest_rank_that_claims_it(claims: list[TimeClaim], chance: object) -> None:
    kept = resolve_overlaps(claims)
    owner = {
        instant: min(claim.rank for claim in claims if claim.start_ms <= instant < claim.end_ms)
        for instant in range(40)
        if any(claim.start_ms <= instant < claim.end_ms for claim in claims)
    }
    assert owner == {
        instant: rank for rank, spans in kept.items() for start, end in spans for instant in range(start, end)
    }
    assert all(left[1] < right[0] for spans in kept.values() for left, right in pairwise(spans))
    chance.shuffle(claims)  # type: ignore[attr-defined]
    assert resolve_overlaps(claims) == kept, "the order of arrival decides nothing"


def test_as_many_claims_as_a_sender_may_leave_on_a_gpu_are_resolved() -> None:
    """A day in spans of a second with gaps between them, each claimed twice: with all spans looked through for every
    claim, this takes minutes."""
    claims = claims_of([(origin, 2 * second, 1) for origin in (0, 2) for second in range(DAY // 2)])
    kept = resolve_overlaps(claims)
    assert [kept[claim.rank] for claim in claims[: DAY // 2]] == [
        ((claim.start_ms, claim.end_ms),) for claim in claims[: DAY // 2]
    ]
    assert not any(kept[claim.rank] for claim in claims[DAY // 2 :])
