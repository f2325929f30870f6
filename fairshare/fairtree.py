"""Slurm's Fair Tree: who is served first, level by level of the account tree; and as a feedback law.

At every level the level fairshare LF = S / U (normalised shares over the level's usage) orders siblings;
a subtree is ranked whole before the next begins; a user's fairshare is its rank over the number of users.
Documented ties: sibling users with equal LF share a rank, sibling accounts with equal LF have their
children ranked together, and a user tied with an account gets its best user's rank.

`slurm_compat=True` does what Slurm does: accounts are never merged (its count of tied accounts stops at
every account), and ties are compared in 80-bit floats. Otherwise values within 1e-12 are equal.

Source: SchedMD Slurm 284c3b95f08a, src/plugins/priority/multifactor/fair_tree.c (read, not copied) and
doc/html/fair_tree.shtml. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf, isclose
from operator import mul
from typing import Literal

import numpy as np

from fairshare.weighing.laws import Memory, Siblings, Verdict, normalised

ROOT = "root"
_TIED = 1e-12
Level = float | np.longdouble


@dataclass(frozen=True, slots=True)
class Account:
    """A row of the account tree. shares None: the parent's own (a user then always comes first, an account
    hands its children up). usage counts for users; an account's is its users'."""

    name: str
    parent: str
    kind: Literal["account", "user"]
    shares: int | None
    usage: float = 0.0


@dataclass(frozen=True, slots=True)
class Ranking:
    """level_fs: LF of every row. fairshare: of users, rank / number of users, 1 is first."""

    level_fs: Mapping[str, float]
    fairshare: Mapping[str, float]


def fair_tree(rows: Sequence[Account], *, slurm_compat: bool = False) -> Ranking:
    """Rank all users. Rows of unknown parents are not reached."""
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
        """Usage of the subtree; sets LF of everything below."""
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
class FairTree:
    """Fair Tree as weights: among siblings, the configured part times the rank, so that the order of
    service becomes a gradient and no weight is ever zero."""

    relative = True

    def __call__(self, siblings: Siblings, _memory: Memory, /) -> Verdict:
        names, usage, n = siblings.columns.names, siblings.columns.usage, normalised(siblings)
        levels = [part / u if u > 0 else inf if part > 0 else 0.0 for part, u in zip(n, usage, strict=True)]
        ordered = sorted(zip([-level for level in levels], names, range(len(names)), strict=True))
        fairshare = [1.0] * len(ordered)
        rank, above = len(ordered), inf
        for at, (_, _, q) in enumerate(ordered):
            if at and not _same(above, levels[q]):
                rank = len(ordered) - at
            above = levels[q]
            fairshare[q] = rank / len(ordered)
        wanted = list(map(mul, n, fairshare))
        if not siblings.explain:
            return Verdict(names, wanted, {})
        traces = {
            names[q]: {"n": n[q], "U": usage[q], "LF": min(levels[q], 1e9), "fairshare": fairshare[q]}
            for _, _, q in ordered
        }
        return Verdict(names, wanted, traces)


def _same(one: float, other: float) -> bool:
    return one == other or isclose(one, other, rel_tol=_TIED)
