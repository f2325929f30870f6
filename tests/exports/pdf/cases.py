"""PDF in the tests that all formats pass. It needs a library of the system."""

from __future__ import annotations


def due(content: bytes) -> None:
    assert content.startswith(b"%PDF-")


def assert_is_text(content: bytes, name: str) -> None:
    assert not any(mark in content for mark in (b"/JavaScript", b"/Launch", b"/URI"))


BEGINS = {"pdf": b"%PDF-"}
DUE = {"pdf": due}
COST: dict[str, object] = {}
AS_TEXT = {"pdf": assert_is_text}
