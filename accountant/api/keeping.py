"""Answers of several pages: found once, and kept while somebody turns their pages.

Invariants:
- Pages that follow from one another are of one answer: together they are what one page of all its lines would have
  been, whatever is committed meanwhile.
- An answer that is kept no longer is found again. Where it is the same, byte by byte, its pages go on; where a record,
  a price or a policy has made it another one the page is refused. Nobody is ever shown a page of another answer.
- A question holds the teams that whoever asks may see, and only an answer to the same question is found by a cursor.
- What is kept is bounded in bytes; of more, the one whose page was turned longest ago goes first. Nothing is kept
  longer than KEPT_MS after its last page.

Lines are kept as compressed JSON, a tenth and less of what the objects take. An answer of one page is not kept.
"""

from __future__ import annotations

import hashlib
import threading
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Any, Final, Generic, TypeVar

from cachetools import TTLCache
from pydantic import TypeAdapter

from accountant.api.paging import Page
from accountant.api.problems import Refusal
from accountant.joblines import JobsAnswer
from accountant.wire import CostAnswer, UsageAnswer
from agent.clock import Clock
from agent.units import MS_PER_MINUTE

A = TypeVar("A", UsageAnswer, CostAnswer, JobsAnswer)
KEPT_MS: Final = 15 * MS_PER_MINUTE
PACK_LINES: Final = 1_000
"""Lines that are unpacked together: those of a page, where nobody asks for another number."""
_LEVEL: Final = 1
_HEAD_BYTES: Final = 4_096
"""Of an answer beside its lines, about."""
_Key = tuple[str, int, int, int, str]


class KeptAnswers:
    """Thread-safe. most_bytes: of all that is kept."""

    def __init__(self, clock: Clock, most_bytes: int) -> None:
        self._lock = threading.Lock()
        self._kept: TTLCache[_Key, _Packed[Any]] = TTLCache(
            most_bytes, KEPT_MS, timer=clock.monotonic_ms, getsizeof=lambda packed: packed.nbytes
        )

    def turn(self, page: Page, limit: int, find: Callable[[], A]) -> A:
        """The lines of this page, at most `limit`, beside what is said of all of them. next_page None: it is the last.

        find: the whole answer, its lines sorted, to the page's question over its span at its instant. Raises what it
        raises, and Refusal for a page whose answer is gone. Takes time: call it in a thread."""
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
                "what the pages before it were of is no longer kept, and the answer is another one by now: ask for the "
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
        """Of what is kept."""
        with self._lock:
            self._kept.expire()
            return int(self._kept.currsize)

    def _keep(self, key: _Key, packed: _Packed[Any]) -> None:
        """From now on, as the one asked for last. One that is larger than all that may be kept is not."""
        with self._lock, suppress(ValueError):
            self._kept.pop(key, None)
            self._kept[key] = packed


@dataclass(frozen=True, slots=True)
class _Packed(Generic[A]):
    """An answer. head: without lines. packs: those, PACK_LINES in each but the last. digest: of all of it."""

    head: A
    packs: tuple[bytes, ...]
    count: int
    digest: str

    @property
    def nbytes(self) -> int:
        """Of memory, about."""
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
    """Of the lines."""
    return "jobs" if model is JobsAnswer else "lines"


@cache
def _adapter(model: type[UsageAnswer | CostAnswer | JobsAnswer]) -> TypeAdapter[tuple[Any, ...]]:
    lines: Any = model.model_fields[_field(model)].annotation
    return TypeAdapter(lines)


def _key(page: Page, answer: str) -> _Key:
    return page.question, page.start_ms, page.end_ms, page.at_ms, answer
