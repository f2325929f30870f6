"""The `gputally` command and the Python client; composes the stages, imports them lazily."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from gputally.client import Client

__version__ = version("gputally")
__all__ = ["__version__", "connect"]
_PACKAGES: Final = frozenset({"agent", "accountant", "fairshare", "dashboards"})


def connect(url: str, token: str | None = None) -> Client:
    """Connect to the accountant at `url`, whose data comes back as pandas DataFrames; see gputally.client. Needs the
    extra `accountant`.

    The caller's own modules with names of gputally's packages (an `agent` beside a notebook) are not affected.
    """
    if "gputally.client" not in sys.modules:
        with _own_packages():
            import_module("gputally.client")
    from gputally.client import connect

    return connect(url, token)


@contextmanager
def _own_packages() -> Iterator[None]:
    """Inside this context, the names of gputally's packages refer to the installed packages.

    Afterwards each name refers to the caller's own module again.
    """
    home = str(Path(__file__).parents[1])

    def foreign(name: str, module: ModuleType | None) -> bool:
        file = getattr(module, "__file__", None)
        return name.partition(".")[0] in _PACKAGES and (file is None or not file.startswith(home + os.sep))

    theirs = {name: module for name, module in sys.modules.items() if foreign(name, module)}
    shadowed = {name.partition(".")[0] for name in theirs}
    shadowed |= {name for name in _PACKAGES - set(sys.modules) if _elsewhere(name, home)}
    if not shadowed:
        yield
        return
    for name in theirs:
        del sys.modules[name]
    sys.path.insert(0, home)
    try:
        yield
    finally:
        sys.path.remove(home)
        for name in [name for name in sys.modules if name.partition(".")[0] in shadowed]:
            del sys.modules[name]
        sys.modules.update(theirs)


def _elsewhere(name: str, home: str) -> bool:
    """Return whether the caller would import another module of that name than the one in `home`."""
    found = find_spec(name)
    return found is None or found.origin is None or not found.origin.startswith(home + os.sep)
