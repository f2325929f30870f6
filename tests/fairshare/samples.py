"""The product's sample of a policy and a cluster for it, with the fake scheduler instead of the one that they show."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml

from gputally.kubernetes.objects import GPU
from gputally.testing.fake_scheduler import NAME, queue_object, setup_object

SAMPLES = files("fairshare") / "samples"


def policy_text() -> str:
    """Return the sample of a policy."""
    text = (SAMPLES / "policy.yaml").read_text("utf-8")
    shown = yaml.safe_load(text)["queues"][0]["refs"][0].partition(":")[0]
    return text.replace(f'["{shown}:', f'["{NAME}:').replace(f"\n  {shown}:\n", f"\n  {NAME}:\n")


def cluster_objects() -> list[dict[str, Any]]:
    """Return the objects of the sample of a cluster: its nodes, and a queue with the figures of each of its queues."""
    listed = yaml.safe_load((SAMPLES / "cluster.yaml").read_text("utf-8"))
    nodes = [obj for obj in listed if obj["kind"] == "Node"]
    return [setup_object(), *nodes, *(_queue(obj) for obj in listed if obj["kind"] == "Queue")]


def _queue(obj: dict[str, Any]) -> dict[str, Any]:
    spec, status = obj["spec"], obj["status"]
    shown = spec["resources"]["gpu"]
    queue = queue_object(
        obj["metadata"]["name"], shown["overQuotaWeight"], requested=status["requested"][GPU],
        allocated=status["allocated"][GPU], quota=shown["quota"], parent=spec.get("parentQueue"),
    )  # fmt: skip
    more = {"limit": shown["limit"], **({"priority": spec["priority"]} if "priority" in spec else {})}
    return {**queue, "spec": {**queue["spec"], **more}}


def written(folder: Path) -> tuple[Path, Path]:
    """Write the policy and the cluster as files."""
    policy, cluster = folder / "policy.yaml", folder / "cluster.yaml"
    policy.write_text(policy_text())
    cluster.write_text(yaml.safe_dump(cluster_objects()))
    return policy, cluster
