"""Checks identifiers that come from outside, and escapes text from outside for terminals, pages, cells and JSON.

Characters that steer a terminal or turn the reading direction become visible escapes. One function for each medium;
HTML's own characters are jinja2's matter, JSON's quotes json's.

Names of pods, teams and jobs come from users, and some of them reach a terminal, a spreadsheet or a page. What is not
printable in Unicode's sense (controls, bidirectional overrides, zero-width and unassigned characters, separators other
than the space) has no business in any of them.

Of each identifier the alphabet and the greatest length are declared here. The declared types stand in the published
languages, so that a value that is none is refused where it enters, with its place. What describes a record (a holder's
or a pod's names, a GPU's model) is judged record by record, by `is_name`: one odd name must not keep a whole node out.
"""

from __future__ import annotations

import re
import unicodedata
from typing import Annotated, Final

import msgspec

LONGEST_EPOCH: Final = 200
LONGEST_NAME: Final = 1024
_END = r"$(?!\n)"
"""The end of the text: a `$` alone lets one line feed pass."""
EPOCH: Final = rf"^[0-9A-Za-z][0-9A-Za-z._:-]*{_END}"
"""A UUID of any version is one; so are the outboxes of an import, and those of payloads of the first hour."""
LINE: Final = rf"^[^\u0000-\u001f\u007f-\u009f\u2028\u2029]+{_END}"

Epoch = Annotated[
    str, msgspec.Meta(pattern=EPOCH, max_length=LONGEST_EPOCH, description="letters, digits, '.', '_', ':' and '-'")
]
"""Id of an outbox; agents write a UUIDv7."""
Name = Annotated[
    str, msgspec.Meta(pattern=LINE, max_length=LONGEST_NAME, description="one line without control characters")
]
"""Name of a cluster or a node."""
BootId = Annotated[str, msgspec.Meta(pattern=LINE[: -len(_END) - 1] + "*" + _END, max_length=LONGEST_NAME)]
"""Id of a node's boot; empty where the node does not say."""

NO_CONTROLS: Final = "a text has no control characters but line ends and tabs"

_STEERING = ("Cc", "Cs", "Zl", "Zp")
_epoch = re.compile(EPOCH)


def is_epoch(text: str) -> bool:
    return len(text) <= LONGEST_EPOCH and _epoch.search(text) is not None


def is_name(text: str) -> bool:
    """Whether it is one line of text without control characters, no longer than a name may be. The empty text is."""
    if len(text) > LONGEST_NAME:
        return False
    return text.isprintable() or not any(unicodedata.category(character) in _STEERING for character in text)


def known_name(text: str) -> str:
    """The text itself. Raises ValueError where it is no name."""
    if not is_name(text):
        raise ValueError(f"not one line of at most {LONGEST_NAME} characters without control characters: {text[:80]!r}")
    return text


def known_epoch(text: str) -> str:
    """The text itself. Raises ValueError where it is no epoch."""
    if not is_epoch(text):
        raise ValueError(
            f"not an epoch: {text[:80]!r} (a UUID; at most {LONGEST_EPOCH} letters, digits, '.', '_', ':' and '-')"
        )
    return text


def unprintable(value: object, at: str = "") -> str:
    """Where in a document the first text (or key) with a control character other than a line end or a tab stands."""
    todo: list[tuple[str, object]] = [(at, value)]
    while todo:
        place, found = todo.pop()
        if isinstance(found, str):
            if any(unicodedata.category(char) in ("Cc", "Cs") and char not in "\n\r\t" for char in found):
                return place or "the body"
        elif isinstance(found, dict):
            for key, inner in found.items():
                todo += [(place, key), (f"{place}.{key}" if place else str(key), inner)]
        elif isinstance(found, list):
            todo += [(f"{place}.{number}" if place else str(number), inner) for number, inner in enumerate(found)]
    return ""


FORMULA: Final = ("=", "+", "-", "@", "\uff1d", "\uff0b", "\uff0d", "\uff20")
"""What spreadsheets take for the beginning of a formula (CWE-1236); the last four are the full-width forms."""
_JOINERS: Final = frozenset("\u200c\u200d")
"""Zero-width joiners, which some scripts are written with."""
_PLAIN: Final = re.compile(r"[ -~]*")


def escaped(text: str, keep: str = "") -> str:
    """The text with every character that is not printable as `\\xHH`, `\\uHHHH` or `\\UHHHHHHHH`. keep: characters
    that may stand as they are."""
    if _PLAIN.fullmatch(text):
        return text
    return "".join(char if char.isprintable() or char in keep or char in _JOINERS else _code(char) for char in text)


def for_terminal(text: str) -> str:
    """For a terminal or a log that people read: lines stay lines."""
    return escaped(text, "\n\u00a0")


def for_page(text: str) -> str:
    """For HTML, SVG and what is printed from them; markup is escaped by jinja2 or the element tree."""
    return escaped(text, "\n\t\u00a0\u2009\u202f")


def for_cell(text: str) -> str:
    """For a cell of CSV or of a workbook, which no spreadsheet executes."""
    text = escaped(text, "\u00a0")
    return f"'{text}" if text.startswith(FORMULA) else text


def for_json(document: str) -> str:
    """A JSON document, written without `ensure_ascii`, with those characters as its own escapes: it means the same."""
    if _PLAIN.fullmatch(document):
        return document
    return "".join(char if char.isprintable() or char == "\n" else _utf16(char) for char in document)


def _code(char: str) -> str:
    number = ord(char)
    if number < 0x100:
        return f"\\x{number:02x}"
    return f"\\u{number:04x}" if number < 0x10000 else f"\\U{number:08x}"


def _utf16(char: str) -> str:
    encoded = char.encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{encoded[at : at + 2].hex()}" for at in range(0, len(encoded), 2))
