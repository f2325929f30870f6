"""The cache of slow answers with their instant, and pages of one answer: repeated, found again, or refused."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from accountant.api.answer_cache import (
    AHEAD_MS,
    FRESH_MS,
    KEPT_MS,
    PACK_LINES,
    READING_MS,
    STALEST_MS,
    TIMES_AS_OLD,
    UNSIZED_BYTES,
    AnswerCache,
    CachedAnswer,
    PagedQuery,
    open_page,
)
from accountant.api.problems import Refusal
from accountant.api.query_parameters import QuerySpan
from accountant.composition import Service
from accountant.core.errors import LedgerUnavailable
from accountant.core.settings import Limits, Settings
from accountant.wire.usage_cost_and_job_models import CostAnswer, CostLine, UsageLine
from gputally.base.clock import VirtualClock
from gputally.base.units import MS_PER_DAY
from tests.fakes.memory_ledger import MemoryLedger
from tests.http.conftest import (
    MINUTE_MS,
    NOW_MS,
    StartAccountant,
    bearer,
    client_of,
    refused,
    settings_in,
    token_entry,
    usage_line,
)
from tests.hypothesis_examples import examples
from tests.price_books import price_book_text
from tests.usage_records import batch, interval, pod_facts, pod_holder

AT = NOW_MS
MOST_BYTES = 256 * 2**20


class Spent:
    """CPU time that a test lets pass."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


class Finding:
    """Computes 1, 2, 3 …, each at a cost; `found` is set after each."""

    def __init__(self, spent: Spent, price: float) -> None:
        self.spent, self.price, self.times, self.found = spent, price, 0, threading.Event()

    def __call__(self) -> int:
        self.spent.seconds += self.price
        self.times += 1
        self.found.set()
        return self.times


@pytest.fixture
def spent() -> Spent:
    return Spent()


@pytest.fixture
def answers(clock: VirtualClock, spent: Spent) -> Iterator[AnswerCache]:
    answers = AnswerCache(clock, MOST_BYTES, spent)
    yield answers
    answers.close()


def test_what_is_quick_is_found_every_time(answers: AnswerCache, spent: Spent) -> None:
    find = Finding(spent, 0.01)
    assert [answers.ask("a", find) for _ in range(2)] == [CachedAnswer(1, None), CachedAnswer(2, None)]


def test_what_takes_long_is_kept_and_says_of_when_it_is(
    answers: AnswerCache, spent: Spent, clock: VirtualClock
) -> None:
    find = Finding(spent, 1.0)
    assert answers.ask("a", find).as_of_ms is None
    clock.advance(FRESH_MS - 1)
    kept = answers.ask("a", find)
    assert (kept.value, kept.as_of_ms) == (1, AT)
    assert answers.ask("b", find).value == 2, "another key is another answer"


@pytest.mark.parametrize(("price", "age_ms"), [(1.0, FRESH_MS), (10.0, TIMES_AS_OLD * 10_000)])
def test_an_old_one_is_shown_while_it_is_found_anew(
    answers: AnswerCache, spent: Spent, clock: VirtualClock, price: float, age_ms: int
) -> None:
    find = Finding(spent, price)
    answers.ask("a", find)
    clock.advance(age_ms)
    assert answers.ask("a", find).value == 1
    assert find.times == 1, "not older than it may be"
    find.found.clear()
    clock.advance(1)
    assert answers.ask("a", find).as_of_ms == AT
    assert find.found.wait(10)
    answers.close()
    assert answers.ask("a", find).value == 2


def test_what_is_too_old_is_not_shown(answers: AnswerCache, spent: Spent, clock: VirtualClock) -> None:
    find = Finding(spent, 1.0)
    answers.ask("a", find)
    clock.advance(STALEST_MS + 1)
    assert answers.ask("a", find).value == 2


def test_two_who_ask_at_once_wait_for_one_finding(answers: AnswerCache, spent: Spent) -> None:
    begun, go = threading.Event(), threading.Event()
    times: list[int] = []

    def find() -> int:
        times.append(1)
        begun.set()
        assert go.wait(10)
        return 7

    with ThreadPoolExecutor(2) as several:
        first = several.submit(answers.ask, "a", find)
        assert begun.wait(10)
        second = several.submit(answers.ask, "a", find)
        go.set()
        assert first.result(10).value == second.result(10).value == 7
    assert len(times) in (1, 2), "the second may come after the first, of which nothing is kept"


def _fails() -> int:
    raise ValueError("no ledger")


def test_a_failure_is_told_and_not_kept(answers: AnswerCache, spent: Spent) -> None:
    with pytest.raises(ValueError, match="no ledger"):
        answers.ask("a", _fails)
    assert answers.ask("a", Finding(spent, 1.0)).value == 1


def test_a_failure_behind_the_readers_back_is_the_next_readers(
    answers: AnswerCache, spent: Spent, clock: VirtualClock
) -> None:
    answers.ask("a", Finding(spent, 1.0))
    clock.advance(FRESH_MS + 1)
    assert answers.ask("a", _fails).value == 1
    answers.close()
    with pytest.raises(ValueError, match="no ledger"):
        answers.ask("a", _fails)


def test_no_more_is_kept_than_fits(answers: AnswerCache, spent: Spent) -> None:
    find = Finding(spent, 1.0)
    most = MOST_BYTES // UNSIZED_BYTES
    for number in range(most + 1):
        answers.ask(number, find)
    assert answers.ask(most, find).as_of_ms == AT
    assert answers.ask(0, find).as_of_ms is None


def test_an_equal_mark_makes_a_kept_answer_one_of_now(answers: AnswerCache, spent: Spent, clock: VirtualClock) -> None:
    find, marks = Finding(spent, 1.0), iter((1, 1, 1, 2, 2))

    def ask() -> CachedAnswer[int]:
        return answers.ask("a", find, lambda: next(marks, 2))

    assert ask() == CachedAnswer(1, None)
    clock.advance(2 * STALEST_MS)
    assert ask() == CachedAnswer(1, None), "as long as nothing changed, however old"
    assert ask() == CachedAnswer(2, None), "changed, and too old to be shown"
    assert find.times == 2


def test_while_nobody_reads_little_is_asked_ahead(answers: AnswerCache, spent: Spent, clock: VirtualClock) -> None:
    find = Finding(spent, 0.5)

    def asked_ahead_in(span_ms: int) -> int:
        times = 0
        for _ in range(span_ms // FRESH_MS):
            clock.advance(FRESH_MS)
            if answers.ahead_is_due:
                times += 1
                with answers.ahead():
                    answers.ask("a", find)
        return times

    assert asked_ahead_in(4 * AHEAD_MS) == 4
    answer = answers.ask("a", find)
    assert answer.as_of_ms is not None
    assert clock.wall_ms() - answer.as_of_ms < STALEST_MS
    assert asked_ahead_in(READING_MS) == READING_MS // FRESH_MS, "somebody reads"
    assert asked_ahead_in(4 * AHEAD_MS) == 4, "nobody has come back"


def test_what_is_found_together_is_kept_apart(answers: AnswerCache, spent: Spent, clock: VirtualClock) -> None:
    find = Finding(spent, 1.0)

    def both() -> list[int]:
        return [find(), 10 * find.times]

    answers.ask_together(("a", "b"), both)
    answers.ask_together(("a", "b"), both)
    assert find.times == 1, "both are fresh"
    alone = Finding(spent, 1.0)
    assert answers.ask("a", alone) == CachedAnswer(1, AT)
    assert answers.ask("b", alone) == CachedAnswer(10, AT)
    clock.advance(FRESH_MS + 1)
    answers.ask_together(("a", "b"), both)
    assert (find.times, alone.times) == (2, 0)
    assert answers.ask("b", alone) == CachedAnswer(20, AT + FRESH_MS + 1)


def test_together_too_what_is_quick_is_not_kept_and_an_equal_mark_is_enough(
    answers: AnswerCache, spent: Spent, clock: VirtualClock
) -> None:
    quick, slow = Finding(spent, 0.01), Finding(spent, 1.0)
    answers.ask_together(("a",), lambda: [quick()])
    assert answers.ask("a", quick) == CachedAnswer(2, None)
    for _ in range(2):
        answers.ask_together(("b",), lambda: [slow()], lambda: "same")
        clock.advance(2 * STALEST_MS)
    assert slow.times == 1
    answers.ask_together(("b",), lambda: [slow()], lambda: "other")
    assert slow.times == 2
    with pytest.raises(ZeroDivisionError):
        answers.ask_together(("c",), lambda: [1 // 0])


@dataclass(frozen=True)
class Heavy:
    nbytes: int


def test_no_more_is_kept_than_memory_is_meant_for(answers: AnswerCache, spent: Spent) -> None:
    def find() -> Heavy:
        spent.seconds += 1.0
        return Heavy(MOST_BYTES // 3 - UNSIZED_BYTES)

    answers.ask("small", Finding(spent, 1.0))
    for key in "abc":
        answers.ask(key, find)
    for key in ("small", "a"):
        answers.ask(key, find)
    answers.ask("d", find)
    together = Finding(spent, 1.0)
    for _ in range(2):
        answers.ask_together(("e", "f"), lambda: [Heavy(together() * MOST_BYTES + 1), Heavy(MOST_BYTES + 1)])
    assert together.times == 1, "not again before they are due, though they do not fit"
    assert [answers.ask(key, find).as_of_ms for key in ("small", "a", "c", "d")] == [AT] * 4
    assert answers.ask("b", find).as_of_ms is None
    for _ in range(2):
        assert answers.ask("huge", lambda: Heavy(find().nbytes * 4)).as_of_ms is None
    assert answers.ask("b", find).as_of_ms == AT, "what is too large to keep costs nobody else's place"


BEGIN = NOW_MS - 60 * MINUTE_MS
PLENTY = 2**20


def line(number: int, busy: int = 1) -> UsageLine:
    return usage_line(f"t{number:05}", busy=busy)


def changed(page: str, **changes: Any) -> str:
    """Return the cursor with other content, as a caller could forge it."""
    names = ("question", "start_ms", "end_ms", "at_ms", "answer", "shown")
    content = dict(zip(names, json.loads(base64.urlsafe_b64decode(page + "=" * (-len(page) % 4))), strict=True))
    return base64.urlsafe_b64encode(json.dumps(list((content | changes).values())).encode()).decode().rstrip("=")


def whole(costs: list[int]) -> CostAnswer:
    return CostAnswer(
        start_ms=0, end_ms=9, by=("job",), currency="EUR", price_book_version="v", total=Decimal(sum(costs)) / 7,
        lines=tuple(
            CostLine(key={"job": f"j{n:04}"}, gpu_us=each, cost=Decimal(each) / 7) for n, each in enumerate(costs)
        ),
        unpriced_gpu_us=0,
    )  # fmt: skip


def asked(page: str | None, now_ms: int = 5) -> PagedQuery:
    return open_page(["cost"], QuerySpan(0, 9), now_ms, page, Limits(span_days=1))


@settings(max_examples=examples(60, 400))
@given(
    costs=st.lists(st.integers(1, 10**12), min_size=1, max_size=40),
    limits=st.lists(st.integers(1, 9), min_size=1, max_size=60),
    happens=st.lists(st.sampled_from(["nothing", "booked", "forgotten", "both", "undone"]), min_size=60, max_size=60),
    room=st.sampled_from([0, PLENTY]),
)
def test_pages_add_up_to_one_answer_or_are_refused(
    costs: list[int], limits: list[int], happens: list[str], room: int
) -> None:
    """Whatever is booked, retracted or forgotten between two pages."""
    clock = VirtualClock(NOW_MS)
    kept, first, ledger = AnswerCache(clock, room), whole(costs), list(costs)
    forgotten = not room
    lines: list[CostLine] = []
    page: str | None = None
    for turn, what in enumerate(happens):
        opened, limit = asked(page, now_ms=5 + turn), limits[turn % len(limits)]
        if page is not None and forgotten and ledger != costs:
            with pytest.raises(Refusal, match="no longer stored") as gone:
                kept.page(opened, limit, partial(whole, ledger))
            assert (gone.value.slug, gone.value.kind.status) == ("page-gone", 410)
            return
        answer = kept.page(opened, limit, partial(whole, ledger))
        lines += answer.lines
        assert answer.model_copy(update={"lines": (), "next_page": None}) == first.model_copy(update={"lines": ()})
        page = answer.next_page
        if page is None:
            break
        forgotten = not room
        if what in ("booked", "both"):
            ledger = [each + 1 for each in costs]
        if what == "undone":
            ledger = list(costs)
        if what in ("forgotten", "both"):
            clock.advance(KEPT_MS + 1)
            forgotten = True
    assert tuple(lines) == first.lines
    assert sum(each.cost or 0 for each in lines) == sum(each.cost or 0 for each in first.lines)


def test_a_page_may_reach_over_what_is_packed_together() -> None:
    kept, answer = AnswerCache(VirtualClock(0), PLENTY), whole(list(range(1, 2 * PACK_LINES + 8)))
    first = kept.page(asked(None), PACK_LINES - 3, lambda: answer)
    second = kept.page(asked(first.next_page), PACK_LINES + 6, lambda: whole([]))
    third = kept.page(asked(second.next_page), PACK_LINES, lambda: whole([]))
    assert [*first.lines, *second.lines, *third.lines] == list(answer.lines)
    assert third.next_page is None


def test_an_answer_of_one_page_is_not_kept() -> None:
    kept, answer = AnswerCache(VirtualClock(0), PLENTY), whole([1, 2])
    assert kept.page(asked(None), 2, lambda: answer) is answer
    assert (len(kept), kept.nbytes) == (0, 0)


def test_more_than_fits_is_not_kept_and_what_is_turned_stays() -> None:
    """Of three answers two fit: the one whose pages were not requested is evicted."""
    one = AnswerCache(VirtualClock(0), PLENTY)
    one.page(asked(None), 1, lambda: whole([1, 2, 3]))
    kept = AnswerCache(VirtualClock(0), 2 * one.nbytes + one.nbytes // 2)
    pages = [kept.page(asked(None), 1, partial(whole, [each, 2, 3])).next_page for each in (1, 4)]
    kept.page(asked(pages[0]), 1, lambda: whole([]))
    pages.append(kept.page(asked(None), 1, lambda: whole([7, 2, 3])).next_page)
    assert len(kept) == 2
    assert kept.page(asked(pages[0]), 1, lambda: whole([])).lines[0].gpu_us == 2
    assert kept.page(asked(pages[2]), 1, lambda: whole([])).lines[0].gpu_us == 2
    with pytest.raises(Refusal, match="no longer stored"):
        kept.page(asked(pages[1]), 1, lambda: whole([]))


def test_what_is_turned_now_and_then_stays_and_what_is_not_goes() -> None:
    clock = VirtualClock(0)
    kept = AnswerCache(clock, PLENTY)
    page = kept.page(asked(None), 1, lambda: whole([1, 2, 3, 4])).next_page
    for _ in range(2):
        clock.advance(KEPT_MS - 1)
        page = kept.page(asked(page), 1, lambda: whole([])).next_page
    clock.advance(KEPT_MS)
    assert (len(kept), kept.nbytes) == (0, 0)


def test_kept_lines_take_little_memory() -> None:
    lines = whole(list(range(10**11, 10**11 + 20_000)))
    kept = AnswerCache(VirtualClock(0), 64 * PLENTY)
    kept.page(asked(None), 1, lambda: lines)
    assert kept.nbytes < 60 * len(lines.lines)


def test_kept_pages_ask_the_ledger_nothing(accountant: StartAccountant, ledger: MemoryLedger) -> None:
    ledger.lines = [line(n) for n in range(5)]
    client = accountant().client
    answer = client.get("/v1/cost?limit=2").json()
    ledger.trouble = LedgerUnavailable("closing")
    seen = list(answer["lines"])
    while answer["next_page"]:
        answer = client.get(f"/v1/cost?limit=2&page={answer['next_page']}").json()
        seen += answer["lines"]
    assert [one["key"]["team"] for one in seen] == [f"t{n:05}" for n in range(5)]
    refused(client.get("/v1/cost?limit=2"), "ledger-unavailable")


@pytest.mark.parametrize("path", ["/v1/usage", "/v1/usage?breakdown=true", "/v1/cost"])
@pytest.mark.parametrize("limits", [{"pages_bytes": 0}, {}])
def test_an_answer_that_is_forgotten_is_found_again_where_nothing_changed(
    accountant: StartAccountant, ledger: MemoryLedger, path: str, limits: dict[str, int]
) -> None:
    ledger.lines = [line(n) for n in range(5)]
    running = accountant(limits=limits)
    query = f"{path}{'&' if '?' in path else '?'}limit=2"
    every = running.client.get(path).json()["lines"]
    answer = running.client.get(query).json()
    seen = list(answer["lines"])
    while answer["next_page"]:
        running.clock.advance(KEPT_MS + 1)
        answer = running.client.get(f"{query}&page={answer['next_page']}").json()
        seen += answer["lines"]
    assert seen == every


@pytest.mark.parametrize("path", ["/v1/usage", "/v1/cost"])
def test_a_page_of_an_answer_that_is_gone_is_refused_where_the_ledger_moved_on(
    accountant: StartAccountant, ledger: MemoryLedger, path: str
) -> None:
    ledger.lines = [line(n) for n in range(5)]
    running = accountant()
    page = running.client.get(f"{path}?limit=2").json()["next_page"]
    ledger.lines[4] = line(4, busy=2)
    assert running.client.get(f"{path}?limit=2&page={page}").status_code == 200
    running.clock.advance(KEPT_MS + 1)
    gone = running.client.get(f"{path}?limit=2&page={page}")
    assert "first page" in refused(gone, "page-gone")["detail"]
    assert running.client.get(f"{path}?limit=2").json()["next_page"] != page


def test_a_cursor_that_was_made_up_is_refused(accountant: StartAccountant, ledger: MemoryLedger) -> None:
    ledger.lines = [line(n) for n in range(3)]
    running = accountant()
    page = running.client.get("/v1/usage?limit=2").json()["next_page"]
    for changes in (
        {"shown": 0}, {"shown": -1}, {"shown": 3}, {"shown": 10**30}, {"shown": "2"}, {"answer": None}, {"answer": 7},
        {"end_ms": NOW_MS + 2_000 * MS_PER_DAY}, {"start_ms": NOW_MS}, {"end_ms": 10**40}, {"at_ms": -(10**40)},
        {"question": "0" * 32}, {"start_ms": 1.5}, {"more": 1},
    ):  # fmt: skip
        told = running.client.get(f"/v1/usage?limit=2&page={changed(page, **changes)}")
        if changes == {"more": 1}:
            assert told.status_code == 200, "a later release may write more into it"
        else:
            refused(told, "bad-page")
    refused(running.client.get(f"/v1/usage?limit=2&page={changed(page, answer='0' * 32)}"), "page-gone")
    for other in ("/v1/usage?by=gpu_model", "/v1/cost?", "/v1/usage?where.team=x"):
        refused(running.client.get(f"{other}&page={page}"), "bad-page")
    for garbage in ("x", "AAAA", "....", "W10"):
        for path in ("/v1/usage", "/v1/jobs"):
            refused(running.client.get(f"{path}?page={garbage}"), "bad-page")
    refused(running.client.get(f"/v1/usage?limit=2&page={changed(page, answer='')}"), "bad-page")
    refused(running.client.get(f"/v1/usage?page={page[:-3]}"), "bad-page")


PRICES = price_book_text(H100=6.37, currency="USD")
QUESTIONS = {
    "/v1/usage": {"by": "job"}, "/v1/usage?breakdown": {"by": "pod", "breakdown": "true"}, "/v1/cost": {"by": "job"},
    "/v1/cost?until": {"by": "pod,hour", "end": str(NOW_MS + MS_PER_DAY)}, "/v1/jobs": {},
    "/v1/jobs?until": {"end": str(NOW_MS + MS_PER_DAY)},
}  # fmt: skip
"""Path, and a parameter that distinguishes two queries of it."""


def node(number: int, minutes: int, pods: int = 3) -> bytes:
    """Build a batch of one node: pods of two teams, each on a GPU of its own; some of them still wait."""
    facts, rows = [], []
    for pod in range(pods):
        space, name, uid = ("vision", "nlp")[pod % 2], f"train-{number}-{pod}", f"u-{number}-{pod}"
        told = {"namespace": space, "node": f"n{number}", "uid": uid, "workload": f"Job/{name}"}
        scheduled_ms = BEGIN if pod else None
        facts.append(pod_facts(name, BEGIN, created_ms=BEGIN - MINUTE_MS, scheduled_ms=scheduled_ms, **told))
        for at in range(BEGIN, BEGIN + (minutes if pod else 0) * MINUTE_MS, MINUTE_MS):
            holder = pod_holder(name, space, uid)
            rows.append(interval(at, f"GPU-{uid}", holder, span_ms=MINUTE_MS, busy_us=MINUTE_MS * 600))
    return msgspec.json.encode(batch(rows, facts, cluster="prod", node=f"n{number}"))


@pytest.fixture
def chosen(tmp_path: Path) -> Settings:
    leads = (("vision", "vision"), ("nlp", "nlp"), ("both", "nlp, vision"))
    tokens = "".join(token_entry(name, "read", f", teams: [{teams}]") for name, teams in leads)
    return settings_in(
        tmp_path, prices=PRICES, tokens="tokens:\n" + token_entry("all", "admin") + tokens,
        inventory="schema: 1\ncluster: prod\nnamespaces:\n"
        "  - {name: nlp, team: nlp}\n  - {name: vision, team: vision}\n",
    )  # fmt: skip


@pytest.fixture
def service(chosen: Settings) -> Iterator[Service]:
    with Service(chosen, VirtualClock(NOW_MS)) as running:
        for number in range(3):
            running.ingest.submit(node(number, 7 + number)).result()
        yield running


def ask(service: Service, who: str, path: str, **query: Any) -> Any:
    return client_of(service, headers=bearer(who)).get(path.partition("?")[0], params=query)


def lines_of(answer: Any) -> list[Any]:
    found: list[Any] = answer["jobs" if "jobs" in answer else "lines"]
    return found


@pytest.mark.parametrize("path", QUESTIONS)
def test_pages_add_up_to_the_whole_with_commits_between_them(service: Service, path: str) -> None:
    every = ask(service, "all", path, **QUESTIONS[path]).json()
    answer = ask(service, "all", path, **QUESTIONS[path], limit=2).json()
    seen, commits = lines_of(answer), 0
    while answer["next_page"]:
        service.ingest.submit(node(10 + commits, 5)).result()
        policy = {"schema": 1, "queues": [{"name": f"q{commits}", "deserved": 8, "refs": ["kai:q"]}]}
        client_of(service, headers=bearer("all")).put("/v1/policy", json=policy).raise_for_status()
        commits += 1
        answer = ask(service, "all", path, **QUESTIONS[path], limit=2, page=answer["next_page"]).json()
        seen += lines_of(answer)
        assert {**answer, "lines": 0, "jobs": 0, "next_page": 0} == {**every, "lines": 0, "jobs": 0, "next_page": 0}
    assert commits >= 2
    assert seen == lines_of(every)
    assert len(lines_of(ask(service, "all", path, **QUESTIONS[path]).json())) > len(seen), "the ledger did move on"
    if "total" in every:
        assert sum(Decimal(one["cost"]) for one in seen) == Decimal(every["total"])
    if path == "/v1/jobs":
        assert sum(Decimal(one["cost"]) for one in seen) == Decimal(every["total_cost"])
        assert sum(sum(one["accounts_gpu_us"].values()) for one in seen) == every["total_gpu_us"]


@pytest.mark.parametrize("path", QUESTIONS)
def test_pages_outlive_a_restart_of_the_service(chosen: Settings, path: str) -> None:
    """Waiting times are those of the first page, although time has passed since."""
    with Service(chosen, VirtualClock(NOW_MS)) as running:
        for number in range(3):
            running.ingest.submit(node(number, 7 + number)).result()
        every = ask(running, "all", path, **QUESTIONS[path]).json()
        first = ask(running, "all", path, **QUESTIONS[path], limit=2).json()
    with Service(chosen, VirtualClock(NOW_MS + 30 * MINUTE_MS)) as again:
        rest = ask(again, "all", path, **QUESTIONS[path], page=first["next_page"]).json()
        assert lines_of(first) + lines_of(rest) == lines_of(every)
    with Service(chosen, VirtualClock(NOW_MS + 30 * MINUTE_MS)) as moved:
        moved.ingest.submit(node(7, 5)).result()
        refused(ask(moved, "all", path, **QUESTIONS[path], page=first["next_page"]), "page-gone")


@pytest.mark.parametrize("path", QUESTIONS)
def test_another_callers_cursor_opens_nothing(service: Service, path: str) -> None:
    page = ask(service, "all", path, **QUESTIONS[path], limit=1).json()["next_page"]
    of_both = ask(service, "both", path, **QUESTIONS[path], limit=1).json()["next_page"]
    of_vision = ask(service, "vision", path, **QUESTIONS[path], limit=1).json()["next_page"]
    pairs = ("vision", page), ("vision", of_both), ("nlp", of_vision), ("both", of_vision), ("all", of_both)
    for who, foreign in pairs:
        refused(ask(service, who, path, **QUESTIONS[path], limit=1, page=foreign), "bad-page")


@pytest.mark.parametrize("path", QUESTIONS)
def test_another_callers_answer_is_not_found_by_a_cursor_that_was_made_up(service: Service, path: str) -> None:
    """The caller's own query with the name of another caller's answer."""
    named = {"where.team": "vision"}
    foreign = ask(service, "all", path, **QUESTIONS[path], limit=1).json()["next_page"]
    own = ask(service, "nlp", path, **QUESTIONS[path], limit=1).json()["next_page"]
    answer = json.loads(base64.urlsafe_b64decode(foreign + "=" * (-len(foreign) % 4)))[4]
    refused(ask(service, "nlp", path, **QUESTIONS[path], limit=1, page=changed(own, answer=answer)), "page-gone")
    # Who may see the same may turn the same pages.
    of_vision = ask(service, "vision", path, **QUESTIONS[path], limit=1).json()["next_page"]
    turned = ask(service, "all", path, **QUESTIONS[path], **named, limit=1, page=of_vision)
    assert turned.json() == ask(service, "vision", path, **QUESTIONS[path], limit=1, page=of_vision).json()
