"""Pages that follow from one another are of one answer: kept while they are turned, found again, or refused."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.testclient import TestClient

from accountant.api.answer_cache import KEPT_MS, PACK_LINES, AnswerCache, PagedQuery, open_page
from accountant.api.problems import Refusal
from accountant.composition import Service
from accountant.core.errors import LedgerUnavailable
from accountant.core.settings import Limits, Settings
from accountant.wire.usage_cost_and_job_models import Accounts, CostAnswer, CostLine, UsageLine
from agent.wire import PROBLEM
from gputally.base.clock import VirtualClock
from gputally.server.tokens_and_grants import sha256
from tests import fresh
from tests.effort import examples
from tests.price_books import price_book_text
from tests.usage_records import batch, interval, pod_facts, pod_holder

NOW_MS = 1_793_534_400_000  # 2026-11-01T12:00:00Z
MINUTE = 60_000
BEGIN = NOW_MS - 60 * MINUTE
DAY_MS = 86_400_000
PLENTY = 2**20


def refused(answer: Any, slug: str) -> str:
    assert answer.json()["type"] == PROBLEM + slug, answer.text
    detail: str = answer.json()["detail"]
    return detail


def line(number: int, busy: int = 1) -> UsageLine:
    return UsageLine(key={"team": f"t{number:05}", "gpu_model": "H100"}, accounts_gpu_us=Accounts(busy=busy))


def changed(page: str, **changes: Any) -> str:
    """The cursor with other content, as somebody could make it up."""
    names = ("question", "start_ms", "end_ms", "at_ms", "answer", "shown")
    content = dict(zip(names, json.loads(base64.urlsafe_b64decode(page + "=" * (-len(page) % 4))), strict=True))
    return base64.urlsafe_b64encode(json.dumps(list((content | changes).values())).encode()).decode().rstrip("=")


# --- what is kept, by itself ------------------------------------------------------------------------------------------


def whole(costs: list[int]) -> CostAnswer:
    return CostAnswer(
        start_ms=0, end_ms=9, by=("job",), currency="EUR", price_book_version="v", total=Decimal(sum(costs)) / 7,
        lines=tuple(
            CostLine(key={"job": f"j{n:04}"}, gpu_us=each, cost=Decimal(each) / 7) for n, each in enumerate(costs)
        ),
        unpriced_gpu_us=0,
    )  # fmt: skip


def asked(page: str | None, now_ms: int = 5) -> PagedQuery:
    return open_page(["cost"], 0, 9, now_ms, page, span_days=1)


@settings(max_examples=examples(60, 400), deadline=None)
@given(
    costs=st.lists(st.integers(1, 10**12), min_size=1, max_size=40),
    limits=st.lists(st.integers(1, 9), min_size=1, max_size=60),
    happens=st.lists(st.sampled_from(["nothing", "booked", "forgotten", "both", "undone"]), min_size=60, max_size=60),
    room=st.sampled_from([0, PLENTY]),
)
def test_pages_add_up_to_one_answer_or_are_refused(
    costs: list[int], limits: list[int], happens: list[str], room: int
) -> None:
    """Whatever is booked, taken back or forgotten between two of them."""
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
    """Of three answers two fit: the one that nobody turned the pages of goes."""
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


# --- over HTTP --------------------------------------------------------------------------------------------------------


def test_kept_pages_ask_the_ledger_nothing(door: Any, ledger: Any) -> None:
    ledger.lines = [line(n) for n in range(5)]
    client = door().client
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
    door: Any, ledger: Any, path: str, limits: dict[str, int]
) -> None:
    ledger.lines = [line(n) for n in range(5)]
    opened = door(limits=limits)
    query = f"{path}{'&' if '?' in path else '?'}limit=2"
    every = opened.client.get(path).json()["lines"]
    answer = opened.client.get(query).json()
    seen = list(answer["lines"])
    while answer["next_page"]:
        opened.clock.advance(KEPT_MS + 1)
        answer = opened.client.get(f"{query}&page={answer['next_page']}").json()
        seen += answer["lines"]
    assert seen == every


@pytest.mark.parametrize("path", ["/v1/usage", "/v1/cost"])
def test_a_page_of_an_answer_that_is_gone_is_refused_where_the_ledger_moved_on(
    door: Any, ledger: Any, path: str
) -> None:
    ledger.lines = [line(n) for n in range(5)]
    opened = door()
    page = opened.client.get(f"{path}?limit=2").json()["next_page"]
    ledger.lines[4] = line(4, busy=2)
    assert opened.client.get(f"{path}?limit=2&page={page}").status_code == 200
    opened.clock.advance(KEPT_MS + 1)
    gone = opened.client.get(f"{path}?limit=2&page={page}")
    assert gone.status_code == 410
    assert "first page" in refused(gone, "page-gone")
    assert opened.client.get(f"{path}?limit=2").json()["next_page"] != page


def test_pages_outlive_a_restart_where_nothing_changed(door: Any, ledger: Any) -> None:
    ledger.lines = [line(n) for n in range(3)]
    page = door().client.get("/v1/usage?limit=2").json()["next_page"]
    assert [one["key"]["team"] for one in door().client.get(f"/v1/usage?page={page}").json()["lines"]] == ["t00002"]
    ledger.lines.append(line(3))
    refused(door().client.get(f"/v1/usage?page={page}"), "page-gone")


def test_a_cursor_that_was_made_up_is_refused(door: Any, ledger: Any) -> None:
    ledger.lines = [line(n) for n in range(3)]
    opened = door()
    page = opened.client.get("/v1/usage?limit=2").json()["next_page"]
    for changes in (
        {"shown": 0}, {"shown": -1}, {"shown": 3}, {"shown": 10**30}, {"shown": "2"}, {"answer": None}, {"answer": 7},
        {"end_ms": NOW_MS + 2_000 * DAY_MS}, {"start_ms": NOW_MS}, {"end_ms": 10**40}, {"at_ms": -(10**40)},
        {"question": "0" * 32}, {"start_ms": 1.5}, {"more": 1},
    ):  # fmt: skip
        told = opened.client.get(f"/v1/usage?limit=2&page={changed(page, **changes)}")
        if changes == {"more": 1}:
            assert told.status_code == 200, "a later release may write more into it"
        else:
            assert told.status_code == 400, changes
            refused(told, "bad-page")
    refused(opened.client.get(f"/v1/usage?limit=2&page={changed(page, answer='0' * 32)}"), "page-gone")
    refused(opened.client.get(f"/v1/usage?limit=2&page={changed(page, answer='')}"), "bad-page")
    refused(opened.client.get(f"/v1/usage?page={page[:-3]}"), "bad-page")


# --- on a real ledger, between commits --------------------------------------------------------------------------------


PRICES = price_book_text(H100=6.37, currency="USD")
QUESTIONS = {
    "/v1/usage": {"by": "job"}, "/v1/usage?breakdown": {"by": "pod", "breakdown": "true"}, "/v1/cost": {"by": "job"},
    "/v1/cost?until": {"by": "pod,hour", "end": str(NOW_MS + DAY_MS)}, "/v1/jobs": {},
    "/v1/jobs?until": {"end": str(NOW_MS + DAY_MS)},
}  # fmt: skip
"""Path, and a word that tells two questions of it apart."""


def node(number: int, minutes: int, pods: int = 3) -> bytes:
    """A batch of one node: pods of two teams, each on a GPU of its own; some of them still wait."""
    facts, rows = [], []
    for pod in range(pods):
        space, name, uid = ("vision", "nlp")[pod % 2], f"train-{number}-{pod}", f"u-{number}-{pod}"
        told = {"namespace": space, "node": f"n{number}", "uid": uid, "workload": f"Job/{name}"}
        scheduled_ms = BEGIN if pod else None
        facts.append(pod_facts(name, BEGIN, created_ms=BEGIN - MINUTE, scheduled_ms=scheduled_ms, **told))
        for at in range(BEGIN, BEGIN + (minutes if pod else 0) * MINUTE, MINUTE):
            holder = pod_holder(name, space, uid)
            rows.append(interval(at, f"GPU-{uid}", holder, span_ms=MINUTE, busy_us=MINUTE * 600))
    return msgspec.json.encode(batch(rows, facts, cluster="prod", node=f"n{number}"))


@pytest.fixture
def chosen(tmp_path: Path) -> Settings:
    (tmp_path / "prices.yaml").write_text(PRICES)
    (tmp_path / "inventory.yaml").write_text(
        "schema: 1\ncluster: prod\nnamespaces:\n  - {name: nlp, team: nlp}\n  - {name: vision, team: vision}\n"
    )
    tokens = "".join(
        f"  - {{name: {name}, token_sha256: {sha256(name)}, scopes: [{scopes}]{teams}}}\n"
        for name, scopes, teams in (
            ("all", "admin", ""), ("vision", "read", ", teams: [vision]"), ("both", "read", ", teams: [nlp, vision]"),
            ("nlp", "read", ", teams: [nlp]"),
        )
    )  # fmt: skip
    (tmp_path / "tokens.yaml").write_text("tokens:\n" + tokens)
    return Settings(
        data=fresh.data(tmp_path / "data"), tokens=tmp_path / "tokens.yaml", linger_ms=0,
        prices=tmp_path / "prices.yaml", inventory=tmp_path / "inventory.yaml",
    )  # fmt: skip


@pytest.fixture
def service(chosen: Settings) -> Iterator[Service]:
    with Service(chosen, VirtualClock(NOW_MS)) as running:
        for number in range(3):
            running.ingest.submit(node(number, 7 + number)).result()
        yield running


def ask(service: Service, who: str, path: str, **query: Any) -> Any:
    client = TestClient(service.app, base_url="http://127.0.0.1", headers={"Authorization": f"Bearer {who}"})
    return client.get(path.partition("?")[0], params=query)


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
        TestClient(service.app, base_url="http://127.0.0.1", headers={"Authorization": "Bearer all"}).put(
            "/v1/policy", json=policy
        ).raise_for_status()
        commits += 1
        answer = ask(service, "all", path, **QUESTIONS[path], limit=2, page=answer["next_page"]).json()
        seen += lines_of(answer)
        assert {name: answer[name] for name in every if name not in ("lines", "jobs", "next_page")} == {
            name: every[name] for name in every if name not in ("lines", "jobs", "next_page")
        }
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
    """Time passes; who waits is told to wait as long as on the first page."""
    with Service(chosen, VirtualClock(NOW_MS)) as running:
        for number in range(3):
            running.ingest.submit(node(number, 7 + number)).result()
        every = ask(running, "all", path, **QUESTIONS[path]).json()
        first = ask(running, "all", path, **QUESTIONS[path], limit=2).json()
    with Service(chosen, VirtualClock(NOW_MS + 30 * MINUTE)) as again:
        rest = ask(again, "all", path, **QUESTIONS[path], page=first["next_page"]).json()
        assert lines_of(first) + lines_of(rest) == lines_of(every)
    with Service(chosen, VirtualClock(NOW_MS + 30 * MINUTE)) as moved:
        moved.ingest.submit(node(7, 5)).result()
        refused(ask(moved, "all", path, **QUESTIONS[path], page=first["next_page"]), "page-gone")


@pytest.mark.parametrize("path", QUESTIONS)
def test_another_callers_cursor_opens_nothing(service: Service, path: str) -> None:
    page = ask(service, "all", path, **QUESTIONS[path], limit=1).json()["next_page"]
    of_both = ask(service, "both", path, **QUESTIONS[path], limit=1).json()["next_page"]
    of_vision = ask(service, "vision", path, **QUESTIONS[path], limit=1).json()["next_page"]
    for who, foreign in (
        ("vision", page),
        ("vision", of_both),
        ("nlp", of_vision),
        ("both", of_vision),
        ("all", of_both),
    ):
        answer = ask(service, who, path, **QUESTIONS[path], limit=1, page=foreign)
        assert answer.status_code == 400
        refused(answer, "bad-page")


@pytest.mark.parametrize("path", QUESTIONS)
def test_another_callers_answer_is_not_found_by_a_cursor_that_was_made_up(service: Service, path: str) -> None:
    """Their own question with the name of an answer that others were given."""
    named = {"team": "vision"} if path.startswith("/v1/jobs") else {"where.team": "vision"}
    foreign = ask(service, "all", path, **QUESTIONS[path], limit=1).json()["next_page"]
    own = ask(service, "nlp", path, **QUESTIONS[path], limit=1).json()["next_page"]
    answer = json.loads(base64.urlsafe_b64decode(foreign + "=" * (-len(foreign) % 4)))[4]
    refused(ask(service, "nlp", path, **QUESTIONS[path], limit=1, page=changed(own, answer=answer)), "page-gone")
    # Who may see the same may turn the same pages.
    of_vision = ask(service, "vision", path, **QUESTIONS[path], limit=1).json()["next_page"]
    turned = ask(service, "all", path, **QUESTIONS[path], **named, limit=1, page=of_vision)
    assert turned.json() == ask(service, "vision", path, **QUESTIONS[path], limit=1, page=of_vision).json()


def test_the_settings_bound_what_is_kept() -> None:
    assert Limits().pages_bytes == 320 * 2**20
    with pytest.raises(ValueError, match="pages_bytes"):
        Limits(pages_bytes=-1)
