"""Changes values in a YAML file and keeps its comments and layout.

ruamel.yaml changes the values. Of what it writes, only the lines that the change touches go into the file; every other
line stays letter for letter. The result is parsed and has to be exactly the data that was asked for. Where it is not
(anchors, merge keys, a list on one line), the text is written from the data, under the comments it began with.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Any

import yaml
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError
from ruamel.yaml.util import load_yaml_guess_indent

from gputally.base.yaml_file import FileFault, Key, Plain, parse

Path = tuple[Key, ...]
LISTED = "queues"
"""The list whose entries may come and go."""
_LONGEST_LINE = 1_000_000
_NESTED = re.compile(r"^( +)[^ -]", re.MULTILINE)
"""The first key inside another."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry of the list as it should be. at: its number in the base, None for a new one. values: the keys that
    change; None takes a key away."""

    at: int | None
    values: Mapping[str, Plain]


@dataclass(frozen=True, slots=True)
class Revision:
    """values: outside of the list, by path; None takes a key away. entries: all that the list should have, in order."""

    values: Mapping[Path, Plain]
    entries: tuple[Entry, ...]


def revised(data: Mapping[str, Any], revision: Revision) -> dict[str, Any]:
    """The data that the revision asks for."""
    wanted: dict[str, Any] = deepcopy(dict(data))
    for path, value in revision.values.items():
        _put(wanted, path, value)
    listed = data.get(LISTED) or []
    entries = []
    for entry in revision.entries:
        found = deepcopy(listed[entry.at]) if entry.at is not None else {}
        for key, value in entry.values.items():
            _put(found, (key,), value)
        entries.append(found)
    wanted[LISTED] = entries
    return wanted


def revise(text: str, revision: Revision) -> tuple[str, bool]:
    """The text that says what the revision asks for, and whether it is the old one edited (True) or written anew."""
    data: Any = parse(text, "policy").data or {}
    wanted = revised(data, revision)
    if wanted == data:
        return text, True
    try:
        edited = _edited(text, revision)
        if parse(edited, "policy").data == wanted:
            return edited, True
    except (YAMLError, FileFault, LookupError, TypeError, ValueError, AttributeError):
        pass  # a structure that cannot be edited in place
    return policy_text(wanted, _heading(text)), False


def policy_text(data: Mapping[str, Any], heading: str = "") -> str:
    """The data as a file, one queue a line."""
    parts = [heading] if heading else []
    for key, value in data.items():
        if key == LISTED:
            parts.append(f"{LISTED}:\n" + "".join(f"  - {flow(entry)}\n" for entry in value))
        else:
            parts.append(yaml.safe_dump({key: value}, sort_keys=False, allow_unicode=True))
    return "".join(parts)


def flow(value: Any) -> str:
    """On one line."""
    dumped = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, allow_unicode=True, width=10**9)
    return str(dumped).removesuffix("\n...\n").rstrip("\n")


def _put(data: Any, path: Path, value: Any) -> None:
    *above, last = path
    for key in above:
        data = data.setdefault(str(key), {})
    if value is None:
        data.pop(str(last), None)
    else:
        data[str(last)] = value


def _heading(text: str) -> str:
    """The comments that a file begins with."""
    lines = []
    for line in text.splitlines(keepends=True):
        if not line.startswith("#") and line.strip():
            break
        lines.append(line)
    return "".join(lines)


def _edited(text: str, revision: Revision) -> str:
    """Comments on lines of their own are left out of what ruamel.yaml sees, and so keep their places among the lines
    that do not change."""
    lines = [f"{line}\n" for line in text.splitlines()]
    bare = "".join(line for line in lines if _has_content(line))
    _, indent, offset = load_yaml_guess_indent(bare)
    editor = YAML()
    editor.preserve_quotes = True
    editor.width = _LONGEST_LINE
    nested = _NESTED.search(bare)
    editor.indent(mapping=len(nested[1]) if nested else 2, sequence=indent or 2, offset=offset or 0)
    tree = editor.load(bare)
    before = _dumped(editor, tree)
    _change(editor, tree, revision)
    return _merged(lines, before, _dumped(editor, tree))


def _change(editor: YAML, tree: Any, revision: Revision) -> None:
    for path, value in revision.values.items():
        new = path[0] not in tree
        _put(tree, path, _styled(editor, value))
        if new and len(path) > 1 and value is not None:
            tree.yaml_set_comment_before_after_key(path[0], before="\n")
    listed = tree[LISTED]
    standing = list(listed)
    kept = {entry.at for entry in revision.entries}
    for at in reversed(range(len(standing))):
        if at not in kept:
            del listed[at]
    for entry in revision.entries:
        if entry.at is None:
            listed.append(editor.load(flow({key: value for key, value in entry.values.items() if value is not None})))
        else:
            for key, value in entry.values.items():
                _put(standing[entry.at], (key,), _styled(editor, value))


def _styled(editor: YAML, value: Plain) -> Any:
    """A mapping has a line for each key, a list of mappings a line for each of them; all else is on one line."""
    if isinstance(value, dict) and value:
        return {key: _styled(editor, each) for key, each in value.items()}
    if isinstance(value, list) and any(isinstance(each, dict) for each in value):
        return [editor.load(flow(each)) for each in value]
    return None if value is None else editor.load(flow(value))


def _dumped(editor: YAML, tree: Any) -> list[str]:
    stream = io.StringIO()
    editor.dump(tree, stream)
    return stream.getvalue().splitlines(keepends=True)


def _merged(lines: Sequence[str], before: Sequence[str], after: Sequence[str]) -> str:
    """The lines of a file, changed as `after` differs from `before`, which is the same file without the comments that
    have lines of their own, as ruamel.yaml lays it out."""
    content = [number for number, line in enumerate(lines) if _has_content(line)]
    first: list[int] = []
    """Of each line of `before`: the first of the lines with content that it stands for."""
    for _, start, end, at, last in SequenceMatcher(None, before, [lines[n] for n in content], False).get_opcodes():
        first += [min(at + number, last) for number in range(end - start)]
    ends = [0, *(content[number - 1] + 1 if number else 0 for number in [*first[1:], len(content)])]
    merged: list[str] = []
    done = 0
    for start, end, at, last in _line_changes(before, after):
        if start < end:
            kept = content[first[start]]  # the comments above what changes
        else:
            kept = max(done, ends[start])
            while kept < len(lines) and not _has_content(lines[kept]) and _indent(lines[kept]) > _indent(after[at]):
                kept += 1  # the comments that end the part before
        merged += [*lines[done:kept], *after[at:last]]
        done = max(kept, ends[end])
    return "".join([*merged, *lines[done:]])


def _line_changes(before: Sequence[str], after: Sequence[str]) -> Iterator[tuple[int, int, int, int]]:
    """The ranges of lines that are different; lines that are each replaced by one come alone."""
    for change, start, end, at, last in SequenceMatcher(None, before, after, autojunk=False).get_opcodes():
        if change == "replace" and end - start == last - at:
            yield from ((start + n, start + n + 1, at + n, at + n + 1) for n in range(end - start))
        elif change != "equal":
            yield start, end, at, last


def _has_content(line: str) -> bool:
    return not line.lstrip().startswith("#") and bool(line.strip())


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip(" "))
