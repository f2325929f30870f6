"""What a report's file is called, wherever it is written: by the command, a download, a letter. Pure."""

from __future__ import annotations


def file_name(extension: str, *parts: str | None) -> str:
    """Of a report: `gputally-2026-10-vision.pdf`; only letters, digits, `-`, `_` and `.`."""
    name = "-".join(part for part in ("gputally", *parts) if part)
    safe = "".join(char if char.isascii() and (char.isalnum() or char in "-_.") else "_" for char in name)
    return f"{safe}.{extension}"
