"""Reads and writes the objects of each supported scheduler."""

from __future__ import annotations

from fairshare.targets import kai, kube_scheduler, kueue, runai, volcano
from fairshare.targets.weight_plan import Adapter
from gputally.kubernetes.objects import BUDGET, CONFIG_MAP, EVENT, NODE, POD, PRIORITY_CLASS, Kind

ADAPTERS: tuple[Adapter, ...] = (
    kai.KaiAdapter(),
    kueue.KueueAdapter(),
    volcano.VolcanoAdapter(),
    kube_scheduler.KubeSchedulerAdapter(),
    runai.RunaiAdapter(),
)
KINDS: tuple[Kind, ...] = (
    *kai.KINDS,
    *kueue.KINDS,
    *volcano.KINDS,
    NODE,
    POD,
    CONFIG_MAP,
    EVENT,
    BUDGET,
    PRIORITY_CLASS,
)
