"""The pages of jobs and nodes on a real ledger: figures add up, and names are only text."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from html import unescape
from itertools import pairwise
from typing import Any
from urllib.parse import unquote
from zoneinfo import ZoneInfo

import pytest

from accountant.billing.job_attempts import decisions_about_job, gangs_of
from accountant.ledger.protocols import JobKey
from accountant.ledger.usage import Usage, Where
from accountant.web.job_and_node_pages import MOST_STRIPS, cells, timeline, timeline_svg
from accountant.wire.policy_models import Decision
from accountant.wire.usage_cost_and_job_models import Accounts, Dimension
from gputally.base.gpu_resources import requested_devices
from tests.fakes.list_ledger import ListLedger, Row
from tests.http.conftest import HOUR_US, MINUTE_MS, NOW_MS, decision, encoded
from tests.http.page_parser import EVIL, read
from tests.price_books import price_book_text
from tests.usage_records import batch, interval, pod_facts, pod_holder

HOUR_MS = 60 * MINUTE_MS
PAGE = {"Accept": "text/html"}


@pytest.fixture
def client(request, start_service):
    """Half an hour of one GPU held by a job with a hostile name, and a pod that waits. param: the price of its hour."""
    begin = NOW_MS - 40 * MINUTE_MS
    price = getattr(request, "param", "2.40")
    holder = pod_holder(EVIL, EVIL, "pod-1", "main")
    facts = [
        pod_facts(
            EVIL, begin, namespace=EVIL, node="node-1", uid="pod-1", workload=f"Job/{EVIL}",
            created_ms=begin, scheduled_ms=begin, started_ms=begin,
        ),
        pod_facts(
            "later", begin, namespace="vision", node="node-1", uid="pod-2", workload="Job/later",
            requests={"nvidia.com/gpu": "3"}, created_ms=begin,
        ),
    ]  # fmt: skip
    rows = [
        interval(begin + i * MINUTE_MS, "GPU-a1b2-c3d4", holder, span_ms=MINUTE_MS, busy_us=MINUTE_MS * 750)
        for i in range(30)
    ]
    _, client = start_service(prices=price_book_text(H100=f"'{price}'"))
    client.headers.update(PAGE)
    one = batch(rows, facts, cluster="prod", node="node-1")
    assert client.post("/v1/usage", content=encoded(one)).status_code == 200
    return client


JOB = JobKey("prod", EVIL, f"Job/{EVIL}")


def test_the_list_leads_to_the_job_and_the_job_adds_up(client):
    listed = read(client.get("/jobs").text)
    links = [unquote(value) for tag, name, value in listed.attributes if tag == "a" and name == "href"]
    assert f"/job/{JOB.id}" in links
    page = read(client.get(f"/job/{JOB.id}").text)
    text = " ".join(page.texts)
    assert "script" not in page.tags
    assert "1.20" in text, "half an hour at 2.40"
    assert "75.0 %" in text
    assert text.count(EVIL) > 2
    assert "gputally decided no preemption of it" in text


@pytest.mark.parametrize(("client", "price"), [("0", "0.00"), ("0.000000001", "0.000000001")], indirect=["client"])
def test_who_holds_a_gpu_that_costs_nothing_holds_it(client, price):
    text = " ".join(read(client.get(f"/job/{JOB.id}").text).texts)
    assert "0.00 per hour now" in text
    assert "1 GPUs now" in text or "1.0 GPUs now" in text
    assert "holds nothing" not in text
    assert price in text


@pytest.mark.parametrize("page", ["/", f"/job/{JOB.id}", "/month/2026-11", "/month/2026-11/lines?by=queue"])
def test_what_is_in_no_queue_is_called_so(client, page):
    text = " ".join(read(client.get(page).text).texts)
    assert "no queue" in text.lower()
    assert "__" not in text


def test_a_preemption_of_the_job_is_on_its_page_and_no_other(client):
    """Also for names with a common beginning."""
    subjects = {
        f"Job/{EVIL}/{EVIL}": "its very own", f"Job/other/{EVIL}": "of another namespace",
        f"Job/{EVIL}/{EVIL}ing": "of a longer name", f"PodGroup/{EVIL}/{EVIL}-2": "of a sibling",
    }  # fmt: skip
    pods = {"pods": [f"{EVIL}/{EVIL}-2-abc"]}
    decisions = [
        decision(
            id=reason, kind="preemption", subject=subject, reason=reason,
            inputs=pods if subject.startswith("PodGroup") else {},
        )
        for subject, reason in subjects.items()
    ]  # fmt: skip
    assert client.post("/v1/decisions", json=decisions).status_code == 200
    text = client.get(f"/job/{JOB.id}").text
    assert [reason for reason in subjects.values() if reason in text] == ["its very own"]


def test_a_node_shows_its_gpus_and_who_held_them(client):
    listed = client.get("/nodes")
    assert 'href="/node/prod/node-1"' in listed.text
    page = read(client.get("/node/prod/node-1?days=1").text)
    text = " ".join(page.texts)
    assert "GPU-a1b2" in text
    assert "0.4" in text
    assert client.get("/node/prod/nobody").status_code == 404
    assert client.get("/node/prod/node-1?days=0").status_code == 422


def rows_of(client, path):
    answer = client.get(path)
    assert answer.status_code == 200, answer.text
    return list(csv.DictReader(io.StringIO(answer.text)))


def test_the_file_of_jobs_has_the_jobs_and_figures_of_the_view(client):
    listed = client.get("/v1/jobs?start=31d").json()["jobs"]
    rows = rows_of(client, "/jobs.csv?start=31d&columns=busy,cost,state,waited")
    assert {row["id"].lstrip("'") for row in rows} == {job["id"] for job in listed}
    (held,) = (row for row in rows if row["state"] != "waiting")
    assert Decimal(held["busy_gpu_hours"]) == Decimal("0.375")
    assert (Decimal(held["cost"]), held["currency"]) == (Decimal("1.2"), "EUR")
    (waits,) = rows_of(client, "/jobs.csv?start=31d&state=waiting")
    assert waits["job"] == "Job/later"
    assert Decimal(waits["waited_s"]) > 0
    assert rows_of(client, "/jobs.csv?start=31d&search=no+such+name") == []


def test_the_pages_of_the_jobs_lead_to_the_last_one(start_service):
    _, client = start_service()
    client.headers.update(PAGE)
    begin = NOW_MS - 40 * MINUTE_MS
    facts = [
        pod_facts(f"pod-{n}", begin, namespace="vision", uid=f"pod-{n}", workload=f"Job/job-{n}", created_ms=begin + n)
        for n in range(620)
    ]
    assert client.post("/v1/usage", content=encoded(batch([], facts, cluster="prod"))).status_code == 200
    address, shown = "/jobs?start=1d&sort=waited", []
    while address:
        page = client.get(address).text
        shown.append(re.findall(r'href="/job/([^"]+)"', page))
        following = re.search(r'href="([^"]+)" rel="next">next', page)
        address = following and unescape(following[1])
    assert [len(jobs) for jobs in shown] == [100] * 6 + [20]
    listed = [row["id"] for row in rows_of(client, "/jobs.csv?start=1d&sort=waited")]
    assert (
        [unquote(job) for jobs in shown for job in jobs] == listed == [f"prod~vision~Job~job-{n}" for n in range(620)]
    )
    assert re.findall(r'href="/job/([^"]+)"', client.get("/jobs?start=1d&sort=waited&page=9999").text) == shown[-1]


def test_the_overview_says_who_waits_and_what_an_hour_costs(client):
    page = read(client.get("/").text)
    text = " ".join(page.texts)
    assert "Nobody waits for a GPU" not in text
    assert "Cost per hour" in text
    assert "2.40" in text, "one GPU, held for the whole quarter"
    (job,) = {value for tag, name, value in page.attributes if tag == "a" and name == "href" and "/job/" in value}
    assert client.get(job).status_code == 200


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/job/nonsense", 422),
        ("/job/prod~vision~Job~nobody", 404),
        ("/jobs?start=2027-01-01", 422),
        ("/jobs?month=2026-11", 422),
        ("/jobs?state=x", 422),
    ],
)
def test_what_is_not_there_is_said(client, path, status):
    assert client.get(path).status_code == status


class Hours:
    """Usage of some GPUs by the hour, in the form that timeline queries."""

    def __init__(self, lines: Sequence[tuple[str, int, Accounts]]) -> None:
        self.lines = lines
        self.asked = 0

    def usage(
        self, edges: Sequence[int], by: Sequence[Dimension], where: Where | None = None, timezone: str = "UTC"
    ) -> Usage:
        self.asked += 1
        gpus = {gpu for gpu, _, _ in self.lines}
        rows = [
            Row(at_ms, at_ms + 1, accounts, {"node": "n", "gpu": gpu, "gpu_model": "H100"})
            for gpu, at_ms, accounts in self.lines
            if gpu in (where or {}).get("gpu", gpus)
        ]
        return ListLedger(rows).usage(edges, by, None, timezone)

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"{name} is not asked")


def test_cells_grow_with_the_span_and_lose_nothing():
    start = _ms(datetime(2026, 10, 1, tzinfo=UTC))
    for hours in (1, 30, 95, 96, 200, 744, 2_000):
        ledger = Hours([("GPU-1", start + n * HOUR_MS, Accounts(busy=n + 1)) for n in range(hours)])
        found, of_gpus = timeline(ledger, start, start + hours * HOUR_MS, {}, "UTC")
        assert len(found.starts) <= 97
        assert (
            sum(cell.busy for cell in found.strips[0].cells)
            == hours * (hours + 1) // 2
            == of_gpus[0].accounts_gpu_us.busy
        )
        assert found.strips[0].cells[0].busy == sum(range(1, min(found.hours, hours) + 1))
        assert ledger.asked == 2


@pytest.mark.parametrize(
    ("zone", "start", "hours"),
    [
        ("Europe/Berlin", datetime(2026, 10, 24, 20, 30, tzinfo=UTC), 12),
        ("Europe/Berlin", datetime(2026, 10, 23, tzinfo=UTC), 7 * 24),
        ("Europe/Berlin", datetime(2026, 3, 28, tzinfo=UTC), 3 * 24),
        ("Asia/Kathmandu", datetime(2026, 10, 1, 7, 10, tzinfo=UTC), 31 * 24),
        ("Australia/Lord_Howe", datetime(2026, 4, 3, tzinfo=UTC), 5 * 24),
    ],
)
def test_every_hour_is_in_the_cell_of_its_local_name(zone, start, hours):
    tz, begin = ZoneInfo(zone), _ms(start)
    cut = cells(begin, begin + hours * HOUR_MS, tz)
    assert (cut.edges[0], cut.edges[-1]) == (begin, begin + hours * HOUR_MS)
    assert list(cut.edges) == sorted(set(cut.edges))
    assert len(cut.places) == len(cut.edges) - 1
    for (low, high), place in zip(pairwise(cut.edges), cut.places, strict=True):
        for at in range(low, high, 15 * MINUTE_MS):
            local = datetime.fromtimestamp(at / 1000, tz).replace(tzinfo=None)
            ahead = local - cut.starts[place]
            assert timedelta(0) <= ahead < timedelta(hours=cut.hours) or place == len(cut.starts) - 1


def test_the_busiest_of_many_gpus_are_shown_in_their_order():
    at = _ms(datetime(2026, 10, 1, tzinfo=UTC))
    ledger = Hours([(f"GPU-{n:04}", at, Accounts(busy=n)) for n in range(40)])
    found, of_gpus = timeline(ledger, at, at + HOUR_MS, {}, "UTC")
    assert (len(found.strips), found.more, len(of_gpus)) == (MOST_STRIPS, 8, 40)
    assert [strip.name for strip in found.strips] == [f"GPU-{n:04}" for n in range(8, 40)]


def test_a_name_cannot_break_out_of_the_drawing():
    at = _ms(datetime(2026, 10, 1, tzinfo=UTC))
    found, _ = timeline(Hours([(EVIL, at, Accounts(busy=HOUR_US))]), at, at + HOUR_MS, {}, "UTC")
    assert "<script" not in timeline_svg(found, EVIL)


def test_devices_asked_for_are_counted():
    def asked(**requests: str) -> int | None:
        named = {name.replace("_", "/"): amount for name, amount in requests.items()}
        return requested_devices(named)

    assert asked(**{"nvidia.com_gpu": "8", "cpu": "4"}) == 8
    assert asked(**{"nvidia.com_mig-1g.10gb": "2"}) == 2
    assert asked(**{"nvidia.com_gpu": "many"}) == 1
    assert asked(**{"nvidia.com_gpu": "9" * 4_000}) == 1
    assert asked(**{"nvidia.com_gpu": "0"}) == 0
    assert asked(cpu="4") is None, "it asks by a claim or a label"
    limits = {"nvidia.com_gpumem": "8000", "nvidia.com_gpucores": "50", "nvidia.com_gpumem-percentage": "10"}
    assert asked(**{"nvidia.com_gpu": "1"}, **limits) == 1
    assert asked(**{"gpu.intel.com_i915": "1", "gpu.intel.com_millicores": "500", "gpu.intel.com_memory.max": "9"}) == 1


def _ms(at: datetime) -> int:
    return round(at.timestamp()) * 1000


KEY = JobKey("prod", "vision", "Job/train")
SIBLINGS = ("Job/train", "Job/train-2", "Job/training", "Job/other")


def decided(subject: str, *pods: str) -> Decision:
    return Decision(
        id=subject, at_ms=1, kind="preemption", target="kai", subject=subject, mode="enforce", reason="r",
        policy_version="p", inputs={"pods": list(pods)} if pods else {"verdict": {}},
    )  # fmt: skip


@pytest.mark.parametrize(
    ("subject", "pods", "mine"),
    [
        ("Job/vision/train", (), True),
        ("Workload/vision/train-5c2f1", (), True),
        ("PodGroup/vision/train-9d-1", ("vision/train-abcde",), True),
        ("PodGroup/vision/pg-train-7d0c", (), True),
        ("Workload/vision/job-train-5c2f1", (), True),
        ("Workload/vision/job-train-2-5c2f1", (), False),
        ("Job/vision/train-2", (), False),
        ("Workload/vision/train-2-77aa1", (), False),
        ("PodGroup/vision/train-x", ("vision/train-2-abcde",), False),
        ("Job/vision/training", (), False),
        ("Job/other/train", (), False),
    ],
)
def test_a_name_that_begins_alike_is_another_jobs(subject: str, pods: tuple[str, ...], mine: bool) -> None:
    found = decisions_about_job([decided(subject, *pods)], KEY, {"train-abcde"}, SIBLINGS)
    assert bool(found) is mine


def test_the_longer_name_has_its_own() -> None:
    key = JobKey("prod", "vision", "Job/train-2")
    everything = [decided("Job/vision/train"), decided("Workload/vision/train-2-77aa1"), decided("Job/vision/train-2")]
    found = decisions_about_job(everything, key, (), SIBLINGS)
    assert [one.subject for one in found] == ["Workload/vision/train-2-77aa1", "Job/vision/train-2"]
    assert gangs_of(key) == ("vision/train-2", "vision/pg-train-2", "vision/job-train-2")
