"""The names of the epochs of imports.

An epoch names the source and the start of the run of chunks. It begins with `import:`. It therefore sorts after the
epoch of every agent, which is a UUIDv7 and begins with 0-9 or a-f."""

from __future__ import annotations

from typing import Final

_PREFIX: Final = "import:"


def import_prefix(source: str) -> str:
    """The beginning of every epoch of imports from a source, the name of a history."""
    return f"{_PREFIX}{source}:"


def epoch(source: str, first_ms: int, generation: int = 0) -> str:
    """The epoch of the outboxes of a run of chunks that began at `first_ms`. generation: how often an import from this
    source was withdrawn before."""
    return f"{import_prefix(source)}{first_ms:014d}" + (f":{generation}" if generation else "")


def generation(epoch_of: str) -> int:
    parts = epoch_of.split(":")
    return int(parts[3]) if len(parts) > 3 and parts[3].isdigit() else 0


def is_import(epoch_of: str) -> bool:
    return epoch_of.startswith(_PREFIX)


def source_of(epoch_of: str) -> str:
    """The name of the history; "" if the epoch is not that of an import."""
    return epoch_of.split(":")[1] if is_import(epoch_of) else ""
