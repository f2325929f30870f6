"""What-if previews: one at a time, with progress, stopped on request, remembered for who comes back.

A preview replays the same days under the policy in force and under the draft. How that is carried out is a constructor
argument: in a process of its own (`fairshare.web.worker`), or right here for who can wait.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from accountant.wire import Policy
from agent.units import MS_PER_HOUR
from fairshare.client import AccountantClient
from fairshare.explain import comparing
from fairshare.explain.comparing import Row
from fairshare.explain.pasts import Days, of_books
from fairshare.simulator.what_if import daily

MOST_DAYS = 30
MOST_KEPT = 20
State = Literal["running", "done", "failed", "cancelled"]
Told = Callable[[float, str], None]
"""Hears of progress: the part that is done (0..1), and what is being done."""


class Busy(Exception):
    """Another preview is being made."""


class Cancelled(Exception):
    """Somebody asked for it to stop."""


@dataclass(frozen=True, slots=True)
class Order:
    """Replay `days` whole days up to the hour before `at_ms` under both policies."""

    now: Policy
    then: Policy
    days: int
    at_ms: int

    @property
    def key(self) -> str:
        """Equal orders within an hour, equal keys, on every replica."""
        parts = f"{self.now.version()} {self.then.version()} {self.days} {self.at_ms // MS_PER_HOUR}"
        return hashlib.sha256(parts.encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class Comparison:
    """What came out. series: by queue and "had" (as the books have it), "now" and "then": (day, mean GPUs held)."""

    gpus: int
    jobs: int
    start_ms: int
    end_ms: int
    rows: tuple[Row, ...]
    series: Mapping[str, Mapping[str, Sequence[tuple[float, float]]]]
    told: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Preview:
    """part: of the work that is done. text: the policy file as it would be. fault: why it failed."""

    order: Order
    text: str
    edited: bool
    state: State = "running"
    part: float = 0.0
    doing: str = "starting"
    result: Comparison | None = None
    fault: str = ""


Work = Callable[[Order, Told, threading.Event], Comparison]
"""Raises Cancelled soon after the event is set, and an Exception with a sentence for whatever else goes wrong."""


class Previews:
    """Made in a thread each; asked for from any."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self._lock = threading.Lock()
        self._known: OrderedDict[str, Preview] = OrderedDict()
        self._stops: dict[str, threading.Event] = {}

    def start(self, order: Order, text: str, *, edited: bool) -> str:
        """Its key. One that is running, or has come out well, is not made again. Raises Busy."""
        key = order.key
        with self._lock:
            known = self._known.get(key)
            if known is not None and known.state in ("running", "done"):
                return key
            if self._stops:
                raise Busy("another preview is being made; it can be stopped on its page")
            self._known[key] = Preview(order, text, edited)
            self._known.move_to_end(key)
            while len(self._known) > MOST_KEPT:
                self._known.popitem(last=False)
            stop = self._stops[key] = threading.Event()
        threading.Thread(target=self._make, args=(key, order, stop), name="fairshare-preview", daemon=True).start()
        return key

    def get(self, key: str) -> Preview | None:
        """None: never heard of here, or forgotten."""
        with self._lock:
            return self._known.get(key)

    def running(self) -> str | None:
        """The key of the one that is being made."""
        with self._lock:
            return next(iter(self._stops), None)

    def cancel(self, key: str) -> None:
        with self._lock:
            stop = self._stops.get(key)
        if stop is not None:
            stop.set()

    def close(self) -> None:
        """Stop what is under way."""
        with self._lock:
            stops = tuple(self._stops.values())
        for stop in stops:
            stop.set()

    def _make(self, key: str, order: Order, stop: threading.Event) -> None:
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


def compare(order: Order, client: AccountantClient, told: Told) -> Comparison:
    """The work itself. Raises WhatIfError and AccountantUnavailable."""
    told(0.0, "reading the books")
    past = of_books(client, order.then, order.days * 86_400, None, order.at_ms)
    told(0.1, "replaying the policy in force")
    before = comparing.replayed(order.now, past, lambda part: told(0.1 + 0.45 * part, "replaying the policy in force"))
    told(0.55, "replaying the draft")
    after = comparing.replayed(order.then, past, lambda part: told(0.55 + 0.45 * part, "replaying the draft"))
    names = comparing.leaves(order.then)
    days: dict[str, tuple[list[str], Days]] = {
        "now": (comparing.leaves(order.now), daily(before, past.from_s)),
        "then": (names, daily(after, past.from_s)),
        "had": (names, past.days or []),
    }
    series = {
        name: {
            case: [(at, values[queues.index(name)]) for at, values in found] if name in queues else []
            for case, (queues, found) in days.items()
        }
        for name in names
    }
    end_ms = order.at_ms // MS_PER_HOUR * MS_PER_HOUR
    start_ms = end_ms - (past.end_s - past.from_s) * 1000
    rows = tuple(comparing.rows(names, past, before, after))
    told_ = comparing.assumed(past, order.now, order.then)
    return Comparison(past.gpus, len(past.workload.submit_s), start_ms, end_ms, rows, series, told_)
