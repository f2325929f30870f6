"""Text from outside, made safe for what shows it: characters that steer a terminal or turn the reading direction become
visible escapes. One function for each medium; HTML's own characters are jinja2's matter, JSON's quotes json's.

Names of pods, teams and jobs come from users, and some of them reach a terminal, a spreadsheet or a page. What is not
printable in Unicode's sense (controls, bidirectional overrides, zero-width and unassigned characters, separators other
than the space) has no business in any of them.
"""

from __future__ import annotations

import re
from typing import Final

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
