"""Packages with plug-ins, as an installer leaves them: a module, and its metadata beside it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from accountant.inventory import pod_facts
from agent.holders import installed as installed_holders
from fairshare.targets import installed
from gputally.base import plugins as registry
from gputally.kubernetes import pod_queue_labels, scheduler_plugins


def install(folder: Path, package: str, entry_points: Mapping[str, Mapping[str, str]], **modules: str) -> None:
    """Write a package into a folder of the path. entry_points: name and value by group. modules: their text by
    name."""
    for name, text in modules.items():
        (folder / f"{name}.py").write_text(text)
    metadata = folder / f"{package.replace('-', '_')}-1.2.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.2\n")
    groups = [
        "\n".join([f"[{group}]", *(f"{name} = {value}" for name, value in points.items())])
        for group, points in entry_points.items()
    ]
    (metadata / "entry_points.txt").write_text("\n".join(groups) + "\n")


@contextmanager
def on_the_path(folder: Path) -> Iterator[None]:
    """Have a folder on the path of this process, and of those that it starts, until the block ends. Packages must be
    installed before a plug-in is looked for."""
    try:
        with pytest.MonkeyPatch.context() as patched:
            patched.syspath_prepend(folder)
            patched.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)
            _forget()
            yield
    finally:
        _forget()
        # Only modules of the folder: others, of an engine's library for example, cannot all be imported a second time.
        brought = [
            name for name, module in sys.modules.items()
            if (getattr(module, "__file__", None) or "").startswith(f"{folder}/")
        ]  # fmt: skip
        for name in brought:
            del sys.modules[name]


@contextmanager
def fake_channels(folder: Path) -> Iterator[None]:
    """Have the channels of `gputally.testing.fake_channels` installed in an empty folder until the block ends."""
    with on_the_path(folder):
        install_fake_channels(folder)
        yield


def install_fake_channels(folder: Path) -> None:
    points = {name.lower(): f"gputally.testing.fake_channels:{name}" for name in ("SHELF", "BELL")}
    install(folder, "fake-channels", {"gputally.channels": points})


def _forget() -> None:
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
