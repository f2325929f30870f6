"""How the history of a window decays: exactly, or as Slurm calculates it, so that windows can be compared with its
figures."""

from __future__ import annotations

from typing import Final, Literal

Decay = Literal["exact", "slurm"]
"""exact: the integral. slurm: Slurm's calculation for the same half-life, per period of `calc_period`."""
DECAY: Final = "exact: the integral; slurm: Slurm's own calculation."
CALC_PERIOD: Final = "With decay=slurm: Slurm's PriorityCalcPeriod."
CHOICES: Final = (
    ("exact", "exact: the integral of the half-life"),
    ("slurm", "slurm: period by period, as Slurm does"),
)
"""The choices of a form."""
FOR_PERIOD: Final = "for the decay slurm: PriorityCalcPeriod"
