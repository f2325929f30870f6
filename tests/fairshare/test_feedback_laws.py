"""Fair Tree and the classic factor against the figures of Slurm."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import inf, isclose
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairshare.laws.feedback_laws import FairTree, Kai, LawColumns, LawQueue, LawQueues, Multifactor, fair_share_factor
from tests.shared_files import shared

ROOT = "root"
_TIED = 1e-12
Level = float | np.longdouble


@dataclass(frozen=True, slots=True)
class Account:
    """A row of the account tree. shares None: the parent's own (such a user comes first, and such an account passes its
    children up). usage counts for users; an account's usage is its users'."""

    name: str
    parent: str
    kind: Literal["account", "user"]
    shares: int | None
    usage: float = 0.0


@dataclass(frozen=True, slots=True)
class Ranking:
    """level_fs: LF of every row. fairshare: of users, rank / number of users; 1 is first."""

    level_fs: Mapping[str, float]
    fairshare: Mapping[str, float]


def fair_tree(rows: Sequence[Account], *, slurm_compat: bool = False) -> Ranking:
    """Rank all users. Rows of unknown parents are not reached.

    At every level LF = S / U (normalised shares over the level's usage) orders siblings; a subtree is ranked whole
    before the next begins; a user's fairshare is its rank over the number of users. Sibling users with equal LF share
    a rank, sibling accounts with equal LF have their children ranked together, and a user tied with an account gets
    its best user's rank. slurm_compat: as Slurm does, accounts are never merged (its count of tied accounts stops at
    every account), and ties are compared in 80-bit floats; otherwise values within 1e-12 are equal.

    Source: SchedMD Slurm 284c3b95f08a, src/plugins/priority/multifactor/fair_tree.c (read, not copied) and
    doc/html/fair_tree.shtml."""
    tree = _Tree(rows, slurm_compat)
    tree.rank(tree.children(ROOT), tied_with_account=False)
    return Ranking({name: float(value) for name, value in tree.level.items()}, tree.fairshare)


class _Tree:
    def __init__(self, rows: Sequence[Account], slurm_compat: bool) -> None:
        self._compat = slurm_compat
        self._below: dict[str, list[Account]] = {}
        self._usage: dict[str, float] = {}
        handed_up = {row.name: row.parent for row in rows if row.kind == "account" and row.shares is None}
        for row in rows:
            parent = row.parent
            while parent in handed_up:
                parent = handed_up[parent]
            if row.name not in handed_up:
                self._below.setdefault(parent, []).append(row)
        self._users = sum(row.kind == "user" for row in rows)
        self._next = self._users
        self._rank = self._users
        self.fairshare: dict[str, float] = {}
        self.level: dict[str, Level] = {}
        self._measure(ROOT)

    def _measure(self, account: str) -> float:
        """Return the usage of the subtree, and set LF of everything below."""
        rows = self._below.get(account, [])
        for row in rows:
            self._usage[row.name] = self._measure(row.name) if row.kind == "account" else row.usage
        whole = sum(self._usage[row.name] for row in rows)
        shares = sum(row.shares for row in rows if row.shares is not None)
        for row in rows:
            self.level[row.name] = self._level(row, shares, whole)
        return whole

    def _level(self, row: Account, shares: int, whole: float) -> Level:
        if row.shares is None:
            return inf
        if row.shares == 0 or shares == 0:
            # An idle user without shares has 0 / 0, which Slurm takes for infinite; an account has none.
            return inf if row.kind == "user" and shares == 0 and whole == 0 else 0.0
        if whole == 0 or self._usage[row.name] == 0:
            return inf
        if self._compat:
            return np.longdouble(row.shares / shares) / (np.longdouble(self._usage[row.name]) / np.longdouble(whole))
        return row.shares / shares / (self._usage[row.name] / whole)

    def children(self, account: str) -> list[Account]:
        return self._below.get(account, [])

    def rank(self, siblings: Sequence[Account], *, tied_with_account: bool) -> None:
        ordered = sorted(siblings, key=lambda row: (-self.level[row.name], row.kind != "user", row.name))
        before: Level | None = None
        at = 0
        while at < len(ordered):
            row = ordered[at]
            tied = tied_with_account if at == 0 else before is not None and self._equal(before, self.level[row.name])
            before = self.level[row.name]
            at += 1
            if row.kind == "user":
                if not tied:
                    self._rank = self._next
                self.fairshare[row.name] = self._rank / self._users
                self._next -= 1
                continue
            merged = list(self.children(row.name))
            while not self._compat and at < len(ordered) and self._equal(before, self.level[ordered[at].name]):
                merged += self.children(ordered[at].name)
                at += 1
            self.rank(merged, tied_with_account=tied)

    def _equal(self, one: Level, other: Level) -> bool:
        if self._compat:
            return bool(one == other)
        return one == other or isclose(one, other, rel_tol=_TIED)


@dataclass(frozen=True, slots=True)
class Factor:
    """norm_shares: S. norm_usage: U_A, of the root's. effective_usage: U_E. fairshare: F, 0..1."""

    norm_shares: float
    norm_usage: float
    effective_usage: float
    fairshare: float


def factors(rows: Sequence[Account], dampening: float = 1.0) -> dict[str, Factor]:
    """Return every association's factor. Usage on account rows is ignored, because it is their users'.

    Usage is weighed against the siblings': U_E = U + (U_E of the parent - U) · shares / siblings' shares, so that a
    quiet account pays for a busy parent. S is the product of normalised shares down the tree.

    Source: SchedMD Slurm 284c3b95f08a, src/plugins/priority/multifactor/priority_multifactor.c (read, not copied)."""
    below: dict[str, list[Account]] = {}
    for row in rows:
        below.setdefault(row.parent, []).append(row)
    usage: dict[str, float] = {}

    def measure(name: str) -> float:
        for row in below.get(name, ()):
            usage[row.name] = row.usage if row.kind == "user" else measure(row.name)
        return sum(usage[row.name] for row in below.get(name, ()))

    whole = measure(ROOT)
    found: dict[str, Factor] = {}

    def level(name: str) -> list[Account]:
        """Return the competitors below `name`; an account on its parent's shares passes its children up."""
        rows = below.get(name, [])
        return rows + [own for row in rows if row.shares is None and row.kind == "account" for own in level(row.name)]

    def descend(name: str, shares: float, effective: float | None) -> None:
        rows = level(name)
        whole_shares = sum(row.shares or 0 for row in rows)
        for row in rows:
            used = min(1.0, usage[row.name] / whole) if whole else 0.0
            if row.shares is None:  # it stands on its parent's shares, and answers for its parent's usage
                own, charged = 1.0, used if effective is None else effective
            else:
                own = row.shares / whole_shares if whole_shares else 0.0
                charged = used if effective is None else used + (effective - used) * own
            found[row.name] = Factor(shares * own, used, charged, fair_share_factor(charged, shares * own, dampening))
            if row.shares is not None:
                descend(row.name, shares * own, charged)

    descend(ROOT, 1.0, None)
    return found


@cache
def _vectors() -> Any:
    return json.loads(shared("vectors/schedulers.json").read_text())


def _rows(case: Any) -> list[Account]:
    rows = [{**row, "shares": None if row["shares"] == "parent" else row["shares"]} for row in case["rows"]]
    return [Account(*(row[key] for key in ("name", "parent", "kind", "shares", "usage"))) for row in rows]


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
    exact = case.get("oracle_full_precision", {})
    expected = case.get("level_fs") or {name: values["level_fs"] for name, values in exact.items()}
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
        figures = (factor.norm_shares, factor.norm_usage, factor.effective_usage, factor.fairshare)
        keys = ("norm_shares", "norm_usage", "effectv_usage", "fairshare")
        assert [f"{figure:.6f}" for figure in figures] == [line[key] for key in keys], name


def test_kais_rule_in_figures() -> None:
    for case in _vectors()["kai_time_based"]["cases"]:
        rest = 1 - case["nW"]
        it = LawQueue("it", case["nW"], case["nW"], case["nU"], 10, 0)
        members = (it, LawQueue("rest", rest, rest, 1 - case["nU"], 10, 0))
        verdict = Kai(case["k"])(LawQueues(LawColumns.of(members), 16.0, 3600.0, 0), {})
        assert verdict.weights["it"] == pytest.approx(case["want"])
        assert set(verdict.traces["it"]) == {"n", "U", "k", "P"}


@given(st.lists(st.tuples(st.integers(1, 50), st.integers(0, 20)), min_size=1, max_size=8))
def test_the_laws_of_siblings_are_slurms_among_users_of_one_account(users: list[tuple[int, int]]) -> None:
    """usage: integers, so that equal ratios compare equal."""
    whole = sum(usage for _, usage in users) or 1
    rows = [Account(f"u{n}", ROOT, "user", shares, float(usage)) for n, (shares, usage) in enumerate(users)]
    members = [LawQueue(row.name, row.shares or 0, 1.0, row.usage / whole, 10, 0) for row in rows]
    siblings = LawQueues(LawColumns.of(members), 16.0, 3600.0, 0)
    ranked, factored = FairTree()(siblings, {}).traces, Multifactor()(siblings, {}).traces
    assert {name: trace["fairshare"] for name, trace in ranked.items()} == fair_tree(rows).fairshare
    expected = {name: factor.fairshare for name, factor in factors(rows).items()}
    assert {name: trace["F"] for name, trace in factored.items()} == pytest.approx(expected)
