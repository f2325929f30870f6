"""Expands lists of nodes, as batch systems write them: `n[01-03,7],login`."""

from __future__ import annotations

import re

MOST_NODES = 65_536
"""Maximum number of nodes of one list."""
_RANGE = re.compile(r"(\d{1,9})(?:-(\d{1,9}))?")


def node_names(text: str) -> list[str]:
    """`n[01-03,7],login` expanded, in its order. Raises ValueError if the text is not a list of nodes."""
    names: list[str] = []
    for one in re.split(r",(?![^\[]*\])", text):  # at commas outside brackets
        found = [""]
        for part in re.split(r"(\[[^\]]*\])", one):
            inside = _numbers(part[1:-1]) if part.startswith("[") else [part]
            if len(found) * len(inside) + len(names) > MOST_NODES:
                raise ValueError(f"more than {MOST_NODES} nodes")
            found = [head + tail for head in found for tail in inside]
        names += found
    if not names or not all(names) or any(mark in name for name in names for mark in "[], "):
        raise ValueError(f"not a list of nodes: {text[:80]!r}")
    return names


def _numbers(text: str) -> list[str]:
    """`01-03,7` -> 01, 02, 03, 7."""
    found: list[str] = []
    for part in text.split(","):
        match = _RANGE.fullmatch(part)
        if match is None:
            raise ValueError(f"not a range of nodes: {part[:40]!r}")
        first, last = match[1], match[2] or match[1]
        if int(last) - int(first) >= MOST_NODES:
            raise ValueError(f"more than {MOST_NODES} nodes")
        found += [f"{number:0{len(first)}d}" for number in range(int(first), int(last) + 1)]
    return found
