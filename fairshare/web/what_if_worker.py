"""Runs what-if previews in a separate process, one at a time.

A preview replays the same days under the policy in force and under a changed one. Its process has a low priority and
limited memory. The controller ends the process on request, or when its time is over. The process sends messages through
a pipe: ("progress", part, step), then ("done", Comparison) or ("failed", reason)."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import resource
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Literal

from cachetools import LRUCache

from accountant.wire.policy_models import Policy
from fairshare.explain import what_if_simulation
from fairshare.explain.what_if_simulation import Comparison, history_from_ledger
from fairshare.usage.accountant_client import AccountantApi
from gputally.base.errors import FairshareError
from gputally.base.units import MS_PER_HOUR

MOST_DAYS = 30
MOST_KEPT = 20
State = Literal["running", "done", "failed", "cancelled"]
ProgressCallback = Callable[[float, str], None]
"""Called with the finished part (0..1) and the name of the present step."""


class PreviewRunning(Exception):
    """Another preview is running."""


class Cancelled(Exception):
    """A caller has cancelled the preview."""


@dataclass(frozen=True, slots=True)
class PreviewOrder:
    """The arguments of a preview: both policies, and the number of whole days up to the last full hour at `at_ms`."""

    now: Policy
    then: Policy
    days: int
    at_ms: int

    @property
    def key(self) -> str:
        """Return the preview's key. Equal orders within one hour have equal keys on every replica."""
        parts = f"{self.now.version()} {self.then.version()} {self.days} {self.at_ms // MS_PER_HOUR}"
        return hashlib.sha256(parts.encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class Preview:
    """The state of a preview, running or finished.

    text: the changed policy file.
    edited: True if the text is the file's own text with the changes; False if it was written from the data.
    part, doing: the finished part of the work (0..1), and the present step.
    result: None until the preview is done.
    fault: the reason why the preview failed, "" if it did not fail."""

    order: PreviewOrder
    text: str
    edited: bool
    state: State = "running"
    part: float = 0.0
    doing: str = "starting"
    result: Comparison | None = None
    fault: str = ""


Work = Callable[[PreviewOrder, ProgressCallback, threading.Event], Comparison]
"""Makes a preview. Raises Cancelled soon after the event is set, and any other exception, with a sentence as its
message, if the preview fails."""


class Previews:
    """Makes one preview at a time in a thread, and keeps the latest previews. Thread-safe."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self._lock = threading.Lock()
        self._known: LRUCache[str, Preview] = LRUCache(MOST_KEPT)
        self._stops: dict[str, threading.Event] = {}

    def start(self, order: PreviewOrder, text: str, *, edited: bool) -> str:
        """Start a preview and return its key. Raises PreviewRunning.

        A preview that is running or has succeeded is not made again."""
        key = order.key
        with self._lock:
            known = self._known.get(key)
            if known is not None and known.state in ("running", "done"):
                return key
            if self._stops:
                raise PreviewRunning("another preview is running; wait for it, or stop it on its page")
            self._known[key] = Preview(order, text, edited)
            stop = self._stops[key] = threading.Event()
        threading.Thread(target=self._make, args=(key, order, stop), name="fairshare-preview", daemon=True).start()
        return key

    def get(self, key: str) -> Preview | None:
        """Return a preview; None if this replica did not make it, or dropped it for newer ones."""
        with self._lock:
            return self._known.get(key)

    def running(self) -> str | None:
        """Return the key of the running preview; None if none is running."""
        with self._lock:
            return next(iter(self._stops), None)

    def cancel(self, key: str) -> None:
        """Ask a preview to stop, if it is running."""
        with self._lock:
            stop = self._stops.get(key)
        if stop is not None:
            stop.set()

    def close(self) -> None:
        """Stop the running preview."""
        if (key := self.running()) is not None:
            self.cancel(key)

    def _make(self, key: str, order: PreviewOrder, stop: threading.Event) -> None:
        def progress(part: float, doing: str) -> None:
            self._change(key, part=min(1.0, part), doing=doing)

        try:
            result = self._work(order, progress, stop)
        except Cancelled:
            self._change(key, over=True, state="cancelled")
        except Exception as error:  # noqa: BLE001  # the page shows the error, and the controller goes on
            self._change(key, over=True, state="failed", fault=str(error) or type(error).__name__)
        else:
            self._change(key, over=True, state="done", part=1.0, result=result)

    def _change(self, key: str, *, over: bool = False, **changes: object) -> None:
        with self._lock:
            if over:
                self._stops.pop(key, None)
            if key in self._known:
                self._known[key] = replace(self._known[key], **changes)  # type: ignore[arg-type]  # checked by replace


def compare(order: PreviewOrder, client: AccountantApi, progress: ProgressCallback) -> Comparison:
    """Make a preview from the accountant's history. Raises WhatIfError and AccountantUnavailable."""
    progress(0.0, "reading the ledger")
    past = history_from_ledger(client, order.then, order.days * 86_400, None, order.at_ms)
    end_ms = order.at_ms // MS_PER_HOUR * MS_PER_HOUR
    return what_if_simulation.compare(
        order.now, order.then, past, end_ms, lambda part, doing: progress(0.1 + 0.9 * part, doing)
    )


Compare = Callable[[PreviewOrder, AccountantApi, ProgressCallback], Comparison]
MIB = 1024 * 1024
_POLL_S = 0.2
_NICE = 10


class PreviewFailed(FairshareError):
    """The process of the preview failed; the text is the reason."""


@dataclass(frozen=True, slots=True)
class PreviewWorker:
    """Makes a preview (`Work`) in a separate process.

    client: creates the client of the accountant in the process.
    most_mib, most_s: the memory and the time that the process may use.
    compare: the function that the process runs. It must be a function of a module, because it is pickled."""

    client: Callable[[], AccountantApi]
    most_mib: int = 768
    most_s: float = 600.0
    compare: Compare = compare

    def __call__(self, order: PreviewOrder, progress: ProgressCallback, stop: threading.Event) -> Comparison:
        context = multiprocessing.get_context("spawn")
        receiver, sender = context.Pipe(duplex=False)
        policies = (order.now.model_dump_json(by_alias=True), order.then.model_dump_json(by_alias=True))
        process = context.Process(
            target=_run,
            args=(self.compare, self.client, policies, order.days, order.at_ms, self.most_mib, sender),
            name="gputally-preview",
            daemon=True,
        )

        def start() -> None:
            with suppress(OSError):
                os.nice(_NICE)  # of this thread alone: a process begins as nice as the thread that starts it
            process.start()

        # What the process imports takes seconds, so that it is after the controller in line from the first import.
        with ThreadPoolExecutor(1) as thread:
            thread.submit(start).result()
        sender.close()  # otherwise the receiver would not notice the end of the process
        try:
            return self._receive(receiver, progress, stop)
        finally:
            process.terminate()
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join()
            process.close()
            receiver.close()

    def _receive(self, pipe: Connection, progress: ProgressCallback, stop: threading.Event) -> Comparison:
        polls = round(self.most_s / _POLL_S)
        while polls > 0:
            if stop.is_set():
                raise Cancelled
            if not pipe.poll(_POLL_S):
                polls -= 1
                continue
            try:
                kind, *content = pipe.recv()
            except EOFError as error:
                raise PreviewFailed(
                    f"its process ended, perhaps because {self.most_mib} MiB are not enough: choose fewer days"
                ) from error
            if kind == "progress":
                progress(*content)
            elif kind == "done":
                comparison: Comparison = content[0]
                return comparison
            else:
                raise PreviewFailed(str(content[0]))
        raise PreviewFailed(f"it took longer than {self.most_s:g} s: choose fewer days")


def _run(
    compare: Compare,
    client_of: Callable[[], AccountantApi],
    policies: tuple[str, str],
    days: int,
    at_ms: int,
    most_mib: int,
    pipe: Connection,
) -> None:
    """Make a preview in the separate process, and send its progress and its result through the pipe."""
    resource.setrlimit(resource.RLIMIT_DATA, (most_mib * MIB, most_mib * MIB))
    now, then = (Policy.model_validate_json(each) for each in policies)
    last_sent = 0.0

    def progress(part: float, doing: str) -> None:
        nonlocal last_sent
        if part == 0.0 or part - last_sent >= 0.01:
            last_sent = part
            pipe.send(("progress", part, doing))

    try:
        with client_of() as client:
            result = compare(PreviewOrder(now, then, days, at_ms), client, progress)
    except MemoryError:
        pipe.send(("failed", f"it needs more than {most_mib} MiB: choose fewer days"))
    except Exception as error:  # noqa: BLE001  # the page shows the error
        pipe.send(("failed", str(error) or type(error).__name__))
    else:
        pipe.send(("done", result))
