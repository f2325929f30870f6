"""Fair Tree and the classic factor against Slurm's own figures."""

from __future__ import annotations

import json
from functools import cache
from math import inf
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairshare.laws.feedback_laws import FairTree, Kai, LawColumns, LawQueue, LawQueues, Multifactor
from tests.fairshare.slurm_reference import (
    ROOT,
    Account,
    exact_accrual,
    exact_decay,
    factors,
    fair_tree,
    slurm_accrual,
    slurm_decay,
)
from tests.shelf import shared


@cache
def _vectors() -> Any:
    return json.loads(shared("vectors/schedulers.json").read_text())


def _rows(case: Any) -> list[Account]:
    return [
        Account(
            row["name"], row["parent"], row["kind"], None if row["shares"] == "parent" else row["shares"], row["usage"]
        )
        for row in case["rows"]
    ]


@pytest.mark.parametrize("number", range(6))
def test_fair_tree_ranks_as_slurm_does(number: int) -> None:
    case = _vectors()["slurm_fair_tree"][number]
    ranking = fair_tree(_rows(case), slurm_compat=True)
    if "expected_sshare_6dp" in case:
        lines = case["expected_sshare_6dp"]
        assert len(lines) == 34 or len(lines) == sum(row["kind"] == "user" for row in case["rows"])
        for name, line in lines.items():
            if line["fairshare"]:
                assert f"{ranking.fairshare[name]:.6f}" == line["fairshare"], name
        return
    assert ranking.fairshare == pytest.approx(case["slurm_actual"])
    assert fair_tree(_rows(case)).fairshare == pytest.approx(case["documented"])


@pytest.mark.parametrize("number", range(6))
def test_level_fairshare_is_slurms(number: int) -> None:
    case = _vectors()["slurm_fair_tree"][number]
    expected = case.get("level_fs") or {
        name: values["level_fs"] for name, values in case["oracle_full_precision"].items()
    }
    level = fair_tree(_rows(case), slurm_compat=True).level_fs
    for name, value in expected.items():
        if name in level and value is not None and value != 4294967294:  # "the parent's": no figure of its own
            assert level[name] == pytest.approx(inf if value == "inf" else value), name


@pytest.mark.parametrize("number", range(2))
def test_the_classic_factor_is_slurms(number: int) -> None:
    case = _vectors()["slurm_classic"][number]
    found = factors(_rows(case), case["dampening"])
    for name, line in case["expected_sshare_6dp"].items():
        factor = found[name]
        assert f"{factor.norm_shares:.6f}" == line["norm_shares"], name
        assert f"{factor.norm_usage:.6f}" == line["norm_usage"], name
        assert f"{factor.effective_usage:.6f}" == line["effectv_usage"], name
        assert f"{factor.fairshare:.6f}" == line["fairshare"], name


def test_decay_exact_and_as_slurm_computes_it() -> None:
    cases = _vectors()["slurm_decay"]["cases"]
    assert len(cases) == 17
    for case in cases:
        elapsed, half_life = case["elapsed_s"], case["half_life_s"]
        assert slurm_decay(elapsed, half_life) == pytest.approx(case["slurm_multiplier"], rel=1e-9)
        if half_life > 0:
            assert exact_decay(elapsed, half_life) == pytest.approx(case["exact_multiplier"], rel=1e-12)


def test_accrual_exact_and_as_slurm_computes_it() -> None:
    cases = _vectors()["slurm_accrual"]["cases"]
    assert len(cases) == 4
    for case in cases:
        given = (case["billing"], case["job_runs_s"], case["observed_at_s"], case["half_life_s"])
        assert slurm_accrual(*given, case["calc_period_s"]) == pytest.approx(case["slurm_raw_usage"], rel=1e-9)
        assert exact_accrual(*given) == pytest.approx(case["exact_decayed_integral"], rel=1e-9)


def test_kais_rule_in_figures() -> None:
    for case in _vectors()["kai_time_based"]["cases"]:
        rest = 1 - case["nW"]
        members = (
            LawQueue("it", case["nW"], case["nW"], case["nU"], 10, 0),
            LawQueue("rest", rest, rest, 1 - case["nU"], 10, 0),
        )
        verdict = Kai(case["k"])(LawQueues(LawColumns.of(members), 16.0, 3600.0, 0), {})
        assert verdict.weights["it"] == pytest.approx(case["want"])
        assert set(verdict.traces["it"]) == {"n", "U", "k", "P"}


@given(st.lists(st.tuples(st.integers(1, 50), st.integers(0, 20)), min_size=1, max_size=8))
def test_the_laws_of_siblings_are_slurms_among_users_of_one_account(users: list[tuple[int, int]]) -> None:
    """usage: whole numbers, so that equal ratios are equal."""
    whole = sum(usage for _, usage in users) or 1
    rows = [Account(f"u{n}", ROOT, "user", shares, float(usage)) for n, (shares, usage) in enumerate(users)]
    members = [LawQueue(row.name, row.shares or 0, 1.0, row.usage / whole, 10, 0) for row in rows]
    siblings = LawQueues(LawColumns.of(members), 16.0, 3600.0, 0)
    ranked, factored = FairTree()(siblings, {}).traces, Multifactor()(siblings, {}).traces
    assert {name: trace["fairshare"] for name, trace in ranked.items()} == fair_tree(rows).fairshare
    expected = {name: factor.fairshare for name, factor in factors(rows).items()}
    assert {name: trace["F"] for name, trace in factored.items()} == pytest.approx(expected)
