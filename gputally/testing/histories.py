"""The contract of histories, as tests. Derive a class from `HistorySuite` and say how the other system writes records:

    class TestCsv(HistorySuite):
        plugin = HISTORY

        @pytest.fixture
        def written(self, tmp_path):
            def write(uses):
                file = tmp_path / "uses.csv"
                ...
                return [str(file)]

            return write

Each test runs the command `gputally import NAME` against a fake accountant that keeps what it is sent."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from threading import Lock
from typing import Any, ClassVar
from urllib.parse import urlsplit

import pytest
from msgspec import structs

from accountant.__main__ import main
from accountant.history_import.protocol import SEAM, HistoryPlugin
from accountant.runtime.ingest import decode
from agent.wire import Batch, Gap, PodFacts, UsageInterval
from gputally.base.plugins import usable
from gputally.base.units import MS_PER_HOUR, US_PER_MS
from gputally.base.untrusted_text import LONGEST_REFERENCE, is_name
from gputally.testing.http_server import Handler, listening

START_MS = 1_740_787_200_000
"""2025-03-01T00:00:00Z, before which there is no record."""
HOSTILE = 'x|2|y,z;w\t"q"\'p\' {"a": [1]}\n7|7|root\r\n\u202e\x00\x1b[2J=1+1 ' + "long" * 200
"""A text as a user of the other system may choose it."""
NUMBERS = ("-1", "0", "1e300", "9" * 400, "NaN", "Infinity", "999999999", "")
INSTANTS = (-1, 0, 2**53, 10**30)
MOST_GPUS_OF_A_NODE = 1_024


@dataclass(frozen=True)
class Use:
    """A record of the other system: who held GPUs of a node, and when.

    number: the job's number, or the pod's.
    text: what a user chose: a job's or a pod's own name, a comment.
    account: who pays: an account, or a namespace.
    gpus: as the record writes it.
    busy_percent: how busy each of the GPUs was; None if nobody recorded it."""

    number: int
    text: str
    account: str
    node: str
    gpus: str
    start_ms: int
    end_ms: int
    busy_percent: int | None = None


USES = (
    Use(101, "train", "vision", "n1", "2", START_MS, START_MS + 2 * MS_PER_HOUR),
    Use(102, "serve", "nlp", "n1", "1", START_MS + MS_PER_HOUR // 2, START_MS + 2 * MS_PER_HOUR),
    Use(103, "train", "vision", "n2", "3", START_MS + MS_PER_HOUR, START_MS + 3 * MS_PER_HOUR),
)
"""Uses that every system can record. No node has more than four GPUs."""
END_MS = START_MS + 4 * MS_PER_HOUR
Write = Callable[..., Sequence[str]]
SILENT_MS = (START_MS + MS_PER_HOUR, START_MS + 2 * MS_PER_HOUR)
"""When a meter that samples recorded nothing, if a test says so."""


@dataclass
class FakeAccountant:
    """Keeps what imports send.

    breaks_after: batches that it still takes; then it fails.
    rows: with their node, by node, epoch and number, each once."""

    url: str = ""
    breaks_after: int | None = None
    batches: int = 0
    rows: dict[tuple[str, str, int], tuple[str, UsageInterval]] = field(default_factory=dict)
    facts: dict[str, PodFacts] = field(default_factory=dict)
    chunks: list[dict[str, Any]] = field(default_factory=list)
    withdrawn: list[dict[str, Any]] = field(default_factory=list)
    _turn: Lock = field(default_factory=Lock)

    def state(self) -> dict[str, Any]:
        marks: dict[tuple[str, str], int] = {}
        for node, epoch, seq in self.rows:
            marks[node, epoch] = max(seq, marks.get((node, epoch), 0))
        return {
            "done": [{name: one[name] for name in ("epoch", "start_ms", "end_ms")} for one in self.chunks],
            "marks": [{"node": node, "epoch": epoch, "durable_seq": seq} for (node, epoch), seq in marks.items()],
            "metered": [],
            "generation": len(self.withdrawn),
        }

    def take(self, batch: Batch) -> int | None:
        """Store a batch; return its last number, or None if it fails. Nodes are sent at the same time."""
        with self._turn:
            if self.breaks_after is not None and self.batches >= self.breaks_after:
                return None
            self.batches += 1
            for row in batch.intervals:
                self.rows.setdefault((batch.node, batch.epoch, row.seq), (batch.node, row))
            self.facts |= {fact.uid: fact for fact in batch.facts}
        return max([*(row.seq for row in batch.intervals), *(fact.seq for fact in batch.facts)], default=0)

    def withdraw(self, span: dict[str, Any]) -> int:
        gone = [key for key, (_, row) in self.rows.items() if span["start_ms"] <= row.start_ms < span["end_ms"]]
        for key in gone:
            del self.rows[key]
        self.chunks = [one for one in self.chunks if not span["start_ms"] <= one["start_ms"] < span["end_ms"]]
        self.withdrawn.append(span)
        return len(gone)

    @property
    def booked(self) -> list[tuple[str, UsageInterval]]:
        """The rows with their node, without numbers, in order."""
        rows = [(node, structs.replace(row, seq=0)) for node, row in self.rows.values()]
        return sorted(rows, key=lambda one: (one[0], one[1].gpu_uuid, one[1].start_ms, repr(one[1].holder)))

    def held_us(self) -> Counter[str]:
        """The GPU-microseconds of each account."""
        found: Counter[str] = Counter()
        for _, row in self.booked:
            if row.holder is not None and row.allocated_us:
                fact = self.facts.get(row.holder.uid)
                found[fact.namespace if fact is not None else row.holder.namespace] += row.allocated_us
        return found


@contextmanager
def fake_accountant() -> Iterator[FakeAccountant]:
    """Run a fake accountant until the block ends."""
    fake = FakeAccountant()

    class _Accountant(Handler):
        def do_GET(self) -> None:  # noqa: N802
            self.say(200, json.dumps(fake.state()).encode(), Content_Type="application/json")

        def do_POST(self) -> None:  # noqa: N802
            body = self.content()
            path = urlsplit(self.path).path
            if path == "/v1/imports/usage":
                batch = decode(gzip.decompress(body))
                seq = fake.take(batch)
                if seq is None:
                    self.say(500)
                    return
                answer: dict[str, Any] = {"epoch": batch.epoch, "durable_seq": seq, "checkpointed_seq": seq}
            elif path == "/v1/imports":
                fake.chunks.append(json.loads(body))
                answer = {"new": True}
            else:
                answer = {"rows": fake.withdraw(json.loads(body))}
            self.say(200, json.dumps(answer).encode(), Content_Type="application/json")

    with listening(_Accountant) as url:
        fake.url = url
        yield fake


@dataclass(frozen=True)
class Told:
    """What the command said. summaries: one for each cluster; none if it failed."""

    code: int
    summaries: list[dict[str, Any]]
    errors: str

    @property
    def coverage(self) -> float:
        return min((one["coverage"] for one in self.summaries if one["coverage"] is not None), default=0.0)

    @property
    def missed(self) -> int:
        """Records that were left out, and held time on no GPU."""
        return sum(one["left_out"] + one["unplaced_us"] for one in self.summaries)


class HistorySuite:
    """The tests that every history passes.

    tolerance_ms: how far the other system's records may be off, at the start and at the end of a use.
    not_bookable: a number of GPUs in a record that cannot be booked: no number at all, or more than the node has.
    records_use: whether the other system can record how busy GPUs were.
    samples: whether a meter samples who holds GPUs, and may have been silent. Then `written` takes the span in which it
        was, `silent_ms`, as second argument: (start, end), or None."""

    plugin: ClassVar[HistoryPlugin]
    tolerance_ms: ClassVar[int] = 0
    not_bookable: ClassVar[str] = "what"
    records_use: ClassVar[bool] = False
    samples: ClassVar[bool] = False

    @pytest.fixture
    def written(self) -> Write:
        """A function that writes records in the form of the other system, over those that it wrote before, and returns
        the arguments of the command that imports them. Their cluster is `default`."""
        raise NotImplementedError("define the fixture `written` in your class")

    @pytest.fixture
    def books(self) -> Iterator[FakeAccountant]:
        with fake_accountant() as fake:
            yield fake

    @pytest.fixture
    def run(self, books: FakeAccountant, capsys: pytest.CaptureFixture[str]) -> Callable[..., Told]:
        """A function that runs the command with these arguments."""

        def call(*arguments: str) -> Told:
            capsys.readouterr()
            code = main(["import", self.plugin.name, *arguments, "--output", "json", "--url", books.url])
            told = capsys.readouterr()
            assert "Traceback" not in told.err
            assert "failed: " not in told.err, "raise CannotImport with the place and the reason"
            return Told(code, json.loads(told.out) if told.out.strip() else [], told.err)

        return call

    def test_its_manifest_is_complete(self) -> None:
        plugin = self.plugin
        assert plugin.title
        assert plugin.records, "say what of the other system is imported"
        assert plugin.limits, "say what the records cannot show"
        assert plugin.reaches, "say what an import reads and connects to"
        assert plugin.page, "name the page about it"
        assert plugin.imports.__doc__, "the docstring is the help of the command"

    def test_it_is_found_by_its_name(self) -> None:
        found = usable(SEAM, HistoryPlugin).get(self.plugin.name)
        assert found is self.plugin, "register the entry point, and install"

    def test_its_command_has_a_help(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["import", self.plugin.name, "--help"]) == 0
        assert "--replace" in capsys.readouterr().out

    def test_the_hours_are_those_of_the_records(
        self, written: Write, run: Callable[..., Told], books: FakeAccountant
    ) -> None:
        told = run(*written(USES))
        assert (told.code, told.missed) == (0, 0), told.errors
        self._adds_up(books)
        self._are_the_hours_of(USES, books)

    def test_the_same_records_twice_are_booked_once(
        self, written: Write, run: Callable[..., Told], books: FakeAccountant
    ) -> None:
        arguments = written(USES)
        assert run(*arguments).code == 0
        before = books.booked, books.batches, len(books.chunks)
        told = run(*arguments)
        assert (told.code, [one["done"] for one in told.summaries]) == (0, [0])
        assert (books.booked, books.batches, len(books.chunks)) == before

    def test_an_import_that_was_cut_off_goes_on(
        self, written: Write, run: Callable[..., Told], books: FakeAccountant
    ) -> None:
        arguments = written(USES)
        books.breaks_after = 1
        assert run(*arguments).code == 1
        books.breaks_after = None
        assert run(*arguments).code == 0
        self._adds_up(books)
        self._are_the_hours_of(USES, books)

    def test_an_import_that_was_wrong_is_replaced(
        self, written: Write, run: Callable[..., Told], books: FakeAccountant
    ) -> None:
        assert run(*written([replace(one, account="visoin") for one in USES])).code == 0
        assert run(*written(USES), "--replace").code == 0
        assert len(books.withdrawn) == 1
        self._adds_up(books)
        self._are_the_hours_of(USES, books)

    def test_no_word_of_a_user_changes_hours_or_controls_a_terminal(
        self, written: Write, run: Callable[..., Told], books: FakeAccountant
    ) -> None:
        told = run(*written([replace(one, text=HOSTILE) for one in USES]))
        assert told.code == 0, told.errors
        assert "\x1b" not in told.errors
        self._adds_up(books)
        self._are_the_hours_of(USES, books)
        facts, holders = books.facts.values(), [row.holder for _, row in books.booked if row.holder is not None]
        words = [word for fact in facts for word in (fact.name, fact.namespace, fact.queue_ref, *fact.labels.values())]
        words += [word for one in holders for word in (one.uid, one.namespace, one.name, one.container)]
        assert [word for word in words if not is_name(word, LONGEST_REFERENCE)] == [], "pass it through as_name"

    def test_what_is_left_out_is_said_and_lowers_the_coverage(
        self, written: Write, run: Callable[..., Told], books: FakeAccountant
    ) -> None:
        bad = replace(USES[0], number=104, account="other", node="n3", gpus=self.not_bookable)
        told = run(*written([*USES, bad]))
        assert told.code == 1, "the exit code says that something is missing"
        assert told.missed
        assert told.coverage < 1 or any(one["left_out"] for one in told.summaries)
        assert told.errors or told.coverage < 1, "name the record"
        self._adds_up(books)
        self._are_the_hours_of(USES, books, besides="other")

    @pytest.mark.parametrize("number", NUMBERS)
    def test_no_number_is_too_large_for_the_books(
        self, written: Write, run: Callable[..., Told], books: FakeAccountant, number: str
    ) -> None:
        run(*written([*USES, replace(USES[0], number=104, account="other", node="n3", gpus=number)]))
        self._adds_up(books)
        self._are_the_hours_of(USES, books, besides="other")

    @pytest.mark.parametrize("instant", INSTANTS)
    def test_no_instant_is_too_far_for_the_books(
        self, written: Write, run: Callable[..., Told], books: FakeAccountant, instant: int
    ) -> None:
        odd = replace(USES[0], number=104, account="other", node="n3", gpus="1")
        bounds = f"--start={START_MS}", f"--end={END_MS}"
        run(*written([*USES, replace(odd, end_ms=instant)]), *bounds)
        run(*written([*USES, replace(odd, start_ms=instant)]), *bounds, "--replace")
        self._adds_up(books)
        assert all(row.start_ms >= START_MS and row.end_ms <= END_MS for _, row in books.booked)
        self._are_the_hours_of(USES, books, besides="other")

    def test_unknown_use_stays_unknown(self, written: Write, run: Callable[..., Told], books: FakeAccountant) -> None:
        assert run(*written(USES)).code == 0
        held = [row for _, row in books.booked if row.allocated_us]
        assert held
        assert {row.busy_us for row in held} == {None}, "busy_us is None, and not 0, where nobody recorded it"

    def test_recorded_use_is_booked(self, written: Write, run: Callable[..., Told], books: FakeAccountant) -> None:
        if not self.records_use:
            return
        assert run(*written([replace(one, busy_percent=50) for one in USES])).code == 0
        held = [row for _, row in books.booked if row.allocated_us and row.busy_us is not None and not row.gaps]
        assert held
        assert all(row.busy_us == row.allocated_us // 2 for row in held)

    def test_nothing_counts_while_the_meter_was_silent(
        self, written: Write, run: Callable[..., Told], books: FakeAccountant
    ) -> None:
        """Who held a GPU before and after may have held it meanwhile. Nothing shows that one was free, or how busy."""
        if not self.samples:
            return
        busy = 50 if self.records_use else None
        told = run(*written([replace(one, busy_percent=busy) for one in USES], SILENT_MS))
        assert told.coverage < 1, "the silence lowers the coverage"
        self._adds_up(books)
        for node, row in books.booked:
            if row.holder is None or row.busy_us is not None:
                counted_ms = _within(row, SILENT_MS) - sum(_within(gap, SILENT_MS) for gap in row.gaps)
                assert counted_ms <= 2 * self.tolerance_ms, f"{node}: {row} counts what nobody saw: end GpuLayout.known"
        held, most = books.held_us(), Counter[str]()
        for one in USES:
            most[one.account] += int(one.gpus) * (one.end_ms - one.start_ms + 2 * self.tolerance_ms) * US_PER_MS
        assert held <= most, "no hour is added"

    def _are_the_hours_of(self, uses: Sequence[Use], books: FakeAccountant, besides: str = "") -> None:
        found = books.held_us()
        found.pop(besides, None)
        tolerance: Counter[str] = Counter()
        expected: Counter[str] = Counter()
        for one in uses:
            expected[one.account] += int(one.gpus) * (one.end_ms - one.start_ms) * US_PER_MS
            tolerance[one.account] += int(one.gpus) * 2 * self.tolerance_ms * US_PER_MS
        assert found.keys() == expected.keys()
        assert all(abs(found[account] - us) <= tolerance[account] for account, us in expected.items()), (
            found,
            expected,
        )

    def _adds_up(self, books: FakeAccountant) -> None:
        """No time of a GPU is booked twice, its rows fill their time, and a node has no more GPUs than fit in it."""
        sets: dict[tuple[str, int, int], int] = {}
        gpus: dict[str, set[str]] = {}
        for node, row in books.booked:
            assert row.method == "imported"
            assert 0 <= row.allocated_us <= row.capacity_us
            assert row.busy_us is None or 0 <= row.busy_us <= (row.end_ms - row.start_ms) * US_PER_MS
            place = row.gpu_uuid, row.start_ms, row.end_ms
            sets[place] = sets.get(place, 0) + row.capacity_us
            gpus.setdefault(node, set()).add(row.gpu_uuid)
        assert all(len(of_node) <= MOST_GPUS_OF_A_NODE for of_node in gpus.values())
        until: dict[str, int] = {}
        for (gpu, start, end), capacity_us in sorted(sets.items()):
            assert until.get(gpu, 0) <= start < end
            assert capacity_us <= (end - start) * US_PER_MS
            until[gpu] = end


def _within(span: UsageInterval | Gap, outer: tuple[int, int]) -> int:
    """Milliseconds of a row or a gap that lie in a span."""
    return max(0, min(span.end_ms, outer[1]) - max(span.start_ms, outer[0]))
