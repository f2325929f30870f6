"""The pages of jobs and nodes, on the real ledger: what they show adds up, and names are nothing but text."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import Any
from urllib.parse import unquote
from zoneinfo import ZoneInfo

import pytest
from starlette.testclient import TestClient

from accountant.billing.job_costs import Where
from accountant.composition import Service
from accountant.core.settings import Settings
from accountant.ledger.protocols import JobKey
from accountant.web import page_rows
from accountant.web.job_and_node_pages import MOST_STRIPS, cells, timeline, timeline_svg
from accountant.wire.usage_cost_and_job_models import Accounts, Dimension, UsageLine
from agent.wire import PodFacts
from tests import fresh
from tests.http.readers import EVIL, read
from tests.price_books import price_book_text
from tests.usage_records import batch, interval, pod_facts, pod_holder

MINUTE_MS = 60_000
HOUR_MS = 60 * MINUTE_MS
HOUR_US = 3_600_000_000
PAGE = {"Accept": "text/html"}


@pytest.fixture
def house(request, tmp_path, clock, kit):
    """Half an hour of one GPU held by a job with an evil name, and a pod that waits. param: the price of its hour."""
    begin = kit.now_ms - 40 * MINUTE_MS
    price = getattr(request, "param", "2.40")
    (tmp_path / "prices.yaml").write_text(price_book_text(H100=f"'{price}'"))
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
    settings = Settings(data=fresh.data(tmp_path / "data"), auth="off", linger_ms=0, prices=tmp_path / "prices.yaml")
    with Service(settings, clock) as service:
        client = TestClient(service.app, base_url="http://127.0.0.1", headers=PAGE)
        one = batch(rows, facts, cluster="prod", node="node-1")
        assert client.post("/v1/usage", content=kit.encoded(one)).status_code == 200
        yield client


JOB = JobKey("prod", EVIL, f"Job/{EVIL}")


def test_the_list_leads_to_the_job_and_the_job_adds_up(house):
    listed = read(house.get("/jobs").text)
    links = [unquote(value) for tag, name, value in listed.attributes if tag == "a" and name == "href"]
    assert f"/job/{JOB.id}" in links
    page = read(house.get(f"/job/{JOB.id}").text)
    text = " ".join(page.texts)
    assert "script" not in page.tags
    assert "1.20" in text, "half an hour at 2.40"
    assert "75.0 %" in text
    assert text.count(EVIL) > 2
    assert "No preemption of it, or for it, was decided" in text


@pytest.mark.parametrize(("house", "price"), [("0", "0.00"), ("0.000000001", "0.000000001")], indirect=["house"])
def test_who_holds_a_gpu_that_costs_nothing_holds_it(house, price):
    text = " ".join(read(house.get(f"/job/{JOB.id}").text).texts)
    assert "0.00 an hour now" in text
    assert "1 GPUs now" in text or "1.0 GPUs now" in text
    assert "holds nothing" not in text
    assert price in text


@pytest.mark.parametrize("page", ["/", f"/job/{JOB.id}", "/month/2026-11", "/month/2026-11/lines?by=queue"])
def test_what_is_in_no_queue_is_called_so(house, page):
    text = " ".join(read(house.get(page).text).texts)
    assert "no queue" in text.lower()
    assert "__" not in text


def test_a_preemption_of_the_job_is_on_its_page_and_no_other(house, kit):
    common = {
        "at_ms": kit.now_ms - 1, "target": "kai", "mode": "enforce", "policy_version": "p", "kind": "preemption",
    }  # fmt: skip
    decisions = [
        {
            "id": "1",
            "at_ms": kit.now_ms - 1,
            "subject": f"Job/{EVIL}/{EVIL}",
            "reason": "vision gets its own",
            **common,
        },
        {"id": "2", "subject": f"Job/other/{EVIL}", "reason": "somebody else's", **common},
    ]
    assert house.post("/v1/decisions", json=decisions).status_code == 200
    text = house.get(f"/job/{JOB.id}").text
    assert "vision gets its own" in text
    assert "somebody else" not in text


def test_a_job_whose_name_begins_alike_keeps_its_preemptions_to_itself(house, kit):
    common = {"at_ms": kit.now_ms - 1, "target": "kai", "mode": "enforce", "policy_version": "p", "kind": "preemption"}
    decisions = [
        {"id": "1", "subject": f"Job/{EVIL}/{EVIL}", "reason": "its very own", **common},
        {"id": "2", "subject": f"Job/{EVIL}/{EVIL}ing", "reason": "the other's", **common},
        {"id": "3", "subject": f"PodGroup/{EVIL}/{EVIL}-2", "reason": "a sibling's victim", **common,
         "inputs": {"pods": [f"{EVIL}/{EVIL}-2-abc"]}},
    ]  # fmt: skip
    assert house.post("/v1/decisions", json=decisions).status_code == 200
    text = house.get(f"/job/{JOB.id}").text
    assert "its very own" in text
    assert "the other" not in text
    assert "a sibling" not in text


def test_a_node_shows_its_gpus_and_who_held_them(house):
    listed = house.get("/nodes")
    assert 'href="/node/prod/node-1?days=7"' in listed.text
    page = read(house.get("/node/prod/node-1?days=1").text)
    text = " ".join(page.texts)
    assert "GPU-a1b2" in text
    assert "0.4" in text
    assert house.get("/node/prod/nobody").status_code == 404
    assert house.get("/node/prod/node-1?days=0").status_code == 422


def test_the_overview_says_who_waits_and_what_an_hour_costs(house):
    page = read(house.get("/").text)
    text = " ".join(page.texts)
    assert "Nobody waits for a GPU" not in text
    assert "Cost of an hour" in text
    assert "2.40" in text, "one GPU, held for the whole quarter"
    (job,) = {value for tag, name, value in page.attributes if tag == "a" and name == "href" and "/job/" in value}
    assert house.get(job).status_code == 200


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/job/nonsense", 422),
        ("/job/prod~vision~Job~nobody", 404),
        ("/jobs?month=2027-01", 422),
        ("/jobs?state=x", 422),
    ],
)
def test_what_is_not_there_is_said(house, path, status):
    assert house.get(path).status_code == status


class Hours:
    """Usage of some GPUs by the hour: what timeline asks."""

    def __init__(self, lines: Sequence[tuple[str, int, Accounts]]) -> None:
        self.lines = lines
        self.asked = 0

    def usage(
        self, start_ms: int, end_ms: int, by: Sequence[Dimension], where: Where | None = None, timezone: str = "UTC"
    ) -> list[UsageLine]:
        (found,) = self.usage_between((start_ms, end_ms), by, where, timezone)
        return found

    def usage_between(
        self, edges: Sequence[int], by: Sequence[Dimension], where: Where | None = None, timezone: str = "UTC"
    ) -> list[list[UsageLine]]:
        self.asked += 1
        found: list[list[UsageLine]] = []
        for start, end in pairwise(edges):
            of_gpus: dict[str, list[Accounts]] = {}
            for gpu, at_ms, accounts in self.lines:
                if start <= at_ms < end and gpu in (where or {}).get("gpu", (gpu,)):
                    of_gpus.setdefault(gpu, []).append(accounts)
            found.append(
                [
                    UsageLine(
                        key={"node": "n", "gpu": gpu, "gpu_model": "H100"}, accounts_gpu_us=page_rows.added(several)
                    )
                    for gpu, several in sorted(of_gpus.items())
                ]
            )
        return found

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
    def asked(**requests: str) -> int:
        named = {name.replace("_", "/"): amount for name, amount in requests.items()}
        return page_rows.requested_gpus(
            PodFacts(seq=1, uid="u", namespace="n", name="p", node="", requests=named, observed_ms=0)
        )

    assert asked(**{"nvidia.com_gpu": "8", "cpu": "4"}) == 8
    assert asked(**{"nvidia.com_mig-1g.10gb": "2"}) == 2
    assert asked(**{"nvidia.com_gpu": "many"}) == 1
    assert asked(cpu="4") == 0


def _ms(at: datetime) -> int:
    return round(at.timestamp()) * 1000
