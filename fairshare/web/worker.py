"""A preview in a process of its own: no cycle waits for it, and one too large ends itself instead of the controller.

The process is niced, may not grow beyond its memory, and is ended when its time is over or somebody asks. What it says
comes through a pipe: ("progress", part, doing), then ("done", Comparison) or ("failed", reason).
"""

from __future__ import annotations

import multiprocessing
import os
import resource
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

from accountant.wire import Policy
from fairshare.client import AccountantClient
from fairshare.errors import FairshareError
from fairshare.web.previews import Cancelled, Comparison, Order, Told, compare

MIB = 1024 * 1024
_LOOK_S = 0.2
_PATIENCE_S = 300.0
_NICE = 10


class PreviewFailed(FairshareError):
    """It did not come to an end, and why."""


@dataclass(frozen=True, slots=True)
class Source:
    """Where the history comes from."""

    url: str
    token_file: Path | None = None
    ca_file: Path | None = None
    cluster: str = ""

    def open(self) -> AccountantClient:
        return AccountantClient(
            self.url,
            token_file=self.token_file,
            ca_file=self.ca_file,
            cluster=self.cluster,
            timeout_s=_PATIENCE_S,
        )


@dataclass(frozen=True, slots=True)
class Worker:
    """Implements `previews.Work`. most_mib: memory of the process's own; most_s: its time.

    compare: what it does; a function of a module, for it travels by name."""

    source: Source
    most_mib: int = 768
    most_s: float = 600.0
    compare: Callable[[Order, AccountantClient, Told], Comparison] = compare

    def __call__(self, order: Order, told: Told, stop: threading.Event) -> Comparison:
        context = multiprocessing.get_context("spawn")
        here, there = context.Pipe(duplex=False)
        plain = (order.now.model_dump_json(by_alias=True), order.then.model_dump_json(by_alias=True))
        process = context.Process(
            target=_work,
            args=(self.compare, self.source, plain, order.days, order.at_ms, self.most_mib, there),
            name="gputally-preview",
            daemon=True,
        )
        process.start()
        there.close()  # so that its end is seen here
        try:
            return self._listen(here, told, stop)
        finally:
            process.terminate()
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join()
            process.close()
            here.close()

    def _listen(self, pipe: Connection, told: Told, stop: threading.Event) -> Comparison:
        looks = round(self.most_s / _LOOK_S)
        while looks > 0:
            if stop.is_set():
                raise Cancelled
            if not pipe.poll(_LOOK_S):
                looks -= 1
                continue
            try:
                kind, *said = pipe.recv()
            except EOFError as error:
                raise PreviewFailed(f"its process died; it may use {self.most_mib} MiB: take fewer days") from error
            if kind == "progress":
                told(*said)
            elif kind == "done":
                found: Comparison = said[0]
                return found
            else:
                raise PreviewFailed(str(said[0]))
        raise PreviewFailed(f"it took longer than {self.most_s:g} s: take fewer days")


def _work(
    compare: Callable[[Order, AccountantClient, Told], Comparison],
    source: Source,
    policies: tuple[str, str],
    days: int,
    at_ms: int,
    most_mib: int,
    pipe: Connection,
) -> None:
    """In the process."""
    with suppress(OSError):
        os.nice(_NICE)
    resource.setrlimit(resource.RLIMIT_DATA, (most_mib * MIB, most_mib * MIB))
    now, then = (Policy.model_validate_json(each) for each in policies)
    said = 0.0

    def told(part: float, doing: str) -> None:
        nonlocal said
        if part == 0.0 or part - said >= 0.01:
            said = part
            pipe.send(("progress", part, doing))

    try:
        with source.open() as client:
            result = compare(Order(now, then, days, at_ms), client, told)
    except MemoryError:
        pipe.send(("failed", f"it needs more than {most_mib} MiB: take fewer days"))
    except Exception as error:  # noqa: BLE001  # the page says it; there is nobody else to tell
        pipe.send(("failed", str(error) or type(error).__name__))
    else:
        pipe.send(("done", result))
