"""Volcano in the tests that all schedulers pass."""

from __future__ import annotations

from fairshare.schedulers.volcano.adapter import VolcanoAdapter
from fairshare.schedulers.volcano.kinds import QUEUE
from tests.fairshare.builders import object_of
from tests.fairshare.volcano.objects import DRF, HOLDING, VOLCANO_QUEUE, volcano

# A queue whose status counts parts of GPUs.
COUNTED = (QUEUE, VolcanoAdapter())
# Annotations with a pod's queue and gang, and what is read of them where it places: scheduler, ref, gang.
MARKS = {"scheduling.k8s.io/group-name": "v", "scheduling.volcano.sh/queue-name": "v"}
PLACES = ("volcano", "volcano:v", "PodGroup/ns/v")
# Annotations with which it does not preempt a pod.
PROTECTED = {"volcano.sh/preemptable": "false"}
# The queue in a pod's labels and annotations.
QUEUE_REFS = [
    ({"volcano.sh/queue-name": "q"}, {}, "volcano:q"),
    ({}, {"scheduling.volcano.sh/queue-name": "q"}, "volcano:q"),
]
# A group that names the queue of pods with these annotations: kind, name, annotations, ref.
GROUP = ("VolcanoGroup", "v", {"scheduling.k8s.io/group-name": "v"}, "volcano:batch")

# The fields that docs/schedulers.md names for each mode: mode, kind, objects.
QUEUES = [
    object_of(QUEUE, name, {}, HOLDING, annotations={
        "volcano.sh/hierarchy": f"root/{name}", "volcano.sh/hierarchy-weights": "1/1",
    })
    for name in "ab"
]  # fmt: skip
MODES = [
    ("weight", QUEUE, [*QUEUES, volcano("proportion")]),
    ("deserved", QUEUE, [*QUEUES, volcano("capacity")]),
    ("hierarchy", QUEUE, [*QUEUES, volcano(DRF)]),
]

# What the doctor finds wrong, with the lines to write.
EDIT = "kubectl -n volcano-system edit configmap volcano-scheduler-configmap: "
MENDED = [
    ("volcano:weight", volcano({"name": "gang"}), volcano({"name": "gang"}, {"name": "proportion"}), "PluginNotActive",
     EDIT + "under `plugins` of a tier in volcano-scheduler.conf write `- {name: proportion}`"),
    ("volcano:deserved", volcano({"name": "gang"}), volcano({"name": "gang"}, {"name": "capacity"}), "PluginNotActive",
     EDIT + "under `plugins` of a tier in volcano-scheduler.conf write `- {name: capacity}`"),
    ("volcano:hierarchy", volcano({"name": "drf", "enabledHierarchy": True}),
     volcano({"name": "drf", "enableHierarchy": True}), "HierarchyOff", "write `- {name: drf, enableHierarchy: true}`"),
    ("volcano:weight", volcano({"name": "proportion"}, {"name": "fairshare"}), volcano({"name": "proportion"}),
     "HistoryCountedTwice", EDIT + "take `- name: fairshare` out of volcano-scheduler.conf"),
]  # fmt: skip
MENDED_QUEUE = VOLCANO_QUEUE
# What the policy says of the target beside its mode.
MENDED_TARGET: dict[str, str] = {}
