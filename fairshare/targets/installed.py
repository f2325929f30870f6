"""The schedulers that are installed, those of gputally and those of other packages in the same way."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from accountant.wire.policy_models import Policy
from fairshare.core.published_devices import SLICES
from fairshare.targets.protocol import SEAM, SchedulerPlugin
from fairshare.targets.weight_plan import Adapter
from gputally.base.plugins import usable
from gputally.kubernetes.objects import BUDGET, CONFIG_MAP, EVENT, NODE, POD, PRIORITY_CLASS, Kind


def schedulers() -> Mapping[str, SchedulerPlugin]:
    """Return the manifests by name."""
    return usable(SEAM, SchedulerPlugin)


@cache
def _adapter(plugin: SchedulerPlugin) -> Adapter:
    return plugin.adapter()


def adapters() -> tuple[Adapter, ...]:
    """Return the adapter of every scheduler."""
    return tuple(_adapter(plugin) for plugin in schedulers().values())


def with_workloads() -> frozenset[str]:
    """Return the schedulers whose workloads are read, so that victims can be chosen among them."""
    return frozenset(name for name, plugin in schedulers().items() if plugin.workloads)


def kinds() -> tuple[Kind, ...]:
    """Return every kind that the controller reads or writes."""
    own = (kind for plugin in schedulers().values() for versions in plugin.kinds for kind in versions)
    return (*own, NODE, POD, CONFIG_MAP, EVENT, BUDGET, PRIORITY_CLASS, *SLICES)


def modes(policy: Policy) -> dict[str, str]:
    """Return the mode of every target: off, dry-run or enforce."""
    return {adapter.name: adapter.mode(policy) for adapter in adapters()}
