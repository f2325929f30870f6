"""Zip archives whose bytes depend on their contents alone."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Mapping

_EPOCH = (1980, 1, 1, 0, 0, 0)
"""The earliest instant the format knows."""


def pack(members: Mapping[str, bytes]) -> bytes:
    """In the order given, without instants, owners or permissions."""
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            entry = zipfile.ZipInfo(name, _EPOCH)
            entry.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(entry, content)
    return packed.getvalue()


def unpack(packed: bytes) -> dict[str, bytes]:
    """Raises zipfile.BadZipFile."""
    with zipfile.ZipFile(io.BytesIO(packed)) as archive:
        return {name: archive.read(name) for name in archive.namelist()}
