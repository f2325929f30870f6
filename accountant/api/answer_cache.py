"""Caches answers of the API in memory, limited in bytes: answers for HTML pages, and lists that clients fetch by pages.

`AnswerCache` holds answers that take long to compute. A key identifies the query and everything the answer depends on
besides the records (who may see it, the price book, the acts). A mark is a version of the records.

Invariants:
- An answer that is computed quickly is not cached, so with a small ledger every page is current.
- An answer with an equal mark is current, however old it is.
- An answer without a mark shows when it was computed. It is refreshed once it is older than a minute, or than twenty
  times its computing time, whichever is longer, so the cost is a fraction of one core for any number of readers. An
  answer older than an hour is not shown.
- Concurrent callers with the same key wait for one computation.
- Answers are computed ahead of readers, so that the first page view is fast. After an hour without readers this happens
  every half an hour.

`AnswerPages` holds long lists between the requests for their pages.

Invariants:
- All pages of a list come from one answer, whatever is committed meanwhile.
- An answer that is no longer cached is computed again. If it is equal, byte by byte, its pages continue; otherwise the
  page is refused.
- A query includes the teams that its caller may see, and a cursor is valid only for an answer to the same query.
- An answer is dropped KEPT_MS after its last page. An answer of one page is not cached.

Lines are stored as compressed JSON, which takes less than a tenth of the memory of objects. Both caches evict the least
recently used entries first."""

from __future__ import annotations

import hashlib
import threading
import time
import zlib
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from queue import SimpleQueue
from typing import Any, Final, Generic, Protocol, TypeAlias, TypeVar, runtime_checkable

import structlog
from cachetools import LRUCache, TTLCache
from pydantic import TypeAdapter

from accountant.api.problems import Refusal
from accountant.api.query_parameters import Page
from accountant.wire.usage_models import CostAnswer, JobsAnswer, UsageAnswer
from gputally.base.background_tasks import BackgroundTasks
from gputally.base.clock import Clock
from gputally.base.units import MS_PER_HOUR, MS_PER_MINUTE, MS_PER_SECOND

_log = structlog.get_logger("accountant.api.answer_cache")
T = TypeVar("T")
_PATIENCE_S: Final = 300.0
"""How long a caller waits for an answer."""
QUICK_S: Final = 0.15
"""CPU time up to which an answer is computed on every request."""
FRESH_MS: Final = MS_PER_MINUTE
TIMES_AS_OLD: Final = 20
"""An answer is recomputed once it is older than this many times its own computing time."""
STALEST_MS: Final = MS_PER_HOUR
READING_MS: Final = MS_PER_HOUR
"""How long after the last request readers count as present."""
AHEAD_MS: Final = STALEST_MS // 2
"""How often answers are computed while there are no readers."""
MOST_BYTES: Final = 256 * 2**20
UNSIZED_BYTES: Final = 1 * 2**20
"""Assumed size of an answer that does not state its size."""

_NONE: Final = object()
_Due: TypeAlias = tuple[Hashable, Callable[[], Any], Callable[[], Hashable] | None]


@dataclass(frozen=True, slots=True)
class Answer(Generic[T]):
    """A value, and whether it comes from the cache. as_of_ms: when a cached answer was computed; None: now."""

    value: T
    as_of_ms: int | None


@runtime_checkable
class SizedAnswer(Protocol):
    """An answer with a known size. nbytes: approximate memory."""

    @property
    def nbytes(self) -> int: ...


@dataclass(frozen=True, slots=True)
class _CachedAnswer:
    value: Any
    at_ms: int
    took_s: float
    mark: Hashable

    @property
    def nbytes(self) -> int:
        return self.value.nbytes if isinstance(self.value, SizedAnswer) else UNSIZED_BYTES

    @property
    def fresh_ms(self) -> float:
        return max(FRESH_MS, TIMES_AS_OLD * self.took_s * MS_PER_SECOND)


class AnswerCache:
    """Cached answers. Thread-safe.

    spent: returns the CPU seconds of the calling thread so far.
    close: waits for computations in progress."""

    def __init__(
        self, clock: Clock, spent: Callable[[], float] = time.thread_time, tasks: BackgroundTasks | None = None
    ) -> None:
        self._clock = clock
        self._task = (tasks or BackgroundTasks(clock)).add("refreshing pages", _PATIENCE_S)
        self._spent = spent
        self._lock = threading.Lock()
        self._kept: LRUCache[Hashable, _CachedAnswer] = LRUCache(MOST_BYTES, getsizeof=lambda kept: kept.nbytes)
        self._finding: dict[Hashable, Future[Any]] = {}
        self._due: SimpleQueue[_Due | None] = SimpleQueue()
        self._worker: threading.Thread | None = None
        self._closed = False
        self._read_ms: int | None = None
        self._ahead_ms: int | None = None
        self._ahead_of_readers: int | None = None
        """The thread that computes answers ahead of readers."""

    @property
    def ahead_is_due(self) -> bool:
        """Whether answers should be computed ahead of readers again."""
        now = self._clock.wall_ms()
        expected = self._read_ms is not None and now - self._read_ms <= READING_MS
        return expected or self._ahead_ms is None or not 0 <= now - self._ahead_ms < AHEAD_MS

    @contextmanager
    def ahead(self) -> Iterator[None]:
        """Inside this context the thread does not count as a reader and recomputes answers that are due. One thread at
        a time."""
        self._ahead_ms, self._ahead_of_readers = self._clock.wall_ms(), threading.get_ident()
        try:
            yield
        finally:
            self._ahead_of_readers = None

    def ask(self, key: Hashable, find: Callable[[], T], mark: Callable[[], Hashable] | None = None) -> Answer[T]:
        """Returns the answer of a key.

        find: computes it from the ledger.
        mark: returns a version of the records; while it is unchanged, a cached answer is current.

        Raises what `find` raises if there is no older answer to show."""
        now, current = self._clock.wall_ms(), _NONE if mark is None else mark()
        reader = threading.get_ident() != self._ahead_of_readers
        if reader:
            self._read_ms = now
        with self._lock:
            kept = self._kept.get(key)
            if kept is not None and mark is not None and kept.mark == current:
                return Answer(kept.value, None)
            if kept is not None and 0 <= now - kept.at_ms <= STALEST_MS:
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
        """Computes the answers of several keys at once, unless all are fresh, for later calls of `ask`.

        find: returns an answer per key, equal to what `ask` would compute. The computing time of each is taken to be
        that of the whole batch, which decides when it is refreshed. Raises what `find` raises."""
        now, current = self._clock.wall_ms(), _NONE if mark is None else mark()
        together = tuple(keys)
        with self._lock:
            if self._is_fresh(self._kept.get(together), now, current):
                return
        began = self._spent()
        values = find()
        took_s = self._spent() - began
        if took_s > QUICK_S:
            with self._lock:
                for key, value in zip(keys, values, strict=True):
                    self._keep(key, _CachedAnswer(value, now, took_s, current))
                # Cached as well, so that answers that do not fit are not computed again until they are due.
                self._keep(together, _CachedAnswer(None, now, took_s, current))

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
            # Before `find`: a commit during the computation makes the answer due again.
            current = _NONE if mark is None else mark()
            value = find()
        except BaseException as error:
            self._done(key, None).set_exception(error)
            raise
        took_s = self._spent() - began
        self._done(key, _CachedAnswer(value, at_ms, took_s, current) if took_s > QUICK_S else None).set_result(value)
        return value

    def _done(self, key: Hashable, kept: _CachedAnswer | None) -> Future[Any]:
        with self._lock:
            if kept is None:
                self._kept.pop(key, None)
            else:
                self._keep(key, kept)
            return self._finding.pop(key)

    def _keep(self, key: Hashable, kept: _CachedAnswer) -> None:
        """Caches the answer unless it alone exceeds the limit. The caller holds the lock."""
        self._kept.pop(key, None)
        with suppress(ValueError):
            self._kept[key] = kept

    @staticmethod
    def _is_fresh(kept: _CachedAnswer | None, now_ms: int, current: Hashable) -> bool:
        """Whether the entry can be served without computing it again."""
        if kept is None:
            return False
        unchanged = kept.mark is not _NONE and kept.mark == current
        return unchanged or (0 <= now_ms - kept.at_ms <= min(kept.fresh_ms, STALEST_MS))

    def _work(self) -> None:
        """Starts the worker thread unless it runs. The caller holds the lock."""
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
            self._task.succeed()  # an earlier fault of another answer is over


A = TypeVar("A", UsageAnswer, CostAnswer, JobsAnswer)
KEPT_MS: Final = 15 * MS_PER_MINUTE
PACK_LINES: Final = 1_000
"""Lines that are decompressed together: the default page size."""
_LEVEL: Final = 1
_HEAD_BYTES: Final = 4_096
"""Approximate size of an answer without its lines."""
_Key = tuple[str, int, int, int, str]


class AnswerPages:
    """Cached lists. Thread-safe. most_bytes: limit of all entries."""

    def __init__(self, clock: Clock, most_bytes: int) -> None:
        self._lock = threading.Lock()
        self._kept: TTLCache[_Key, _Packed[Any]] = TTLCache(
            most_bytes, KEPT_MS, timer=clock.monotonic_ms, getsizeof=lambda packed: packed.nbytes
        )

    def turn(self, page: Page, limit: int, find: Callable[[], A]) -> A:
        """The lines of this page, at most `limit`, with the fields about the whole answer. next_page: None on the last
        page.

        find: computes the whole answer, with sorted lines, for the page's query, span and instant. Raises what it
        raises, and Refusal for a page whose answer has changed. Slow: call it in a thread."""
        packed: _Packed[A] | None = None
        if page.answer:
            with self._lock:
                packed = self._kept.get(_key(page, page.answer))
        if packed is None:
            answer = find()
            if not page.answer and len(_lines(answer)) <= limit:
                return answer
            packed = _packed(answer)
        if page.answer and packed.digest != page.answer:
            raise Refusal(
                "page-gone",
                "the answer that the earlier pages came from is no longer stored and has changed since: request the "
                "first page again",
            )
        if page.shown >= packed.count:
            raise Refusal("bad-page", "the page is not one that this service gave out")
        self._keep(_key(page, packed.digest), packed)
        return packed.page(page, limit)

    def __len__(self) -> int:
        with self._lock:
            self._kept.expire()
            return len(self._kept)

    @property
    def nbytes(self) -> int:
        """Bytes that the cached answers take."""
        with self._lock:
            self._kept.expire()
            return int(self._kept.currsize)

    def _keep(self, key: _Key, packed: _Packed[Any]) -> None:
        """Caches the answer as the most recently used one, unless it alone exceeds the limit."""
        with self._lock, suppress(ValueError):
            self._kept.pop(key, None)
            self._kept[key] = packed


@dataclass(frozen=True, slots=True)
class _Packed(Generic[A]):
    """An answer.

    head: without lines.
    packs: the compressed lines, PACK_LINES in each but the last.
    digest: of the whole."""

    head: A
    packs: tuple[bytes, ...]
    count: int
    digest: str

    @property
    def nbytes(self) -> int:
        """Approximate memory in bytes."""
        return _HEAD_BYTES + sum(map(len, self.packs))

    def page(self, page: Page, limit: int) -> A:
        until = min(page.shown + limit, self.count)
        following = page.cursor(self.digest, until) if until < self.count else None
        shown = tuple(self._between(page.shown, until))
        return self.head.model_copy(update={_field(type(self.head)): shown, "next_page": following})

    def _between(self, start: int, until: int) -> Iterator[Any]:
        adapter = _adapter(type(self.head))
        for number in range(start // PACK_LINES, -(-until // PACK_LINES)):
            before = number * PACK_LINES
            yield from adapter.validate_json(zlib.decompress(self.packs[number]))[
                max(0, start - before) : until - before
            ]


def _packed(answer: A) -> _Packed[A]:
    lines = _lines(answer)
    head = answer.model_copy(update={_field(type(answer)): (), "next_page": None})
    digest, adapter, packs = hashlib.sha256(head.model_dump_json().encode()), _adapter(type(answer)), []
    for start in range(0, len(lines), PACK_LINES):
        content = adapter.dump_json(lines[start : start + PACK_LINES])
        digest.update(content)
        packs.append(zlib.compress(content, _LEVEL))
    return _Packed(head, tuple(packs), len(lines), digest.hexdigest()[:32])


def _lines(answer: UsageAnswer | CostAnswer | JobsAnswer) -> tuple[Any, ...]:
    found: tuple[Any, ...] = getattr(answer, _field(type(answer)))
    return found


def _field(model: type[UsageAnswer | CostAnswer | JobsAnswer]) -> str:
    """The field of the model that holds the lines."""
    return "jobs" if model is JobsAnswer else "lines"


@cache
def _adapter(model: type[UsageAnswer | CostAnswer | JobsAnswer]) -> TypeAdapter[tuple[Any, ...]]:
    lines: Any = model.model_fields[_field(model)].annotation
    return TypeAdapter(lines)


def _key(page: Page, answer: str) -> _Key:
    return page.question, page.start_ms, page.end_ms, page.at_ms, answer
