"""What the reasons of its conditions mean and what to do, for docs/conditions.md."""

from __future__ import annotations

from fairshare.core.queues_and_weights import ConditionReason
from fairshare.targets.weight_plan import ONE_QUANTITY

REASONS = (
    ConditionReason(
        "Effective", "False", "HistoryCountedTwice", "a node pool has its own time-based fair share", "switch it off"
    ),
    ConditionReason(
        "Effective",
        "Unknown",
        "SettingNotSeen",
        "Run:ai's API does not show whether weights count",
        "switch on *Over quota weight* in its general settings",
    ),
    ONE_QUANTITY,
)
