"""Lists the installed plug-ins: `gputally plugins`.

It loads each of them, so a plug-in that cannot be loaded is listed with the reason, and the exit code is 1."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING, Any

from gputally.base.command_output import OUTPUTS, show

if TYPE_CHECKING:
    from gputally.base.plugins import Plugin


_SEAMS = {
    "accountant.assistant.protocol": "AssistantTool",
    "accountant.channels.protocol": "ChannelPlugin",
    "accountant.exports.protocol": "ExportPlugin",
    "accountant.history_import.protocol": "HistoryPlugin",
    "accountant.lake.engines.protocol": "EnginePlugin",
    "agent.gpu_readers.protocol": "GpuReaderPlugin",
    "agent.holders.protocol": "HolderPlugin",
    "gputally.kubernetes.scheduler_plugins": "SchedulerPlugin",
}
"""The module of each seam, with the type of its manifests."""


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command."""
    found = argparse.ArgumentParser(
        prog="gputally plugins", description="List the installed plug-ins, and what each of them may do."
    )
    found.add_argument(
        "--output", "-o", choices=OUTPUTS, default="table", help="Form of the list (default: %(default)s)."
    )
    return found


def main(argv: Sequence[str]) -> int:
    """Print the plug-ins, by seam. Return 1 if one of them cannot be used."""
    options = parser().parse_args(argv)
    found = installed()

    def drawn() -> Any:
        from gputally.base.terminal import table

        rows = [
            (seam.partition(".")[2], one.name, f"{one.package} {one.version}", _state(one), _reaches(one))
            for seam, one in found
        ]
        return table("", ("seam", "name", "package", "state", "a use of it"), rows)

    show(options.output, drawn, [_record(seam, one) for seam, one in found])
    return int(any(one.fault for _, one in found))


def installed() -> list[tuple[str, Plugin[Any]]]:
    """Return every plug-in with its seam. The seams of a program whose libraries are not installed are left out: an
    image has only those of its own program."""
    # Imported here, because each seam imports what its plug-ins need, and `--help` needs none of it.
    from gputally.base.plugins import plugins

    found: list[tuple[str, Plugin[Any]]] = []
    for path, kind in _SEAMS.items():
        try:
            protocol = import_module(path)
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] in ("accountant", "agent", "fairshare", "gputally"):
                raise
            continue
        listed = plugins(protocol.SEAM, getattr(protocol, kind))
        found += [(protocol.SEAM, one if one.fault else replace(one, fault=_later(one))) for one in listed]
    return found


def _later(one: Plugin[Any]) -> str:
    """Return why a plug-in of another package cannot be used although its manifest can: its adapter is loaded later."""
    from gputally.base.plugins import OURS

    if one.package == OURS or not hasattr(one.manifest, "adapter"):
        return ""
    try:
        installed_adapters = import_module("fairshare.targets.installed")
    except ModuleNotFoundError:  # an image that has no controller loads no adapter either
        return ""
    fault: str = installed_adapters.adapter_fault(one.manifest, one.package)
    return fault


def _state(one: Plugin[Any]) -> str:
    return f"left out: {one.fault}" if one.fault else "usable"


def _reaches(one: Plugin[Any]) -> str:
    return one.manifest.reaches if one.manifest is not None else ""


def _record(seam: str, one: Plugin[Any]) -> dict[str, Any]:
    page = one.manifest.page if one.manifest is not None else ""
    return {
        "seam": seam, "name": one.name, "package": one.package, "version": one.version, "fault": one.fault,
        "reaches": _reaches(one), "page": page, "rights": [str(right) for right in getattr(one.manifest, "rights", ())],
    }  # fmt: skip
