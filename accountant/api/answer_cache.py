"""Caches answers of the API and of the HTML pages in memory, in one store that is limited in bytes, and divides long
lists into pages.

The store has two kinds of entries; the least recently used ones are evicted first.

`AnswerCache.ask` caches answers that take long to compute. A key identifies the query and everything the answer depends
on besides the records (who may see it, the price book, the administrative acts). A mark is a version of the records.

- An answer that is computed quickly is not cached, so with a small ledger every page is current.
- An answer with an equal mark is current, however old it is.
- An answer without a mark, or with an older one, shows when it was computed. It is refreshed once it is older than a
  minute, or than twenty times its computing time, whichever is longer, so the cost is a fraction of one core for any
  number of readers. An answer older than an hour is not shown.
- Concurrent callers with the same key wait for one computation.
- Answers are computed ahead of readers, so that the first page view is fast. After an hour without readers this happens
  every half-hour.

`AnswerCache.page` caches long lists between the requests for their pages. The digest of a list is its version.

- All pages of a list are parts of one answer, whatever is committed meanwhile.
- A list that is no longer cached is computed again. If it is equal, byte by byte, its pages continue; otherwise the
  page is refused.
- A cursor names the digest of its list and the number of lines shown so far. It contains the span and the instant of
  the first page, so that "until now" is the same on every page, and a digest of the query, which includes the teams
  that its caller may see. A cursor can therefore not be used with another query.
- A list is dropped KEPT_MS after the last request for a page of it. A list of one page is not cached.
- Lines are stored as compressed JSON, which takes less than a tenth of the memory of objects."""

from __future__ import annotations

import base64
import hashlib
import math
import threading
import time
import zlib
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from itertools import islice
from queue import SimpleQueue
from typing import Annotated, Any, Final, Generic, Protocol, TypeAlias, TypeVar

import msgspec
import structlog
from cachetools import TLRUCache
from pydantic import TypeAdapter

from accountant.api.problems import Refusal
from accountant.api.query_parameters import QuerySpan, bounded
from accountant.core.settings import Limits
from accountant.wire.usage_cost_and_job_models import CostAnswer, JobsAnswer, NodesAnswer, UsageAnswer
from gputally.base import instants
from gputally.base.background_tasks import BackgroundTasks
from gputally.base.called_off import CalledOff, Work, make_current, stoppable
from gputally.base.clock import Clock
from gputally.base.units import MS_PER_HOUR, MS_PER_MINUTE, MS_PER_SECOND
from gputally.base.untrusted_text import UNDECODABLE

_log = structlog.get_logger("accountant.api.answer_cache")
T = TypeVar("T")
_TIMEOUT_S: Final = 300.0
"""How long the refresh of one answer may take before its background task counts as failing."""
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
UNSIZED_BYTES: Final = 1 * 2**20
"""Assumed size of an answer without the attribute `nbytes`."""
KEPT_MS: Final = 15 * MS_PER_MINUTE
"""How long a list is cached after its last page."""
PACK_LINES: Final = 1_000
"""Lines of a list that are compressed together: the default page size."""
_COMPRESSION_LEVEL: Final = 1
_HEAD_BYTES: Final = 4_096
"""Approximate size of an entry beside its value or its lines, such as its key."""

_NO_MARK: Final = object()
_Refresh: TypeAlias = tuple[Hashable, Callable[[], Any], Callable[[], Hashable] | None]


_LARGEST = 2**53
"""Largest number in a cursor, so that a forged cursor cannot contain a larger one."""
_Ms = Annotated[int, msgspec.Meta(ge=-_LARGEST, le=_LARGEST)]


class PagedQuery(msgspec.Struct, frozen=True, array_like=True):
    """A request for one page of a list; its JSON is the cursor of the page. The limits of the fields apply to cursors.

    question: digest of the query.
    start_ms, end_ms, at_ms: the span and the instant of the first page.
    answer: digest of the whole list, "" for the first page.
    shown: number of lines on the earlier pages."""

    question: str
    start_ms: _Ms
    end_ms: _Ms
    at_ms: _Ms
    answer: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{32}$")] = ""
    shown: Annotated[int, msgspec.Meta(ge=1, le=_LARGEST)] = 0

    @property
    def span(self) -> QuerySpan:
        return QuerySpan(self.start_ms, self.end_ms)

    def cursor(self, answer: str, shown: int) -> str:
        """The cursor of the page after `shown` lines of the list with the digest `answer`."""
        cursor = msgspec.structs.replace(self, answer=answer, shown=shown)
        return base64.urlsafe_b64encode(msgspec.json.encode(cursor)).decode().rstrip("=")

    def key(self, answer: str) -> Hashable:
        """The cache key of the list with the digest `answer`."""
        return "list", self.question, self.start_ms, self.end_ms, self.at_ms, answer


_cursor = msgspec.json.Decoder(PagedQuery)


def open_page(question: object, span: QuerySpan, now_ms: int, page: str | None, limits: Limits) -> PagedQuery:
    """Reads the cursor `page` of a query; None: the first page.

    question: everything that determines the answer, except span and limit; it must be convertible to JSON.

    Raises Refusal for a cursor of another query."""
    digest = hashlib.sha256(msgspec.json.encode(question, order="sorted")).hexdigest()[:32]
    if page is None:
        return PagedQuery(digest, span.start_ms, span.end_ms, now_ms)
    try:
        raw = base64.b64decode(page + "=" * (-len(page) % 4), altchars=b"-_", validate=True)
        query = _cursor.decode(raw)
    except UNDECODABLE as error:
        raise _unknown_page() from error
    if not query.shown:
        raise _unknown_page()
    if query.question != digest:
        raise Refusal("bad-page", "the page belongs to another query: send the parameters of the first page unchanged")
    try:
        bounded(query.start_ms, query.end_ms, limits)
        instants.in_calendar(query.at_ms)
    except ValueError as error:  # a forged cursor
        raise _unknown_page() from error
    return query


def _unknown_page() -> Refusal:
    return Refusal("bad-page", "this service did not issue the page: copy `next_page` from the previous answer")


@dataclass(frozen=True, slots=True)
class CachedAnswer(Generic[T]):
    """A cached or new answer. as_of_ms: when a cached answer was computed; None: the answer is current."""

    value: T
    as_of_ms: int | None


class _Entry(Protocol):
    """An entry of the store. nbytes: approximate memory. lifetime_ms: how long the entry stays after it was last put
    there."""

    @property
    def nbytes(self) -> int: ...
    @property
    def lifetime_ms(self) -> float: ...


@dataclass(frozen=True, slots=True)
class _CachedAnswer:
    """A cached answer.

    at_ms: wall-clock instant of its computation; since_ms: the same instant on the monotonic clock.
    took_s: CPU seconds that the computation took.
    mark: the version of the records, or _NO_MARK."""

    value: Any
    at_ms: int
    since_ms: int
    took_s: float
    mark: Hashable

    @property
    def nbytes(self) -> int:
        size = getattr(self.value, "nbytes", None)
        return UNSIZED_BYTES if size is None else _HEAD_BYTES + int(size)

    @property
    def lifetime_ms(self) -> float:
        return STALEST_MS + 1 if self.mark is _NO_MARK else math.inf

    def is_current(self, mark: Hashable) -> bool:
        """Whether the records have not changed since the answer was computed."""
        return self.mark is not _NO_MARK and self.mark == mark

    def is_due(self, now_ms: int) -> bool:
        """Whether the answer is old enough to be refreshed."""
        fresh_ms = max(FRESH_MS, TIMES_AS_OLD * self.took_s * MS_PER_SECOND)
        return now_ms - self.since_ms > min(fresh_ms, STALEST_MS)


A = TypeVar("A", UsageAnswer, CostAnswer, JobsAnswer, NodesAnswer)


class AnswerCache:
    """Cached answers and lists. Thread-safe.

    most_bytes: limit of all entries.
    spent: returns the CPU seconds of the calling thread so far.
    settled: whether the records never change: every answer is cached, however quickly it was computed, and is current.
    close: waits for computations in progress."""

    def __init__(
        self,
        clock: Clock,
        most_bytes: int,
        spent: Callable[[], float] = time.thread_time,
        tasks: BackgroundTasks | None = None,
        *,
        settled: bool = False,
    ) -> None:
        self._clock = clock
        self._settled = settled
        self._task = (tasks or BackgroundTasks(clock)).add("refreshing pages", _TIMEOUT_S)
        self._spent = spent
        self._lock = threading.Lock()
        self._entries: TLRUCache[Hashable, _Entry] = TLRUCache(
            most_bytes,
            lambda _, entry, now_ms: now_ms + entry.lifetime_ms,
            timer=clock.monotonic_ms,
            getsizeof=lambda entry: entry.nbytes,
        )
        self._computing: dict[Hashable, Future[Any]] = {}
        self._due: SimpleQueue[_Refresh | None] = SimpleQueue()
        self._worker: threading.Thread | None = None
        self._refreshes = Work()
        self._closed = False
        self._read_ms: int | None = None
        self._ahead_ms: int | None = None
        self._ahead_of_readers: int | None = None
        """The thread that computes answers ahead of readers."""

    @property
    def ahead_is_due(self) -> bool:
        """Whether answers should be computed ahead of readers again."""
        now = self._clock.monotonic_ms()
        expected = self._read_ms is not None and now - self._read_ms <= READING_MS
        return expected or self._ahead_ms is None or now - self._ahead_ms >= AHEAD_MS

    @contextmanager
    def ahead(self) -> Iterator[None]:
        """Inside this context, the calling thread does not count as a reader, and `ask` recomputes answers that are
        due. Only one thread at a time may enter it."""
        self._ahead_ms, self._ahead_of_readers = self._clock.monotonic_ms(), threading.get_ident()
        try:
            yield
        finally:
            self._ahead_of_readers = None

    def ask(
        self, key: Hashable, compute: Callable[[], T], mark: Callable[[], Hashable] | None = None
    ) -> CachedAnswer[T]:
        """Returns the answer of a key.

        compute: computes it from the ledger.
        mark: returns a version of the records; while it is unchanged, a cached answer is current.

        Raises what `compute` raises if there is no older answer to show."""
        now, current = self._clock.monotonic_ms(), _NO_MARK if mark is None else mark()
        reader = threading.get_ident() != self._ahead_of_readers
        if reader:
            self._read_ms = now
        with self._lock:
            cached = self._cached(key)
            if cached is not None and (self._settled or cached.is_current(current)):
                return CachedAnswer(cached.value, None)
            if cached is not None and now - cached.since_ms <= STALEST_MS:
                due = cached.is_due(now) and key not in self._computing and not self._closed
                if due and reader:
                    self._computing[key] = Future()
                    self._due.put((key, compute, mark))
                    self._start_worker()
                if reader or not due:
                    return CachedAnswer(cached.value, cached.at_ms)
            other = self._computing.get(key)
            if other is None:
                self._computing[key] = Future()
        if other is None:
            return CachedAnswer(self._compute(key, compute, mark), None)
        try:
            return CachedAnswer(other.result(), None)
        except CalledOff:  # by the caller of that computation, but not by this one
            with stoppable(lambda: None):
                return self.ask(key, compute, mark)

    def ask_together(
        self,
        keys: Sequence[Hashable],
        compute: Callable[[], Sequence[Any]],
        mark: Callable[[], Hashable] | None = None,
    ) -> None:
        """Computes the answers of several keys at once, unless all are fresh, for later calls of `ask`.

        compute: returns an answer per key, equal to what `ask` would compute. The computing time of each is taken to be
        that of the whole batch, which decides when it is refreshed. Raises what `compute` raises."""
        batch = tuple(keys)
        at_ms, now, current = self._clock.wall_ms(), self._clock.monotonic_ms(), _NO_MARK if mark is None else mark()
        with self._lock:
            cached = self._cached(batch)
        if cached is not None and (cached.is_current(current) or not cached.is_due(now)):
            return
        began = self._spent()
        values = compute()
        took_s = self._spent() - began
        if took_s > QUICK_S or self._settled:
            with self._lock:
                for key, value in zip(keys, values, strict=True):
                    self._put(key, _CachedAnswer(value, at_ms, now, took_s, current))
                # Cached as well, so that answers that do not fit are not computed again until they are due.
                self._put(batch, _CachedAnswer(None, at_ms, now, took_s, current))

    def page(self, page: PagedQuery, limit: int, compute: Callable[[], A | PackedList[A]]) -> A:
        """Returns the answer with the lines of this page, at most `limit`, and the fields about the whole list. Its
        `next_page` is None on the last page.

        compute: computes the whole list, with sorted lines, for the page's query, span and instant. It may pack a list
            of more than `limit` lines itself (`pack`), so that its lines need not be in memory together.

        Raises Refusal for a page whose list has changed, and what `compute` raises. Slow: call it in a thread."""
        packed: PackedList[A] | None = None
        if page.answer:
            with self._lock:
                packed = self._entries.get(page.key(page.answer))  # type: ignore[assignment]  # lists have keys of their own
        if packed is None:
            answer = compute()
            if isinstance(answer, PackedList):
                packed = answer
            elif not page.answer and len(_lines(answer)) <= limit:
                return answer
            else:
                packed = pack(answer, _lines(answer))
        if page.answer and packed.digest != page.answer:
            raise Refusal(
                "page-gone",
                "the answer that the earlier pages came from is no longer stored and has changed since: request the "
                "first page again",
            )
        if page.shown >= packed.count:
            raise _unknown_page()
        with self._lock:
            self._put(page.key(packed.digest), packed)
        return packed.page(page, limit)

    def close(self) -> None:
        self._task.end()
        with self._lock:
            self._closed = True
            worker = self._worker
        if worker is not None:
            self._due.put(None)
            self._refreshes.end(worker)

    def __len__(self) -> int:
        with self._lock:
            self._entries.expire()
            return len(self._entries)

    @property
    def nbytes(self) -> int:
        """Bytes that the entries take."""
        with self._lock:
            self._entries.expire()
            return int(self._entries.currsize)

    def _cached(self, key: Hashable) -> _CachedAnswer | None:
        """The cached answer of a key. The caller holds the lock."""
        entry = self._entries.get(key)
        return entry if isinstance(entry, _CachedAnswer) else None

    def _put(self, key: Hashable, entry: _Entry) -> None:
        """Caches the entry as the most recently used one, unless it alone exceeds the limit. The caller holds the
        lock."""
        self._entries.pop(key, None)
        with suppress(ValueError):
            self._entries[key] = entry

    def _compute(self, key: Hashable, compute: Callable[[], T], mark: Callable[[], Hashable] | None) -> T:
        at_ms, since_ms, began = self._clock.wall_ms(), self._clock.monotonic_ms(), self._spent()
        try:
            # Before `compute`: a commit during the computation makes the answer due again.
            current = _NO_MARK if mark is None else mark()
            value = compute()
        except BaseException as error:
            self._finish(key, None).set_exception(error)
            raise
        took_s = self._spent() - began
        keep = took_s > QUICK_S or self._settled
        cached = _CachedAnswer(value, at_ms, since_ms, took_s, current) if keep else None
        self._finish(key, cached).set_result(value)
        return value

    def _finish(self, key: Hashable, cached: _CachedAnswer | None) -> Future[Any]:
        """Replaces the key's entry, and returns the future on which other callers wait."""
        with self._lock:
            if cached is None:
                self._entries.pop(key, None)
            else:
                self._put(key, cached)
            return self._computing.pop(key)

    def _start_worker(self) -> None:
        """Starts the worker thread unless it runs. The caller holds the lock."""
        if self._worker is None:
            self._worker = threading.Thread(target=self._refresh, name="answer-cache", daemon=True)
            self._task.watch(self._worker)
            self._worker.start()

    def _refresh(self) -> None:
        make_current(self._refreshes)
        while (due := self._due.get()) is not None:
            self._task.begin()
            try:
                self._compute(*due)
            except CalledOff:
                pass  # by `close`
            except Exception as error:  # noqa: BLE001 - counted; the next reader computes the answer or gets the error
                self._task.fail(error)
                _log.error("refresh_failed", key=str(due[0]), reason=str(error))
            self._task.succeed()  # an earlier fault of another answer is over


@dataclass(frozen=True, slots=True)
class PackedList(Generic[A]):
    """A list with compressed lines.

    head: the list without its lines.
    packs: the compressed lines, PACK_LINES in each but the last.
    digest: the digest of the whole list."""

    head: A
    packs: tuple[bytes, ...]
    count: int
    digest: str

    @property
    def nbytes(self) -> int:
        return _HEAD_BYTES + sum(map(len, self.packs))

    @property
    def lifetime_ms(self) -> float:
        return KEPT_MS

    def page(self, page: PagedQuery, limit: int) -> A:
        until = min(page.shown + limit, self.count)
        next_page = page.cursor(self.digest, until) if until < self.count else None
        lines = tuple(self._between(page.shown, until))
        return self.head.model_copy(update={_field(type(self.head)): lines, "next_page": next_page})

    def _between(self, start: int, until: int) -> Iterator[Any]:
        adapter = _adapter(type(self.head))
        for number in range(start // PACK_LINES, -(-until // PACK_LINES)):
            before = number * PACK_LINES
            yield from adapter.validate_json(zlib.decompress(self.packs[number]))[
                max(0, start - before) : until - before
            ]


def pack(answer: A, lines: Iterable[Any]) -> PackedList[A]:
    """Packs the lines of an answer as they come. answer: the whole answer, its own lines are not read."""
    head = answer.model_copy(update={_field(type(answer)): (), "next_page": None})
    digest, adapter, packs, count = hashlib.sha256(head.model_dump_json().encode()), _adapter(type(answer)), [], 0
    left = iter(lines)
    while some := tuple(islice(left, PACK_LINES)):
        content = adapter.dump_json(some)
        digest.update(content)
        packs.append(zlib.compress(content, _COMPRESSION_LEVEL))
        count += len(some)
    return PackedList(head, tuple(packs), count, digest.hexdigest()[:32])


def _lines(answer: UsageAnswer | CostAnswer | JobsAnswer | NodesAnswer) -> tuple[Any, ...]:
    lines: tuple[Any, ...] = getattr(answer, _field(type(answer)))
    return lines


def _field(model: type[UsageAnswer | CostAnswer | JobsAnswer | NodesAnswer]) -> str:
    """The field of the model that holds the lines."""
    return "jobs" if model is JobsAnswer else "lines"


@cache
def _adapter(model: type[UsageAnswer | CostAnswer | JobsAnswer | NodesAnswer]) -> TypeAdapter[tuple[Any, ...]]:
    lines: Any = model.model_fields[_field(model)].annotation
    return TypeAdapter(lines)
