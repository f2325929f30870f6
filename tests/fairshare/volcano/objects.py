"""Objects of Volcano as its administrators write them."""

from __future__ import annotations

from typing import Any

import yaml

from gputally.kubernetes.objects import CONFIG_MAP
from tests.fairshare.builders import object_of


def volcano(*plugins: object) -> dict[str, Any]:
    """Build Volcano's configuration with these plugins, given by name or as mappings."""
    listed = [{"name": plugin} if isinstance(plugin, str) else plugin for plugin in plugins]
    text = yaml.safe_dump({"actions": "enqueue, allocate", "tiers": [{"plugins": listed}]})
    there = object_of(CONFIG_MAP, "volcano-scheduler-configmap", namespace="volcano-system")
    return {**there, "data": {"volcano-scheduler.conf": text}}


VOLCANO_QUEUE = {
    "apiVersion": "scheduling.volcano.sh/v1beta1", "kind": "Queue",
    "metadata": {"name": "a", "annotations": {"volcano.sh/hierarchy": "root/a", "volcano.sh/hierarchy-weights": "1/1"}},
    "spec": {"weight": 1},
}  # fmt: skip
HOLDING = {"state": "Open", "allocated": {"nvidia.com/gpu": "4"}}
DRF = {"name": "drf", "enableHierarchy": True}
