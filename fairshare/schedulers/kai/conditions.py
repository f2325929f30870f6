"""What the reasons of its conditions mean and what to do, for docs/conditions.md."""

from __future__ import annotations

from fairshare.core.queues_and_weights import ConditionReason
from fairshare.targets.weight_plan import ONE_QUANTITY

REASONS = (
    ConditionReason(
        "Effective", "True", "WeightsOnly", "every SchedulingShard has k = 0 or no usage database", "nothing"
    ),
    ConditionReason(
        "Effective", "True", "UsageOnly", "mode `usage`: KAI reads past usage from the policy's endpoint", "nothing"
    ),
    ConditionReason(
        "Effective",
        "False",
        "HistoryCountedTwice",
        "mode `weight`, and a shard reads usage with k above 0",
        "set `kValue: 0` in the shard, in `plugins.proportion.arguments` if these are set",
    ),
    ConditionReason(
        "Effective",
        "False",
        "ProportionOff",
        "the plugin proportion is off in a shard, so KAI divides nothing",
        "run the command in the message",
    ),
    ConditionReason(
        "Effective",
        "False",
        "HierarchyIgnored",
        "a shard has `full-hierarchy-fairness: false`, so KAI ignores the queues above the lowest ones",
        "run the command in the message",
    ),
    ConditionReason(
        "Effective",
        "False",
        "UsageNotRead",
        "mode `usage`, and a shard has k = 0, no `usageDBConfig`, another address, another window type or "
        "names of other metrics",
        "`gputally fairshare shard --policy FILE --endpoint URL` prints the shard",
    ),
    ConditionReason(
        "Effective",
        "False",
        "UsageTooOld",
        "mode `usage`: a shard's `fetchInterval` is longer than the policy's `max_staleness`; until the next "
        "fetch KAI divides by the usage that it has, whatever its `stalenessPeriod`",
        "run the command in the message",
    ),
    ConditionReason(
        "Effective",
        "Unknown",
        "NoShards",
        "no SchedulingShard can be read",
        "install KAI's operator, or check the shard by hand",
    ),
    ConditionReason(
        "Effective",
        "Unknown",
        "AddressUnknown",
        "mode `usage`: the address is in an environment variable or in a Config that cannot be read, or the "
        "policy names no endpoint",
        "set `connectionString` in the shard and `targets.kai.endpoint` in the policy",
    ),
    ConditionReason("InSync", "True", "AsPolicy", "quota, limit, priority and parent are the same in both", "nothing"),
    ConditionReason(
        "InSync",
        "False",
        "PolicyDiffers",
        "quota, limit, priority or parent differ; the message names each object and both values",
        "change the object or the policy; gputally writes neither",
    ),
    ONE_QUANTITY,
)
