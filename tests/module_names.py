"""Checks that modules and names mentioned in texts exist."""

from __future__ import annotations

import re
from pathlib import Path

PACKAGES = ("agent", "accountant", "fairshare", "gputally", "dashboards", "tests", "scripts")


def name_exists(root: Path, name: str) -> bool:
    """Return whether the dotted name is a module, or a name that occurs in a module (`module.Class.method` too)."""
    parts = name.split(".")
    for depth in range(len(parts), 0, -1):
        path = root.joinpath(*parts[:depth])
        holder = path / "__init__.py" if path.is_dir() else path.with_name(f"{path.name}.py")
        if depth == len(parts) and (path.is_dir() or holder.exists()):
            return True
        if holder.exists():
            text = holder.read_text("utf-8")
            return all(re.search(rf"\b{part}\b", text) for part in parts[depth:])
    return False
