"""Answers that take long to find: kept, shown with the instant they are of, and found anew behind the reader's back.

Invariants:
- What is found quickly is never kept: where the ledger is small every page is of this instant.
- A kept answer says when it was found. It is found anew once it is older than a minute, or than twenty times what it
  took, whichever is longer, so that answers cost a fraction of one core however many readers there are; one that is
  older than an hour is not shown at all.
- Where a mark says that nothing it was found from has changed, a kept answer is one of this instant.
- One answer is found once at a time: who asks for the same meanwhile waits for it.
- What is asked ahead of readers costs that fraction while somebody reads; who has not looked for an hour finds answers
  of the last half hour, and they cost next to nothing meanwhile.

Of more answers than fit, by number or by memory, the one asked for longest ago goes first.

What an answer depends on besides the records (who may see it, the price book, acts in the books) belongs into its key.
It knows no pages and no ledger.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, Final, Generic, Protocol, TypeAlias, TypeVar, runtime_checkable

import structlog

from agent.background import BackgroundTasks
from agent.clock import Clock
from agent.units import MS_PER_HOUR, MS_PER_MINUTE, MS_PER_SECOND

_log = structlog.get_logger("accountant.prepared")
T = TypeVar("T")
_PATIENCE_S: Final = 300.0
"""One answer may take this long to be found."""
QUICK_S: Final = 0.15
"""CPU time up to which an answer is found while the reader waits, every time."""
FRESH_MS: Final = MS_PER_MINUTE
TIMES_AS_OLD: Final = 20
"""How many times what it took an answer may be old before it is found anew."""
STALEST_MS: Final = MS_PER_HOUR
READING_MS: Final = MS_PER_HOUR
"""How long after a reader's last question the next one is expected."""
AHEAD_MS: Final = STALEST_MS // 2
"""How often answers are found for readers of whom none is expected."""
MOST_KEPT: Final = 128
MOST_BYTES: Final = 256 * 2**20
"""Of answers that tell how large they are, beside those that were last found together."""

_NONE: Final = object()
_Due: TypeAlias = tuple[Hashable, Callable[[], Any], Callable[[], Hashable] | None]


@dataclass(frozen=True, slots=True)
class Answer(Generic[T]):
    """as_of_ms: when a kept answer was found; None: now."""

    value: T
    as_of_ms: int | None


@runtime_checkable
class Large(Protocol):
    """An answer of which not many may be kept. nbytes: of memory, about."""

    @property
    def nbytes(self) -> int: ...


@dataclass(frozen=True, slots=True)
class _Kept:
    value: Any
    at_ms: int
    took_s: float
    mark: Hashable

    @property
    def nbytes(self) -> int:
        return self.value.nbytes if isinstance(self.value, Large) else 0

    @property
    def fresh_ms(self) -> float:
        return max(FRESH_MS, TIMES_AS_OLD * self.took_s * MS_PER_SECOND)


class Prepared:
    """Thread-safe. spent: CPU seconds of the calling thread so far. close: waits for what is being found."""

    def __init__(
        self, clock: Clock, spent: Callable[[], float] = time.thread_time, tasks: BackgroundTasks | None = None
    ) -> None:
        self._clock = clock
        self._task = (tasks or BackgroundTasks(clock)).add("refreshing pages", _PATIENCE_S)
        self._spent = spent
        self._lock = threading.Lock()
        self._kept: OrderedDict[Hashable, _Kept] = OrderedDict()
        self._finding: dict[Hashable, Future[Any]] = {}
        self._as_one: frozenset[Hashable] = frozenset()
        """What was last found together: to drop one of them would be to find all of them again."""
        self._due: SimpleQueue[_Due | None] = SimpleQueue()
        self._worker: threading.Thread | None = None
        self._closed = False
        self._read_ms: int | None = None
        self._ahead_ms: int | None = None
        self._ahead_of_readers: int | None = None
        """The thread that asks for them."""

    @property
    def ahead_is_due(self) -> bool:
        """Whether it is time to ask `ahead` of readers again."""
        now = self._clock.wall_ms()
        expected = self._read_ms is not None and now - self._read_ms <= READING_MS
        return expected or self._ahead_ms is None or not 0 <= now - self._ahead_ms < AHEAD_MS

    @contextmanager
    def ahead(self) -> Iterator[None]:
        """Within, this thread is no reader, and finds anew itself what is due. One thread at a time."""
        self._ahead_ms, self._ahead_of_readers = self._clock.wall_ms(), threading.get_ident()
        try:
            yield
        finally:
            self._ahead_of_readers = None

    def ask(self, key: Hashable, find: Callable[[], T], mark: Callable[[], Hashable] | None = None) -> Answer[T]:
        """find: from the ledger, as of now. mark: equal as long as it would find the same.

        Raises what `find` raises where there is nothing to show meanwhile."""
        now, current = self._clock.wall_ms(), _NONE if mark is None else mark()
        reader = threading.get_ident() != self._ahead_of_readers
        if reader:
            self._read_ms = now
        with self._lock:
            kept = self._kept.get(key)
            if kept is not None and mark is not None and kept.mark == current:
                self._kept.move_to_end(key)
                return Answer(kept.value, None)
            if kept is not None and 0 <= now - kept.at_ms <= STALEST_MS:
                self._kept.move_to_end(key)
                due = now - kept.at_ms > kept.fresh_ms and key not in self._finding and not self._closed
                if due and reader:
                    self._finding[key] = Future()
                    self._due.put((key, find, mark))
                    self._work()
                if reader or not due:
                    return Answer(kept.value, kept.at_ms)
            other = self._finding.get(key)
            if other is None:
                self._finding[key] = Future()
        if other is not None:
            return Answer(other.result(), None)
        return Answer(self._find(key, find, mark), None)

    def together(
        self,
        keys: Sequence[Hashable],
        find: Callable[[], Sequence[Any]],
        mark: Callable[[], Hashable] | None = None,
    ) -> None:
        """Find the answers of several keys at once, unless all are fresh, for whoever asks for one of them later.

        find: an answer for each key, which `ask` with that key would find as well. As old as the whole took, each is
        due. Raises what `find` raises."""
        now, current = self._clock.wall_ms(), _NONE if mark is None else mark()
        with self._lock:
            if all(self._is_fresh(self._kept.get(key), now, current) for key in keys):
                return
        began = self._spent()
        values = find()
        took_s = self._spent() - began
        if took_s > QUICK_S:
            with self._lock:
                self._as_one = frozenset(keys)
                for key, value in zip(keys, values, strict=True):
                    self._keep(key, _Kept(value, now, took_s, current))

    def close(self) -> None:
        self._task.end()
        with self._lock:
            self._closed = True
            worker = self._worker
        if worker is not None:
            self._due.put(None)
            worker.join()

    def _find(self, key: Hashable, find: Callable[[], T], mark: Callable[[], Hashable] | None) -> T:
        at_ms, began = self._clock.wall_ms(), self._spent()
        try:
            # Asked first: what is committed meanwhile makes the answer found anew.
            current = _NONE if mark is None else mark()
            value = find()
        except BaseException as error:
            self._done(key, None).set_exception(error)
            raise
        took_s = self._spent() - began
        self._done(key, _Kept(value, at_ms, took_s, current) if took_s > QUICK_S else None).set_result(value)
        return value

    def _done(self, key: Hashable, kept: _Kept | None) -> Future[Any]:
        with self._lock:
            if kept is None:
                self._kept.pop(key, None)
            else:
                self._keep(key, kept)
            return self._finding.pop(key)

    def _keep(self, key: Hashable, kept: _Kept) -> None:
        """Holding the lock."""
        self._kept.pop(key, None)
        if kept.nbytes > MOST_BYTES and key not in self._as_one:
            return
        self._kept[key] = kept
        self._forget(kept.at_ms)

    @staticmethod
    def _is_fresh(kept: _Kept | None, now_ms: int, current: Hashable) -> bool:
        """Whether nobody would find it anew."""
        if kept is None:
            return False
        unchanged = kept.mark is not _NONE and kept.mark == current
        return unchanged or (0 <= now_ms - kept.at_ms <= min(kept.fresh_ms, STALEST_MS))

    def _forget(self, now_ms: int) -> None:
        """Holding the lock: what nobody will be shown any more, and the least recently asked for of too many."""
        gone = [key for key, one in self._kept.items() if one.mark is _NONE and now_ms - one.at_ms > STALEST_MS]
        for key in gone:
            del self._kept[key]
        while len(self._kept) > MOST_KEPT:
            self._kept.popitem(last=False)
        large = {key: kept.nbytes for key, kept in self._kept.items() if kept.nbytes and key not in self._as_one}
        over = sum(large.values()) - MOST_BYTES
        for key, nbytes in large.items():
            if over <= 0:
                break
            del self._kept[key]
            over -= nbytes

    def _work(self) -> None:
        """Holding the lock: see that somebody works."""
        if self._worker is None:
            self._worker = threading.Thread(target=self._behind, name="prepared", daemon=True)
            self._task.watch(self._worker)
            self._worker.start()

    def _behind(self) -> None:
        while (due := self._due.get()) is not None:
            self._task.begin()
            try:
                self._find(*due)
            except Exception as error:  # noqa: BLE001 - counted; the next reader finds it, or is told why not
                self._task.fail(error)
                _log.error("failed", what="preparing", key=str(due[0]), reason=str(error))
            self._task.succeed()  # of another page there is no fault left
