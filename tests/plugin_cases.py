"""What one plug-in adds to a test of several stands in `cases.py` of its own folder of tests, and goes with it. If only
some of a group take part in a test, their part stands in a module of another name."""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType

import pytest

TESTS = Path(__file__).parent


def registered(plugin: str) -> bool:
    """Return whether somebody registers a plug-in (`schedulers.kueue`)."""
    seam, _, name = plugin.partition(".")
    return name in entry_points(group=f"gputally.{seam}").names


def needs(plugin: str) -> pytest.MarkDecorator:
    """Return the mark of a test that needs a plug-in and is not in its folder, because others of its module do not."""
    return pytest.mark.skipif(not registered(plugin), reason=f"{plugin} is deleted")


def need(plugin: str) -> None:
    """Skip the running test where a plug-in is deleted that a helper of many tests needs."""
    if not registered(plugin):
        pytest.skip(f"{plugin} is deleted")


def plugin_cases(group: str, module: str = "cases") -> dict[str, ModuleType]:
    """Return the cases of the plug-ins in a folder of tests ('fairshare') by the plug-in's folder ('volcano').

    module: the name of the modules. Each has every name that the tests read: a missing one is an AttributeError."""
    paths = sorted((TESTS / group).glob(f"*/{module}.py"))
    return {
        path.parent.name: import_module(".".join(path.with_suffix("").relative_to(TESTS.parent).parts))
        for path in paths
    }
