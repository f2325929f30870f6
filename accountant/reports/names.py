"""What a report's file is called, wherever it is written: by the command, a download, a letter. Pure."""

from __future__ import annotations

import hashlib
from typing import Final

_LONGEST: Final = 180
"""Characters: with a digest and the longest extension it stays below what a file system takes."""


def file_name(extension: str, *parts: str | None) -> str:
    """Of a report: `gputally-2026-10-vision.pdf`; only letters, digits, `-`, `_` and `.`.

    A name that this changes ends in a digest of what it was: two teams never share a file."""
    name = "-".join(part for part in ("gputally", *parts) if part)
    safe = "".join(char if char.isascii() and (char.isalnum() or char in "-_.") else "_" for char in name)[:_LONGEST]
    if safe != name:
        safe += "-" + hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:8]
    return f"{safe}.{extension}"
