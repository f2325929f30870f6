"""Stops Workloads by deactivating them.

Their pods are not evicted, because their Job would create new ones while it still has the quota. A deactivated Workload
is activated again only after Kueue has taken its quota back, because Kueue might otherwise not see that it was
stopped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fairshare.schedulers.kueue.kinds import WORKLOADS
from fairshare.targets.whole_stop import WITHOUT_INTENT, NextStep, PreemptionIntent, WholeStop
from gputally.kubernetes.objects import Object, value_at


def condition_of(obj: Object, kind: str) -> Mapping[str, Any]:
    """Return the condition of this type in an object's status; empty if it has none."""
    conditions = value_at(obj, ("status", "conditions")) or ()
    return next((condition for condition in conditions if condition.get("type") == kind), {})


class DeactivateWorkload(WholeStop):
    """Sets `spec.active` of Workloads."""

    kinds = WORKLOADS

    def change(self) -> Mapping[str, Any]:
        return {"spec": {"active": False}}

    def ended(self, obj: Object) -> str | None:
        return "it is switched off already" if value_at(obj, ("spec", "active")) is False else None

    def next_step(
        self, obj: Object, _intent: PreemptionIntent, _commands: Sequence[Object], _now_ms: int
    ) -> NextStep | None:
        if value_at(obj, ("spec", "active")) is not False:
            return NextStep("switched on by another client", WITHOUT_INTENT)
        if condition_of(obj, "QuotaReserved").get("status") == "True":
            return None
        return NextStep("switched on again", {**WITHOUT_INTENT, "spec": {"active": True}})
