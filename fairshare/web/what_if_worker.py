"""Runs what-if previews in a process of their own, one at a time.

A preview replays the same days under the policy in force and under the draft. A constructor argument decides how it
runs: in a separate process, or directly.

The process has a low priority and limited memory, and is ended when its time is over or on request. It sends its
results through a pipe: ("progress", part, doing), then ("done", Comparison) or ("failed", reason)."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import resource
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Literal

from cachetools import LRUCache

from accountant.wire.policy_models import Policy
from fairshare.explain import what_if_replay
from fairshare.explain.what_if_replay import Comparison, of_books
from fairshare.usage.accountant_client import AccountantApi
from gputally.base.errors import FairshareError
from gputally.base.units import MS_PER_HOUR

MOST_DAYS = 30
MOST_KEPT = 20
State = Literal["running", "done", "failed", "cancelled"]
ProgressCallback = Callable[[float, str], None]
"""Called with the progress: the finished part (0..1), and the present step."""


class Busy(Exception):
    """Another preview is running."""


class Cancelled(Exception):
    """The preview was cancelled."""


@dataclass(frozen=True, slots=True)
class PreviewOrder:
    """Replay `days` whole days up to the hour before `at_ms` under both policies."""

    now: Policy
    then: Policy
    days: int
    at_ms: int

    @property
    def key(self) -> str:
        """Return a key that is equal for equal orders within an hour, on every replica."""
        parts = f"{self.now.version()} {self.then.version()} {self.days} {self.at_ms // MS_PER_HOUR}"
        return hashlib.sha256(parts.encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class Preview:
    """The simulation of a changed policy, running or finished.

    part: the finished part of the work.
    text: the changed policy file.
    fault: why it failed."""

    order: PreviewOrder
    text: str
    edited: bool
    state: State = "running"
    part: float = 0.0
    doing: str = "starting"
    result: Comparison | None = None
    fault: str = ""


Work = Callable[[PreviewOrder, ProgressCallback, threading.Event], Comparison]
"""Raises Cancelled soon after the event is set, and an Exception with a sentence for any other failure."""


class Previews:
    """Previews, each made in a thread; any thread may request one."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self._lock = threading.Lock()
        self._known: LRUCache[str, Preview] = LRUCache(MOST_KEPT)
        self._stops: dict[str, threading.Event] = {}

    def start(self, order: PreviewOrder, text: str, *, edited: bool) -> str:
        """Start a preview and return its key. One that is running, or has succeeded, is not made again. Raises Busy."""
        key = order.key
        with self._lock:
            known = self._known.get(key)
            if known is not None and known.state in ("running", "done"):
                return key
            if self._stops:
                raise Busy("another preview is being made; it can be stopped on its page")
            self._known[key] = Preview(order, text, edited)
            stop = self._stops[key] = threading.Event()
        threading.Thread(target=self._make, args=(key, order, stop), name="fairshare-preview", daemon=True).start()
        return key

    def get(self, key: str) -> Preview | None:
        """Return a preview; None if it is unknown here, or forgotten."""
        with self._lock:
            return self._known.get(key)

    def running(self) -> str | None:
        """Return the key of the running preview."""
        with self._lock:
            return next(iter(self._stops), None)

    def cancel(self, key: str) -> None:
        with self._lock:
            stop = self._stops.get(key)
        if stop is not None:
            stop.set()

    def close(self) -> None:
        """Stop the running preview."""
        with self._lock:
            stops = tuple(self._stops.values())
        for stop in stops:
            stop.set()

    def _make(self, key: str, order: PreviewOrder, stop: threading.Event) -> None:
        def told(part: float, doing: str) -> None:
            self._change(key, part=min(1.0, part), doing=doing)

        try:
            result = self._work(order, told, stop)
        except Cancelled:
            self._change(key, over=True, state="cancelled")
        except Exception as error:  # noqa: BLE001  # whatever it is, the page says so and the controller goes on
            self._change(key, over=True, state="failed", fault=str(error) or type(error).__name__)
        else:
            self._change(key, over=True, state="done", part=1.0, result=result)

    def _change(self, key: str, *, over: bool = False, **changes: object) -> None:
        with self._lock:
            if over:
                self._stops.pop(key, None)
            if key in self._known:
                self._known[key] = replace(self._known[key], **changes)  # type: ignore[arg-type]  # checked by replace


def compare(order: PreviewOrder, client: AccountantApi, told: ProgressCallback) -> Comparison:
    """Run a preview. Raises WhatIfError and AccountantUnavailable."""
    told(0.0, "reading the books")
    past = of_books(client, order.then, order.days * 86_400, None, order.at_ms)
    end_ms = order.at_ms // MS_PER_HOUR * MS_PER_HOUR
    return what_if_replay.compare(
        order.now, order.then, past, end_ms, lambda part, doing: told(0.1 + 0.9 * part, doing)
    )


MIB = 1024 * 1024
_LOOK_S = 0.2
_PATIENCE_S = 300.0
_NICE = 10


class PreviewFailed(FairshareError):
    """The preview failed, and why."""


@dataclass(frozen=True, slots=True)
class Source:
    """The source of the history."""

    url: str
    token_file: Path | None = None
    ca_file: Path | None = None
    cluster: str = ""

    def open(self) -> AccountantApi:
        return AccountantApi(
            self.url,
            token_file=self.token_file,
            ca_file=self.ca_file,
            cluster=self.cluster,
            timeout_s=_PATIENCE_S,
        )


@dataclass(frozen=True, slots=True)
class Worker:
    """Implements `Work` in a separate process.

    most_mib: memory that the process may use.
    most_s: time that the process may take.

    compare: the function to run; a function of a module, because it is passed by name."""

    source: Source
    most_mib: int = 768
    most_s: float = 600.0
    compare: Callable[[PreviewOrder, AccountantApi, ProgressCallback], Comparison] = compare

    def __call__(self, order: PreviewOrder, told: ProgressCallback, stop: threading.Event) -> Comparison:
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
        there.close()  # so that this process notices its end
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

    def _listen(self, pipe: Connection, told: ProgressCallback, stop: threading.Event) -> Comparison:
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
                raise PreviewFailed(f"its process ended; it may use {self.most_mib} MiB: choose fewer days") from error
            if kind == "progress":
                told(*said)
            elif kind == "done":
                found: Comparison = said[0]
                return found
            else:
                raise PreviewFailed(str(said[0]))
        raise PreviewFailed(f"it took longer than {self.most_s:g} s: take fewer days")


def _work(
    compare: Callable[[PreviewOrder, AccountantApi, ProgressCallback], Comparison],
    source: Source,
    policies: tuple[str, str],
    days: int,
    at_ms: int,
    most_mib: int,
    pipe: Connection,
) -> None:
    """Run in the separate process."""
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
            result = compare(PreviewOrder(now, then, days, at_ms), client, told)
    except MemoryError:
        pipe.send(("failed", f"it needs more than {most_mib} MiB: take fewer days"))
    except Exception as error:  # noqa: BLE001  # the page says it
        pipe.send(("failed", str(error) or type(error).__name__))
    else:
        pipe.send(("done", result))
