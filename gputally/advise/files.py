"""Node counts as the autoscaler's own configuration: Terraform variables, Ansible variables, Karpenter limits. Pure.

Sources: Terraform, "Variable definitions (.tfvars) files" (JSON); Karpenter, NodePool karpenter.sh/v1: `spec.limits`
maps a resource to a quantity.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, Literal

import yaml

from gputally.advise.demand import DAYS, HOURS, PoolAdvice

Form = Literal["tfvars", "ansible", "karpenter"]
GPU = "nvidia.com/gpu"
VARIABLE = "gpu_node_pools"


def rendered(form: Form, advised: Sequence[PoolAdvice], threshold: float, span: str) -> str:
    """The file's text. span: of the window, for the comment."""
    return _FORMS[form](advised, threshold, span)


def variables(advised: Sequence[PoolAdvice], threshold: float) -> dict[str, dict[str, Any]]:
    """By pool: min_nodes, max_nodes, gpus_per_node, utilisation_threshold, and weekly_nodes as 24 counts a weekday (an
    hour the window has not seen has the largest count)."""
    found: dict[str, dict[str, Any]] = {}
    for one in advised:
        key = one.pool.key
        if key in found:
            key = "_".join(filter(None, (one.pool.cluster, key, one.pool.capacity_type, one.pool.region)))
        found[key] = {
            "pool": one.pool.name,
            "gpu_model": one.pool.gpu_model,
            "gpus_per_node": one.gpus_per_node,
            "min_nodes": one.min_nodes,
            "max_nodes": one.max_nodes,
            "utilisation_threshold": threshold,
            "weekly_nodes": {
                day: [one.max_nodes if count is None else count for count in one.weekly[at * HOURS : (at + 1) * HOURS]]
                for at, day in enumerate(DAYS)
            },
        }
    return found


def _tfvars(advised: Sequence[PoolAdvice], threshold: float, _span: str) -> str:
    return json.dumps({VARIABLE: variables(advised, threshold)}, indent=2) + "\n"


def _ansible(advised: Sequence[PoolAdvice], threshold: float, span: str) -> str:
    text = yaml.safe_dump(
        {VARIABLE: variables(advised, threshold)}, sort_keys=False, default_flow_style=None, width=120
    )
    return f"# gputally advise autoscaler, {span}\n---\n{text}"


def _karpenter(advised: Sequence[PoolAdvice], threshold: float, span: str) -> str:
    """One document a pool that has a name: Karpenter knows no smallest size and no schedule, so that only the limit is
    set."""
    parts = [
        f"# gputally advise autoscaler, {span}, at most {threshold:.0%} of a node's GPUs held\n",
        "# kubectl apply --server-side --field-manager=gputally-advise -f FILE   # NodePools that exist\n",
    ]
    for one in advised:
        if not one.pool.named:
            parts.append(f"# {one.pool.name}: no node pool is known of these nodes\n")
            continue
        document = {
            "apiVersion": "karpenter.sh/v1",
            "kind": "NodePool",
            "metadata": {"name": one.pool.name},
            "spec": {"limits": {GPU: str(one.max_nodes * one.gpus_per_node)}},
        }
        parts.append("---\n" + yaml.safe_dump(document, sort_keys=False))
    return "".join(parts)


_FORMS: dict[Form, Callable[[Sequence[PoolAdvice], float, str], str]] = {
    "tfvars": _tfvars,
    "ansible": _ansible,
    "karpenter": _karpenter,
}
