"""The controller's HTTP client of the accountant: its requests, and the error for every refusal."""

from __future__ import annotations

import gzip
import json
import ssl
from collections.abc import Callable
from contextlib import nullcontext
from decimal import Decimal
from pathlib import Path

import httpx2
import pytest
import trustme

from accountant.wire.policy_models import Decision, Policy, WindowSpec
from fairshare.controller.event_and_decision_recorder import CycleRecorder
from fairshare.usage.accountant_client import MOST_BYTES_PER_POST, MOST_DECISIONS_PER_POST, AccountantApi, UsageReader
from gputally.base.clock import VirtualClock
from gputally.base.errors import AccountantRefused, AccountantUnavailable
from gputally.kubernetes.memory_cluster import MemoryCluster
from gputally.testing.fake_accountant import usage_window
from gputally.testing.http_server import Handler, listening

Answer = Callable[[httpx2.Request], httpx2.Response]
WINDOW = usage_window({"a": 1}, 2, start_ms=0, end_ms=10, half_life_s=3600, watermark_ms=9, policy_version="v")


def _decision(number: int) -> Decision:
    return Decision(
        id=str(number), at_ms=0, kind="hold", target="*", subject="*", mode="off", reason="", policy_version="v"
    )


def _client(answer: Answer, token_file: Path | None = None) -> AccountantApi:
    return AccountantApi("http://accountant:8080/", token_file=token_file, transport=httpx2.MockTransport(answer))


def _refused(answer: Answer, act: Callable[[AccountantApi], object], token_file: Path | None = None) -> Exception:
    """Return the client's error, without the text of its causes."""
    with _client(answer, token_file) as client, pytest.raises(AccountantUnavailable) as told:
        act(client)
    return told.value


def _asks(client: AccountantApi) -> object:
    return client.window(WindowSpec(), "allocated", 0, 0.98)


def _posts(client: AccountantApi) -> object:
    return client.post_decisions([_decision(1)])


def _announces(client: AccountantApi) -> object:
    return client.put_policy(Policy.model_validate({"queues": [{"name": "a"}]}))


def test_a_window_is_asked_for_as_the_policy_says(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("secret-one\n")
    asked: list[httpx2.Request] = []

    def answer(request: httpx2.Request) -> httpx2.Response:
        asked.append(request)
        return httpx2.Response(200, content=WINDOW.model_dump_json())

    with _client(answer, token) as client:
        spec = WindowSpec(kind="sliding", size=86_400, half_life=3_600)
        assert client.window(spec, "allocated", 1_790_812_800_000, 0.98) == WINDOW
        token.write_text("secret-two\n")
        client.window(WindowSpec(size=60), "busy", 5, 1.0)
        weights = {"H100": Decimal(4), "A100-80GB": Decimal("2.5")}
        client.window(WindowSpec(half_life=60, decay="slurm", gpu_weights=weights), "allocated", 5, 1.0)
    assert asked[0].url.path == "/v1/windows"
    assert dict(asked[0].url.params) == {
        "kind": "sliding", "size": "86400s", "measure": "allocated", "by": "queue", "at": "1790812800000",
        "min_coverage": "0.98", "half_life": "3600s",
    }  # fmt: skip
    assert "half_life" not in asked[1].url.params
    assert [request.headers["Authorization"] for request in asked[:2]] == ["Bearer secret-one", "Bearer secret-two"]
    assert asked[2].url.params.get_list("gpu_weight") == ["A100-80GB:2.5", "H100:4"]
    assert (asked[2].url.params["decay"], asked[2].url.params["calc_period"]) == ("slurm", "300s")


def test_a_named_cluster_asks_of_itself_alone_and_decides_in_its_name() -> None:
    asked: list[httpx2.Request] = []
    lines: dict[str, object] = {
        "/v1/windows": WINDOW.model_dump(mode="json") | {"cluster": "prod", "policy_counting": "c"},
        "/v1/usage": {"start_ms": 0, "end_ms": 1, "by": ["node"], "lines": [], "next_page": None, "coverage": 1.0},
        "/v1/waits": [], "/v1/decisions": [],
    }  # fmt: skip

    def answer(request: httpx2.Request) -> httpx2.Response:
        asked.append(request)
        return httpx2.Response(200, json=lines[request.url.path])

    transport = httpx2.MockTransport(answer)
    with AccountantApi("http://accountant:8080", cluster="prod", transport=transport) as client:
        assert client.window(WindowSpec(), "allocated", 5, 1.0).cluster == "prod"
        assert client.median_waits_s(0, 1) == {}
        assert not client.metered_nodes(0, 1)
        assert list(client.decisions(0, 1)) == []
        client.post_decisions([_decision(1)])
    assert [request.url.params.get("cluster") for request in asked[:4]] == ["prod", "prod", None, "prod"]
    assert asked[2].url.params["where.cluster"] == "prod"
    assert json.loads(gzip.decompress(asked[4].content)) == [_decision(1).model_dump() | {"cluster": "prod"}]
    assert "cluster" not in _decision(1).model_dump()


def test_policy_and_decisions_are_sent_whole() -> None:
    bodies: list[tuple[str, str, object]] = []
    policy = Policy.model_validate({"queues": [{"name": "a"}]})

    def answer(request: httpx2.Request) -> httpx2.Response:
        zipped = request.headers.get("Content-Encoding") == "gzip"
        body = json.loads(gzip.decompress(request.content) if zipped else request.content)
        bodies.append((request.method, request.url.path, body))
        if request.method == "PUT":
            stored = {"version": policy.version(), "effective_ms": 1, "policy": body}
            return httpx2.Response(200, json=stored)
        return httpx2.Response(200, json={"recorded": len(body), "known": 0})

    decisions = [_decision(number) for number in range(MOST_DECISIONS_PER_POST + 1)]
    with _client(answer) as client:
        assert client.put_policy(policy).policy == policy
        client.post_decisions(decisions)
        client.post_decisions([])
    assert bodies[0][:2] == ("PUT", "/v1/policy")
    assert [len(body) for _, path, body in bodies if path == "/v1/decisions"] == [MOST_DECISIONS_PER_POST, 1]  # type: ignore[arg-type]


def test_large_decisions_are_sent_a_few_at_a_time() -> None:
    """In a cluster with twenty thousand pods the inputs of one preemption are ten megabytes."""
    sent: list[int] = []

    def answer(request: httpx2.Request) -> httpx2.Response:
        assert len(request.content) < 8 * 1024 * 1024
        sent.append(len(json.loads(gzip.decompress(request.content))))
        return httpx2.Response(200, json={"recorded": 1, "known": 0})

    large = [_decision(n).model_copy(update={"inputs": {"pods": "x" * (MOST_BYTES_PER_POST // 3)}}) for n in range(5)]
    with _client(answer) as client:
        client.post_decisions(large)
    assert sent == [2, 2, 1]


@pytest.mark.parametrize(("status", "final"), [(413, True), (422, True), (429, False), (503, False), (401, False)])
def test_what_is_never_taken_is_told_from_what_is_not_taken_now(status: int, final: bool) -> None:
    assert isinstance(_refused(lambda _: httpx2.Response(status), _posts), AccountantRefused) is final


@pytest.mark.parametrize("status", [409, 429])
def test_decisions_beyond_a_quota_are_kept_named_and_sent_again_with_none_lost(status: int) -> None:
    left, taken, problem = [1], dict[str, None](), {"Content-Type": "application/problem+json"}

    def answer(request: httpx2.Request) -> httpx2.Response:
        if not left[0]:
            return httpx2.Response(status, json={"title": "t", "detail": "quotas.decisions"}, headers=problem)
        left[0] -= 1
        taken.update(dict.fromkeys(each["id"] for each in json.loads(gzip.decompress(request.content))))
        return httpx2.Response(200, json={"recorded": 1, "known": 0})

    decisions = [_decision(number) for number in range(MOST_DECISIONS_PER_POST + 500)]
    with _client(answer) as client:
        recorder = CycleRecorder(MemoryCluster([]), client, None)
        assert not recorder.deliver(decisions, accountant_away=False)
        (condition,) = recorder.conditions()
        assert (condition.type, condition.reason, "quotas.decisions" in condition.message) == (
            "Recorded", "DecisionsWait", True,
        )  # fmt: skip
        assert not recorder.deliver([_decision(9_999)], accountant_away=False)
        left[0] = 2
        assert recorder.deliver([], accountant_away=False)
        assert recorder.conditions() == ()
    assert list(taken) == [each.id for each in (*decisions, _decision(9_999))]


def test_a_problem_is_told_in_its_own_words() -> None:
    problem = {"type": "x", "title": "Ledger unavailable", "status": 503, "detail": "the disk is full"}
    told = _refused(lambda _: httpx2.Response(503, json=problem), _asks)
    assert str(told) == "http://accountant:8080/v1/windows: 503 Ledger unavailable: the disk is full"


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (httpx2.Response(502, content=b"<html>"), "502 Bad Gateway"),
        (httpx2.Response(302, headers={"Location": "http://elsewhere/"}), "302 Found"),
        (httpx2.Response(200, content=b"{}"), "not the answer of an accountant of this release"),
        (httpx2.Response(200, content=b"hello"), "not the answer of an accountant of this release"),
    ],
    ids=["gateway", "redirect", "other-json", "no-json"],
)
@pytest.mark.parametrize("act", [_asks, _announces])
def test_other_answers(answer: httpx2.Response, says: str, act: Callable[[AccountantApi], object]) -> None:
    assert says in str(_refused(lambda _: answer, act))


@pytest.mark.parametrize("status", [429, 503])
@pytest.mark.parametrize(("act", "other"), [(_asks, _posts), (_posts, _asks), (_announces, _asks)])
def test_a_kind_of_request_waits_as_the_accountant_asks_while_others_are_sent(
    status: int, act: Callable[[AccountantApi], object], other: Callable[[AccountantApi], object]
) -> None:
    sent, clock = list[str](), VirtualClock(0)

    def answer(request: httpx2.Request) -> httpx2.Response:
        sent.append(request.url.path)
        return httpx2.Response(status, headers={"Retry-After": "30"})

    with AccountantApi("http://accountant:8080", transport=httpx2.MockTransport(answer), clock=clock) as client:
        for after_ms, requests in ((0, 1), (29_000, 1), (1_000, 2), (29_999, 2)):
            clock.advance(after_ms)
            with pytest.raises(AccountantUnavailable) as told:
                act(client)
            assert (len(sent), told.value.reason) == (requests, "AccountantUnavailable")
        with pytest.raises(AccountantUnavailable):
            other(client)
        assert len(set(sent)) == 2


@pytest.mark.parametrize("text", ["", "-5", "soon", "1e9", "Wed, 21 Oct 2026 07:28:00 GMT", "٣", "9" * 400])
def test_no_pause_of_an_odd_or_endless_retry_after_lasts_longer_than_ten_minutes(text: str) -> None:
    sent, clock = list[str](), VirtualClock(0)

    def answer(request: httpx2.Request) -> httpx2.Response:
        sent.append(request.url.path)
        return httpx2.Response(503, headers={"Retry-After": text.encode()})  # type: ignore[dict-item]

    with AccountantApi("http://accountant:8080", transport=httpx2.MockTransport(answer), clock=clock) as client:
        for _ in range(2):
            with pytest.raises(AccountantUnavailable):
                _asks(client)
            clock.advance(600_000)
    assert len(sent) == 2


@pytest.mark.parametrize(
    ("act", "status", "reason"),
    [
        (_announces, 409, "PolicyNotTaken"),
        (_announces, 422, "PolicyNotTaken"),
        (_announces, 403, "AccountantRefuses"),
        (_announces, 404, "AccountantRefuses"),
        (_announces, 429, "AccountantUnavailable"),
        (_announces, 503, "AccountantUnavailable"),
        (_asks, 401, "AccountantRefuses"),
        (_asks, 422, "AccountantRefuses"),
        (_asks, 302, "AccountantUnavailable"),
        (_asks, 502, "AccountantUnavailable"),
    ],
)
def test_an_accountant_that_refuses_is_told_from_one_that_does_not_answer(
    act: Callable[[AccountantApi], object], status: int, reason: str
) -> None:
    problem = {"type": "x", "title": "T", "status": status, "detail": "why"}

    def answer(request: httpx2.Request) -> httpx2.Response:
        if act is _announces and request.method == "GET":
            return httpx2.Response(404)
        return httpx2.Response(status, json=problem)

    policy = Policy.model_validate({"queues": [{"name": "a"}]})
    with _client(answer) as client:
        reading = UsageReader(client, VirtualClock(1_000)).read(policy, policy.version(), announce=act is _announces)
    assert reading.hold is not None
    assert (reading.hold.reason, "T: why" in reading.hold.message) == (reason, True)


def test_no_answer() -> None:
    def refuse(request: httpx2.Request) -> httpx2.Response:
        raise httpx2.ConnectError("Connection refused", request=request)

    assert str(_refused(refuse, _posts)) == "http://accountant:8080: Connection refused"


@pytest.mark.parametrize("url", ["ftp://user:word@accountant", "http://user:w#rd@accountant"])
def test_the_refusal_of_an_address_hides_its_password(url: str) -> None:
    with pytest.raises(AccountantUnavailable, match=r"not an address: '\w+://user:\*\*\*@accountant'"):
        AccountantApi(url)


@pytest.mark.parametrize("url", ["accountant:8080", "ftp://accountant", "http://", "http://[::"])
def test_no_address(url: str) -> None:
    with pytest.raises(AccountantUnavailable, match="not an address"):
        AccountantApi(url)


def test_a_token_that_cannot_be_read_says_so_and_never_itself(tmp_path: Path) -> None:
    odd = tmp_path / "odd"
    odd.write_bytes("geheim-ü".encode())
    assert "No such file" in str(_refused(lambda _: httpx2.Response(200), _asks, tmp_path / "none"))
    assert str(_refused(lambda _: httpx2.Response(200), _asks, odd)) == f"token file {odd}: not ASCII text"


def test_decisions_are_read_page_by_page_none_twice_and_none_lost() -> None:
    """Newest first; a page may end within a millisecond, and a millisecond may have more than a page."""
    kept = [_decision(i).model_copy(update={"at_ms": i // 1_300, "id": f"d{i:05}"}) for i in range(4_500)]
    asked: list[tuple[int, int]] = []

    def answer(request: httpx2.Request) -> httpx2.Response:
        start, end = int(request.url.params["start"]), int(request.url.params["end"])
        asked.append((start, end))
        before = request.url.params.get("before", "e")
        found = [d for d in reversed(kept) if start <= d.at_ms < end and (d.at_ms < end - 1 or d.key < before)]
        found = found[: int(request.url.params["limit"])]
        return httpx2.Response(200, json=[json.loads(d.model_dump_json()) for d in found])

    with _client(answer) as client:
        assert list(client.decisions(0, 10)) == kept[::-1]
    assert all(start == 0 for start, _ in asked)


def test_usage_is_read_to_its_last_page() -> None:
    def answer(request: httpx2.Request) -> httpx2.Response:
        page = request.url.params.get("page")
        line = {"key": {"queue": page or "first"}, "accounts_gpu_us": {"busy": 1}}
        following = "second" if page is None else None
        body = {"start_ms": 0, "end_ms": 9, "by": ["queue"], "lines": [line], "next_page": following, "coverage": 1.0}
        return httpx2.Response(200, json=body)

    with _client(answer) as client:
        assert [line.key["queue"] for line in client.usage(0, 9, ("queue",))] == ["first", "second"]


def test_waits_and_budgets_of_another_release_are_unavailable() -> None:
    waits = [{"key": "a", "queued": {"median": 90.5}}]
    with _client(lambda _: httpx2.Response(200, json=waits)) as client:
        assert client.median_waits_s(0, 1) == {"a": 90.5}
    told = _refused(lambda _: httpx2.Response(200, json=waits), lambda client: client.budgets())
    assert "not the answer of an accountant of this release" in str(told)
    told = _refused(lambda _: httpx2.Response(200, json=[{"key": "a"}]), lambda client: client.median_waits_s(0, 1))
    assert "/v1/waits" in str(told)


def test_only_an_accountant_the_ca_file_vouches_for_is_believed(tmp_path: Path) -> None:
    authority = trustme.CA()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    trusted, other, empty = tmp_path / "ca.pem", tmp_path / "other.pem", tmp_path / "empty.pem"
    authority.cert_pem.write_to_path(str(trusted))
    trustme.CA().cert_pem.write_to_path(str(other))
    empty.write_text("")

    class Budgets(Handler):
        def do_GET(self) -> None:
            self.say(200, b"[]")

    with listening(Budgets, context) as url:
        with AccountantApi(url, ca_file=trusted) as client:
            assert client.budgets() == []
        for ca_file in (other, None):
            with (
                AccountantApi(url, ca_file=ca_file) as client,
                pytest.raises(AccountantUnavailable, match="CERTIFICATE_VERIFY_FAILED"),
            ):
                client.budgets()
        with AccountantApi(url, ca_file=other) as client:
            for renewal, found in ((b"half of a renewal", "CERTIFICATE_VERIFY_FAILED"), (trusted.read_bytes(), "")):
                other.write_bytes(renewal)
                with pytest.raises(AccountantUnavailable, match=found) if found else nullcontext():
                    assert client.budgets() == []
    with pytest.raises(AccountantUnavailable, match="it contains no certificate"):
        AccountantApi(url, ca_file=empty)
    with pytest.raises(AccountantUnavailable, match=r"none\.pem: No such file"):
        AccountantApi(url, ca_file=tmp_path / "none.pem")
