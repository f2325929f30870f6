"""The roles of the chart have the rights that the manifests of schedulers name."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import helm_python
import pytest
from msgspec.structs import replace

from gputally.kubernetes.rights import Rights
from gputally.kubernetes.scheduler_plugins import SchedulerPlugin
from scripts import chart_roles
from tests.chart.conftest import Manifest, rendered_by

LANES = SchedulerPlugin("lanes", ("lanes",), "lanes:Lanes", (), "nothing", "lanes.md")
QUEUES = Rights("lanes.example.com", "lanes tracks", "list patch", "to write weights")
OWN = Rights("", "secrets", "get", "to read its key", name="lanes-key")
STOPS = Rights("lanes.example.com", "runs", "patch", "to stop runs", preempting=True)
BILLS = Rights("lanes.example.com", "lanes", "list watch", "to bill a pod to its queue", "accountant")


def rendered(folder: Path, tmp_path: Path, manifests: tuple[SchedulerPlugin, ...], values: Any) -> dict[str, Manifest]:
    """Return the ClusterRoles of a chart whose schedulers are these, by program."""
    chart = tmp_path / "chart"
    shutil.copytree(folder, chart, dirs_exist_ok=True)
    (chart / "templates" / "_rights.tpl").write_text(chart_roles.template(manifests))
    roles = rendered_by(helm_python.Chart.load(chart), values).of("ClusterRole")
    return {role["metadata"]["labels"]["app.kubernetes.io/component"]: role for role in roles}


def test_a_right_of_a_manifest_is_in_the_role_of_its_program_alone(folder: Path, tmp_path: Path) -> None:
    lanes = replace(LANES, rights=(QUEUES, OWN, STOPS, BILLS))

    def rules(preempt: bool) -> dict[str, list[Any]]:
        values = {"fairshare": {"rbac": {"preempt": preempt}}, "accountant": {"kubernetesApi": True}}
        none = rendered(folder, tmp_path, (), values)
        roles = rendered(folder, tmp_path, (lanes,), values)
        return {name: [rule for rule in roles[name]["rules"] if rule not in none[name]["rules"]] for name in roles}

    group = {"apiGroups": ["lanes.example.com"]}
    always = [
        {**group, "resources": ["lanes", "tracks"], "verbs": ["list", "patch"]},
        {"apiGroups": [""], "resources": ["secrets"], "resourceNames": ["lanes-key"], "verbs": ["get"]},
    ]
    bills = [{**group, "resources": ["lanes"], "verbs": ["list", "watch"]}]
    assert rules(preempt=False) == {"agent": [], "accountant": bills, "fairshare": always}
    stops = {**group, "resources": ["runs"], "verbs": ["patch"]}
    assert rules(preempt=True) == {"agent": [], "accountant": bills, "fairshare": [*always, stops]}


def test_configmaps_that_a_policy_can_name_are_defaults_of_a_value() -> None:
    rights = Rights("", "configmaps", "get", "to read settings", name="lanes-config", setting="config")
    text = "a: 1\n    schedulerConfigMaps: [old]\n"
    changed = chart_roles.values(text, (replace(LANES, rights=(rights,)),))
    assert changed == "a: 1\n    schedulerConfigMaps: [lanes-config]\n"
    with pytest.raises(ValueError, match="lanes-config"):
        chart_roles.values(text, (replace(LANES, rights=(replace(rights, resources="secrets"),)),))
