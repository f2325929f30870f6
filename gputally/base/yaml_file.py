"""Reads YAML, and reports faults with their file and line.

`parse` returns plain data and the line of every key and item. A duplicate key, which other YAML readers silently drop,
is a fault. `Document.place` turns the path of a value (`("queues", 2, "weight")`) into `file:line`, so that validation
can report its faults with their places. `convert` validates the data against a msgspec type."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

if TYPE_CHECKING:
    import yaml

MAX_BYTES = 4 * 1024 * 1024
MAX_VALUES = 250_000
"""Largest number of values in one file; values that an alias repeats count each time."""
MAX_CONFIG_CHARACTERS = 128 * 1024
"""Largest number of characters of a scheduler's configuration, which the controller reads from a ConfigMap in every
cycle. A real configuration has a few hundred lines."""
Key = str | int
T = TypeVar("T")
Plain = None | bool | int | float | str | list["Plain"] | dict[str, "Plain"]


class FileFault(Exception):
    """One or more faults of one file; `str()` is a line per fault, each `file:line: reason`."""

    def __init__(self, faults: Sequence[str]) -> None:
        super().__init__("\n".join(faults))
        self.faults = tuple(faults)


class Unreadable(FileFault):
    """The operating system could not read the file. Its content can be valid, so a later attempt can succeed."""


@dataclass(frozen=True)
class Document:
    """A parsed YAML document.

    name: the name of the file, for messages.
    data: the content as plain values.
    lines: the line (from 1) of every key and item, by its path."""

    name: str
    data: Plain
    lines: dict[tuple[Key, ...], int]

    def place(self, path: Sequence[Key]) -> str:
        """Return `file:line` of the value at `path`, or of its nearest parent that the document contains."""
        for depth in range(len(path), -1, -1):
            line = self.lines.get(tuple(path[:depth]))
            if line is not None:
                return f"{self.name}:{line}"
        return f"{self.name}:1"


_TOO_MANY = f"more than {MAX_VALUES} values, aliases counted as often as they are used"


@cache
def _loader() -> type[yaml.SafeLoader]:
    """Return a safe loader for YAML 1.1 that reads dates as text, refuses more than `MAX_VALUES` values, and names the
    line of a value that it cannot convert."""
    import yaml

    class Loader(yaml.SafeLoader):
        values = 0

        def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
            self.values += 1
            if self.values > MAX_VALUES:
                raise yaml.MarkedYAMLError(problem=_TOO_MANY, problem_mark=self.get_mark())
            node: yaml.Node | None = super().compose_node(parent, index)
            return node

        def construct_scalar(self, node: yaml.ScalarNode | yaml.MappingNode) -> str:
            text: str = super().construct_scalar(node)
            if not text.isascii():
                text.encode()  # half a surrogate pair (`"\\uDC80"`) is no text, and could not be sent or stored
            return text

        def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
            try:
                return super().construct_object(node, deep=deep)
            except (ValueError, LookupError, TypeError, OverflowError, AttributeError) as error:
                raise yaml.MarkedYAMLError(
                    problem=f"not a {node.tag}: {error}", problem_mark=node.start_mark
                ) from error

    Loader.yaml_implicit_resolvers = {
        first: [(tag, regexp) for tag, regexp in resolvers if tag != "tag:yaml.org,2002:timestamp"]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    return Loader


def read(path: Path) -> Document:
    """Parse a file. Raises FileFault for an invalid or oversized file, Unreadable for one that cannot be read."""
    try:
        if path.stat().st_size > MAX_BYTES:
            raise FileFault([f"{path}:1: the file is larger than {MAX_BYTES // 1024 // 1024} MiB"])
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise Unreadable([f"{path}: {error.strerror}"]) from error
    except UnicodeDecodeError as error:
        raise FileFault([f"{path}:1: not UTF-8: {error.reason} at byte {error.start}"]) from error
    return parse(text, str(path))


def parse(text: str, name: str, max_characters: int = MAX_BYTES) -> Document:
    """Parse one YAML document. Raises FileFault for invalid YAML, several documents, duplicate keys, or too many
    values.

    The function counts the values that an alias repeats before it expands them, because a few lines of aliases can
    expand to gigabytes."""
    import yaml

    if len(text) > max_characters:
        raise FileFault([f"{name}:1: longer than {max_characters} characters"])
    try:
        loader = _loader()(text)
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise FileFault([f"{name}:{line}: {error.reason}"]) from error
    lines: dict[tuple[Key, ...], int] = {}
    faults: list[str] = []
    try:
        node = loader.get_single_node()
        if node is None:
            return Document(name, None, {(): 1})
        _locate(node, (), node.start_mark.line + 1, lines, faults, name)
        if faults:
            raise FileFault(faults)
        return Document(name, loader.construct_document(node), lines)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark else 1
        raise FileFault([f"{name}:{line}: {error.problem or error.context or 'not YAML'}"]) from error
    except (yaml.YAMLError, RecursionError) as error:
        raise FileFault([f"{name}:1: {str(error).splitlines()[0]}"]) from error
    finally:
        loader.dispose()


_AT = re.compile(r"^(?P<reason>.*?)(?: - at `(?P<path>.*)`)?$", re.DOTALL)
_STEP = re.compile(r"\.(\w+)|\[(\d+)\]")
_UNKNOWN = re.compile(r"^Object contains unknown field `(.*)`$")


def convert(document: Document, shape: type[T]) -> T:
    """Convert the document to a msgspec type. Raises FileFault with the place of the first fault."""
    try:
        return msgspec.convert(document.data, shape)
    except msgspec.ValidationError as error:
        match = _AT.match(str(error))
        assert match is not None  # the pattern matches any text
        reason = match["reason"]
        path: list[Key] = [int(index) if index else name for name, index in _STEP.findall(match["path"] or "")]
        if unknown := _UNKNOWN.match(reason):
            path.append(unknown[1])
            reason = "unknown key"
        where = ".".join(str(key) for key in path)
        raise FileFault([f"{document.place(path)}: {where + ': ' if where else ''}{reason}"]) from error


def _locate(
    node: yaml.Node,
    path: tuple[Key, ...],
    line: int,
    lines: dict[tuple[Key, ...], int],
    faults: list[str],
    name: str,
) -> None:
    """Add the line of a node and of everything inside it to `lines`, and its duplicate keys to `faults`."""
    import yaml

    lines[path] = line
    if len(lines) > MAX_VALUES:
        raise yaml.MarkedYAMLError(problem=_TOO_MANY, problem_mark=node.start_mark)
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            at = key.start_mark.line + 1
            inner = (*path, str(key.value))
            if inner in lines:
                faults.append(f"{name}:{at}: key {key.value!r} occurs twice, first on line {lines[inner]}")
            else:
                _locate(value, inner, at, lines, faults, name)
    elif isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            _locate(item, (*path, index), item.start_mark.line + 1, lines, faults, name)
