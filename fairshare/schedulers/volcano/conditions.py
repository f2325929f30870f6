"""What the reasons of its conditions mean and what to do, for docs/conditions.md."""

from __future__ import annotations

from fairshare.core.queues_and_weights import ConditionReason
from fairshare.targets.weight_plan import ONE_QUANTITY

REASONS = (
    ConditionReason("Effective", "True", "PluginActive", "the plugin of the mode is active", "nothing"),
    ConditionReason(
        "Effective",
        "False",
        "PluginNotActive",
        "the plugin of the mode is in no tier",
        "add it, or set the mode that fits the active plugin",
    ),
    ConditionReason(
        "Effective",
        "False",
        "HierarchyOff",
        "mode `hierarchy`, and drf has no `enableHierarchy: true`",
        "add it; Volcano ignores the unknown key `enabledHierarchy`",
    ),
    ConditionReason(
        "Effective",
        "False",
        "HistoryCountedTwice",
        "Volcano's own plugin `fairshare` counts past usage too",
        "remove the plugin, name only other queues in its `fairshare.targetQueues`, or switch the target off "
        "in the policy",
    ),
    ConditionReason(
        "Effective",
        "False",
        "StrangersCompete",
        "mode `weight`, and Volcano queues that the policy does not name hold GPUs",
        "name each in the `refs` of a queue of the policy",
    ),
    ConditionReason(
        "Effective",
        "False",
        "ConfigurationRefused",
        "Volcano refuses its configuration and keeps the earlier one",
        "correct it",
    ),
    ConditionReason(
        "Effective",
        "Unknown",
        "ConfigurationUnread",
        "the ConfigMap cannot be read or has no tiers",
        "name it in `targets.volcano.config` and in the chart's `fairshare.rbac.schedulerConfigMaps`",
    ),
    ConditionReason("InSync", "True", "AsPolicy", "capability, guarantee and parent are the same in both", "nothing"),
    ConditionReason(
        "InSync",
        "False",
        "PolicyDiffers",
        "a capability is not the policy's limit, a guarantee is above the quota, or the parent differs",
        "change the Queue or the policy; gputally writes neither",
    ),
    ConditionReason(
        "InSync",
        "False",
        "QueuesStopped",
        "work waits in a queue whose state is not `Open`; it counts as no demand",
        "`vcctl queue operate --action open --name QUEUE`",
    ),
    ONE_QUANTITY,
)
