"""What the reasons of its conditions mean and what to do, for docs/conditions.md."""

from __future__ import annotations

from fairshare.core.queues_and_weights import ConditionReason

REASONS = (
    ConditionReason("Effective", "True", "Asked", "the scheduler calls the extender", "nothing"),
    ConditionReason(
        "Effective",
        "Unknown",
        "NoRequests",
        "no scheduler has called the extender of this replica since it started",
        "check `urlPrefix` and `tlsConfig: {caFile}` in the scheduler's configuration",
    ),
    ConditionReason(
        "Effective",
        "Unknown",
        "AsksTheExtender",
        "`plan` cannot see the requests to the extender",
        "read the running controller's condition",
    ),
    ConditionReason(
        "ByModel",
        "True",
        "ByNode",
        "the extender and the controller's victims follow the quotas of the node's model",
        "nothing",
    ),
)
