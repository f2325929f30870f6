"""Reads and changes the text of a token file; comments and other entries stay as they are."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import typer
import yaml

from gputally.base.yaml_file import FileFault
from gputally.server import config_loading
from gputally.server.tokens_and_grants import SCOPES, Scope, TokenEntry, TokenList


def with_entry(text: str, entry: str) -> str:
    """The text of a token file with one more entry at the end. Raises ValueError if the list is written on one line or
    is not the only key."""
    document = yaml.compose(text, yaml.SafeLoader)
    assert isinstance(document, yaml.MappingNode)
    tokens = next((value for key, value in document.value if key.value == "tokens"), None)
    if tokens is None or len(document.value) > 1 or (tokens.flow_style and tokens.value):
        raise ValueError("write each entry on its own lines, below a line with only `tokens:`")
    text_before = text if tokens.value else "tokens:\n"
    return text_before + ("" if text_before.endswith("\n") else "\n") + entry


def bound(entry: TokenEntry) -> str:
    """The cluster, node or teams that an entry is bound to, as text."""
    if entry.teams is not None:
        return "teams " + ", ".join(entry.teams)
    where = [f"{kind} {value}" for kind, value in (("cluster", entry.cluster), ("node", entry.node)) if value]
    return ", ".join(where) or "everything"


def without(text: str, name: str) -> str:
    """The text of a token file without the entry of that name. Raises ValueError if entries share a line."""
    document = yaml.compose(text, yaml.SafeLoader)
    assert isinstance(document, yaml.MappingNode)
    key, tokens = next((key, value) for key, value in document.value if key.value == "tokens")
    starts = [item.start_mark.line for item in tokens.value]
    if tokens.flow_style or len(set(starts)) < len(starts):
        raise ValueError("several entries share a line: write each on its own lines")
    item = next(node for node in tokens.value if ("name", name) in [(k.value, v.value) for k, v in node.value])
    lines = text.splitlines(keepends=True)
    if len(starts) == 1:
        lines[key.start_mark.line] = "tokens: []\n"
    return "".join(lines[: item.start_mark.line] + lines[_last_line(item) + 1 :])


def _last_line(node: yaml.Node) -> int:
    """The last line of a node's own text. The parser's end of a block would include comments that follow it."""
    if isinstance(node, yaml.CollectionNode) and not node.flow_style:
        children = [child for part in node.value for child in (part if isinstance(part, tuple) else (part,))]
        return max(_last_line(child) for child in children)
    return int(node.end_mark.line)


def entries(file: Path) -> tuple[TokenEntry, ...]:
    try:
        return config_loading.load_yaml(file, TokenList).tokens
    except FileFault as error:
        raise typer.BadParameter(str(error)) from error


def scopes_named(names: Sequence[str]) -> tuple[Scope, ...]:
    known: dict[str, Scope] = {scope: scope for scope in SCOPES}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise typer.BadParameter(f"there is no scope {unknown[0]!r}: choose from {', '.join(known)}")
    return tuple(known[name] for name in names)
