"""A job's attempts on a real ledger, with figures computed by hand: over HTTP and on the page of the job."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from accountant.api.bookkeeping_models import PodReport
from accountant.composition import Service
from accountant.ledger.protocols import Down, Facts, NamespaceFacts, NodeFacts
from accountant.storage import read_snapshot
from agent.wire import PodFacts, Slice, UsageInterval
from gputally.base.clock import VirtualClock
from gputally.base.pod_stop import LONGEST_MESSAGE, PodStop
from tests.fakes.memory_ledger import MINUTE_MS, NOW_MS
from tests.http.conftest import INVENTORY, bearer, client_of, decision, settings_in, token_entry
from tests.http.page_parser import read, rows_after
from tests.http.quarter_hours import held
from tests.price_books import price_book_text
from tests.usage_records import batch, deliver, interval, pod_facts, pod_holder

BEGIN = NOW_MS - 120 * MINUTE_MS
JOB = "prod~vision~Job~train"
BROWSER = {"Accept": "text/html"}


def minutes(first: int, last: int, gpu: str, uid: str, space: str) -> list[UsageInterval]:
    """Records of every minute in which the pod held the GPU."""
    holder = pod_holder(f"pod-{uid}", space, uid)
    return [
        interval(BEGIN + at * MINUTE_MS, gpu, holder, span_ms=MINUTE_MS, busy_us=MINUTE_MS * 750)
        for at in range(first, last)
    ]


def fact(uid: str, space: str, workload: str, created: int, scheduled: int, **more: Any) -> PodFacts:
    at = BEGIN + scheduled * MINUTE_MS
    return pod_facts(
        f"pod-{uid}", at, namespace=space, node="n1", uid=uid, workload=workload,
        created_ms=BEGIN + created * MINUTE_MS, scheduled_ms=at, started_ms=at, **more,
    )  # fmt: skip


@pytest.fixture
def service(tmp_path: Path, clock: VirtualClock) -> Iterator[Service]:
    """Job vision/train has two pods, each with a GPU. Its attempts: minutes 0 to 20, then nlp/eval takes one of the
    GPUs at once and vision/other the other one after two minutes; 40 to 60, ended by the node; and from 100 on."""
    leads = "".join(token_entry(team, "read, progress", f", teams: [{team}]") for team in ("nlp", "vision"))
    chosen = settings_in(
        tmp_path, prices=price_book_text(H100=6, currency="USD"), inventory=INVENTORY,
        tokens="tokens:\n" + token_entry("all", "admin") + leads,
    )  # fmt: skip
    facts = [
        fact("a1", "vision", "Job/train", -10, 0, ended_ms=BEGIN + 20 * MINUTE_MS),
        fact("a2", "vision", "Job/train", -8, 0, ended_ms=BEGIN + 20 * MINUTE_MS),
        fact("e", "nlp", "Job/eval", 5, 20),
        fact("o", "vision", "Job/other", 5, 22),
        fact("b1", "vision", "Job/train", 20, 40, ended_ms=BEGIN + 60 * MINUTE_MS),
        fact("b2", "vision", "Job/train", 20, 41, ended_ms=BEGIN + 60 * MINUTE_MS),
        fact("c1", "vision", "Job/train", 70, 100),
    ]
    rows = [
        *minutes(0, 20, "GPU-1", "a1", "vision"), *minutes(20, 40, "GPU-1", "e", "nlp"),
        *minutes(40, 60, "GPU-1", "b1", "vision"), *minutes(100, 120, "GPU-1", "c1", "vision"),
        *minutes(0, 20, "GPU-2", "a2", "vision"), *minutes(22, 40, "GPU-2", "o", "vision"),
        *minutes(41, 60, "GPU-2", "b2", "vision"),
    ]  # fmt: skip
    with Service(chosen, clock) as running:
        deliver(running.ledger, NOW_MS, batch(rows, facts, cluster="prod", node="n1"))
        down = Down(BEGIN + 60 * MINUTE_MS, BEGIN + 65 * MINUTE_MS, "kernel panic")
        running.ledger.observe(Facts(nodes=(NodeFacts("prod", "n1", down=(down,)),)), NOW_MS)
        yield running


def asked(service: Service, who: str) -> Any:
    answer = client_of(service).get(f"/v1/jobs/{JOB}", headers=bearer(who))
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_each_attempt_says_when_it_ran_what_it_held_and_who_held_its_gpus_next(service: Service) -> None:
    first, second, third = asked(service, "all")["attempts"]
    assert [one["number"] for one in (first, second, third)] == [1, 2, 3]
    assert (first["start_ms"], first["end_ms"]) == (BEGIN, BEGIN + 20 * MINUTE_MS)
    assert first["waited_ms"] == 10 * MINUTE_MS
    assert (first["pods"], first["gpus"], first["nodes"]) == (2, 2, ["n1"])
    assert first["gpu_us"] == 40 * MINUTE_MS * 1000
    assert (first["end"], first["reason"], first["lost_gpu_us"]) == ("stopped", "", None)
    assert first["next_holders"] == [
        {"job": "prod~nlp~Job~eval", "team": "nlp", "queue": first["next_holders"][0]["queue"], "gpus": 1,
         "held_gpus": "1.000000", "after_ms": 0},
        {"job": "prod~vision~Job~other", "team": "vision", "queue": first["next_holders"][1]["queue"], "gpus": 1,
         "held_gpus": "1.000000", "after_ms": 2 * MINUTE_MS},
    ]  # fmt: skip
    assert second["waited_ms"] == 20 * MINUTE_MS
    assert (second["end"], second["next_holders"]) == ("node-down", [])
    assert "kernel panic" in second["reason"]
    assert (third["end"], third["end_ms"], third["waited_ms"]) == ("running", None, 30 * MINUTE_MS)


def test_the_attempts_have_all_the_time_that_the_job_held(service: Service) -> None:
    found = asked(service, "all")
    held = found["job"]["accounts_gpu_us"]
    assert sum(one["gpu_us"] for one in found["attempts"]) == held["busy"] + held["allocated_idle"]
    assert found["earlier_attempts"] == 0


def test_a_team_does_not_see_which_job_of_another_team_held_its_gpus_next(service: Service) -> None:
    first, *_ = asked(service, "vision")["attempts"]
    assert [(one["job"], one["team"], one["gpus"]) for one in first["next_holders"]] == [
        ("prod~vision~Job~other", "vision", 1), (None, None, 1),
    ]  # fmt: skip
    page = client_of(service).get(f"/job/{JOB}", headers=bearer("vision") | {"Accept": "text/html"})
    assert "another team" in page.text
    assert "eval" not in page.text


def test_what_was_lost_is_what_was_held_since_the_last_epoch(service: Service) -> None:
    body = [{"epoch": 1, "at": str(BEGIN + 15 * MINUTE_MS)}]
    answer = client_of(service).post(f"/v1/jobs/{JOB}/progress", json=body, headers=bearer("vision"))
    assert answer.status_code == 200, answer.text
    first, second, third = asked(service, "all")["attempts"]
    assert first["lost_gpu_us"] == 2 * 5 * MINUTE_MS * 1000
    assert second["lost_gpu_us"] == (20 + 19) * MINUTE_MS * 1000, "no epoch ended in it"
    assert third["lost_gpu_us"] is None, "it runs"
    assert [one["checkpoint_ms"] for one in (first, second, third)] == [BEGIN + 15 * MINUTE_MS] * 3
    whole = asked(service, "all")
    assert whole["lost_gpu_us"] == whole["known_lost_gpu_us"] == first["lost_gpu_us"] + second["lost_gpu_us"]
    text = client_of(service).get(f"/job/{JOB}", headers=bearer("all") | BROWSER).text
    assert any("0.8 lost by stops" in one for one in read(text).texts)
    assert text.count(">checkpoint ") == 1 + 3, "of the last stop, and of each attempt"


def test_what_all_stops_lost_is_unknown_if_it_is_unknown_of_one(service: Service) -> None:
    unknown = asked(service, "all")
    assert (unknown["lost_gpu_us"], unknown["known_lost_gpu_us"]) == (None, 0)
    page = client_of(service).get(f"/job/{JOB}", headers=bearer("all") | BROWSER).text
    assert "lost by stops is unknown" in page
    made = decision(
        id="cycle/0/0", at_ms=BEGIN + 19 * MINUTE_MS, kind="preemption", subject="Job/vision/train", mode="enforce",
        reason="team nlp is owed 1 GPU", inputs={"pods": ["vision/pod-a1"], "result": "stopped", "lost_gpu_hours": 0.5},
    )  # fmt: skip
    assert client_of(service).post("/v1/decisions", json=[made], headers=bearer("all")).status_code == 200
    half = asked(service, "all")
    assert (half["lost_gpu_us"], half["known_lost_gpu_us"]) == (None, 1_800_000_000)
    page = client_of(service).get(f"/job/{JOB}", headers=bearer("all") | BROWSER).text
    assert "at least 0.5 lost" in page


@pytest.mark.parametrize(
    ("mode", "pods", "end"),
    [
        ("enforce", ["vision/pod-a1"], "preempted"),
        ("dry-run", ["vision/pod-a1"], "stopped"),
        ("enforce", ["vision/pod-b1"], "stopped"),
    ],
)
def test_a_decision_of_the_controller_says_why(service: Service, mode: str, pods: list[str], end: str) -> None:
    made = decision(
        id="cycle/0/0", at_ms=BEGIN + 19 * MINUTE_MS, kind="preemption", subject="Job/vision/train", mode=mode,
        reason="team nlp is owed 1 GPU", inputs={"pods": pods, "result": "stopped", "lost_gpu_hours": 0.5},
    )  # fmt: skip
    assert client_of(service).post("/v1/decisions", json=[made], headers=bearer("all")).status_code == 200
    first, *_ = asked(service, "all")["attempts"]
    assert first["end"] == end
    assert first["checkpoint_ms"] is None, "of what the controller counts from, and of the job, none is known"
    known = end == "preempted"
    assert first["reason"] == ("team nlp is owed 1 GPU" if known else "")
    assert first["decision"] == ("cycle/0/0" if known else None)
    assert first["lost_gpu_us"] == (1_800_000_000 if known else None)


def with_stops(ledger_of: Any, *stops: PodStop | None) -> Service:
    """Job vision/train has a pod for each of these, until minute 20; then it runs again."""
    uids = [f"a{number}" for number in range(len(stops))]
    facts = [
        fact(uid, "vision", "Job/train", -10, 0, stop=stop, **ended(20)) for uid, stop in zip(uids, stops, strict=True)
    ]
    rows = [row for uid in uids for row in minutes(0, 20, f"GPU-{uid}", uid, "vision")]
    service: Service = ledger_of(
        [*facts, fact("z", "vision", "Job/train", 20, 40)], [*rows, *minutes(40, 120, "GPU-z", "z", "vision")]
    )
    return service


def at_minute(minute: int, how: str, *texts: str) -> PodStop:
    return PodStop(how, *texts, at_ms=BEGIN + minute * MINUTE_MS)


TAKEN = at_minute(19, "preempted", "kai-scheduler", "PreemptionByScheduler", "Pod vision/a was preempted by nlp/eval")
OBEYED = at_minute(19, "deleted")


@pytest.mark.parametrize(
    ("stops", "end", "by", "words"),
    [
        ((TAKEN, OBEYED), "preempted", "kai-scheduler", "preempted by nlp/eval"),
        ((OBEYED, TAKEN), "preempted", "kai-scheduler", "preempted by nlp/eval"),
        ((at_minute(19, "preempted", "lanes", "Taken"),), "preempted", "lanes", "Taken"),
        ((at_minute(19, "evicted", "kubelet", "Evicted", "low on memory"),), "stopped", "kubelet", "low on memory"),
        ((at_minute(19, "evicted", "", "Unheard-of"),), "stopped", "", "Unheard-of"),
        ((at_minute(19, "of a newer release", "x", "Moved"),), "stopped", "x", "Moved"),
        ((OBEYED, at_minute(20, "failed", "", "OOMKilled", "exit code 137")), "failed", "", "OOMKilled: exit code 137"),
        ((OBEYED,), "stopped", "", "deleted"),
        ((None,), "stopped", "", ""),
        ((at_minute(-90, "preempted", "kai-scheduler", "CalledOff"),), "stopped", "", ""),
        ((at_minute(40, "preempted", "kai-scheduler", "MuchLater"),), "stopped", "", ""),
        ((PodStop("preempted", "kai-scheduler", "AtSomeTime"),), "preempted", "kai-scheduler", "AtSomeTime"),
    ],
)
def test_the_status_of_its_pods_says_by_whom_an_attempt_was_stopped_and_why(
    ledger_of: Any, stops: tuple[PodStop | None, ...], end: str, by: str, words: str
) -> None:
    service = with_stops(ledger_of, *stops)
    first, second = asked(service, "all")["attempts"]
    assert (first["end"], first["by"]) == (end, by)
    assert words in first["reason"]
    assert bool(words) == bool(first["reason"])
    assert (second["end"], second["by"], second["reason"]) == ("running", "", "")
    text = " ".join(read(client_of(service).get(f"/job/{JOB}", headers=bearer("all") | BROWSER).text).texts)
    assert words in text
    assert by in text
    assert ("not recorded" in text) is not bool(words)


def test_a_node_that_failed_before_it_sent_its_last_records_is_the_reason(ledger_of: Any) -> None:
    """The last record is of minute 20. The node failed at minute 35, and the pod was deleted then."""
    facts = [fact("a", "vision", "Job/train", -10, 0, stop=at_minute(35, "deleted"), **ended(35))]
    service = ledger_of([*facts, fact("b", "vision", "Job/train", 36, 50)], [
        *minutes(0, 20, "GPU-1", "a", "vision"), *minutes(50, 120, "GPU-1", "b", "vision"),
    ])  # fmt: skip
    down = Down(BEGIN + 35 * MINUTE_MS, BEGIN + 49 * MINUTE_MS, "power supply failed")
    service.ledger.observe(Facts(nodes=(NodeFacts("prod", "n1", down=(down,)),)), NOW_MS)
    first, _ = asked(service, "all")["attempts"]
    assert (first["end"], first["end_ms"]) == ("node-down", BEGIN + 20 * MINUTE_MS)
    assert "power supply failed" in first["reason"]


def test_a_node_that_was_down_for_a_while_and_had_the_pod_again_is_not_the_reason(ledger_of: Any) -> None:
    """The agent was gone soon. The node was down for three minutes a little later, and its pod ended hours after."""
    facts = [fact("a", "vision", "Job/train", -300, -280, **ended(95))]
    service = ledger_of([*facts, fact("b", "vision", "Job/train", 96, 100)], [
        *minutes(-280, -240, "GPU-1", "a", "vision"), *minutes(100, 120, "GPU-1", "b", "vision"),
    ])  # fmt: skip
    down = Down(BEGIN - 230 * MINUTE_MS, BEGIN - 227 * MINUTE_MS, "rebooted")
    service.ledger.observe(Facts(nodes=(NodeFacts("prod", "n1", down=(down,)),)), NOW_MS)
    first, _ = asked(service, "all")["attempts"]
    assert (first["end"], first["end_ms"], first["reason"]) == ("stopped", BEGIN - 240 * MINUTE_MS, "")


def test_what_the_controller_decided_says_more_than_the_status_of_the_pods(ledger_of: Any) -> None:
    service = with_stops(ledger_of, at_minute(19, "evicted", "eviction API", "EvictionByEvictionAPI"))
    stopped(service, 19, pods=["vision/pod-a0"], result="stopped")
    first, _ = asked(service, "all")["attempts"]
    assert (first["end"], first["by"], first["reason"]) == ("preempted", "gputally", "team nlp is owed 1 GPU")


def test_a_reason_of_any_length_and_content_is_stored_short_and_shown_as_text(ledger_of: Any) -> None:
    hostile = "<script>alert(1)</script>\u202e\n\x1b[31m" + "x" * 3_000
    service = ledger_of([], [])
    fact_ = fact("a", "vision", "Job/train", -10, 0, stop=at_minute(19, "preempted", *[hostile] * 3), **ended(20))
    sent = batch(minutes(0, 20, "GPU-1", "a", "vision"), [fact_], cluster="prod", node="n1", epoch="f")
    client = client_of(service)
    answer = client.post("/v1/usage", content=msgspec.json.encode(sent), headers=bearer("all"))
    assert answer.status_code == 200, answer.text
    (one,) = asked(service, "all")["attempts"]
    assert one["end"] == "preempted"
    assert (len(one["by"]), len(one["reason"])) == (253, LONGEST_MESSAGE)
    assert one["reason"].isprintable()
    page = read(client.get(f"/job/{JOB}", headers=bearer("all") | BROWSER).text)
    assert "alert(1)" in " ".join(page.texts)
    assert not any(tag == "script" and "alert" in (value or "") for tag, _, value in page.attributes)
    assert "<script>alert" not in client.get(f"/job/{JOB}", headers=bearer("all") | BROWSER).text


def test_nor_is_one_kept_long_that_a_batch_system_reports(ledger_of: Any) -> None:
    service = with_stops(ledger_of, None)
    told = fact("a0", "vision", "Job/train", -10, 0, stop=PodStop("evicted", "x", "Long", "word " * 800), **ended(20))
    report = PodReport("prod", "jobs", (replace(told, observed_ms=NOW_MS - 1),))
    answer = client_of(service).post("/v1/pods", content=msgspec.json.encode(report), headers=bearer("all"))
    assert answer.status_code == 200, answer.text
    first, _ = asked(service, "all")["attempts"]
    assert (first["end"], first["by"], len(first["reason"])) == ("stopped", "x", LONGEST_MESSAGE)


@pytest.mark.parametrize("field", ["how", "by", "reason", "message"])
def test_a_text_that_no_agent_sends_is_refused_with_its_place(service: Service, field: str) -> None:
    plain = msgspec.to_builtins(batch([], [fact("a", "vision", "", 0, 0, stop=OBEYED)], cluster="prod", node="n1"))
    plain["facts"][0]["stop"][field] = "x" * 5_000
    answer = client_of(service).post("/v1/usage", content=msgspec.json.encode(plain), headers=bearer("all"))
    assert answer.status_code == 422
    assert field in answer.json()["detail"]


def test_no_other_node_says_why_a_pod_was_stopped(ledger_of: Any) -> None:
    service = with_stops(ledger_of, None)
    forged = replace(
        fact("a0", "vision", "Job/train", -10, 0, stop=TAKEN, **ended(20)), node="n2", observed_ms=NOW_MS - 1
    )
    deliver(service.ledger, NOW_MS, batch([], [forged], cluster="prod", node="n2"))
    first, _ = asked(service, "all")["attempts"]
    assert (first["end"], first["by"], first["reason"]) == ("stopped", "", "")


def test_what_the_api_server_and_the_node_know_of_a_stop_is_joined(ledger_of: Any) -> None:
    service = with_stops(ledger_of, TAKEN)
    seen = fact("a0", "vision", "Job/train", -10, 0, **ended(20))
    service.ledger.observe(Facts(pods=(("prod", replace(seen, observed_ms=NOW_MS - 1)),)), NOW_MS)
    first, _ = asked(service, "all")["attempts"]
    assert (first["end"], first["by"]) == ("preempted", "kai-scheduler")


def test_the_page_has_the_attempts_with_links(service: Service) -> None:
    page = read(client_of(service).get(f"/job/{JOB}", headers=bearer("all") | {"Accept": "text/html"}).text)
    text = " ".join(page.texts)
    assert "not recorded" in text
    assert "kernel panic" in text
    assert "/job/prod~nlp~Job~eval" in {value for tag, name, value in page.attributes if (tag, name) == ("a", "href")}


ONE_JOB_OF_TWO_TEAMS = INVENTORY.replace(
    "{name: vision, team: vision}", "{name: vision, team: vision, label: team, teams: [vision, nlp]}"
)


@pytest.fixture
def ledger_of(tmp_path: Path, clock: VirtualClock) -> Iterator[Callable[..., Service]]:
    """Makes a service with these records."""
    leads = "".join(token_entry(team, "read, progress", f", teams: [{team}]") for team in ("nlp", "vision"))
    with ExitStack() as running:

        def make(facts: list[PodFacts], rows: list[UsageInterval], inventory: str = INVENTORY) -> Service:
            chosen = settings_in(
                tmp_path, prices=price_book_text(H100=6, currency="USD"), inventory=inventory,
                tokens="tokens:\n" + token_entry("all", "admin") + leads,
            )  # fmt: skip
            service = running.enter_context(Service(chosen, clock))
            deliver(service.ledger, NOW_MS, batch(rows, facts, cluster="prod", node="n1"))
            return service

        yield make


def stopped(service: Service, minute: int, **inputs: Any) -> None:
    """The controller records a decision about vision/train."""
    made = decision(
        id="cycle/0/0", at_ms=BEGIN + minute * MINUTE_MS, kind="preemption", subject="Job/vision/train",
        mode="enforce", reason="team nlp is owed 1 GPU", inputs=inputs,
    )  # fmt: skip
    assert client_of(service).post("/v1/decisions", json=[made], headers=bearer("all")).status_code == 200


def ended(minute: int) -> dict[str, int]:
    return {"ended_ms": BEGIN + minute * MINUTE_MS}


def test_a_team_sees_of_a_job_of_two_teams_only_its_own_pods(ledger_of: Any) -> None:
    facts = [
        fact("a1", "vision", "Job/train", -10, 0, labels={"team": "vision"}, **ended(60)),
        fact("a2", "vision", "Job/train", -10, 0, labels={"team": "nlp"}, **ended(60)),
        fact("o", "vision", "Job/other", 5, 60, labels={"team": "vision"}),
        fact("p", "vision", "Job/other", 5, 60, labels={"team": "nlp"}),
    ]
    rows = [
        *minutes(0, 60, "GPU-1", "a1", "vision"), *minutes(0, 60, "GPU-2", "a2", "vision"),
        *minutes(60, 120, "GPU-1", "o", "vision"), *minutes(60, 120, "GPU-2", "p", "vision"),
    ]  # fmt: skip
    service = ledger_of(facts, rows, ONE_JOB_OF_TWO_TEAMS)
    stopped(service, 59, pods=["vision/pod-a1", "vision/pod-a2"], result="stopped", lost_gpu_hours=2)
    for who, uid in (("vision", "a1"), ("nlp", "a2")):
        found = asked(service, who)
        held = found["job"]["accounts_gpu_us"]
        (one,) = found["attempts"]
        assert one["gpu_us"] == held["busy"] + held["allocated_idle"] == 60 * MINUTE_MS * 1000, uid
        assert (one["pods"], one["gpus"]) == (1, 1)
        assert one["lost_gpu_us"] is None, "the recorded loss is that of both teams"
        assert [(taker["job"], taker["team"]) for taker in one["next_holders"]] == [("prod~vision~Job~other", who)]
    (both,) = asked(service, "all")["attempts"]
    assert (both["pods"], both["gpus"], both["lost_gpu_us"]) == (2, 2, 7_200_000_000)
    assert sorted((taker["team"], taker["gpus"]) for taker in both["next_holders"]) == [("nlp", 1), ("vision", 1)]


def test_each_team_sees_the_time_that_was_booked_to_it_of_a_namespace_that_moved(ledger_of: Any) -> None:
    """The namespace is of vision for the first hour, and then of nlp."""
    inventory = INVENTORY.replace("  - {name: vision, team: vision}\n", "")
    service = ledger_of(
        [fact("a1", "vision", "Job/train", -10, 0)], minutes(0, 120, "GPU-1", "a1", "vision"), inventory
    )
    for minute, team in ((0, "vision"), (60, "nlp")):
        space = NamespaceFacts("prod", "vision", team, since_ms=BEGIN + minute * MINUTE_MS)
        service.ledger.observe(Facts(namespaces=(space,)), NOW_MS)
    for who, start, end in (("vision", 0, 60), ("nlp", 60, None), ("all", 0, None)):
        found = asked(service, who)
        held = found["job"]["accounts_gpu_us"]
        (one,) = found["attempts"]
        assert one["gpu_us"] == held["busy"] + held["allocated_idle"], who
        assert one["start_ms"] == BEGIN + start * MINUTE_MS
        assert one["end_ms"] == (None if end is None else BEGIN + end * MINUTE_MS), who
    page = client_of(service).get("/node/prod/n1", headers=bearer("all") | {"Accept": "text/html"})
    titles = [text for text in read(page.text).texts if "vision/pod-a1" in text]
    assert [title.partition(":")[0] for title in titles] == ["vision", "nlp"]


@pytest.mark.parametrize("result", ["blocked", "refused", "unavailable", "gone", "another", None])
def test_a_decision_that_stopped_nothing_ends_no_attempt(service: Service, result: str | None) -> None:
    stopped(service, 19, pods=["vision/pod-a1"], lost_gpu_hours=0.5, **({"result": result} if result else {}))
    first, *_ = asked(service, "all")["attempts"]
    assert (first["end"], first["decision"], first["lost_gpu_us"]) == ("stopped", None, None)


def test_a_decision_that_only_shrank_an_attempt_does_not_end_it(ledger_of: Any) -> None:
    """a1 is preempted at minute 20, and a2 ends by itself at minute 70."""
    facts = [
        fact("a1", "vision", "Job/train", -10, 0, **ended(20)), fact("a2", "vision", "Job/train", -10, 0, **ended(70)),
    ]  # fmt: skip
    rows = [*minutes(0, 20, "GPU-1", "a1", "vision"), *minutes(0, 70, "GPU-2", "a2", "vision")]
    service = ledger_of(facts, rows)
    stopped(service, 19, pods=["vision/pod-a1"], result="stopped")
    (one,) = asked(service, "all")["attempts"]
    assert (one["end"], one["decision"]) == ("ended", None)


def mig(first: int, last: int, uid: str, space: str, part: int) -> list[UsageInterval]:
    """Records of a pod that held a part of GPU-1."""
    of = Slice(
        profile="1g.10gb", gi=part, ci=0, compute=1, compute_of=7, memory_mib=10_000, memory_of_mib=80_000
    )  # fmt: skip
    half = MINUTE_MS * 500
    return [
        replace(row, slice=of, busy_us=0, capacity_us=half, allocated_us=half)
        for row in minutes(first, last, "GPU-1", uid, space)
    ]


def test_the_next_holder_of_a_part_of_a_gpu_held_that_part(ledger_of: Any) -> None:
    facts = [
        fact("a1", "vision", "Job/train", -10, 0, **ended(20)), fact("a3", "vision", "Job/train", -10, 0, **ended(20)),
        fact("e", "nlp", "Job/eval", 5, 25), fact("o", "vision", "Job/other", 5, 22),
    ]  # fmt: skip
    rows = [*mig(0, 20, "a1", "vision", 1), *mig(0, 20, "a3", "vision", 3)]
    rows += [*mig(25, 40, "e", "nlp", 1), *mig(22, 40, "o", "vision", 2)]
    (one,) = asked(ledger_of(facts, rows), "all")["attempts"]
    assert one["gpus"] == 2, "two parts of one profile"
    assert [(taker["job"], taker["gpus"], taker["after_ms"]) for taker in one["next_holders"]] == [
        ("prod~nlp~Job~eval", 1, 5 * MINUTE_MS)
    ]  # fmt: skip


def test_a_job_that_was_stopped_a_minute_ago_does_not_run(ledger_of: Any) -> None:
    facts = [
        fact("a1", "vision", "Job/train", -10, 0, **ended(117)), fact("e", "nlp", "Job/eval", 110, 117),
        pod_facts("pod-c1", BEGIN + 118 * MINUTE_MS, namespace="vision", uid="c1", node="", workload="Job/train",
                  created_ms=BEGIN + 117 * MINUTE_MS),
    ]  # fmt: skip
    rows = [*minutes(0, 117, "GPU-1", "a1", "vision"), *minutes(117, 120, "GPU-1", "e", "nlp")]
    service = ledger_of(facts, rows)
    (one,) = asked(service, "all")["attempts"]
    assert (one["end"], one["end_ms"]) == ("stopped", BEGIN + 117 * MINUTE_MS)
    stopped(service, 116, pods=["vision/pod-a1"], result="stopped")
    (one,) = asked(service, "all")["attempts"]
    assert one["end"] == "preempted"
    assert [taker["job"] for taker in one["next_holders"]] == ["prod~nlp~Job~eval"]


def test_a_new_attempt_without_records_does_not_make_the_previous_one_run(ledger_of: Any) -> None:
    facts = [fact("a1", "vision", "Job/train", -10, 0, **ended(110)), fact("c1", "vision", "Job/train", 110, 118)]
    (one,) = asked(ledger_of(facts, minutes(0, 110, "GPU-1", "a1", "vision")), "all")["attempts"]
    assert (one["end"], one["end_ms"]) == ("stopped", BEGIN + 110 * MINUTE_MS)


def test_gpus_that_were_released_before_the_end_have_next_holders(ledger_of: Any) -> None:
    facts = [
        fact("a1", "vision", "Job/train", -10, 0, **ended(20)), fact("a2", "vision", "Job/train", -10, 0, **ended(80)),
        fact("e", "nlp", "Job/eval", 5, 20),
    ]  # fmt: skip
    rows = [
        *minutes(0, 20, "GPU-1", "a1", "vision"), *minutes(20, 60, "GPU-1", "e", "nlp"),
        *minutes(0, 80, "GPU-2", "a2", "vision"),
    ]  # fmt: skip
    (one,) = asked(ledger_of(facts, rows), "all")["attempts"]
    assert [(taker["job"], taker["after_ms"]) for taker in one["next_holders"]] == [("prod~nlp~Job~eval", 0)]


def test_a_job_that_takes_its_gpus_again_is_their_next_holder(ledger_of: Any) -> None:
    facts = [
        fact("a1", "vision", "Job/train", -10, 0, **ended(20)), fact("b1", "vision", "Job/train", 20, 22, **ended(40)),
    ]  # fmt: skip
    rows = [*minutes(0, 20, "GPU-1", "a1", "vision"), *minutes(22, 40, "GPU-1", "b1", "vision")]
    service = ledger_of(facts, rows)
    first, second = asked(service, "all")["attempts"]
    assert [(taker["job"], taker["after_ms"]) for taker in first["next_holders"]] == [(JOB, 2 * MINUTE_MS)]
    assert second["next_holders"] == []
    page = client_of(service).get(f"/job/{JOB}", headers=bearer("all") | {"Accept": "text/html"})
    assert "itself" in page.text


@pytest.mark.parametrize(
    ("low", "high", "starts", "ends"),
    [
        (0, 10, [0], [None]), (0, 45, [0, 40], [20, None]), (10, 50, [None, 40], [20, None]), (30, 110, [40, 100],
        [60, None]), (45, 90, [None], [60]), (90, 120, [100], [None]),
    ],
)  # fmt: skip
def test_the_attempts_of_a_span_have_the_time_that_the_job_held_in_it(
    service: Service, low: int, high: int, starts: list[int | None], ends: list[int | None]
) -> None:
    """A start before the span is not known, and what ran at its end has no end yet."""
    query = {"start": BEGIN + low * MINUTE_MS, "end": BEGIN + high * MINUTE_MS}
    found = client_of(service).get(f"/v1/jobs/{JOB}", params=query, headers=bearer("all")).json()
    shown = found["attempts"]
    assert [one["start_ms"] for one in shown] == [at if at is None else BEGIN + at * MINUTE_MS for at in starts]
    assert [one["end_ms"] for one in shown] == [at if at is None else BEGIN + at * MINUTE_MS for at in ends]
    assert [one["end"] == "running" for one in shown] == [at is None for at in ends]
    held = found["job"]["accounts_gpu_us"]
    assert sum(one["gpu_us"] for one in shown) == held["busy"] + held["allocated_idle"]
    numbers = [None] * len(shown) if low else [1, 2, 3][: len(shown)]
    assert [one["number"] for one in shown] == numbers
    assert found["earlier_attempts"] == (None if low else 0)


def test_what_was_lost_of_an_attempt_that_began_before_the_span_is_known_since_an_epoch_in_it(
    service: Service,
) -> None:
    query = {"start": BEGIN + 10 * MINUTE_MS, "end": BEGIN + 30 * MINUTE_MS}

    def lost() -> int | None:
        found = client_of(service).get(f"/v1/jobs/{JOB}", params=query, headers=bearer("all"))
        value: int | None = found.json()["attempts"][0]["lost_gpu_us"]
        return value

    for epoch, minute, expected in ((1, 5, None), (2, 15, 2 * 5 * MINUTE_MS * 1000)):
        body = [{"epoch": epoch, "at": str(BEGIN + minute * MINUTE_MS)}]
        client_of(service).post(f"/v1/jobs/{JOB}/progress", json=body, headers=bearer("vision")).raise_for_status()
        assert lost() == expected


def test_a_job_that_has_run_longer_than_a_question_may_be_long_runs(tmp_path: Path, clock: VirtualClock) -> None:
    chosen = settings_in(tmp_path, inventory=INVENTORY, limits={"span_days": 1})
    with Service(chosen, clock) as running:
        deliver(running.ledger, NOW_MS, batch(held(30, 30, "GPU-1", "vision"), cluster="prod", node="n1"))
        client = client_of(running)
        job = client.get("/v1/jobs?start=1h").json()["jobs"][0]["id"]
        (one,) = client.get(f"/v1/jobs/{job}?start=24h").json()["attempts"]
        page = read(client.get(f"/job/{job}", headers={"Accept": "text/html"}).text)
    assert (one["start_ms"], one["end_ms"], one["end"]) == (None, None, "running")
    assert rows_after(page, "Attempts of the job", "earlier")[0] == "running"


@pytest.mark.parametrize(("most", "starts"), [(1, [100]), (2, [100]), (4, [40, 100]), (5, [0, 40, 100])])
def test_attempts_that_are_not_all_read_say_so(
    service: Service, monkeypatch: pytest.MonkeyPatch, most: int, starts: list[int]
) -> None:
    """The job has five holds, of which the newest are read; an attempt that ended before they begin is left out."""
    monkeypatch.setattr(read_snapshot, "MOST_HOLDS", most)
    found = asked(service, "all")
    assert [one["start_ms"] for one in found["attempts"]] == [BEGIN + at * MINUTE_MS for at in starts]
    assert found["earlier_attempts"] == (0 if most == 5 else None)
    assert [one["number"] for one in found["attempts"]] == ([1, 2, 3] if most == 5 else [None] * len(starts))
    if most == 5:
        assert [one["next_holders"] for one in found["attempts"]] == [None, [], []], "six holds are around the ends"
    page = client_of(service).get(f"/job/{JOB}", headers=bearer("all") | {"Accept": "text/html"})
    assert page.status_code == 200
    assert ("not known" in page.text) == (most < 5)


@pytest.mark.parametrize(
    ("stops", "found"),
    [
        ((TAKEN,), ["train"]),
        ((OBEYED, at_minute(19, "evicted", "kubelet", "Evicted")), ["train"]),
        ((PodStop("preempted", "kai-scheduler", "AtSomeTime"),), ["train"]),
        ((at_minute(19, "of a newer release", "x", "Moved"),), ["train"]),
        ((OBEYED,), []),
        ((at_minute(20, "failed", "", "OOMKilled"),), []),
        ((at_minute(-90, "preempted", "kai-scheduler", "CalledOff"),), []),
        ((None,), []),
    ],
)
def test_the_list_of_jobs_finds_those_that_a_scheduler_or_an_eviction_stopped(
    ledger_of: Any, stops: tuple[PodStop | None, ...], found: list[str]
) -> None:
    service = with_stops(ledger_of, *stops)
    client = client_of(service, headers=bearer("all"))
    span = {"start": BEGIN, "end": NOW_MS, "stopped": "true"}
    for more in ({}, {"where.team": "vision"}, {"state": "running"}):
        jobs = client.get("/v1/jobs", params=span | more).json()["jobs"]
        assert [job["job"].partition("/")[2] for job in jobs] == found, more
    assert not client.get("/v1/jobs", params=span | {"where.team": "nlp"}).json()["jobs"]
    page = client.get("/jobs", params=span, headers=BROWSER)
    assert [name for name in ("train",) if f"~{name}" in page.text] == found
    link = client.get("/decisions?kind=preemption", headers=BROWSER).text
    assert "/jobs?start=31d&amp;stopped=true" in link


def losses(service: Service, who: str = "all", **query: object) -> dict[str, tuple[int | None, int]]:
    """What stops of each listed job lost: in full, and as far as it is known."""
    answer = client_of(service).get("/v1/jobs", params={"lost": "true", **query}, headers=bearer(who))
    assert answer.status_code == 200, answer.text
    found = {job["id"]: (job["stops"]["lost_gpu_us"], job["stops"]["known_lost_gpu_us"])
             for job in answer.json()["jobs"]}  # fmt: skip
    whole = answer.json()["stops"]
    unknown = [lost for lost, _ in found.values() if lost is None]
    assert whole["unknown_jobs"] == len(unknown)
    assert whole["known_lost_gpu_us"] == sum(known for _, known in found.values())
    assert whole["lost_gpu_us"] == (None if unknown else whole["known_lost_gpu_us"])
    return found


def epochs_at(service: Service, *at: int) -> None:
    body = [{"epoch": number, "at": str(BEGIN + minute * MINUTE_MS)} for number, minute in enumerate(at)]
    client_of(service).post(f"/v1/jobs/{JOB}/progress", json=body, headers=bearer("vision")).raise_for_status()


@pytest.mark.parametrize(("at", "decided"), [((), True), ((15,), False), ((5, 15, 45), True)])
def test_the_list_of_jobs_has_what_the_attempts_of_each_say_that_stops_lost(
    service: Service, at: tuple[int, ...], decided: bool
) -> None:
    if at:
        epochs_at(service, *at)
    if decided:
        stopped(service, 19, pods=["vision/pod-a1", "vision/pod-a2"], result="stopped", lost_gpu_hours=0.5)
        stopped(service, 59, pods=["vision/pod-b1"], result="blocked", lost_gpu_hours=4.5)
    for low, high in ((-1, 121), (10, 50), (45, 90)):
        query = {"start": BEGIN + low * MINUTE_MS, "end": BEGIN + high * MINUTE_MS}
        for who in ("all", "vision"):
            found = losses(service, who, **query)
            assert JOB in found
            for job, lost in found.items():
                one = client_of(service).get(f"/v1/jobs/{job}", params=query, headers=bearer(who)).json()
                assert lost == (one["lost_gpu_us"], one["known_lost_gpu_us"]), (job, query)
    whole = losses(service, start=BEGIN - MINUTE_MS)
    if at == (15,):
        assert whole[JOB] == ((2 * 5 + 39) * MINUTE_MS * 1000,) * 2
    if not at:
        assert whole[JOB] == (None, 30 * MINUTE_MS * 1000), "a decision knows a checkpoint, the job none"


@pytest.mark.parametrize(
    "stops",
    [
        (TAKEN, OBEYED), (OBEYED,), (None,), (at_minute(20, "failed", "", "OOMKilled"),),
        (at_minute(-90, "preempted", "kai-scheduler", "CalledOff"),),
    ],
)  # fmt: skip
def test_the_list_finds_losses_of_every_kind_of_stop(ledger_of: Any, stops: tuple[PodStop | None, ...]) -> None:
    service = with_stops(ledger_of, *stops)
    assert losses(service, start=BEGIN) == {JOB: (None, 0)}
    epochs_at(service, 15)
    assert losses(service, start=BEGIN) == {JOB: (len(stops) * 5 * MINUTE_MS * 1000,) * 2}


def test_a_job_that_nothing_stopped_lost_nothing_and_is_not_looked_for(
    ledger_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of jobs with more holds than are read, the losses are unknown; of those that had one pod, nothing is lost."""
    monkeypatch.setattr(read_snapshot, "MOST_HOLDS", 1)
    once = fact("once", "vision", "Job/once", 0, 0, **ended(30))
    service = ledger_of(
        [fact("a", "vision", "Job/train", 0, 0, stop=TAKEN, **ended(20)), fact("b", "vision", "Job/train", 20, 40),
         once],
        [*minutes(0, 20, "GPU-1", "a", "vision"), *minutes(40, 120, "GPU-1", "b", "vision"),
         *minutes(0, 30, "GPU-2", "once", "vision")],
    )  # fmt: skip
    epochs_at(service, 15)
    assert losses(service, start=BEGIN) == {JOB: (None, 0), "prod~vision~Job~once": (0, 0)}


def test_the_page_its_files_and_the_order_have_what_stops_lost(service: Service) -> None:
    epochs_at(service, 15)
    client = client_of(service, headers=bearer("all"))
    span = f"start={BEGIN - MINUTE_MS}&end={NOW_MS}"
    plain = client.get(f"/v1/jobs?{span}").json()
    assert "stops" not in plain
    assert all("stops" not in job for job in plain["jobs"])
    ordered = client.get(f"/v1/jobs?{span}&sort=lost_gpu_hours:asc").json()["jobs"]
    known = [job["stops"]["lost_gpu_us"] for job in ordered if job["stops"]["lost_gpu_us"] is not None]
    assert known == sorted(known)
    assert max(known) == 49 * MINUTE_MS * 1000
    paged = client.get(f"/v1/jobs?{span}&sort=lost_gpu_hours&limit=1").json()
    assert (paged["jobs"][0]["id"], paged["count"]) == (JOB, 3)
    assert paged["stops"]["known_lost_gpu_us"] == 49 * MINUTE_MS * 1000, "of all pages"
    for query in (f"{span}&columns=lost_gpu_hours", f"{span}&sort=lost_gpu_hours"):
        rows = list(csv.DictReader(io.StringIO(client.get(f"/jobs.csv?{query}").text)))
        assert {row["id"]: row["lost_gpu_hours"] for row in rows}[JOB] == "0.816666667"
        page = client.get(f"/jobs?{query}", headers=BROWSER).text
        assert "Lost by stops" in page
        assert "0.8" in page[page.index("<tfoot>") :]
    assert "Lost by stops" in client.get(f"/jobs?{span}&stopped=true", headers=BROWSER).text
    assert "lost_gpu_hours" not in client.get(f"/jobs.csv?{span}").text


def test_the_checkpoint_is_that_from_which_the_controller_counted(service: Service) -> None:
    epochs_at(service, 5)
    at_ms = BEGIN + 12 * MINUTE_MS
    stopped(service, 19, pods=["vision/pod-a1"], result="stopped", lost_gpu_hours=0.5, checkpoint_ms=at_ms)
    first, second, _ = asked(service, "all")["attempts"]
    assert (first["lost_gpu_us"], first["checkpoint_ms"]) == (1_800_000_000, at_ms)
    assert second["checkpoint_ms"] == BEGIN + 5 * MINUTE_MS
    (hidden, *_) = asked(service, "vision")["attempts"]
    assert hidden["checkpoint_ms"] == at_ms, "it sees all the pods that the decision names"


def test_an_attempt_says_how_much_of_a_shared_gpu_it_held(ledger_of: Any) -> None:
    """Three sevenths of GPU-1 and the whole of GPU-2; then another job takes the part."""
    part = Slice(profile="3g.40gb", gi=1, ci=0, compute=3, compute_of=7, memory_mib=40_000, memory_of_mib=80_000)
    begin, span_ms = BEGIN, 20 * MINUTE_MS
    rows = []
    for at, uid in ((begin, "a1"), (begin + span_ms, "e")):
        whole_us = span_ms * 1000
        held_us = whole_us * 3 // 7
        holder = pod_holder(f"pod-{uid}", "vision", uid)
        rows += [
            replace(interval(at, "GPU-1", holder, span_ms=span_ms, busy_us=0), slice=part, capacity_us=held_us,
                    allocated_us=held_us),
            replace(interval(at, "GPU-1", span_ms=span_ms), capacity_us=whole_us - held_us),
        ]  # fmt: skip
    rows += minutes(0, 20, "GPU-2", "a2", "vision")
    service = ledger_of(
        [fact("a1", "vision", "Job/train", -10, 0, **ended(20)), fact("a2", "vision", "Job/train", -10, 0, **ended(20)),
         fact("e", "vision", "Job/other", 5, 20)], rows,
    )  # fmt: skip
    (one,) = asked(service, "all")["attempts"]
    assert (one["gpus"], one["held_gpus"]) == (2, "1.428571")
    (taker,) = one["next_holders"]
    assert (taker["gpus"], taker["held_gpus"]) == (1, "0.428571")
    page = read(client_of(service).get(f"/job/{JOB}", headers=bearer("all") | BROWSER).text)
    assert "1.4" in page.texts
    assert any(text.startswith("0.4 GPUs, at once") for text in page.texts)


def test_of_many_jobs_that_took_its_gpus_the_page_shows_five_and_the_others_on_demand(ledger_of: Any) -> None:
    facts = [fact(f"a{n}", "vision", "Job/train", -10, 0, **ended(20)) for n in range(8)]
    takers = [fact(f"t{n}", "vision", f"Job/taker{n}", 5, 20) for n in range(8)]
    rows = [row for n in range(8) for row in minutes(0, 20, f"GPU-{n}", f"a{n}", "vision")]
    rows += [row for n in range(8) for row in minutes(20, 120, f"GPU-{n}", f"t{n}", "vision")]
    service = ledger_of([*facts, *takers], rows)
    page = client_of(service).get(f"/job/{JOB}", headers=bearer("all") | BROWSER).text
    shown, _, more = page[page.index("Attempts of the job") :].partition("<details><summary>3 more</summary>")
    assert (shown.count('href="/job/'), more.partition("</details>")[0].count('href="/job/')) == (5, 3)


@pytest.fixture
def notebooks(tmp_path: Path, clock: VirtualClock) -> Iterator[Service]:
    """A notebook that is idle for an hour, one that is busy for two hours, and a service that is idle for half an
    hour."""
    chosen = settings_in(tmp_path, prices=price_book_text(H100=6, currency="USD"), inventory=INVENTORY)
    rows = [
        interval(BEGIN + at * MINUTE_MS, f"GPU-{uid}", pod_holder(f"pod-{uid}", "vision", uid), span_ms=MINUTE_MS,
                 busy_us=MINUTE_MS * 1000 * busy)
        for uid, last, busy in (("i", 60, 0), ("b", 120, 1), ("s", 30, 0))
        for at in range(last)
    ]  # fmt: skip
    facts = [
        fact(uid, "vision", workload, 0, 0)
        for uid, workload in (("i", "Notebook/idle"), ("b", "Notebook/used"), ("s", "InferenceService/chat"))
    ]
    with Service(chosen, clock) as running:
        deliver(running.ledger, NOW_MS, batch(rows, facts, cluster="prod", node="n1"))
        yield running


def shown(service: Service, query: str) -> list[str]:
    """The jobs on the page, in its order."""
    answer = client_of(service).get(f"/jobs?{query}", headers={"Accept": "text/html"})
    assert answer.status_code == 200, answer.text
    links = [value for tag, name, value in read(answer.text).attributes if (tag, name) == ("a", "href")]
    return [value.rpartition("~")[2] for value in links if value.startswith("/job/")]


def test_the_list_of_jobs_answers_which_wasted_most_and_which_notebooks_idle(notebooks: Service) -> None:
    assert shown(notebooks, "start=7d") == ["used", "idle", "chat"], "the most expensive first"
    assert shown(notebooks, "start=7d&sort=idle") == ["idle", "chat", "used"]
    assert shown(notebooks, "start=1d&sort=idle&kind=notebook") == ["idle", "used"]
    assert shown(notebooks, "start=1d&kind=&search=CHAT") == ["chat"]
    assert shown(notebooks, "kind=batch") == []
    query = {"start": BEGIN, "end": NOW_MS, "sort": "idle", "kind": "notebook"}
    jobs = client_of(notebooks).get("/v1/jobs", params=query).json()["jobs"]
    assert [job["job"] for job in jobs] == ["Notebook/idle", "Notebook/used"]
    assert client_of(notebooks).get("/jobs?kind=pet").status_code == 422
