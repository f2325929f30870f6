"""A folder of the path, in which a test installs packages with plug-ins."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from accountant.inventory import pod_facts
from agent.holders import installed as installed_holders
from fairshare.targets import installed
from gputally.base import plugins as registry
from gputally.kubernetes import pod_queue_labels, scheduler_plugins


def forget() -> None:
    """Forget what was found, as a new process has."""
    for found in (
        registry._entry_points,
        registry._listed,
        scheduler_plugins.schedulers,
        installed.adapters,
        installed._whole_stops,
    ):
        found.cache_clear()
    # What one of gputally's own sources remembers of others' manifests, if that source is there.
    own = [sys.modules[name] for name in list(sys.modules) if name.startswith("agent.holders.")]
    for module in (pod_queue_labels, pod_facts, installed_holders, *own):
        for found in vars(module).values():
            if hasattr(found, "cache_clear"):
                found.cache_clear()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of the path, in which a test installs packages."""
    monkeypatch.syspath_prepend(tmp_path)
    forget()
    yield tmp_path
    forget()
    # Only modules of the folder: others, of an engine's library for example, cannot all be imported a second time.
    brought = [
        name for name, module in sys.modules.items()
        if (getattr(module, "__file__", None) or "").startswith(f"{tmp_path}/")
    ]  # fmt: skip
    for name in brought:
        del sys.modules[name]
