"""Writes the tables of values in the chart's README.

`python -m scripts.chart_values` writes them, a test keeps them fresh.

A value's meaning is the comment above it that begins with `# --`. A mapping that is empty, or whose keys are not ours
(labels, requests and limits), is one value.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import yaml

CHART = Path(__file__).parents[1] / "helm" / "gputally"
PAGE = CHART / "README.md"
BEGIN, END = "<!-- values: begin -->\n", "<!-- values: end -->\n"
_LONGEST_DEFAULT = 60


class Value(NamedTuple):
    """One line of a table. default: as YAML in one line."""

    path: str
    default: str
    meaning: str


def values(text: str) -> Iterator[Value]:
    """Every value of a values.yaml, in its order. Raises ValueError for one without a meaning."""
    lines = text.splitlines()

    def leaves(node: yaml.MappingNode, data: dict[str, Any], path: str) -> Iterator[Value]:
        for key, value in node.value:
            inner = f"{path}.{key.value}" if path else str(key.value)
            meaning = _meaning(lines, key.start_mark.line)
            if meaning is not None:
                yield Value(inner, _default(data[key.value]), meaning)
            elif isinstance(value, yaml.MappingNode):
                yield from leaves(value, data[key.value], inner)
            else:
                raise ValueError(f"values.yaml:{key.start_mark.line + 1}: {inner} has no meaning (# -- …) above it")

    root = yaml.compose(text)
    assert isinstance(root, yaml.MappingNode)
    yield from leaves(root, yaml.safe_load(text), "")


def _meaning(lines: list[str], at: int) -> str | None:
    comment: list[str] = []
    while at and lines[at - 1].strip().startswith("#"):
        at -= 1
        comment.insert(0, lines[at].strip().removeprefix("#").strip())
    if not comment or not comment[0].startswith("-- "):
        return None
    return " ".join(comment).removeprefix("-- ")


def _default(data: Any) -> str:
    if isinstance(data, str) and ("\n" in data or len(data) > _LONGEST_DEFAULT):
        return "see values.yaml"
    shown = json.dumps(data, ensure_ascii=False)
    return f"`{shown}`" if len(shown) <= _LONGEST_DEFAULT else "see values.yaml"


def _cell(text: str) -> str:
    """Escaped for a table; what stands in backquotes is code and needs it for the column's bar alone."""
    words = text.split("`")
    return "`".join(re.sub(r"[|]" if at % 2 else r"[|<>]", r"\\\g<0>", part) for at, part in enumerate(words))


def tables(text: str) -> str:
    """One table for each group of values."""
    groups: dict[str, list[Value]] = {}
    for value in values(text):
        head, dot, _ = value.path.partition(".")
        groups.setdefault(head if dot else "", []).append(value)
    parts = []
    for group, members in groups.items():
        rows = [f"| `{value.path}` | {value.default} | {_cell(value.meaning)} |" for value in members]
        title = f"### {group}\n\n" if group else "### Everything\n\n"
        parts.append(title + "\n".join(["| Value | Default | Meaning |", "|---|---|---|", *rows]) + "\n")
    return "\n".join(parts)


def page(current: str, text: str) -> str:
    """The page with its tables made anew; the rest as it stands."""
    before, _, rest = current.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{tables(text)}\n{END}{after}"


if __name__ == "__main__":
    source = (CHART / "values.yaml").read_text(encoding="utf-8")
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8"), source), encoding="utf-8")
