"""Identifiers that come from outside: of each the alphabet and the longest that is taken.

The declared types stand in the published languages, so that a value that is none is refused where it enters, with
its place. What describes a record (a holder's or a pod's names, a GPU's model) is judged record by record, by
`is_name`: one odd name must not keep a whole node out.
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
"""Of a cluster or a node."""
BootId = Annotated[str, msgspec.Meta(pattern=LINE[: -len(_END) - 1] + "*" + _END, max_length=LONGEST_NAME)]
"""Of a boot of a node; empty where the node does not say."""

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
