"""The list of jobs with its bar: a view, its files, the API and the command have the same jobs, order and figures."""

from __future__ import annotations

import csv
import io
import re
from datetime import UTC, datetime
from decimal import Decimal
from html import unescape
from pathlib import Path
from typing import Any, get_args
from urllib.parse import parse_qsl, quote, unquote, urlsplit

import pyarrow.parquet as pq
import pytest
from fastapi.testclient import TestClient

from accountant.__main__ import main
from accountant.composition import Service
from accountant.ledger.protocols import Facts
from accountant.ledger.team_assignment import USER_KEY
from accountant.web.job_list_page import COLUMNS
from accountant.wire.option_types import JOB_ORDERS, JobOrder
from gputally.base.clock import VirtualClock
from gputally.base.units import US_PER_HOUR
from gputally.server.https_server import serve
from tests.http.conftest import (
    INVENTORY,
    MINUTE_MS,
    NOW_MS,
    StartService,
    bearer,
    client_of,
    settings_in,
    token_entry,
)
from tests.http.page_parser import read
from tests.http.quarter_hours import NOW, held
from tests.price_books import price_book_text
from tests.usage_records import batch, deliver, pod_facts

PAGE = {"Accept": "text/html"}
HOUR_MS = 60 * MINUTE_MS


def utc_time(at_ms: int) -> datetime:
    return datetime.fromtimestamp(at_ms / 1000, UTC)


def facts(space: str, node: str, name: str, **more: Any) -> Any:
    return pod_facts(
        f"{space}-0", NOW - 48 * HOUR_MS, namespace=space, node=node, uid=space, workload=name,
        labels={"gputally.dev/user": f"{space}-user", "project": f"{space}-project"}, **more,
    )  # fmt: skip


@pytest.fixture(scope="module")
def service(start_for_module: StartService) -> Service:
    """vision trains on n1 since ten hours, nlp had a notebook on n2 for four hours that ended five hours ago, and a
    job of vision waits."""
    lead = token_entry("lead", "read", ", teams: [vision]")
    running, _ = start_for_module(
        prices=price_book_text(H100=2), inventory=INVENTORY, exported_labels=("project",),
        tokens="tokens:\n" + token_entry("all", "admin") + lead,
    )  # fmt: skip
    waits = pod_facts(
        "later", NOW - HOUR_MS, namespace="vision", uid="later", workload="Job/later", created_ms=NOW - HOUR_MS,
        node="", labels={"project": "vision-project"}, requests={"nvidia.com/gpu": "2"},
    )  # fmt: skip
    began = {"created_ms": NOW - 11 * HOUR_MS, "scheduled_ms": NOW - 10 * HOUR_MS, "started_ms": NOW - 10 * HOUR_MS}
    ended = {"created_ms": NOW - 9 * HOUR_MS, "scheduled_ms": NOW - 9 * HOUR_MS, "started_ms": NOW - 9 * HOUR_MS,
             "ended_ms": NOW - 5 * HOUR_MS}  # fmt: skip
    deliver(
        running.ledger, NOW_MS,
        batch(held(10, 10, "GPU-1", "vision"), [facts("vision", "n1", "Job/train", **began), waits],
              cluster="prod", node="n1"),
        batch([*held(9, 4, "GPU-2", "nlp"), *held(5, 5, "GPU-2")],
              [facts("nlp", "n2", "Notebook/explore", **ended)], cluster="prod", node="n2"),
    )  # fmt: skip
    return running


@pytest.fixture
def client(service: Service) -> TestClient:
    client = client_of(service)
    client.headers.update(bearer("all"))
    return client


def ids(client: TestClient, query: str) -> list[str]:
    answer = client.get(f"/v1/jobs?{query}")
    assert answer.status_code == 200, answer.text
    return [job["id"] for job in answer.json()["jobs"]]


def test_a_job_that_was_stopped_waits_since_that_stop(start_service: StartService) -> None:
    running, client = start_service(tokens="tokens:\n" + token_entry("all", "admin"))
    first, stop = NOW - 12 * HOUR_MS, NOW - HOUR_MS
    pods = [
        pod_facts("train-0", NOW, namespace="vision", uid="vision", workload="Job/train", node="n1",
                  created_ms=first, scheduled_ms=first + HOUR_MS, started_ms=first + HOUR_MS, ended_ms=stop),
        pod_facts("train-0", NOW, namespace="vision", uid="again", workload="Job/train", node="", created_ms=stop,
                  requests={"nvidia.com/gpu": "1"}),
    ]  # fmt: skip
    rows = [*held(10, 9, "GPU-1", "vision"), *held(1, 1, "GPU-1")]
    deliver(running.ledger, NOW_MS, batch(rows, pods, cluster="prod", node="n1"))
    (job,) = client.get("/v1/jobs?start=4h&state=waiting", headers=bearer("all")).json()["jobs"]
    assert (job["waiting_since_ms"], job["created_ms"]) == (stop, first)
    for path in ("/jobs?start=4h&state=waiting", f"/job/{job['id']}"):
        text = " ".join(read(client.get(path, headers=bearer("all") | PAGE).text).texts)
        assert re.findall(r"since (\d+ \w+ \d\d:\d\d)", text) == [f"{utc_time(stop):%-d %b %H:%M}"], path


def test_the_wait_beside_its_beginning_is_that_of_the_pod_that_waits(start_service: StartService) -> None:
    running, client = start_service(tokens="tokens:\n" + token_entry("all", "admin"))
    first, ran, stop = NOW - 12 * HOUR_MS, NOW - 5 * HOUR_MS, NOW - HOUR_MS
    pods = [
        pod_facts("train-0", NOW, namespace="vision", uid="vision", workload="Job/train", node="n1",
                  created_ms=first, scheduled_ms=ran, started_ms=ran, ended_ms=stop),
        pod_facts("train-0", NOW, namespace="vision", uid="again", workload="Job/train", node="", created_ms=stop),
    ]  # fmt: skip
    rows = [*held(5, 4, "GPU-1", "vision"), *held(1, 1, "GPU-1")]
    deliver(running.ledger, NOW_MS, batch(rows, pods, cluster="prod", node="n1"))
    query, headers = "start=4h&state=waiting&columns=waited", bearer("all")
    (job,) = client.get(f"/v1/jobs?{query.rpartition('&')[0]}", headers=headers).json()["jobs"]
    assert (job["waited_ms"], job["waiting_ms"]) == (7 * HOUR_MS, NOW_MS - stop)
    (row,) = csv.DictReader(io.StringIO(client.get(f"/jobs.csv?{query}", headers=headers).text))
    assert (float(row["waited_s"]), float(row["waiting_s"])) == (7 * 3600, (NOW_MS - stop) / 1000)
    text = " ".join(read(client.get(f"/jobs?{query}", headers=headers | PAGE).text).texts)
    said = re.search(r"7\.0 h\s+this wait\s+(\S+ \w+), since (\d+ \w+ \d\d:\d\d)", text)
    assert said is not None, text
    assert said.groups() == ("1.0 h", f"{utc_time(stop):%-d %b %H:%M}")


@pytest.mark.parametrize(("price", "total"), [({"H100": "2.25"}, "4.50"), ({"A100": "1"}, None)])
def test_the_cost_an_hour_of_the_listed_jobs_is_added_up_if_it_is_known(
    start_service: StartService, price: dict[str, object], total: str | None
) -> None:
    running, client = start_service(
        prices=price_book_text(**price), inventory=INVENTORY, tokens="tokens:\n" + token_entry("all", "admin")
    )
    began = {"created_ms": NOW - 3 * HOUR_MS, "scheduled_ms": NOW - 2 * HOUR_MS, "started_ms": NOW - 2 * HOUR_MS}
    deliver(
        running.ledger, NOW_MS,
        batch(held(2, 2, "GPU-1", "vision"), [facts("vision", "n1", "Job/train", **began)], cluster="prod", node="n1"),
        batch(held(2, 2, "GPU-2", "nlp"), [facts("nlp", "n2", "Job/tune", **began)], cluster="prod", node="n2"),
    )  # fmt: skip
    headers = bearer("all")
    answer = client.get("/v1/jobs?start=1h&limit=1", headers=headers).json()
    assert len(answer["jobs"]) == 1, "the total is of all pages"
    assert answer["total_burn_per_hour"] == (None if total is None else f"{total}0000")
    for view in ("start=1h", "start=1h&state=running", "start=1h&search=tune"):
        page = client.get(f"/jobs?{view}&columns=burn", headers=headers | PAGE).text
        foot = re.sub(r"<[^>]+>", " ", page[page.index("<tfoot>") : page.index("</tfoot>")]).split()
        shown = "2.25" if "search" in view else total
        assert foot == ["Total", "–" if total is None else shown], view


@pytest.mark.parametrize(
    ("requests", "asks"),
    [
        ([{"nvidia.com/gpu": "2"}, {"nvidia.com/mig-1g.10gb": "1"}], 3),
        ([{}], None),  # by a ResourceClaim, or by an annotation
        ([{"nvidia.com/gpu": "2"}, {}], None),
        ([{}, {"nvidia.com/gpu": "2"}], None),
        ([{"nvidia.com/gpu": "0"}], 0),
    ],
)
def test_a_waiting_job_asks_for_as_many_gpus_as_is_known(
    start_service: StartService, requests: list[dict[str, str]], asks: int | None
) -> None:
    running, client = start_service(tokens="tokens:\n" + token_entry("all", "admin"))
    pods = [
        pod_facts(f"pod-{n}", NOW - HOUR_MS, namespace="vision", uid=f"{n}", workload="Job/later", node="",
                  created_ms=NOW - HOUR_MS, requests=asked, labels={USER_KEY: "ann"})
        for n, asked in enumerate(requests)
    ]  # fmt: skip
    deliver(running.ledger, NOW_MS, batch(held(10, 10, "GPU-1", "nlp"), cluster="prod", node="n1"))
    running.ledger.observe(Facts(pods=tuple(("prod", pod) for pod in pods)), NOW_MS)
    (job,) = client.get("/v1/jobs?start=4h&state=waiting", headers=bearer("all")).json()["jobs"]
    assert (job["state"], job["asks_gpus"]) == ("waiting", asks)
    assert job["users"] == ["ann"], "who waits is known before the job holds a GPU"
    (row,) = csv.DictReader(io.StringIO(client.get("/jobs.csv?start=4h&state=waiting", headers=bearer("all")).text))
    assert row["asks_gpus"] == ("" if asks is None else str(asks))
    page = client.get(f"/job/{WAITS}", headers=bearer("all") | PAGE).text
    assert ("asks for" in page) is (asks is not None)


def listed(client: TestClient, query: str) -> list[str]:
    """The jobs of the page, in their order."""
    answer = client.get(f"/jobs?{query}", headers=PAGE)
    assert answer.status_code == 200, answer.text
    return jobs_on(answer.text)


def jobs_on(page: str) -> list[str]:
    return [unquote(job) for job in re.findall(r'href="/job/([^"]+)"', page)]


TRAIN, NOTEBOOK, WAITS = "prod~vision~Job~train", "prod~nlp~Notebook~explore", "prod~vision~Job~later"


@pytest.mark.parametrize(
    ("query", "found"),
    [
        ("start=12h", [NOTEBOOK, WAITS, TRAIN]),
        ("start=4h", [WAITS, TRAIN]),
        ("start=2026-10-01&end=2026-10-20", []),
        ("start=12h&where.node=n2", [NOTEBOOK]),
        ("start=12h&where.node=n1&where.node=n2", [NOTEBOOK, TRAIN]),
        ("start=12h&where.user=vision-user", [TRAIN]),
        ("start=12h&where.label:project=vision-project", [WAITS, TRAIN]),
        ("start=12h&where.label:project=nlp-project", [NOTEBOOK]),
        ("start=12h&where.team=vision&where.gpu=GPU-2", []),
        ("start=12h&search=train&sort=name", [TRAIN]),
        ("start=12h&state=waiting", [WAITS]),
        ("start=12h&kind=notebook", [NOTEBOOK]),
    ],
)  # fmt: skip
def test_the_page_the_files_and_the_api_have_the_jobs_of_a_view(
    client: TestClient, query: str, found: list[str]
) -> None:
    query += "" if "sort" in query else "&sort=name"
    assert ids(client, query) == listed(client, query) == found
    rows = list(csv.DictReader(io.StringIO(client.get(f"/jobs.csv?{query}").text)))
    table = pq.read_table(io.BytesIO(client.get(f"/jobs.parquet?{query}").content))
    assert [row["id"] for row in rows] == table["id"].to_pylist() == found
    assert [Decimal(row["allocated_gpu_hours"]) for row in rows] == table["allocated_gpu_hours"].to_pylist()


def test_a_search_without_a_hit_names_its_span_and_leads_to_the_longest_one(client: TestClient) -> None:
    headers = {**bearer("all"), **PAGE}
    assert "Search the longest span" not in client.get("/jobs?start=1h&search=train", headers=headers).text
    page = client.get("/jobs?start=1h&search=explore&state=ended&columns=team", headers=headers).text
    (name,) = re.findall(r"<title>Jobs, (.*?) ·", page)
    (empty,) = re.findall(r'<p class="empty">(.*?)</p>', page)
    assert name in empty
    longer, without = (unescape(one) for one in re.findall(r'href="([^"]*)"', empty))
    assert "search" not in without
    assert dict(parse_qsl(urlsplit(longer).query)).items() >= {"search": "explore", "state": "ended"}.items()
    found = client.get(longer, headers=headers)
    assert jobs_on(found.text) == [NOTEBOOK]
    nothing = client.get(longer.replace("explore", "nobody"), headers=headers).text
    assert len(re.findall("href", re.findall(r'<p class="empty">(.*?)</p>', nothing)[0])) == 1, (
        "there is no longer span"
    )


def test_a_part_of_a_job_that_a_filter_excludes_does_not_count_and_its_state_is_that_of_the_job(
    client: TestClient,
) -> None:
    (train,) = client.get("/v1/jobs?start=12h&where.gpu=GPU-1").json()["jobs"]
    assert (train["id"], train["state"]) == (TRAIN, "running")
    hours = client.get("/v1/usage?start=12h&by=hour&where.job=Job/train").json()["lines"]
    name = hours[0]["key"]["hour"]
    (part,) = [one for one in client.get(f"/v1/jobs?start=12h&where.hour={quote(name)}").json()["jobs"]
               if one["id"] == TRAIN]  # fmt: skip
    assert part["state"] == "running", "it runs now, though not in that hour"
    assert part["accounts_gpu_us"]["busy"] + part["accounts_gpu_us"]["allocated_idle"] == HOUR_MS * 1000


def test_the_list_is_sorted_by_every_column_both_ways(client: TestClient) -> None:
    for order in get_args(JobOrder):
        query = f"start=12h&sort={order}"
        first = str(JOB_ORDERS.read(order).turned)
        one, other = ids(client, query), ids(client, f"start=12h&sort={first}")
        assert sorted(one) == sorted(other) == sorted([NOTEBOOK, WAITS, TRAIN])
        columns = f"&columns={order}" if order in COLUMNS else ""
        page = client.get(f"/jobs?{query}{columns}", headers=PAGE).text
        assert jobs_on(page) == one
        assert page.count("aria-sort=") == 1
        following = re.search(r'aria-sort="[a-z]+"><a href="[^"?]*[?]([^"]+)"', page)
        assert following is not None
        assert listed(client, unescape(following[1])) == other


def test_what_is_unknown_is_last_whichever_way_the_list_is_sorted(client: TestClient) -> None:
    for more in (":asc", ":desc"):
        assert ids(client, f"start=12h&sort=utilisation{more}")[-1] == WAITS
        assert ids(client, f"start=12h&sort=ended{more}")[0] == NOTEBOOK


def test_a_view_has_the_columns_that_are_chosen_on_the_page_and_in_its_files(client: TestClient) -> None:
    query = "start=12h&columns=queue,cost,ended"
    page = client.get(f"/jobs?{query}", headers=PAGE).text
    heads = re.findall(r"<th[^>]*><a href=\"/jobs[^\"]*\">([^<]*)", page)
    assert [head.rstrip(" ↓↑") for head in heads] == ["Job", "Queue", "Cost", "Ended"]
    rows = list(csv.DictReader(io.StringIO(client.get(f"/jobs.csv?{query}").text)))
    names = ["id", "cluster", "namespace", "job", "queues", "cost", "unpriced_gpu_hours", "ended", "currency"]
    assert list(rows[0]) == names
    table = pq.read_table(io.BytesIO(client.get(f"/jobs.parquet?{query}").content))
    assert table.column_names == names
    (ended,) = [row for row in table.to_pylist() if row["id"] == NOTEBOOK]
    assert round(ended["ended"].timestamp() * 1000) == NOW - 5 * HOUR_MS
    assert (ended["cost"], ended["currency"]) == (8, "EUR")
    every = ",".join(COLUMNS)
    assert client.get(f"/jobs?start=12h&columns={every}", headers=PAGE).status_code == 200
    assert client.get(f"/jobs.csv?start=12h&columns={every}").status_code == 200
    assert client.get(f"/jobs.parquet?start=12h&columns={every}").status_code == 200


def test_the_form_leads_to_the_address_of_the_view(client: TestClient) -> None:
    sent = client.get(
        "/jobs?start=12h&end=&timezone=&state=&kind=notebook&search=&add=node&value=n2&columns=team&columns=cost",
        headers=PAGE, follow_redirects=False,
    )  # fmt: skip
    assert sent.status_code == 303
    assert sent.headers["location"] == "/jobs?start=12h&where.node=n2&kind=notebook&columns=team,cost"
    assert listed(client, sent.headers["location"].partition("?")[2]) == [NOTEBOOK]


def test_a_team_sees_its_own_jobs_alone(service: Service) -> None:
    client = client_of(service)
    client.headers.update(bearer("lead"))
    assert listed(client, "start=12h&sort=name") == ids(client, "start=12h") == [WAITS, TRAIN]
    assert "explore" not in client.get("/jobs.csv?start=12h").text
    assert ids(client, "start=12h&where.node=n2") == listed(client, "start=12h&where.node=n2") == []
    for path in ("/jobs", "/jobs.csv", "/jobs.parquet", "/v1/jobs"):
        assert client.get(f"{path}?start=12h&where.team=nlp").status_code == 403


@pytest.mark.parametrize(
    "query",
    [
        "columns=x", "sort=x", "sort=-cost", "sort=cost:up", "sort=:asc",
        "state=x", "kind=pet", "where.x=1", "where.label:other=1", "page=0",
        "start=2026-11-02&end=2026-11-01", "start=nonsense", "timezone=Mars/Base", "days=7", "month=2026-11",
        "by=team", "compare=perhaps", "search=" + "x" * 254, "start=9999d", "columns=" + "cost," * 41,
    ],
)  # fmt: skip
def test_a_view_that_there_is_not_is_refused(client: TestClient, query: str) -> None:
    for path in ("/jobs", "/jobs.csv", "/jobs.parquet"):
        assert client.get(f"{path}?{query}").status_code in (422, 501), path


def test_a_view_that_is_too_large_is_refused(tmp_path: Path, clock: VirtualClock) -> None:
    with Service(settings_in(tmp_path, limits={"question_gpu_hours": 10}), clock) as running:
        deliver(running.ledger, NOW_MS, batch(held(10, 10, "GPU-1", "vision"), cluster="prod", node="n1"))
        client = client_of(running)
        for path in ("/jobs", "/jobs.csv", "/jobs.parquet", "/v1/jobs"):
            assert client.get(f"{path}?start=9h").status_code == 422, path
            assert client.get(f"{path}?start=1h").status_code == 200, path


def test_a_view_is_saved_by_its_name(tmp_path: Path, clock: VirtualClock) -> None:
    address = "/jobs?start=7d&where.team=vision&sort=idle"
    with Service(settings_in(tmp_path), clock) as running:
        client = client_of(running)
        form = {"name": "idle ones", "address": address}
        assert client.post("/views", data=form, follow_redirects=False).headers["location"] == address
        assert address in unescape(client.get("/jobs", headers=PAGE).text)
        assert client.post("/views", data=form | {"address": "/month"}).status_code == 422


def test_the_command_has_the_jobs_columns_and_file_of_a_view(
    service: Service, client: TestClient, tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    token = tmp_path / "token"
    token.write_text(next(iter(bearer("all").values())).removeprefix("Bearer "))

    def run(*options: str) -> bytes:
        with serve(service.app, "127.0.0.1", 0) as url:
            code = main(
                [
                    "jobs",
                    "--url",
                    url,
                    "--token-file",
                    str(token),
                    *(() if "--start" in options else ("--start", "12h")),
                    *options,
                ]
            )
        out, err = capsysbinary.readouterr()
        assert code == 0, err
        return out

    query = "start=12h&where.label:project=vision-project&sort=gpu_hours:asc&columns=user,cost"
    options = ("--where", "label:project=vision-project", "--sort", "gpu_hours:asc", "--columns", "user,cost")
    rows = list(csv.DictReader(io.StringIO(run(*options, "--output", "csv").decode())))
    assert [row["id"] for row in rows] == ids(client, query.partition("&columns")[0]) == [WAITS, TRAIN]
    assert set(rows[0]) == {
        "id", "cluster", "namespace", "job", "users", "currency", "cost", "unpriced_gpu_hours",
    }  # fmt: skip
    assert rows == list(csv.DictReader(io.StringIO(client.get(f"/jobs.csv?{query}").text)))
    table = run(*options).decode()
    assert "vision-user" in table
    assert "waited" not in table
    assert run(*options, "--output", "parquet") == client.get(f"/jobs.parquet?{query}").content
    compared = run("--start", "5h", "--compare").decode()
    assert re.search(r"nlp/Notebook/explore .*4\.0 → 0\.0, −100\.0 %", compared), compared
    assert re.search(r"3 jobs, .* 9\.0 → 5\.0, −44\.4 %", compared)
    (row,) = csv.DictReader(
        io.StringIO(run("--start", "5h", "--compare", "--search", "expl", "--output", "csv").decode())
    )
    assert (row["allocated_gpu_hours"], row["allocated_gpu_hours_before"], row["cost_before"]) == (
        "0.000000000",
        "4.000000000",
        "8.000000000",
    )


def test_a_list_is_compared_with_the_span_before(client: TestClient) -> None:
    """Of the last five hours vision held five and nlp none; of the five before vision held five and nlp four."""
    view = "start=5h&sort=name&compare=true"
    answer = client.get(f"/v1/jobs?{view}").json()
    assert [job["id"] for job in answer["jobs"]] == listed(client, view) == [NOTEBOOK, WAITS, TRAIN]
    held_us = [[sum(of["accounts_gpu_us"].values()) for of in (job, job["before"])] for job in answer["jobs"]]
    assert held_us == [[0, 4 * US_PER_HOUR], [0, 0], [5 * US_PER_HOUR, 5 * US_PER_HOUR]]
    notebook, _, train = answer["jobs"]
    assert (Decimal(notebook["before"]["cost"]), Decimal(train["before"]["cost"])) == (8, 10)
    assert (notebook["state"], notebook["teams"], Decimal(notebook["cost"])) == ("ended", ["nlp"], 0)
    before = answer["before"]
    assert (before["start_ms"], before["end_ms"]) == (NOW - 10 * HOUR_MS, NOW - 5 * HOUR_MS)
    assert (answer["total_gpu_us"], before["total_gpu_us"]) == (5 * US_PER_HOUR, 9 * US_PER_HOUR)
    assert (Decimal(answer["total_cost"]), Decimal(before["total_cost"])) == (10, 18)
    plain = client.get("/v1/jobs?start=5h&sort=name").json()
    assert "before" not in plain
    assert all("before" not in job for job in plain["jobs"])
    rows = {row["id"]: row for row in csv.DictReader(io.StringIO(client.get(f"/jobs.csv?{view}").text))}
    assert [Decimal(rows[NOTEBOOK][f"allocated_gpu_hours{which}"]) for which in ("", "_before")] == [0, 4]
    assert [Decimal(rows[TRAIN][f"cost{which}"]) for which in ("", "_before")] == [10, 10]
    table = pq.read_table(io.BytesIO(client.get(f"/jobs.parquet?{view}").content))
    assert table["allocated_gpu_hours_before"].to_pylist() == [4, 0, 5]
    page = client.get(f"/jobs?{view}", headers=PAGE).text
    of_notebook = page[page.index("explore</a>") :].partition("</tr>")[0]
    assert "before 4.0" in of_notebook
    assert "before 8.00" in of_notebook
    assert "before 18.00, −44.4 %" in page[page.index("<tfoot>") :], "the total"
    running = client.get(f"/v1/jobs?{view}&state=running").json()
    assert running["before"]["total_gpu_us"] == 5 * US_PER_HOUR, "of the jobs that are listed"


def test_the_list_says_how_many_of_its_jobs_held_a_gpu(client: TestClient) -> None:
    """A report counts those alone."""
    answer = client.get("/v1/jobs?start=12h").json()
    held = [job for job in answer["jobs"] if any(job["accounts_gpu_us"].values())]
    assert answer["held_count"] == len(held) < answer["count"]
    page = client.get("/jobs?start=12h", headers=PAGE).text
    assert f"{len(held)} held a GPU" in page


@pytest.mark.parametrize("path", ["/jobs", "/nodes", "/explore"])
def test_links_to_files_and_the_api_stay_while_time_passes(client: TestClient, path: str) -> None:
    page = client.get(f"{path}?start=5h", headers=PAGE).text
    assert "moves with time" in page
    links = [unescape(link) for link in re.findall(r'href="([^"]*)"', page)]
    kept = [link for link in links if link.startswith(("/v1/", f"{path}.csv", f"{path}.parquet"))]
    assert len(kept) > 2
    for link in kept:
        query = dict(parse_qsl(urlsplit(link).query))
        assert query["start"].endswith("Z"), link
        assert query["end"].endswith("Z"), link
    (fixed,) = re.findall(r'href="([^"]*)">The address of this span', page)
    assert "moves with time" not in client.get(unescape(fixed), headers=PAGE).text


def test_a_list_is_compared_with_nothing_if_nothing_is_known_of_the_span_before(client: TestClient) -> None:
    view = "start=10h&end=2026-11-01T12:00:00Z&compare=true"
    answer = client.get(f"/v1/jobs?{view}").json()
    assert [answer["before"][name] for name in ("total_gpu_us", "total_cost")] == [None, None]
    assert all("before" not in job for job in answer["jobs"])
    assert "before 0" not in client.get(f"/jobs?{view}", headers=PAGE).text
    row = next(csv.DictReader(io.StringIO(client.get(f"/jobs.csv?{view}").text)))
    assert row["allocated_gpu_hours_before"] == row["cost_before"] == ""


@pytest.fixture
def silent_before(start_service: StartService) -> TestClient:
    """In the cluster prod vision held a GPU for ten hours; of edge, where nlp holds one, nothing is known before the
    last five."""
    running, _ = start_service(prices=price_book_text(H100=2), tokens="tokens:\n" + token_entry("all", "admin"))
    deliver(
        running.ledger, NOW_MS, batch(held(10, 10, "GPU-1", "vision"), cluster="prod", node="n1"),
        batch(held(5, 5, "GPU-2", "nlp"), cluster="edge", node="n2"),
    )  # fmt: skip
    client = client_of(running)
    client.headers.update(bearer("all"))
    return client


def test_jobs_and_nodes_of_a_cluster_of_which_nothing_is_known_before_are_not_compared_with_zero(
    silent_before: TestClient,
) -> None:
    view = "start=5h&compare=true"
    jobs = {job["cluster"]: job for job in silent_before.get(f"/v1/jobs?{view}").json()["jobs"]}
    nodes = {node["cluster"]: node for node in silent_before.get(f"/v1/nodes?{view}").json()["lines"]}
    assert sum(jobs["prod"]["before"]["accounts_gpu_us"].values()) == 5 * US_PER_HOUR
    assert "before" not in jobs["edge"]
    assert "before_gpu_us" not in nodes["edge"]
    for path in ("jobs", "nodes"):
        rows = csv.DictReader(io.StringIO(silent_before.get(f"/{path}.csv?{view}").text))
        assert {row["cluster"]: row["allocated_gpu_hours_before"] for row in rows}["edge"] == ""
        only = f"{view}&where.cluster=edge"
        assert "before 0" not in silent_before.get(f"/{path}?{only}", headers=PAGE).text
        assert silent_before.get(f"/v1/{path}?{only}").json()["before"]["total_gpu_us"] is None
    assert silent_before.get(f"/v1/jobs?{view}&where.cluster=edge").json()["before"]["total_cost"] is None
    for explored in (f"{view}&by=cluster", f"{view}&by=team,cluster", f"{view}&by=team&where.cluster=edge"):
        rows = csv.DictReader(io.StringIO(silent_before.get(f"/explore.csv?{explored}").text))
        of_edge = [row for row in rows if row.get("cluster") == "edge" or "cluster" not in row]
        assert of_edge
        assert {row["allocated_gpu_hours_before"] for row in of_edge} == {""}, explored
        page = silent_before.get(f"/explore?{explored}", headers=PAGE).text
        assert "before 0.0," not in page.partition("<tbody>")[2]
