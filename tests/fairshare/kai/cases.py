"""KAI in the tests that all schedulers pass."""

from __future__ import annotations

from typing import Any

from fairshare.schedulers.kai.adapter import KaiAdapter
from fairshare.schedulers.kai.kinds import QUEUE
from gputally.kubernetes.objects import Kind, Object
from tests.fairshare.kai.objects import ARGUMENTS, DATABASE, KAI_QUEUE, shard_object

# A queue whose status counts parts of GPUs.
COUNTED = (QUEUE, KaiAdapter())
# Annotations with a pod's queue and gang, and what is read of them where it places: scheduler, ref, gang.
MARKS = {"pod-group-name": "k", "kai.scheduler/queue": "k"}
PLACES = ("kai-scheduler", "kai:k", "PodGroup/ns/k")
# Annotations with which it does not preempt a pod.
PROTECTED: dict[str, str] = {}
# The queue in a pod's labels and annotations.
QUEUE_REFS: list[tuple[dict[str, str], dict[str, str], str]] = [
    ({"kai.scheduler/queue": "q"}, {}, "kai:q"),
    ({"runai/queue": "q"}, {}, "kai:q"),
    ({"kai.scheduler/queue": "new", "runai/queue": "old"}, {}, "kai:new"),
]
# A group that names the queue of pods with these annotations: kind, name, annotations, ref.
GROUP = ("KaiGroup", "k", {"pod-group-name": "k"}, "kai:batch")
# The fields that docs/schedulers.md names for each mode: mode, kind, objects.
MODES: list[tuple[str, Kind, list[Object]]] = []

# What the doctor finds wrong, with the lines to write.
PATCH = 'kubectl patch schedulingshard default --type merge -p \'{"spec":'
MENDED: list[tuple[str, dict[str, Any], dict[str, Any], str, str]] = [
    ("kai", shard_object(kValue=1, usageDBConfig=DATABASE), shard_object(kValue=0, usageDBConfig=DATABASE),
     "HistoryCountedTwice", PATCH + '{"kValue":0}}\''),
    ("kai", shard_object(kValue=0, usageDBConfig=DATABASE, **ARGUMENTS),
     shard_object(
         kValue=0, usageDBConfig=DATABASE, plugins={"proportion": {"arguments": {"other": "1", "kValue": "0"}}}),
     "HistoryCountedTwice", PATCH + '{"plugins":{"proportion":{"arguments":{"kValue":"0"}}}}}\''),
    ("kai:usage", shard_object(kValue=1), shard_object(kValue=1, usageDBConfig=DATABASE), "UsageNotRead",
     PATCH + '{"usageDBConfig":{"clientType":"prometheus","connectionString":"http://usage:9091"'),
    ("kai:usage", shard_object(kValue=0, usageDBConfig=DATABASE), shard_object(kValue=1, usageDBConfig=DATABASE),
     "UsageNotRead", PATCH + '{"kValue":1}}\''),
]  # fmt: skip
MENDED_QUEUE = KAI_QUEUE
# What the policy says of the target beside its mode.
MENDED_TARGET = {"endpoint": "http://usage:9091"}
