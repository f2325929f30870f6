"""Changes values in a YAML file and keeps its comments and layout.

`revise` finds each place with YAML's own parser, replaces the text there, and parses what comes out: it has to be
exactly the data that was asked for. Where it is not (anchors, merge keys, unusual layouts), the text is written anew
from the data, under the comments it began with.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import yaml

from gputally.base.yaml_file import FileFault, Key, Plain, parse

Path = tuple[Key, ...]
LISTED = "queues"
"""The list whose entries may come and go."""


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


class _Unsupported(Exception):
    """A layout that is not edited in place."""


@dataclass(frozen=True, slots=True)
class _Edit:
    start: int
    end: int
    text: str


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
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        edited = _applied(text, _edits(text, node, data, wanted, revision))
        if parse(edited, "policy").data == wanted:
            return edited, True
    except (_Unsupported, FileFault):
        pass
    return anew(wanted, _heading(text)), False


def anew(data: Mapping[str, Any], heading: str = "") -> str:
    """The data as a file, one queue a line."""
    parts = [heading] if heading else []
    for key, value in data.items():
        if key == LISTED:
            parts.append(f"{LISTED}:\n" + "".join(f"  - {flow(entry)}\n" for entry in value))
        else:
            parts.append(yaml.safe_dump({key: value}, sort_keys=False, allow_unicode=True))
    return "".join(parts)


def _put(data: dict[str, Any], path: Path, value: Plain) -> None:
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


def _edits(text: str, root: Any, data: Any, wanted: dict[str, Any], revision: Revision) -> list[_Edit]:
    if not isinstance(root, yaml.MappingNode) or root.flow_style:
        raise _Unsupported
    edits: list[_Edit] = []
    for above, values in _grouped(root, revision.values).items():
        before = _at(data, above)
        changed = {key: value for key, value in values.items() if (before or {}).get(key) != value}
        if not changed:
            continue
        node = _find(root, above)
        if isinstance(node, yaml.MappingNode):
            edits += _mapping(text, node, changed, _at(wanted, above))
        elif node is None and len(above) == 1:
            block = {above[0]: {key: value for key, value in changed.items() if value is not None}}
            lead = "\n" if text.endswith("\n") else "\n\n"
            edits.append(_Edit(len(text), len(text), lead + _block(block, 0)))
        else:
            raise _Unsupported
    return edits + _listed(text, root, wanted, revision)


def _grouped(root: yaml.MappingNode, values: Mapping[Path, Plain]) -> dict[Path, dict[str, Plain]]:
    """The values by the mapping that gets them, which is there or is a new one at the top; what stands deeper in it is
    nested."""
    found: dict[Path, dict[str, Plain]] = {}
    for path, value in values.items():
        above, nested = path[:-1], {str(path[-1]): value}
        if value is None and not isinstance(_find(root, above), yaml.MappingNode):
            continue
        while len(above) > 1 and _find(root, above) is None:
            above, nested = above[:-1], {str(above[-1]): nested}
        _merge(found.setdefault(above, {}), nested)
    return found


def _merge(into: dict[str, Plain], more: Mapping[str, Plain]) -> None:
    for key, value in more.items():
        standing = into.get(key)
        if isinstance(standing, dict) and isinstance(value, dict):
            _merge(standing, value)
        else:
            into[key] = value


def _listed(text: str, root: yaml.MappingNode, wanted: dict[str, Any], revision: Revision) -> list[_Edit]:
    node = _find(root, (LISTED,))
    if not isinstance(node, yaml.SequenceNode):
        raise _Unsupported
    kept = [entry.at for entry in revision.entries if entry.at is not None]
    if node.flow_style or not kept or kept != sorted(kept):
        raise _Unsupported
    edits: list[_Edit] = []
    for at, item in enumerate(node.value):
        if at not in kept:
            edits.append(_Edit(_line_start(text, item.start_mark.index), _line_end(text, _last(item)), ""))
    for number, entry in enumerate(revision.entries):
        if entry.at is None:
            continue
        item = node.value[entry.at]
        if entry.values:
            if not isinstance(item, yaml.MappingNode):
                raise _Unsupported
            edits += _mapping(text, item, entry.values, wanted[LISTED][number])
    new = [wanted[LISTED][n] for n, entry in enumerate(revision.entries) if entry.at is None]
    if new:
        first = node.value[0]
        dash = text[_line_start(text, first.start_mark.index) : first.start_mark.index]
        end = _line_end(text, _last(node.value[-1]))
        if dash.strip() != "-" or revision.entries[-1].at is not None:
            raise _Unsupported
        lead = "" if text[:end].endswith("\n") else "\n"
        edits.append(_Edit(end, end, lead + "".join(f"{dash}{flow(entry)}\n" for entry in new)))
    return edits


def _mapping(text: str, node: yaml.MappingNode, changed: Mapping[str, Plain], whole: Any) -> list[_Edit]:
    """Edits that give `node` the changed values; whole: the mapping as it should be."""
    entries = {str(key.value): (key, value) for key, value in node.value}
    simple = all(value is not None and key in entries for key, value in changed.items())
    if node.flow_style and not simple:
        return [_Edit(node.start_mark.index, node.end_mark.index, flow(whole))]
    edits = []
    fresh: dict[str, Plain] = {}
    for key, value in changed.items():
        if key not in entries:
            if value is not None:
                fresh[key] = value
            continue
        name, standing = entries[key]
        if value is None:
            start = _line_start(text, name.start_mark.index)
            if text[start : name.start_mark.index].strip():
                raise _Unsupported  # it shares its line with the dash of its entry
            edits.append(_Edit(start, _line_end(text, _last(standing)), ""))
        elif _replaceable(standing):
            edits.append(_Edit(standing.start_mark.index, standing.end_mark.index, flow(value)))
        else:
            start = _line_start(text, name.start_mark.index)
            if node.flow_style or text[start : name.start_mark.index].strip():
                raise _Unsupported
            edits.append(_Edit(start, _line_end(text, _last(standing)), _block({key: value}, name.start_mark.column)))
    if fresh:
        edits.append(_appended(text, node, _block(fresh, node.value[0][0].start_mark.column)))
    return edits


def _replaceable(node: yaml.Node) -> bool:
    """A value on one line, of which the text between its marks is all there is."""
    if isinstance(node, yaml.ScalarNode):
        return node.style not in ("|", ">") and node.end_mark.index > node.start_mark.index
    return bool(getattr(node, "flow_style", False))


def _appended(text: str, node: yaml.MappingNode, block: str) -> _Edit:
    end = _line_end(text, _last(node))
    return _Edit(end, end, ("" if text[:end].endswith("\n") else "\n") + block)


def _applied(text: str, edits: Sequence[_Edit]) -> str:
    done = len(text) + 1
    for edit in sorted(edits, key=lambda edit: (edit.start, edit.end), reverse=True):
        if edit.end > done:
            raise _Unsupported
        text = text[: edit.start] + edit.text + text[edit.end :]
        done = edit.start
    return text


def _find(node: Any, path: Path) -> Any:
    for key in path:
        if not isinstance(node, yaml.MappingNode):
            return None
        node = next((value for name, value in node.value if name.value == key), None)
    return node


def _at(data: Any, path: Path) -> Any:
    for key in path:
        data = data.get(key) if isinstance(data, Mapping) else None
    return data


def _last(node: yaml.Node) -> int:
    """Where the last value in it ends: a block's own mark stands behind the comments that follow it."""
    if isinstance(node, yaml.MappingNode) and not node.flow_style and node.value:
        return _last(node.value[-1][1])
    if isinstance(node, yaml.SequenceNode) and not node.flow_style and node.value:
        return _last(node.value[-1])
    return int(node.end_mark.index)


def _line_start(text: str, index: int) -> int:
    return text.rfind("\n", 0, index) + 1


def _line_end(text: str, index: int) -> int:
    """Behind the line break, comments on the line included."""
    if index and text[index - 1] == "\n":
        return index
    found = text.find("\n", index)
    return len(text) if found < 0 else found + 1


def flow(value: Any) -> str:
    """On one line."""
    dumped = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, allow_unicode=True, width=10**9)
    return str(dumped).removesuffix("\n...\n").rstrip("\n")


def _block(values: Mapping[Any, Any], indent: int) -> str:
    """One key a line."""
    lead = " " * indent
    return "".join(
        f"{lead}{flow(key)}:\n{_block(value, indent + 2)}"
        if isinstance(value, Mapping) and value
        else f"{lead}{flow(key)}:\n" + "".join(f"{lead}  - {flow(entry)}\n" for entry in value)
        if isinstance(value, list) and any(isinstance(entry, Mapping) for entry in value)
        else f"{lead}{flow(key)}: {flow(value)}\n"
        for key, value in values.items()
    )
