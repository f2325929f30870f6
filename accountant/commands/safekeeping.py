"""Commands that keep the ledger safe: copy it, and put a copy in place of a lost one."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from pydantic import RootModel

from accountant import backups
from accountant.backups import Backup
from accountant.commands import tables
from accountant.commands.asking import Ledger, Printed, Server, answer, connected
from accountant.remote import Unanswered
from accountant.store import open_ledger
from accountant.store.offsite.archive import sha256
from agent.clock import SystemClock
from agent.output import show

Archive = Annotated[Path | None, typer.Option(help="Folder of the archive (archive.to).")]


class _Backups(RootModel[tuple[Backup, ...]]):
    pass


def register(app: typer.Typer) -> None:
    """Add the commands to the program."""
    for command in (backup, restore):
        app.command()(command)
    app.command("backups")(listed)


@connected
def backup(
    to: Annotated[Path | None, typer.Option(help="Folder here to put it in (default: the accountant's own).")] = None,
    keep: Annotated[
        int | None, typer.Option(min=1, help="How many to have in --to at most; the oldest go (default: all).")
    ] = None,
    archive: Archive = None,
    output: Printed = "table",
    *,
    at: Ledger,
) -> None:
    """Copy the whole ledger and verify the copy; a running accountant goes on meanwhile."""
    if keep is not None and to is None:
        raise typer.BadParameter("--keep is about the folder of --to")
    if at.db is not None:
        if not at.db.is_file():
            raise backups.NoBackup(f"{at.db}: there is no ledger")
        clock = SystemClock()
        ledger = open_ledger(at.db, clock, archive=archive)
        try:
            made = backups.make(ledger, to or at.db.parent / "backups", clock.wall_ms())
        finally:
            ledger.close()
    else:
        made = _fetched(at, to)
    if to is not None and keep is not None:
        backups.prune(to, keep)
    answer(output, lambda: tables.backups([made]), made)


def _fetched(at: Server, to: Path | None) -> Backup:
    with at.asking() as remote:
        made = remote.act(Backup, "/v1/backups", {})
        if to is not None:
            place = to / f"{made.name}.duckdb"
            remote.save(f"/v1/backups/{made.name}", place)
            if sha256(place) != made.sha256:
                place.unlink()
                raise Unanswered(f"{place}: did not arrive as it was sent; it was removed")
            place.with_suffix(".json").write_text(made.model_dump_json(indent=2) + "\n", encoding="utf-8")
    return made


@connected
def listed(output: Printed = "table", *, at: Server) -> None:
    """The backups in the accountant's folder, newest first."""
    with at.asking() as remote:
        found = remote.ask(_Backups, "/v1/backups").root
    answer(output, lambda: tables.backups(found), found)


def restore(
    ledger: Annotated[Path, typer.Argument(help="The ledger file to make; there must be none.")],
    source: Annotated[Path | None, typer.Option("--from", help="A backup's .duckdb file.")] = None,
    archive: Archive = None,
    output: Printed = "table",
) -> None:
    """Rebuild a lost ledger from a backup, from the archive, or from both; and check the books.

    Agents send the rest when the accountant runs again."""
    if source is None and archive is None:
        raise typer.BadParameter("give --from BACKUP, --archive FOLDER, or both")
    if source is not None:
        backups.restore(source, ledger)
    elif ledger.exists():
        raise backups.NoBackup(f"{ledger}: there is a ledger already; move it away first")
    clock = SystemClock()
    restored = open_ledger(ledger, clock, archive=archive)
    try:
        start, end = restored.extent()
        found = restored.examine(start, end)
        newest = restored.trail(restored.last_act() - 1, 1)
    finally:
        restored.close()
    act = newest[0] if newest else None
    told = {
        "ledger": str(ledger), "start_ms": start, "end_ms": end, "imbalance_gpu_us": found.total_us,
        "act": act.number if act else 0, "act_ms": act.at_ms if act else None,
    }  # fmt: skip
    document = {**told, "lines": [str(line) for line in found.lines]}
    show(output, lambda: tables.restored(ledger, start, end, act, found), document, [told])
    if found.total_us:
        raise typer.Exit(1)
