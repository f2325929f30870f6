"""What an export is: a file format of a report.

An export writes a report to a stream. It reads no clock and asks no ledger, so equal reports give equal bytes, with the
same libraries and fonts. A figure that is unknown is None in a report and is no number in the file, never 0. Names in a
report come from users of the cluster, so an export writes them as text that programs do not interpret
(`gputally.base.untrusted_text`). What a report lacks is answered with `CannotRender`.

This module imports little, and a manifest's module should import little too: completion and the help of `gputally
report` load every manifest, but libraries only have to be there once a file is written."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Final

from gputally.base.plugins import OURS, plugins, preferred, usable
from gputally.base.untrusted_text import PLUGIN_NAME, is_plugin_name, known_plugin_name

if TYPE_CHECKING:
    from accountant.reports.report_builder import Report

SEAM: Final = "gputally.exports"
_MEDIA_TYPE: Final = re.compile(r"[a-z]+/[a-z0-9][a-z0-9.+-]*(; charset=[a-z0-9-]+)?")
_LONGEST_TITLE: Final = 40
CSV: Final = "text/csv; charset=utf-8"


@dataclass(frozen=True, slots=True)
class ExportPlugin:
    """The manifest of an export.

    name: the word behind `--format`, also the name of the entry point.
    title: its name for people, on links of the pages.
    media_type: its type over HTTP, such as `text/csv; charset=utf-8`.
    suffix: the ending of its files, without the first dot. A longer ending than that of another format is preferred.
    write: `write(report, stream)` writes the file. Raises accountant.core.errors.CannotRender if the report lacks what
        the format needs, or this machine lacks a library.
    reaches: what writing a file reads and connects to, for the operator.
    page: the page about it.
    binary: whether it is no text.
    inline: whether a browser displays it; otherwise it is offered as a download.
    charges: whether it needs every charge of a calendar month, and so is for months alone: the report has `details`."""

    name: str
    title: str
    media_type: str
    suffix: str
    write: Callable[[Report, IO[bytes]], object]
    reaches: str
    page: str
    binary: bool = False
    inline: bool = False
    charges: bool = False

    def __post_init__(self) -> None:
        known_plugin_name(self.name)
        if not is_plugin_name(self.suffix):
            raise ValueError(f"the suffix {self.suffix!r} is not of the form {PLUGIN_NAME}, or is too long")
        if _MEDIA_TYPE.fullmatch(self.media_type) is None:
            raise ValueError(f"the media type {self.media_type!r} is not of the form {_MEDIA_TYPE.pattern}")
        if not (self.title.isprintable() and 0 < len(self.title) <= _LONGEST_TITLE):
            raise ValueError(f"the title {self.title!r} is empty, too long or not printable")

    @property
    def readable(self) -> bool:
        """Whether it may be written to a terminal."""
        return not self.binary and not self.media_type.startswith("text/html")


def exports() -> Mapping[str, ExportPlugin]:
    """The usable exports by name."""
    return usable(SEAM, ExportPlugin)


def downloads() -> list[ExportPlugin]:
    """The usable exports whose files are saved: those that no browser displays."""
    return [one for one in exports().values() if not one.inline]


def default_format(*wanted: str) -> str:
    """The format of a report for which nobody names one: the first of the wanted ones that is installed, otherwise
    another for reports of any days."""
    return preferred([name for name, export in exports().items() if not export.charges], *wanted)


def package_of(name: str) -> str | None:
    """The package of another author that brings a usable export, with its version; None for one of gputally's."""
    brought = {one.name: one for one in plugins(SEAM, ExportPlugin) if one.manifest is not None}
    one = brought[name]
    return None if one.package == OURS else f"{one.package} {one.version}"


_LONGEST: Final = 180
"""Maximum length in characters; with a digest and the longest extension it is below the limit of file systems."""


def file_name(extension: str, *parts: str | None) -> str:
    """The file name of a report: `gputally-2026-10-vision.pdf`; only letters, digits, `-`, `_` and `.`.

    If characters had to be replaced, the name ends in a digest of the original, so that two teams never share a
    file."""
    name = "-".join(part for part in ("gputally", *parts) if part)
    safe = "".join(char if char.isascii() and (char.isalnum() or char in "-_.") else "_" for char in name)[:_LONGEST]
    if safe != name:
        safe += "-" + hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:8]
    return f"{safe}.{extension}"
