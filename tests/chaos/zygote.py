"""Imports the programs once, then forks a process of one for every line it reads: JSON, which, and its arguments.

A start costs a tenth of one that imports everything anew, so that hundreds of real processes can be killed. Answers
each line with the process's id; stands between them and nobody: whoever asked for one kills it."""

from __future__ import annotations

import gc
import json
import os
import signal
import sys

import accountant.__main__
import accountant.cli.server_commands
import accountant.lake.publisher
import agent.__main__
from tests.chaos import lake_upkeep

PROGRAMS = {"accountant": accountant.__main__.main, "agent": agent.__main__.main, "lake_upkeep": lake_upkeep.main}


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
        os._exit(PROGRAMS[asked["program"]](asked["arguments"]))


if __name__ == "__main__":
    run()
