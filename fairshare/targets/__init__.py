"""Reads and writes the objects of each supported scheduler."""

from __future__ import annotations

from accountant.wire.policy_models import Policy
from fairshare.core.published_devices import SLICES
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
    *SLICES,
)


def modes(policy: Policy) -> dict[str, str]:
    """Return the mode of every target: off, dry-run or enforce."""
    return {adapter.name: adapter.mode(policy) for adapter in ADAPTERS}
