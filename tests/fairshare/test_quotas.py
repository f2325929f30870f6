"""Trees of quotas: what a node has left, and could have, by Kueue's rules."""

from __future__ import annotations

from math import inf

from hypothesis import given
from hypothesis import strategies as st

from fairshare.core.admission_quota_tree import QuotaTree, total_quota
from fairshare.core.queues_and_weights import Quota


def test_siblings_borrow_what_is_left_of_the_cohort() -> None:
    quotas = QuotaTree({"a": Quota("ml", 8, 16), "b": Quota("ml", 8, 0)})
    assert (quotas.free("a"), quotas.free("b"), quotas.maximum("b")) == (0, 0, 16)
    quotas.add_use("a", -8)
    assert (quotas.free("a"), quotas.free("b")) == (8, 8)


def test_a_lending_limit_keeps_a_part_and_a_borrowing_limit_bounds_what_is_taken() -> None:
    quotas = QuotaTree({"a": Quota("ml", 12, borrows=4), "b": Quota("ml", 12, lends=2)})
    assert (quotas.maximum("a"), quotas.maximum("b")) == (14, 24)
    assert (quotas.free("a"), quotas.free("b"), total_quota(quotas, ["a"])) == (14, 24, 24)
    quotas.add_use("b", 11)  # one more than it keeps to itself
    assert (quotas.free("a"), quotas.free("b")) == (13, 13)


def test_a_tree_of_cohorts_and_a_root_without_quota_of_its_own() -> None:
    quotas = QuotaTree({"a": Quota("team", 4), "b": Quota("team", 4, 6), "team": Quota("all", 2), "c": Quota("all", 6)})
    assert (quotas.root("a"), quotas.subtree_quota("all"), quotas.maximum("a"), quotas.free("a")) == ("all", 16, 16, 10)
    assert total_quota(quotas, ["a", "c"]) == 16
    assert total_quota(quotas, ["a", "elsewhere"]) is None
    assert total_quota(quotas, []) is None


def test_an_unknown_quota_node_is_unbounded_and_a_cycle_is_unknown() -> None:
    quotas = QuotaTree({"a": Quota("b", 4), "b": Quota("a", 4)})
    assert "a" not in quotas
    assert (quotas.free("a"), quotas.maximum("a")) == (inf, inf)
    quotas.add_use("a", 3)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 12)), max_size=8))
def test_what_is_booked_and_given_back_leaves_no_trace(acts: list[tuple[str, int]]) -> None:
    nodes = {
        "a": Quota("x", 4, lends=1),
        "b": Quota("x", 4, borrows=2),
        "c": Quota("y", 8),
        "x": Quota("y", 0, lends=5),
    }
    quotas = QuotaTree(nodes)
    before = {name: quotas.free(name) for name in "abcxy"}
    for name, gpus in acts:
        quotas.add_use(name, gpus)
    used = {name: float(sum(gpus for at, gpus in acts if at == name)) for name in "abc"}
    fresh = QuotaTree(
        {name: Quota(n.parent, n.nominal, used.get(name, 0), n.borrows, n.lends) for name, n in nodes.items()}
    )
    assert {name: quotas.free(name) for name in "abcxy"} == {name: fresh.free(name) for name in "abcxy"}
    for name, gpus in reversed(acts):
        quotas.add_use(name, -gpus)
    assert {name: quotas.free(name) for name in "abcxy"} == before
