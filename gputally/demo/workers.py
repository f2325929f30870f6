"""Parts of the demo in processes of their own, as they are in reality: each has an interpreter to itself.

Between the parts the only way is HTTP; what goes through a worker's pipes is what the simulation tells a part of the
world, and what it answers. An order is the name of a method with its arguments. Giving it and awaiting what came of it
are two steps, so that several parts work at once; a pipe carries one order at a time, and a worker has as many as its
part can do things at once. A worker whose other side is gone without a word ends, and takes along what would be left
of it on the disk.
"""

from __future__ import annotations

import gc
import logging
import multiprocessing
import os
import pickle
import shutil
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import closing, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, Protocol

from accountant.errors import AccountantError

GC_ALLOCATIONS = 50_000
"""Between collections: an hour of the simulation makes some ten thousand objects, and hardly any of them in cycles."""
SWITCH_S = 0.0005
"""So that the threads of a part get their turns: with Python's 5 ms they would mostly wait for each other."""


class WorkerLost(AccountantError):
    """A process ended, or could not do what it was told: one line with the reason."""


class Part(Protocol):
    """What lives in a worker; its public methods are what can be asked of it."""

    def close(self) -> None:
        """Shut down in good order."""


class Worker:
    """A process with one part in it, which is made by `start`; until then the process loads what it needs.

    who: of which a line can be said ("the accountant has ended"). part: the name of its class, MODULE:CLASS, so that
    only the process loads it. pipes: how many things it can be asked at once. nice: how far it gives way to others.
    log_file: where its warnings go."""

    def __init__(self, who: str, part: str, *, pipes: int = 1, nice: int = 0, log_file: Path | None = None) -> None:
        context = multiprocessing.get_context("spawn")  # a fork would copy threads and locks
        self._who = who
        self._started = False
        self._pipes: list[Connection] = []
        theirs: list[Connection] = []
        for _ in range(pipes):
            here, there = context.Pipe()
            self._pipes.append(here)
            theirs.append(there)
        self._process = context.Process(target=_work, args=(who, part, theirs, nice, log_file), name=who, daemon=True)
        self._process.start()
        for pipe in theirs:
            pipe.close()

    def start(self, *arguments: object, scratch: Path | None = None) -> None:
        """Have the part made, and come back at once; what goes wrong the first answer tells.

        scratch: a folder of this side's, that is to be removed where this side ends without doing so."""
        self._started = True
        self._send(0, pickle.dumps((arguments, scratch)))

    def ask(self, method: str, *arguments: object) -> Any:
        """What came of an order. Raises WorkerLost."""
        self.tell(order(method, *arguments))
        return self.answer()

    def tell(self, order: bytes, pipe: int = 0) -> None:
        """Give an order and come back at once. Raises WorkerLost."""
        self._send(pipe, order)

    def answer(self, pipe: int = 0) -> Any:
        """Wait for what came of the order given last. Raises WorkerLost."""
        try:
            value, failure = self._pipes[pipe].recv()
        except (EOFError, OSError) as error:
            raise WorkerLost(f"{self._who} has ended") from error
        if failure:
            raise WorkerLost(failure)
        return value

    def leave(self) -> None:
        """Let the part shut down in good order, and come back at once. Idempotent."""
        with suppress(OSError):
            self._pipes[0].send(None)

    def close(self) -> None:
        """The same, and wait for it. Idempotent."""
        if not self._started:
            self._process.terminate()  # it is still loading, and for nothing
        self.leave()
        self._process.join()
        for pipe in self._pipes:
            pipe.close()

    def _send(self, pipe: int, message: bytes) -> None:
        try:
            self._pipes[pipe].send_bytes(message)
        except OSError as error:
            raise WorkerLost(f"{self._who} has ended") from error


def order(method: str, *arguments: object) -> bytes:
    """What `Worker.tell` takes; one may be told to several."""
    return pickle.dumps((method, arguments))


def spare_collections() -> None:
    """What is loaded by now stays, and hardly anything that follows lies in cycles: a full collection that walks all
    libraries again and again is a fifth of a run."""
    gc.freeze()
    gc.set_threshold(GC_ALLOCATIONS)


def _work(who: str, name: str, pipes: list[Connection], nice: int, log_file: Path | None) -> None:
    """The process: does as it is told until it is told None, or the other side is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the main process's business
    sys.setswitchinterval(SWITCH_S)
    os.nice(nice)
    if log_file is not None:
        logging.basicConfig(filename=log_file, format="%(levelname)s %(name)s %(message)s")
    make: Callable[..., Part] = resolve_name(name)
    spare_collections()
    first = pipes[0]
    with suppress(EOFError, OSError):
        told = first.recv()
        if told is None:
            return
        arguments, scratch = told
        try:
            part = make(*arguments)
        except Exception as error:  # noqa: BLE001 - whatever it is, the other side has to hear of it
            said = _said(who, error)
            if first.recv() is not None:
                first.send((None, said))
            return
        with closing(part):
            for pipe in pipes[1:]:
                threading.Thread(target=_obey, args=(who, pipe, part), name="orders", daemon=True).start()
            left = _obey(who, first, part)
        if not left and scratch is not None:
            shutil.rmtree(scratch, ignore_errors=True)  # whichever part ends last leaves nothing


def _obey(who: str, orders: Connection, part: Part) -> bool:
    """Whether it was told to leave: not where the other side is gone."""
    with suppress(EOFError, OSError):
        while (told := orders.recv()) is not None:
            method, arguments = told
            try:
                answer = getattr(part, method)(*arguments), ""
            except Exception as error:  # noqa: BLE001 - whatever it is, the other side has to hear of it
                answer = None, _said(who, error)
            orders.send(answer)
        return True
    return False


def _said(who: str, error: Exception) -> str:
    """In a line; what nobody foresaw is logged whole."""
    if isinstance(error, AccountantError):
        return str(error)
    if isinstance(error, OSError) and error.filename:
        return f"{error.filename}: {error.strerror}"
    logging.getLogger("gputally.demo").exception("an order could not be carried out", exc_info=error)
    return f"{who} failed: {type(error).__name__}: {error}"
