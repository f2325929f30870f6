"""The schedulers that are installed, those of gputally and those of other packages in the same way."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path

import structlog

from accountant.wire.policy_models import Policy
from fairshare.core.published_devices import SLICES
from fairshare.targets.guard import BrokenAdapter, GuardedAdapter
from fairshare.targets.status_config_map import StatusObject
from fairshare.targets.weight_plan import Adapter
from fairshare.targets.whole_stop import WholeStop
from gputally.base.background_tasks import error_summary
from gputally.base.clock import Clock
from gputally.base.plugins import MOST_LOADING_S, OURS, TakesTooLong, plugins, within
from gputally.kubernetes.objects import (
    BUDGET,
    CONFIG_MAP,
    EVENT,
    NODE,
    POD,
    POD_GROUPS,
    PRIORITY_CLASS,
    Cluster,
    Kind,
    Objects,
)
from gputally.kubernetes.scheduler_plugins import SEAM, SchedulerPlugin, left_out, own_schedulers, schedulers


@cache
def adapters() -> tuple[Adapter, ...]:
    """Return the adapter of every scheduler, loaded once. One that cannot be loaded says why when it is used."""
    packages = {one.name: one.package for one in plugins(SEAM, SchedulerPlugin) if one.manifest is not None}
    found = [_adapter(plugin, packages.get(name, "")) for name, plugin in schedulers().items()]
    for adapter in found:
        if isinstance(adapter, BrokenAdapter):
            structlog.get_logger("fairshare").error("scheduler_left_out", scheduler=adapter.name, fault=adapter.fault)
    return (*found, *(BrokenAdapter(name, (name,), fault) for name, fault in left_out().items()))


def _adapter(plugin: SchedulerPlugin, package: str) -> Adapter:
    if package == OURS:
        return _loaded(plugin)
    try:
        return within(MOST_LOADING_S, lambda: GuardedAdapter(plugin, _loaded(plugin)))
    except Exception as error:  # noqa: BLE001 - code of others: whatever it does, the program goes on
        reason = str(error) if isinstance(error, TakesTooLong) else error_summary(error)
        fault = f"{plugin.name} of the package {package} cannot be used: {plugin.adapter}: {reason}"
        return BrokenAdapter(plugin.name, plugin.prefixes, fault)


def adapter_fault(plugin: SchedulerPlugin, package: str) -> str:
    """Return why the adapter of a package's scheduler cannot be used; "" if it can."""
    found = _adapter(plugin, package)
    return found.fault if isinstance(found, BrokenAdapter) else ""


def _loaded(plugin: SchedulerPlugin) -> Adapter:
    """Return a new adapter. Raises whatever its module raises, and TypeError if it is not that of the manifest."""
    module, _, name = plugin.adapter.partition(":")
    adapter = getattr(importlib.import_module(module), name)()
    if not isinstance(adapter, Adapter) or (adapter.name, adapter.prefixes) != (plugin.name, plugin.prefixes):
        raise TypeError(f"it is no Adapter with the name {plugin.name} and the prefixes {', '.join(plugin.prefixes)}")
    return adapter


@contextmanager
def opened(
    policy: Policy, cluster: Cluster, file: Callable[[str], Path | None], where: StatusObject, clock: Clock
) -> Iterator[Mapping[str, Objects]]:
    """Yield the clients of targets whose objects are not in the cluster, by the target's name. Raises FairshareError if
    a setting is missing that the policy needs.

    file: returns a setting of a manifest (`SchedulerPlugin.files`). where: the controller's ConfigMap."""
    files = {plugin.name: {one.name: file(one.name) for one in plugin.files} for plugin in own_schedulers()}
    with ExitStack() as stack:
        clients = {
            adapter.name: stack.enter_context(adapter.opened(policy, cluster, files[adapter.name], where, clock))
            for adapter in adapters()
            if files.get(adapter.name)
        }
        yield {name: client for name, client in clients.items() if client is not None}


def with_workloads() -> frozenset[str]:
    """Return the schedulers whose workloads are read, so that victims can be chosen among them."""
    return frozenset(name for name, plugin in schedulers().items() if plugin.workloads)


@cache
def _whole_stops() -> Mapping[tuple[str, str], WholeStop]:
    found = [adapter.stop for adapter in adapters() if adapter.stop is not None]
    return {(kind.api_version.partition("/")[0], kind.kind): stop for stop in found for kind in stop.kinds}


def whole_stop(kind: Kind) -> WholeStop | None:
    """Return how workloads of a kind are stopped through their own objects; None if their pods are evicted."""
    return _whole_stops().get((kind.api_version.partition("/")[0], kind.kind))


def kinds() -> tuple[Kind, ...]:
    """Return every kind that the controller reads or writes."""
    own = (kind for plugin in schedulers().values() for versions in plugin.kinds for kind in versions)
    return (*own, NODE, POD, CONFIG_MAP, EVENT, BUDGET, PRIORITY_CLASS, *POD_GROUPS, *SLICES)


def modes(policy: Policy) -> dict[str, str]:
    """Return the mode of every target: off, dry-run or enforce."""
    return {adapter.name: adapter.mode(policy) for adapter in adapters()}
