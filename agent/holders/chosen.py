"""Opens the source of holders that the settings choose: `kubelet`, or `pods=/etc/pods.yaml`, or one of another package.

gputally's own sources are called as they are; those of other packages run behind `guard`."""

from __future__ import annotations

from collections.abc import Callable

from agent.core.settings import SettingsError
from agent.holders.installed import sharing_systems
from agent.holders.protocol import SEAM, HolderPlugin, HolderSource, NodeSurroundings
from gputally.base.plugins import OURS, BrokenPlugin, NoPlugin, named, plugins


def open_holders(text: str, node: NodeSurroundings) -> tuple[str, HolderSource | None]:
    """Open the source that the setting `holders` names. Return its name, and None if whoever has a process on a GPU
    holds it.

    Raises SettingsError if it names no source, or if a place or the setting `gpu_sharing` is wrong."""
    known = sharing_systems()
    for system in sorted(node.settings.sharing_systems):
        if system not in known:
            raise SettingsError(f"gpu_sharing: unknown sharing system {system!r}; known: {', '.join(sorted(known))}")
    name, _, place = (part.strip() for part in text.partition("="))
    broken: BrokenPlugin | None = None
    try:
        plugin = named(SEAM, HolderPlugin, name)
    except BrokenPlugin as error:
        broken = error
    except NoPlugin as error:
        raise SettingsError(f"holders: {error}") from error
    if broken is None:
        opened = opening(plugin, place, node)
        if any(one.name == name and one.package == OURS for one in plugins(SEAM, HolderPlugin)):
            return name, opened()
    from agent.holders.guard import GuardedSource

    def fail() -> HolderSource:
        raise broken or SettingsError(f"holders: {name} opened no source")

    guard = GuardedSource(name, node.node, fail if broken is not None else lambda: opened() or fail())
    guard.open()
    return name, guard


def opening(plugin: HolderPlugin, place: str, node: NodeSurroundings) -> Callable[[], HolderSource | None]:
    """Return what opens a source. Raises SettingsError if the plug-in is none, needs a place and has none, or the other
    way round."""
    open_source = plugin.open
    if open_source is None:
        raise SettingsError(f"holders: {plugin.name} is no source of holders of its own")
    if bool(place) != bool(plugin.place):
        wanted = f"{plugin.name}=PLACE, {plugin.place}" if plugin.place else plugin.name
        raise SettingsError(f"holders: expected {wanted}")
    return lambda: open_source(place, node)
