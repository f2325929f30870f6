"""Slurm's classic fair-share factor 2^(-U/S), its decay as the code does it, and as a feedback law.

Usage of an association is weighed against its siblings': U_E = U + (U_E of the parent - U) · shares /
siblings' shares, so that a quiet account pays for a busy parent. S is the product of normalised shares
down the tree.

The exact decayed integral is what gputally counts; `slurm_*` functions reproduce Slurm's own linearised
decay, which under-counts, for cross-checks against `sshare`.

Source: SchedMD Slurm 284c3b95f08a, src/plugins/priority/multifactor/priority_multifactor.c (read, not
copied). Pure.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from math import exp2, log
from operator import mul

from fairshare.fairtree import ROOT, Account
from fairshare.weighing.laws import Memory, Siblings, Verdict, normalised


@dataclass(frozen=True, slots=True)
class Factor:
    """norm_shares: S. norm_usage: U_A, of the root's. effective_usage: U_E. fairshare: F, 0..1."""

    norm_shares: float
    norm_usage: float
    effective_usage: float
    fairshare: float


def fair_share_factor(usage: float, shares: float, dampening: float = 1.0) -> float:
    """F = 2^(-(U/S)/d); 0 where there are no shares."""
    return exp2(-usage / shares / dampening) if shares > 0 else 0.0


def factors(rows: Sequence[Account], dampening: float = 1.0) -> dict[str, Factor]:
    """Every association's factor. Usage on account rows is ignored: it is their users'."""
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
        """Who competes below `name`: an account on its parent's shares hands its children up."""
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


def exact_decay(elapsed_s: float, half_life_s: float) -> float:
    """What is left of a usage after `elapsed_s`."""
    return exp2(-elapsed_s / half_life_s)


def slurm_decay(elapsed_s: float, half_life_s: float) -> float:
    """The same as Slurm computes it: (1 - 0.693 / half-life) ^ seconds, never quite 0; no half-life, no decay."""
    if half_life_s <= 0:
        return 1.0
    return float(max((1 - 0.693 / half_life_s) ** elapsed_s, sys.float_info.min))


def exact_accrual(rate: float, run_s: float, observed_s: float, half_life_s: float) -> float:
    """∫ rate · 2^(-age / half-life) of a job that ran for the first `run_s` of `observed_s` seconds."""
    ended = exp2(-(observed_s - run_s) / half_life_s)
    return rate * half_life_s / log(2) * (ended - exp2(-observed_s / half_life_s))


def slurm_accrual(rate: float, run_s: int, observed_s: int, half_life_s: float, period_s: int = 300) -> float:
    """The same in Slurm's periods: a new slice is decayed by its whole length."""
    usage, at = 0.0, 0
    while at < observed_s:
        step = min(period_s, observed_s - at)
        ran = max(0, min(run_s - at, step))
        usage = usage * slurm_decay(step, half_life_s) + ran * slurm_decay(ran, half_life_s) * rate
        at += step
    return usage


@dataclass(frozen=True, slots=True)
class Multifactor:
    """The classic factor as weights: the configured part times 2^(-U/n), never zero."""

    dampening: float = 1.0
    relative = True

    def __call__(self, siblings: Siblings, _memory: Memory, /) -> Verdict:
        names, usage, n = siblings.columns.names, siblings.columns.usage, normalised(siblings)
        factors = [fair_share_factor(max(0.0, u), part, self.dampening) for part, u in zip(n, usage, strict=True)]
        wanted = list(map(mul, n, factors))
        if not siblings.explain:
            return Verdict(names, wanted, {})
        rows = zip(names, n, usage, factors, strict=True)
        return Verdict(names, wanted, {name: {"n": part, "U": u, "F": factor} for name, part, u, factor in rows})
