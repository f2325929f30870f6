"""The manifest of Run:ai."""

from __future__ import annotations

from fairshare.schedulers.runai.adapter import RunaiAdapter
from fairshare.targets.protocol import SchedulerPlugin

SCHEDULER = SchedulerPlugin(
    name="runai",
    adapter=RunaiAdapter,
    kinds=(),
    reaches="calls the API of Run:ai's control plane at targets.runai.url; writes over-quota weights there",
    page="docs/schedulers.md",
    workloads=False,
)
