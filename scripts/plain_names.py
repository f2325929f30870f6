"""Checks that no file or folder of Python code has a name that says nothing to a newcomer.

`python -m scripts.plain_names` prints each path with such a name and ends with status 1 where there is one.
CONTRIBUTING.md says how to choose a name.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = ("agent", "accountant", "fairshare", "gputally", "dashboards", "scripts", "tests")
REFUSED = frozenset(
    [
        "adopting",
        "answers",
        "apart",
        "asked",
        "asking",
        "barred",
        "billed",
        "carriers",
        "carrying",
        "carving",
        "changes",
        "court",
        "crew",
        "dated",
        "demands",
        "doors",
        "entries",
        "epochs",
        "explained",
        "explaining",
        "few",
        "freezing",
        "governing",
        "grains",
        "held",
        "house",
        "keeping",
        "ladder",
        "layers",
        "lenses",
        "letters",
        "live",
        "looking",
        "making",
        "marks",
        "meanwhile",
        "measured",
        "memory",
        "muster",
        "occasions",
        "office",
        "opening",
        "orders",
        "placing",
        "playing",
        "plot",
        "portions",
        "preempter",
        "preempting",
        "prepared",
        "recalled",
        "reported",
        "resuming",
        "rulings",
        "running",
        "settling",
        "sheets",
        "siblings",
        "soon",
        "sparing",
        "stopped",
        "stranded",
        "telling",
        "terms",
        "told",
        "torn",
        "unfolded",
        "unheard",
        "view",
        "warming",
        "watched",
        "waysin",
        "whose",
        "wholefile",
    ]
)
"""Participles without an object, metaphors, and everyday words that mean something else to an engineer."""


def refused(paths: Iterable[Path]) -> list[Path]:
    """Return the paths with a part that is in `REFUSED`, with or without `test_` before it."""
    return [
        path
        for path in paths
        if REFUSED.intersection(part.removeprefix("test_") for part in path.with_suffix("").parts)
    ]


def modules(root: Path) -> list[Path]:
    """Return the paths of all modules below `FOLDERS`, relative to `root` and sorted."""
    return sorted(path.relative_to(root) for folder in FOLDERS for path in (root / folder).rglob("*.py"))


def main() -> int:
    found = refused(modules(ROOT))
    for path in found:
        print(f"{path}: choose a noun of the field instead (CONTRIBUTING.md, The rules)")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
