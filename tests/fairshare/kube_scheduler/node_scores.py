"""Reads the scores of nodes."""

from __future__ import annotations

from collections.abc import Sequence

from fairshare.core.queues_and_weights import Pod
from fairshare.schedulers.kube_scheduler.extender import NodeScores
from fairshare.targets.extender import ExtenderView


def scores(pod: Pod, nodes: Sequence[str], view: ExtenderView) -> dict[str, int]:
    """Return the extender's scores by node."""
    return dict(zip(nodes, NodeScores(nodes, view).of(pod, view), strict=True))
