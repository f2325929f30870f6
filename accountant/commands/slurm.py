"""`slurm import`: Slurm's accounting into the ledger's dimensions."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
import typer

from accountant.commands.asking import Zoned, connected
from accountant.errors import AccountantError
from accountant.inventory import slurm
from accountant.reported import PodReport
from accountant.told import Taken
from agent.clock import SystemClock
from agent.terminal import Terminal

app = typer.Typer(help="Jobs of Slurm: who ran them, for which account.", no_args_is_help=True)
PART = 5_000
"""Jobs sent at a time."""
_SHOWN = 20


class Unreadable(AccountantError):
    """A file with nothing in it that could be taken."""


def register(to: typer.Typer) -> None:
    """Add the commands to the program."""
    to.add_typer(app, name="slurm")


@app.command("import")
@connected
def import_jobs(
    file: Annotated[Path, typer.Argument(help="slurmdbd's REST answer (JSON), or `sacct --parsable2` with heading.")],
    cluster: Annotated[str, typer.Option(help="Name of the Slurm cluster in the ledger.")] = "default",
    *,
    at: Zoned,
) -> None:
    """Name the jobs whose numbers the agents reported. Taking a file in twice changes nothing."""
    try:
        raw = file.read_bytes()
    except OSError as error:
        raise Unreadable(f"{file}: {error.strerror}") from error
    reading = slurm.read(raw, at.zone)
    complain = Terminal(stderr=True)
    for fault in reading.faults[:_SHOWN]:
        complain.print(f"{file}: {fault.place}: {fault.reason}", soft_wrap=True)
    if len(reading.faults) > _SHOWN:
        complain.print(f"{file}: and {len(reading.faults) - _SHOWN} more faults", soft_wrap=True)
    if reading.faults and not reading.jobs:
        raise Unreadable(f"{file}: no job could be read")
    now = SystemClock().wall_ms()
    facts = [slurm.facts(job, now) for job in reading.jobs]
    with at.asking() as remote:
        for begin in range(0, len(facts), PART):
            body = msgspec.json.encode(PodReport(cluster, f"slurm ({file.name})", tuple(facts[begin : begin + PART])))
            remote.send(Taken, "/v1/pods", body, "application/json")
    Terminal().print(f"{len(facts):,} jobs of {cluster} taken, {len(reading.faults):,} records left out")
