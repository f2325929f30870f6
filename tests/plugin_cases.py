"""What one plug-in adds to a test of several stands in `cases.py` of its own folder of tests, and goes with it. If only
some of a group take part in a test, their part stands in a module of another name."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from types import ModuleType

TESTS = Path(__file__).parent


def plugin_cases(group: str, module: str = "cases") -> dict[str, ModuleType]:
    """Return the cases of the plug-ins in a folder of tests ('fairshare') by the plug-in's folder ('volcano').

    module: the name of the modules. Each has every name that the tests read: a missing one is an AttributeError."""
    paths = sorted((TESTS / group).glob(f"*/{module}.py"))
    return {
        path.parent.name: import_module(".".join(path.with_suffix("").relative_to(TESTS.parent).parts))
        for path in paths
    }
