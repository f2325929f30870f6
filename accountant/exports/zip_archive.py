"""Writes zip archives whose bytes depend on their content alone."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Mapping

_EPOCH = (1980, 1, 1, 0, 0, 0)
"""The earliest instant that the zip format supports."""


def pack(members: Mapping[str, bytes]) -> bytes:
    """A zip archive in the given order, without times, owners or permissions."""
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            entry = zipfile.ZipInfo(name, _EPOCH)
            entry.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(entry, content)
    return packed.getvalue()


def unpack(packed: bytes) -> dict[str, bytes]:
    """The members of a zip archive. Raises zipfile.BadZipFile."""
    with zipfile.ZipFile(io.BytesIO(packed)) as archive:
        return {name: archive.read(name) for name in archive.namelist()}
