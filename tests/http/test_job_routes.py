"""Jobs and their progress over HTTP, on a real ledger."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import msgspec
import pytest

from accountant.billing.job_costs import list_jobs
from accountant.composition import Service
from accountant.ledger.protocols import MOST_EPOCHS, EpochReport, JobKey
from accountant.reports import report_builder
from agent.wire import PodFacts, UsageInterval
from gputally.base.clock import VirtualClock
from gputally.server.tokens_and_grants import Principal
from tests.http.conftest import INVENTORY, MINUTE_MS, NOW_MS, bearer, client_of, settings_in, token_entry
from tests.price_books import price_book_text
from tests.usage_records import batch, interval, pod_facts, pod_holder

BEGIN = NOW_MS - 60 * MINUTE_MS
TOTALS = ("total_cost", "total_gpu_us", "start_ms", "end_ms", "note")
TEAM = "/v1/jobs/prod~vision~Job~train"


def held(minute: int, uid: str, space: str, name: str, model: str = "H100") -> UsageInterval:
    at, holder = BEGIN + minute * MINUTE_MS, pod_holder(name, space, uid)
    return interval(at, f"GPU-{uid}", holder, span_ms=MINUTE_MS, gpu_model=model, busy_us=MINUTE_MS * 750)


def fact(uid: str, space: str, name: str, **changes: Any) -> PodFacts:
    times = {"created_ms": BEGIN - 10 * MINUTE_MS, "scheduled_ms": BEGIN, "started_ms": BEGIN}
    return pod_facts(name, BEGIN, namespace=space, node="n1", uid=uid, **{**times, **changes})


@pytest.fixture
def service(tmp_path: Path, clock: VirtualClock) -> Iterator[Service]:
    """Job vision/train holds one H100 for an hour and continues; pod nlp/eval has ended; nlp/later waits."""
    leads = "".join(token_entry(team, "read, progress", f", teams: [{team}]") for team in ("nlp", "vision"))
    chosen = settings_in(
        tmp_path, prices=price_book_text(H100=6, currency="USD"), inventory=INVENTORY,
        tokens="tokens:\n" + token_entry("all", "admin") + token_entry("reader", "read") + leads,
    )  # fmt: skip
    facts = (
        fact("a", "vision", "train-x", workload="Job/train", labels={"gputally.dev/user": "ann"}),
        fact("b", "nlp", "eval", ended_ms=BEGIN + 30 * MINUTE_MS),
        fact("c", "nlp", "later", scheduled_ms=None, started_ms=None),
    )
    rows = [held(n, "a", "vision", "train-x") for n in range(60)]
    rows += [held(n, "b", "nlp", "eval", "MI300X") for n in range(30)]
    one = batch(rows, facts, cluster="prod", node="n1")
    with Service(chosen, clock) as running:
        running.ingest.submit(msgspec.json.encode(one)).result()
        yield running


class Caller:
    """Sends requests as a given caller."""

    def __init__(self, service: Service, name: str) -> None:
        self._client = client_of(service, headers=bearer(name))

    def get(self, path: str, status: int = 200, **query: Any) -> Any:
        answer = self._client.get(path, params=query)
        assert answer.status_code == status, answer.text
        return answer.json()

    def post(self, path: str, body: Any, status: int = 200) -> Any:
        answer = self._client.post(path, json=body)
        assert answer.status_code == status, answer.text
        return answer.json()


def test_running_ended_and_waiting_jobs_with_their_cost(service: Service) -> None:
    found = Caller(service, "all").get("/v1/jobs")
    jobs = {job["id"]: job for job in found["jobs"]}
    assert list(jobs) == ["prod~nlp~Pod~eval", "prod~nlp~Pod~later", "prod~vision~Job~train"]
    train = jobs["prod~vision~Job~train"]
    assert (train["state"], train["teams"], train["users"]) == ("running", ["vision"], ["ann"])
    assert (train["pods"], train["pods_running"], train["waited_ms"]) == (1, 1, 10 * MINUTE_MS)
    assert train["accounts_gpu_us"]["busy"] == 45 * MINUTE_MS * 1000
    assert train["accounts_gpu_us"]["allocated_idle"] == 15 * MINUTE_MS * 1000
    assert (Decimal(train["cost"]), Decimal(train["burn_per_hour"]), Decimal(train["gpus"])) == (6, 6, 1)
    ended = jobs["prod~nlp~Pod~eval"]
    assert (ended["state"], ended["ended_ms"], ended["cost"]) == ("ended", BEGIN + 30 * MINUTE_MS, None)
    assert ended["unpriced_gpu_us"] == 30 * MINUTE_MS * 1000
    waiting = jobs["prod~nlp~Pod~later"]
    assert (waiting["state"], waiting["waited_ms"], waiting["cost"]) == ("waiting", 70 * MINUTE_MS, "0")
    assert (found["currency"], found["total_cost"], found["total_gpu_us"]) == ("USD", None, 90 * MINUTE_MS * 1000)
    only = Caller(service, "all").get("/v1/jobs", state="running")
    assert [job["id"] for job in only["jobs"]] == ["prod~vision~Job~train"]
    assert Decimal(only["total_cost"]) == 6


def test_jobs_are_searched_and_sorted(service: Service) -> None:
    caller = Caller(service, "all")

    def ids(**query: str) -> list[str]:
        found = caller.get("/v1/jobs", **query)
        assert found["count"] == len(found["jobs"])
        return [job["id"].rpartition("~")[2] for job in found["jobs"]]

    assert ids(search="NLP/pod") == ["eval", "later"]
    assert ids(search="nlp", state="waiting") == ["later"]
    assert ids(search="none") == []
    assert ids(sort="cost") == ["train", "later", "eval"]  # eval's cost is unknown
    assert ids(sort="cost:asc") == ["later", "train", "eval"]
    assert ids(sort="idle")[0] == "train"
    assert ids(sort="name") == ids() == ["eval", "later", "train"]
    page = caller.get("/v1/jobs", sort="cost", limit="1")
    assert (page["count"], len(page["jobs"])) == (3, 1)


def test_pages_of_one_job_are_the_list_and_each_has_the_totals_of_all(service: Service) -> None:
    caller = Caller(service, "all")
    for filters in ({}, {"state": "running"}, {"where.namespace": "nlp"}):
        whole = caller.get("/v1/jobs", **filters)
        page = caller.get("/v1/jobs", limit="1", **filters)
        jobs = list(page["jobs"])
        while page["next_page"] is not None:
            page = caller.get("/v1/jobs", limit="1", page=page["next_page"], **filters)
            assert {name: page[name] for name in TOTALS} == {name: whole[name] for name in TOTALS}
            jobs += page["jobs"]
        assert jobs == whole["jobs"]


def test_jobs_are_chosen_by_their_own_figures_and_a_job_is_the_same_among_others_and_alone(service: Service) -> None:
    start, end = BEGIN - 60 * MINUTE_MS, NOW_MS
    with service.ledger.moment(start, end) as moment:
        listed = list_jobs(moment, service.book(), start, end, end)
        jobs = list(listed.built(listed.figures))
        for one, job in zip(listed.figures, jobs, strict=True):
            accounts = job.accounts_gpu_us
            assert (one.key.id, one.state, one.cost) == (job.id, job.state, job.cost)
            assert (one.allocated_us, one.idle_us) == (accounts.allocated, accounts.allocated_idle)
            assert list(listed.built([one])) == [job]


def test_a_job_costs_what_the_cost_of_that_job_is(service: Service) -> None:
    caller = Caller(service, "all")
    asked = caller.get("/v1/cost", by="cluster,namespace,job", **{"where.job": "Job/train"})
    assert Decimal(caller.get(TEAM)["job"]["cost"]) == Decimal(asked["total"])


def test_a_team_sees_its_own_jobs_alone(service: Service) -> None:
    vision = Caller(service, "vision")
    assert [job["id"] for job in vision.get("/v1/jobs")["jobs"]] == ["prod~vision~Job~train"]
    assert vision.get("/v1/jobs", 403, **{"where.team": "nlp"})["type"].endswith("forbidden")
    assert vision.get("/v1/jobs/prod~nlp~Pod~eval", 404)["type"].endswith("not-found")
    assert vision.get("/v1/jobs/prod~nlp~Pod~later", 404)["type"].endswith("not-found")
    assert vision.get("/v1/jobs/what", 422)["type"].endswith("invalid-parameter")


def test_epochs_cost_the_time_between_their_reports_and_add_up(service: Service) -> None:
    vision = Caller(service, "vision")
    assert vision.get(TEAM)["epochs"] == []
    told = [{"epoch": 2, "at": str(BEGIN + 30 * MINUTE_MS)}, {"epoch": 1, "at": str(BEGIN + 12 * MINUTE_MS)}]
    assert vision.post(TEAM + "/progress", told) == {"recorded": 2, "known": 0}
    assert vision.post(TEAM + "/progress", told) == {"recorded": 0, "known": 2}
    found = vision.get(TEAM)
    costs = {line["epoch"]: Decimal(line["cost"]) for line in found["epochs"]}
    assert costs == {1: Decimal("1.2"), 2: Decimal("1.8"), None: 3}
    assert sum(Decimal(line["cost"]) for line in found["epochs"]) == Decimal(found["job"]["cost"]) == 6
    assert [Decimal(part["cost"]) for part in found["parts"]] == [6]
    # One that comes late takes its part of what the next one had.
    assert vision.post(TEAM + "/progress", [{"epoch": 0, "at": str(BEGIN + 6 * MINUTE_MS)}])["recorded"] == 1
    after = [Decimal(line["cost"]) for line in vision.get(TEAM)["epochs"]]
    assert after == [Decimal("0.6"), Decimal("0.6"), Decimal("1.8"), 3]
    assert vision.get(TEAM)["job"]["epochs"] == 3


def test_the_page_of_a_team_has_its_epochs_however_many_jobs_the_others_have(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report_builder, "MOST_EPOCH_JOBS", 1)
    Caller(service, "vision").post(TEAM + "/progress", [{"epoch": 1, "at": str(BEGIN + 12 * MINUTE_MS)}])
    client = client_of(service, headers=bearer("all") | {"Accept": "text/html"})
    for page in ("/month/2026-11", "/team/vision?month=2026-11"):
        assert "Cost of an epoch" in client.get(page).text, page
    assert "Cost of an epoch" not in client.get("/team/nlp?month=2026-11").text


def test_of_two_reports_about_an_epoch_the_earlier_instant_counts_whatever_the_order(service: Service) -> None:
    vision = Caller(service, "vision")
    for minute, new in ((20, 1), (40, 0), (10, 1)):
        body = [{"epoch": 7, "at": str(BEGIN + minute * MINUTE_MS)}]
        assert vision.post(TEAM + "/progress", body)["recorded"] == new
    assert vision.get(TEAM)["epochs"][0]["end_ms"] == BEGIN + 10 * MINUTE_MS


def test_who_may_report_progress(service: Service) -> None:
    body = [{"epoch": 1, "at": str(BEGIN + MINUTE_MS)}]
    assert Caller(service, "reader").post(TEAM + "/progress", body, 403)["type"].endswith("forbidden")
    assert Caller(service, "nlp").post(TEAM + "/progress", body, 404)["type"].endswith("not-found")
    unknown = "/v1/jobs/prod~vision~Job~nobody/progress"
    assert Caller(service, "all").post(unknown, body, 404)["type"].endswith("not-found")
    assert Caller(service, "nobody").post(TEAM + "/progress", body, 401)["type"].endswith("unauthenticated")


def test_a_pod_reports_for_its_own_job_alone(service: Service) -> None:
    class OnePod:
        async def authenticate(self, token: str | None, address: str = "") -> Principal:
            return Principal("vision/trainer", frozenset({"progress"}), "prod", pod=token)

    deps = service.app.state.deps
    service.app.state.deps = replace(deps, authenticator=OnePod())
    body = [{"epoch": 1, "at": str(BEGIN + MINUTE_MS)}]
    assert Caller(service, "a").post(TEAM + "/progress", body) == {"recorded": 1, "known": 0}
    for other in ("b", "unheard-of"):
        assert Caller(service, other).post(TEAM + "/progress", body, 403)["type"].endswith("forbidden")
    assert Caller(service, "a").post("/v1/jobs/other~vision~Job~train/progress", body, 403)


@pytest.mark.parametrize(
    ("body", "slug"),
    [
        ([], "invalid-body"),
        ([{"epoch": -1}], "invalid-body"),
        ([{"epoch": 1, "loss": 0.5}], "invalid-body"),
        ([{"epoch": 1, "at": "yesterday"}], "invalid-parameter"),
        ([{"epoch": 1, "at": str(NOW_MS + 1)}], "invalid-parameter"),
        ([{"epoch": 1}] * 1001, "invalid-body"),
    ],
)
def test_what_no_report_is(service: Service, body: Any, slug: str) -> None:
    assert Caller(service, "vision").post(TEAM + "/progress", body, 422)["type"].endswith(slug)
    assert Caller(service, "vision").get(TEAM)["job"]["epochs"] == 0


def test_a_job_has_a_bounded_number_of_epochs(service: Service) -> None:
    key = JobKey.parse("prod~vision~Job~train")
    every = [EpochReport(key, number, BEGIN + number, "a test") for number in range(MOST_EPOCHS + 5)]
    assert service.ledger.report_epochs(every, NOW_MS) == MOST_EPOCHS
    vision = Caller(service, "vision")
    assert vision.post(TEAM + "/progress", [{"epoch": MOST_EPOCHS}], 409)["type"].endswith("too-many-epochs")
    assert vision.post(TEAM + "/progress", [{"epoch": 3}])["known"] == 1
