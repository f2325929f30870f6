import pytest
from hypothesis import given
from hypothesis import strategies as st

from gputally.base.units import apportion, prorate

weights = st.lists(st.integers(0, 10**9), min_size=1, max_size=12)


@given(st.integers(0, 10**15), weights)
def test_apportioned_parts_add_up_and_stay_within_one_of_the_exact_share(total: int, weights: list[int]) -> None:
    parts = apportion(total, weights)
    assert sum(parts) == total
    exact = weights if any(weights) else [1] * len(weights)
    for part, weight in zip(parts, exact, strict=True):
        assert abs(part * sum(exact) - total * weight) < sum(exact)


def test_equal_remainders_go_to_the_earlier_position() -> None:
    assert apportion(2, [1, 1, 1]) == [1, 1, 0]
    assert apportion(5, [0, 0]) == [3, 2]
    assert apportion(60_000_000, [1] * 7)[:4] == [8_571_429] * 4


@pytest.mark.parametrize(("total", "weights"), [(-1, [1]), (1, [-1]), (1, [])])
def test_apportion_refuses_what_cannot_be_divided(total: int, weights: list[int]) -> None:
    with pytest.raises(ValueError, match="apportion needs"):
        apportion(total, weights)


@given(st.integers(0, 10**15), st.lists(st.integers(1, 10**6), min_size=1, max_size=10))
def test_prorated_pieces_add_up_to_the_whole(value: int, lengths: list[int]) -> None:
    span, start, total = sum(lengths), 0, 0
    for length in lengths:
        piece = prorate(value, span, start, start + length)
        assert piece >= 0
        total += piece
        start += length
    assert total == value


@pytest.mark.parametrize(("span", "start", "end"), [(0, 0, 0), (10, 5, 4), (10, -1, 4), (10, 0, 11)])
def test_prorate_refuses_a_piece_outside_the_span(span: int, start: int, end: int) -> None:
    with pytest.raises(ValueError, match="prorate needs"):
        prorate(1, span, start, end)
