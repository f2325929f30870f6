"""A job's attempts on a real ledger, with figures computed by hand: over HTTP and on the page of the job."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from accountant.composition import Service
from accountant.ledger.protocols import Down, Facts, NodeFacts
from agent.wire import PodFacts, UsageInterval
from gputally.base.clock import VirtualClock
from tests.fakes.memory_ledger import MINUTE_MS, NOW_MS
from tests.http.conftest import bearer, client_of, decision, settings_in, token_entry
from tests.http.page_parser import read
from tests.price_books import price_book_text
from tests.usage_records import batch, deliver, interval, pod_facts, pod_holder

BEGIN = NOW_MS - 120 * MINUTE_MS
INVENTORY = """\
schema: 1
cluster: prod
namespaces:
  - {name: nlp, team: nlp}
  - {name: vision, team: vision}
"""
JOB = "prod~vision~Job~train"


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
         "after_ms": 0},
        {"job": "prod~vision~Job~other", "team": "vision", "queue": first["next_holders"][1]["queue"], "gpus": 1,
         "after_ms": 2 * MINUTE_MS},
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
        reason="team nlp is owed 1 GPU", inputs={"pods": pods, "lost_gpu_hours": 0.5},
    )  # fmt: skip
    assert client_of(service).post("/v1/decisions", json=[made], headers=bearer("all")).status_code == 200
    first, *_ = asked(service, "all")["attempts"]
    assert first["end"] == end
    known = end == "preempted"
    assert first["reason"] == ("team nlp is owed 1 GPU" if known else "")
    assert first["decision"] == ("cycle/0/0" if known else None)
    assert first["lost_gpu_us"] == (1_800_000_000 if known else None)


def test_the_page_has_the_attempts_with_links(service: Service) -> None:
    page = read(client_of(service).get(f"/job/{JOB}", headers=bearer("all") | {"Accept": "text/html"}).text)
    text = " ".join(page.texts)
    assert "not recorded" in text
    assert "kernel panic" in text
    assert "/job/prod~nlp~Job~eval" in {value for tag, name, value in page.attributes if (tag, name) == ("a", "href")}


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
    assert shown(notebooks, "days=7") == ["used", "idle", "chat"], "the most expensive first"
    assert shown(notebooks, "days=7&sort=idle") == ["idle", "chat", "used"]
    assert shown(notebooks, "days=1&sort=idle&kind=notebook") == ["idle", "used"]
    assert shown(notebooks, "days=1&kind=&search=CHAT") == ["chat"]
    assert shown(notebooks, "kind=batch") == []
    query = {"start": BEGIN, "end": NOW_MS, "sort": "idle", "kind": "notebook"}
    jobs = client_of(notebooks).get("/v1/jobs", params=query).json()["jobs"]
    assert [job["job"] for job in jobs] == ["Notebook/idle", "Notebook/used"]
    assert client_of(notebooks).get("/jobs?kind=pet").status_code == 422
