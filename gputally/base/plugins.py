"""Finds plug-ins by their entry points, those of gputally and those of other packages in the same way.

A group of entry points is a seam, such as `gputally.channels`. An entry point's name is the name under which users
choose the plug-in, and its value is the plug-in's manifest. A package whose plug-in cannot be loaded, or not in
time, whose manifest has values of other types than its class states, or that takes what another one has, is named with
the reason and left out, so it never stops a program.

    [project.entry-points."gputally.channels"]
    ntfy = "ntfy_channel:CHANNEL"
"""

from __future__ import annotations

import builtins
import collections.abc
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass
from functools import cache, partial
from importlib import import_module
from importlib.metadata import Distribution, EntryPoint, entry_points
from types import UnionType
from typing import Any, Final, Generic, TypeVar, Union, get_args, get_origin, get_type_hints

from gputally.base.errors import AccountantError
from gputally.base.near_names import nearest, shown

T = TypeVar("T")
R = TypeVar("R")
OURS: Final = "gputally"
"""The package whose plug-ins come first."""
MOST_LOADING_S: Final = 20.0
"""How long a plug-in of another package may take to load."""
_MOST_REASON = 300


class NoPlugin(AccountantError):
    """No usable plug-in has this name."""


class BrokenPlugin(NoPlugin):
    """The plug-in of this name cannot be used."""


@dataclass(frozen=True, slots=True)
class Plugin(Generic[T]):
    """An entry point of a seam.

    package, version: the distribution that brings it.
    manifest: None if it cannot be used; `fault` says why."""

    name: str
    package: str
    version: str
    manifest: T | None
    fault: str = ""


def plugins(seam: str, kind: type[T]) -> tuple[Plugin[T], ...]:
    """The plug-ins of a seam, those of gputally first, then by package and name. kind: the type of their manifests. It
    may have a property `claims`: what only one plug-in can have, as words.

    They are looked for once in a process."""
    any_kind: Any = kind
    return _listed(seam, any_kind)


_entry_points = cache(entry_points)
"""Those of all groups, because each search reads a file of every installed package."""


@cache
def _listed(seam: str, kind: Any) -> tuple[Plugin[Any], ...]:
    named_and_versioned = cache(_named_and_versioned)
    found = sorted(
        ((*named_and_versioned(point.dist), point) for point in _entry_points().select(group=seam)),
        key=lambda one: (one[0] != OURS, one[0], one[2].name),
    )
    taken: dict[str, str] = {}
    claimed: dict[str, str] = {}
    listed = []
    for package, version, point in found:
        if point.name in taken:
            owner, manifest, fault = taken[point.name], None, ""
            if owner == package:  # the same distribution, found twice on the path
                continue
            fault = f"the package {owner} already has a plug-in of this name"
        else:
            taken[point.name] = package
            manifest, fault = _loaded(point, kind, guarded=package != OURS)
            claims: tuple[str, ...] = getattr(manifest, "claims", ())
            if (claim := next((claim for claim in claims if claim in claimed), None)) is not None:
                manifest, fault = None, f"{claim} belongs to {claimed[claim]}"
            else:
                claimed |= dict.fromkeys(claims, point.name)
        listed.append(Plugin(point.name, package, version, manifest, fault))
    return tuple(listed)


def usable(seam: str, kind: type[T]) -> Mapping[str, T]:
    """The manifests by name."""
    return {one.name: one.manifest for one in plugins(seam, kind) if one.manifest is not None}


def named(seam: str, kind: type[T], name: str) -> T:
    """The manifest with this name. Raises BrokenPlugin, which says why it cannot be used, or NoPlugin, which says what
    is installed."""
    found = usable(seam, kind).get(name)
    if found is not None:
        return found
    for one in plugins(seam, kind):
        if one.name == name:
            raise BrokenPlugin(f"{name} of the package {one.package} {one.version} cannot be used: {one.fault}")
    raise NoPlugin(f"no plug-in is called {shown(name)}{nearest(name, usable(seam, kind))}")


def preferred(names: Collection[str], *wanted: str) -> str:
    """The first of the wanted names that is among the names, otherwise the first of these: a default that follows what
    is installed. Without names it is the first that is wanted, which is then refused as any other unknown name."""
    return next((name for name in (*wanted, *names) if name in names), wanted[0])


def _named_and_versioned(package: Distribution | None) -> tuple[str, str]:
    """The name and version of a package, for which its metadata is parsed each time."""
    return (package.name, package.version) if package is not None else ("", "")


def _loaded(point: EntryPoint, kind: type[T], *, guarded: bool) -> tuple[T | None, str]:
    try:
        if guarded:
            within(MOST_LOADING_S, partial(import_module, point.module))
    except Exception as error:  # noqa: BLE001 - code of others: whatever it does, the program goes on
        # Whatever fails while it is imported, such as the manifest of another plug-in, takes all of its plug-ins along.
        reason = (
            f"the module {point.module}, with all its plug-ins, cannot be imported: {type(error).__name__}: {error}"
        )
        return None, reason[:_MOST_REASON]
    try:
        manifest: Any = within(MOST_LOADING_S, point.load) if guarded else point.load()
    except Exception as error:  # noqa: BLE001
        return None, f"{point.value}: {type(error).__name__}: {error}"[:_MOST_REASON]
    if not isinstance(manifest, kind):
        return None, f"{point.value} is of the type {type(manifest).__name__}, not {kind.__name__}"
    own_name = getattr(manifest, "name", point.name)
    if own_name != point.name:
        return None, f"{point.value} calls itself {own_name!r}"
    if (wrong := next(_misshapen(manifest, kind, ""), None)) is not None:
        return None, f"{point.value}: {wrong}"[:_MOST_REASON]
    return manifest, ""


class _Names(dict[str, Any]):
    """The names of a module. What only a type checker sees is any type."""

    def __missing__(self, name: str) -> Any:
        return getattr(builtins, name, Any)


@cache
def _hints(kind: Any) -> Mapping[str, Any]:
    return get_type_hints(kind, localns=_Names(vars(sys.modules[kind.__module__])))


def _misshapen(value: Any, hint: Any, place: str) -> Iterator[str]:
    """Yield where a value is not of the type that a manifest's class states, as far as it can be seen without calls."""
    origin, args = get_origin(hint), get_args(hint)
    if isinstance(hint, TypeVar):
        hint = hint.__bound__ or Any
    if hint is Any:
        return
    if origin in (Union, UnionType):
        right = any(next(_misshapen(value, one, place), None) is None for one in args)
    elif origin is collections.abc.Callable:
        right = callable(value)
    elif origin is type:
        bound = getattr(args[0], "__bound__", None) or args[0]
        right = isinstance(value, type) and (not isinstance(bound, type) or issubclass(value, bound))
    else:
        right = isinstance(value, origin or hint)
    if not right:
        yield f"{place} is {value!r}, not {getattr(hint, '__name__', hint) if origin is None else hint}"
    elif origin in (tuple, frozenset):
        for at, item in enumerate(value):
            yield from _misshapen(item, args[0], f"{place}[{at}]")
    elif origin is None and (hasattr(hint, "__dataclass_fields__") or hasattr(hint, "__struct_fields__")):
        for name, inner in _hints(hint).items():
            yield from _misshapen(getattr(value, name), inner, f"{place}.{name}" if place else name)


class TakesTooLong(AccountantError):
    """The code did not end in its time. It may still run: `done` is set when it has ended."""

    def __init__(self, most_s: float, done: threading.Event) -> None:
        super().__init__(f"no end after {most_s:g} s")
        self.done = done


class PluginRaised(RuntimeError):
    """The code raised what is no Exception, such as SystemExit, or one whose message cannot be read."""


def within(most_s: float, call: Callable[[], R]) -> R:
    """The result of code that may hang, which runs on a thread of its own. Raises the Exception that it raises,
    PluginRaised for anything else that it raises, and TakesTooLong."""
    outcome: Future[R] = Future()
    done = threading.Event()

    def run() -> None:
        try:
            outcome.set_result(call())
        except BaseException as error:  # noqa: BLE001 - it is raised again by the caller
            outcome.set_exception(_plain(error))
        finally:
            done.set()

    threading.Thread(target=run, name="plugin", daemon=True).start()
    try:
        return outcome.result(most_s)
    except FutureTimeout:
        if outcome.done():  # the code itself raised a TimeoutError
            raise
        raise TakesTooLong(most_s, done) from None


def _plain(error: BaseException) -> Exception:
    name = type(error).__name__
    try:
        text = str(error)
    except BaseException:  # noqa: BLE001 - code of others
        return PluginRaised(f"{name}, whose message cannot be read")
    return error if isinstance(error, Exception) else PluginRaised(f"{name}: {text}")
