"""Serves the ledger of a finished demo again, from a copy, so that the demo's files stay as they are."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from importlib.resources import as_file
from pathlib import Path

from rich.console import Console

from accountant.composition import Service
from accountant.core.settings import Settings
from gputally.base.clock import VirtualClock
from gputally.base.errors import CannotStart
from gputally.demo.accountant_process import PRICE_BOOK
from gputally.server.https_server import serve


def serve_finished(folder: Path, port: int, console: Console, wait: Callable[[], None]) -> None:
    """Serve the accountant's pages until `wait` returns, with the time at which the ledger ends.

    folder: of a demo's files. Raises CannotStart if it has no ledger with records, and the exceptions of Service."""
    ledger = folder / "ledger.duckdb"
    if not ledger.is_file():
        raise CannotStart(f"{folder} has no ledger of a finished demo: run gputally demo --to {folder}")
    with tempfile.TemporaryDirectory(prefix="gputally-demo-") as copy, as_file(PRICE_BOOK) as book:
        shutil.copyfile(ledger, Path(copy) / ledger.name)
        settings = Settings(
            data=Path(copy), listen=f"127.0.0.1:{port}", auth="off", prices=book, refresh_seconds=3_600
        )  # fmt: skip
        clock = VirtualClock(0)
        with Service(settings, clock) as service:
            end_ms = service.ledger.extent()[1]
            if not end_ms:
                raise CannotStart(f"{ledger} has no records")
            clock.advance_to(end_ms)
            with serve(service.app, settings.host, settings.port) as url:
                console.print(f"The pages of {folder} are at [bold]{url}[/bold]   (Ctrl-C ends)", soft_wrap=True)
                wait()
