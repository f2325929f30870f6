"""Checks identifiers that come from outside, and escapes untrusted text for terminals, pages, cells and JSON.

Users choose the names of pods, teams and jobs, which appear in terminals, spreadsheets and pages. One function for each
medium replaces the characters that Unicode calls not printable (controls, bidirectional overrides, zero-width and
unassigned characters, separators other than the space) by visible escapes, and `as_name` does it for a name that is
stored. Line ends, no-break spaces and zero-width
joiners stay where the medium or a script needs them. `for_cell` also prevents formulas. jinja2 escapes the characters
of HTML, and json those of JSON.

The types `Epoch`, `Name` and `BootId` declare the allowed characters and the greatest length of each identifier. The
models of requests (`agent.wire`) use these types, so a request with an invalid value is refused with an error that
names the field. `is_name` checks the names inside a record (of a holder, a pod, a GPU model) record by record, so that
one invalid name does not reject the data of a whole node."""

from __future__ import annotations

import hashlib
import re
import unicodedata
from typing import Annotated, Final

import msgspec

UNDECODABLE: Final = (ValueError, RecursionError)
"""What decoding a document from outside (a request, an answer, a file) can raise. msgspec's DecodeError and the
UnicodeDecodeError are ValueErrors, and a deeply nested document gives a RecursionError. A handler names this constant,
so that no kind of bad document passes it."""
LONGEST_EPOCH: Final = 200
LONGEST_NAME: Final = 253
"""The longest name of an object of Kubernetes, in characters."""
LONGEST_REFERENCE: Final = 1024
"""The longest text that is composed of names, such as `Kind/name`, `SCHEDULER:NAMESPACE/NAME` or a list of nodes."""
_END = r"$(?!\n)"
"""Matches the end of the text; `$` alone would allow a trailing line feed."""
EPOCH: Final = rf"^[0-9A-Za-z][0-9A-Za-z._:-]*{_END}"
"""Alphabet of an epoch. A UUID of any version matches, and so do the epochs of imports and of the earliest payloads."""
LINE: Final = rf"^[^\u0000-\u001f\u007f-\u009f\u2028\u2029]+{_END}"

PLUGIN_NAME: Final = "^[a-z][a-z0-9]*([.-][a-z0-9]+)*$"
"""Form of the name of a plug-in of any seam, which is a word of settings, of commands and of names in Kubernetes."""
LONGEST_PLUGIN_NAME: Final = 32

Epoch = Annotated[
    str, msgspec.Meta(pattern=EPOCH, max_length=LONGEST_EPOCH, description="letters, digits, '.', '_', ':' and '-'")
]
"""Id of an agent's outbox. Agents write a UUIDv7."""
Name = Annotated[
    str, msgspec.Meta(pattern=LINE, max_length=LONGEST_NAME, description="one line without control characters")
]
"""Name of a cluster or a node."""
BootId = Annotated[str, msgspec.Meta(pattern=LINE[: -len(_END) - 1] + "*" + _END, max_length=LONGEST_NAME)]
"""Id of a node's boot; empty if the node does not report it."""

NO_CONTROLS: Final = "a text has no control characters but line ends and tabs"

_CONTROL_CATEGORIES = ("Cc", "Cs", "Zl", "Zp")
"""Unicode categories of control characters, surrogates, and line and paragraph separators."""
_epoch = re.compile(EPOCH)
_plugin_name = re.compile(PLUGIN_NAME)


def is_epoch(text: str) -> bool:
    return len(text) <= LONGEST_EPOCH and _epoch.search(text) is not None


def is_name(text: str, longest: int = LONGEST_NAME) -> bool:
    """Return True for one line without control characters that is not longer than `longest`. An empty text is a
    name."""
    if len(text) > longest:
        return False
    return text.isprintable() or not any(unicodedata.category(character) in _CONTROL_CATEGORIES for character in text)


def as_name(text: str, most: int = LONGEST_NAME) -> str:
    """Return the text as a name of at most `most` characters, so that what it names is not refused because of it.

    Unprintable characters are escaped. A longer text is cut, and ends with a part of its digest, so that two texts with
    the same beginning stay two names."""
    line = escaped(text)
    if len(line) <= most:
        return line
    return line[: most - 9] + "…" + hashlib.sha256(line.encode()).hexdigest()[:8]


def known_name(text: str, longest: int = LONGEST_NAME) -> str:
    """Return the text if it is a name. Raises ValueError if it is not."""
    if not is_name(text, longest):
        raise ValueError(f"not one line of at most {longest} characters without control characters: {text[:80]!r}")
    return text


def is_plugin_name(text: object) -> bool:
    return isinstance(text, str) and len(text) <= LONGEST_PLUGIN_NAME and _plugin_name.fullmatch(text) is not None


def known_plugin_name(text: object) -> str:
    """Return the text if it is the name of a plug-in. Raises ValueError if it is not."""
    if not isinstance(text, str) or not is_plugin_name(text):
        raise ValueError(
            f"{str(text)[:80]!r} is not the name of a plug-in (at most {LONGEST_PLUGIN_NAME} small letters and digits, "
            "a letter first, with '-' or '.' only between them)"
        )
    return text


def known_reference(text: str) -> str:
    """Return the text if it is composed of names. Raises ValueError if it is not."""
    return known_name(text, LONGEST_REFERENCE)


def known_epoch(text: str) -> str:
    """Return the text if it is an epoch. Raises ValueError if it is not."""
    if not is_epoch(text):
        raise ValueError(
            f"not an epoch: {text[:80]!r} (a UUID; at most {LONGEST_EPOCH} letters, digits, '.', '_', ':' and '-')"
        )
    return text


def unprintable(value: object) -> str:
    """Return the place (`key.0.key`) of a text or key in a JSON-like document that has a control character other than a
    line end or a tab; "" if there is none."""
    todo: list[tuple[str, object]] = [("", value)]
    while todo:
        place, part = todo.pop()
        if isinstance(part, str):
            if not part.isprintable() and any(
                unicodedata.category(char) in ("Cc", "Cs") and char not in "\n\r\t" for char in part
            ):
                return place or "the body"
        elif isinstance(part, dict):
            for key, inner in part.items():
                todo += [(place, key), (f"{place}.{key}" if place else str(key), inner)]
        elif isinstance(part, list):
            todo += [(f"{place}.{number}" if place else str(number), inner) for number, inner in enumerate(part)]
    return ""


FORMULA: Final = ("=", "+", "-", "@", "\uff1d", "\uff0b", "\uff0d", "\uff20")
"""Characters that make a spreadsheet treat a cell as a formula (CWE-1236); the last four are the full-width forms."""
_JOINERS: Final = frozenset("\u200c\u200d")
"""Zero-width joiners, which some scripts need."""
_PLAIN: Final = re.compile(r"[ -~]*")


def escaped(text: str, keep: str = "") -> str:
    r"""Return the text with every unprintable character as `\xHH`, `\uHHHH` or `\UHHHHHHHH`. keep: characters that are
    not escaped."""
    if _PLAIN.fullmatch(text):
        return text
    return "".join(char if char.isprintable() or char in keep or char in _JOINERS else _code(char) for char in text)


def for_terminal(text: str) -> str:
    """Escape text for a terminal or a log; line ends stay."""
    return escaped(text, "\n\u00a0")


def for_page(text: str) -> str:
    """Escape text for HTML, SVG and print. The markup characters stay for jinja2 or the element tree to escape."""
    return escaped(text, "\n\t\u00a0\u2009\u202f")


def for_cell(text: str) -> str:
    """Escape text for a cell of CSV or of a workbook, so that no spreadsheet executes it as a formula."""
    text = escaped(text, "\u00a0")
    return f"'{text}" if text.startswith(FORMULA) else text


def for_json(document: str) -> str:
    """Replace the unprintable characters of a JSON document by JSON's own escapes, which keep its meaning. The document
    was written without `ensure_ascii`."""
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
