"""Divides GPUs inside the simulated scheduler."""

from __future__ import annotations

from collections.abc import Sequence

from fairshare.core.model import UNLIMITED, Claim, DivisionProblem
from fairshare.laws.division import divide
from fairshare.simulator.simulation_model import ControllerView, Dividing


def whole_gpus(
    names: Sequence[str], deserved: Sequence[float], priorities: Sequence[int] = (), limits: Sequence[float] = ()
) -> Dividing:
    """KAI's division without history (k = 0), by the weights in force."""

    def dividing(view: ControllerView, weights: Sequence[float]) -> list[float]:
        claims = tuple(
            Claim(
                name,
                view.asked[q],
                deserved[q],
                limits[q] if limits else UNLIMITED,
                weights[q],
                priority=priorities[q] if priorities else 100,
                creation=q,
            )
            for q, name in enumerate(names)
        )
        shares = divide(DivisionProblem("cycle", view.capacity, 0.0, claims), kai_compat=True).shares
        return [shares[name] for name in names]

    return dividing
