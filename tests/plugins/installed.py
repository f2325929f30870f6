"""Packages with plug-ins, as an installer leaves them: a module, and its metadata beside it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path


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
