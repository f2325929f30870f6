"""What the reasons of its conditions mean and what to do, for docs/conditions.md."""

from __future__ import annotations

from fairshare.core.queues_and_weights import ConditionReason

REASONS = (
    ConditionReason("Effective", "True", "FairSharing", "every ClusterQueue shows its share", "nothing"),
    ConditionReason(
        "Effective",
        "True",
        "AdmissionFairSharing",
        "Kueue counts the past usage of these LocalQueues and reads their weights",
        "nothing",
    ),
    ConditionReason(
        "Effective",
        "False",
        "FairSharingOff",
        "no ClusterQueue shows a share",
        "switch fair sharing on in the form that the configuration's version needs "
        "([Kueue](schedulers.md#kueue)), and restart the manager",
    ),
    ConditionReason(
        "Effective",
        "False",
        "ConfigurationRefused",
        "the manager does not start with its ConfigMap",
        "correct the ConfigMap, and restart the manager",
    ),
    ConditionReason(
        "Effective",
        "Unknown",
        "ConfigurationRefused",
        "the same, while ClusterQueues show shares, or LocalQueues usage, of an earlier start",
        "correct the ConfigMap before the manager's next start",
    ),
    ConditionReason(
        "Effective",
        "False",
        "NothingToShare",
        "a ClusterQueue has no Cohort, or the policy has several root Cohorts",
        "put them under one Cohort",
    ),
    ConditionReason(
        "Effective",
        "False",
        "AdmissionFairSharingOff",
        "LocalQueues have weights, and `admissionFairSharing`, its `usageHalfLifeTime` or the ClusterQueue's "
        "`admissionScope` is missing",
        "add what is missing; after a change of the ConfigMap, restart the manager",
    ),
    ConditionReason(
        "Effective",
        "Unknown",
        "RestartPending",
        "ClusterQueues show shares, and the ConfigMap switches fair sharing off at the next start",
        "switch fair sharing on in the ConfigMap",
    ),
    ConditionReason(
        "Effective",
        "Unknown",
        "SharesDisagree",
        "some ClusterQueues show a share, some do not",
        "wait for the manager; restart it if the condition stays",
    ),
    ConditionReason("Effective", "Unknown", "SharesUnseen", "no ClusterQueue has a status", "start Kueue's manager"),
    ConditionReason(
        "Effective",
        "Unknown",
        "ConfigurationUnread",
        "the ConfigMap cannot be read while LocalQueues have weights, or while no ClusterQueue has a status",
        "name the ConfigMap in `targets.kueue.config` and in the chart's `fairshare.rbac.schedulerConfigMaps`",
    ),
    ConditionReason(
        "Effective",
        "Unknown",
        "UsageUnseen",
        "admission fair sharing is set up, and a LocalQueue shows no usage yet",
        "start Kueue's manager; the first sample takes `usageSamplingInterval`",
    ),
    ConditionReason("InSync", "True", "AsPolicy", "quota, limit, priority and parent are the same in both", "nothing"),
    ConditionReason(
        "InSync",
        "False",
        "PolicyDiffers",
        "quota, limit, priority or parent differ; the message names each object and both values",
        "change the object or the policy; gputally writes neither",
    ),
    ConditionReason(
        "InSync",
        "False",
        "QueuesStopped",
        "work waits in a queue that admits nothing",
        "remove `stopPolicy`, or correct the reason for which Kueue reports the queue as inactive",
    ),
    ConditionReason(
        "InSync",
        "Unknown",
        "NotComparable",
        "a ClusterQueue has no quota of `nvidia.com/gpu`",
        "give it such a quota, or compare the quotas by hand",
    ),
    ConditionReason(
        "ByModel", "True", "ByFlavor", "a flavor is of each model, by its `nodeLabels` or else its name", "nothing"
    ),
    ConditionReason(
        "ByModel",
        "False",
        "NoFlavor",
        "no ResourceFlavor is of a model that the policy names",
        "label the flavor with the nodes' model (`nvidia.com/gpu.product`), or correct the name in the policy",
    ),
    ConditionReason(
        "ByModel",
        "False",
        "OneWeight",
        "queues have weights by model, and Kueue has one weight for all flavors",
        "nothing, or leave `weight` out of `gpu_models`",
    ),
)
