"""What preemption leaves on an object."""

from __future__ import annotations

from fairshare.preemption.eviction import EvictionCheck
from fairshare.preemption.preemption_types import Victim


def kept(vetting: EvictionCheck, victim: Victim) -> str | None:
    """Return the reason for keeping a victim that has changed since the decision."""
    veto = vetting.refusal(victim)
    assert veto is None or veto.kind == "changed"
    return veto.reason if veto is not None else None
