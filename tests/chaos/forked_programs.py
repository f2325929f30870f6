"""A fork server: it imports the programs once, then forks one process for each JSON line on its standard input.

A fork takes a tenth of the time of a start with imports, so that a test can kill hundreds of real processes. The server
answers each line with the process id. The test that requested a process kills it."""

from __future__ import annotations

import ctypes
import gc
import json
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import accountant.__main__
import accountant.cli.server_commands
import accountant.cli.serving
import accountant.lake.publisher
import agent.__main__
import agent.composition
import fairshare.__main__
import fairshare.composition
from accountant.core.settings import Lake, Settings
from accountant.lake.iceberg_catalog import Catalogue
from accountant.runtime.leadership import take_over
from gputally.base.clock import SystemClock
from tests.chaos import publishing_process


def remove_old_versions(arguments: Sequence[str]) -> int:
    """Remove the files that no version of the ledger `prod` needs. arguments: the warehouse, and the ledger's id."""
    with closing(Catalogue.connect(Lake(warehouse=arguments[0], ledger="prod"))) as catalogue:
        catalogue.claim(arguments[1])
        catalogue.remove_old_versions(3_600)
    return 0


def lead(arguments: Sequence[str]) -> int:
    """Bring the ledger of a replica that begins to lead up to date. arguments: the file of its settings, in JSON."""
    take_over(Settings.model_validate_json(Path(arguments[0]).read_bytes()), SystemClock())
    return 0


PROGRAMS = {
    "publish": publishing_process.run,
    "accountant": accountant.__main__.main,
    "agent": agent.__main__.main,
    "fairshare": fairshare.__main__.main,
    "lake_upkeep": remove_old_versions,
    "lead": lead,
}


def run() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the dead are not waited for
    gc.freeze()
    print("ready", flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        child = os.fork()
        if child:
            print(child, flush=True)
            continue
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        log = os.open(asked["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(log, 1)
        os.dup2(log, 2)
        if asked["kill_at"] is None:
            os._exit(PROGRAMS[asked["program"]](asked["arguments"]))
        library = ctypes.CDLL(None)  # with what kill_at.c adds
        library.kill_at(asked["kill_at"])
        code = PROGRAMS[asked["program"]](asked["arguments"])
        print(code, library.changes(), flush=True)
        os._exit(code)
