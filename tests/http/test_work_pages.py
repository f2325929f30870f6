"""The pages of jobs and nodes, on the real ledger: what they show adds up, and names are nothing but text."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from urllib.parse import unquote
from zoneinfo import ZoneInfo

import pytest
from starlette.testclient import TestClient

from accountant.progress import JobKey
from accountant.service import Service
from accountant.settings import Settings
from accountant.web import views
from accountant.web.timeline import MOST_STRIPS, drawn, timeline
from accountant.wire import Accounts, UsageLine
from agent.wire import Holder, PodFacts, UsageInterval
from tests import fresh
from tests.http.test_pages import EVIL, read

MINUTE_MS = 60_000
HOUR_US = 3_600_000_000
PAGE = {"Accept": "text/html"}


@pytest.fixture
def house(tmp_path, clock, kit):
    """Half an hour of one GPU held by a job with an evil name, and a pod that waits."""
    begin = kit.now_ms - 40 * MINUTE_MS
    (tmp_path / "prices.yaml").write_text(
        "schema: 1\ncurrency: EUR\nrows:\n  - {id: h100, model: H100, price: 2.40, per: gpu-hour,"
        " valid_from: 2026-01-01, source: contract, as_of: 2026-01-01, basis: gpu-only}\n"
    )
    holder = Holder(kind="pod", uid="pod-1", namespace=EVIL, name=EVIL, container="main")
    facts = PodFacts(
        seq=1, uid="pod-1", namespace=EVIL, name=EVIL, node="node-1", workload=f"Job/{EVIL}", requests={},
        created_ms=begin, scheduled_ms=begin, started_ms=begin, observed_ms=begin,
    )  # fmt: skip
    waits = PodFacts(
        seq=2, uid="pod-2", namespace="vision", name="later", node="node-1", workload="Job/later", observed_ms=begin,
        requests={"nvidia.com/gpu": "3"}, created_ms=begin,
    )  # fmt: skip
    rows = tuple(
        UsageInterval(
            seq=3 + i, start_ms=begin + i * MINUTE_MS, end_ms=begin + (i + 1) * MINUTE_MS, gpu_uuid="GPU-a1b2-c3d4",
            gpu_model="NVIDIA H100 80GB HBM3", holder=holder, capacity_us=MINUTE_MS * 1000,
            allocated_us=MINUTE_MS * 1000, busy_us=MINUTE_MS * 750, method="simulated",
        )
        for i in range(30)
    )  # fmt: skip
    settings = Settings(data=fresh.data(tmp_path / "data"), auth="off", linger_ms=0, prices=tmp_path / "prices.yaml")
    with Service(settings, clock) as service:
        client = TestClient(service.app, base_url="http://127.0.0.1", headers=PAGE)
        batch = kit.batch(intervals=rows, facts=(facts, waits))
        assert client.post("/v1/usage", content=kit.encoded(batch)).status_code == 200
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


def line(gpu: str, at: datetime, **accounts: int) -> UsageLine:
    key = {"node": "n", "gpu": gpu, "gpu_model": "H100", "hour": f"{at:%Y-%m-%dT%H}"}
    return UsageLine(key=key, accounts_gpu_us=Accounts(**accounts))


def test_cells_grow_with_the_span_and_lose_nothing():
    start = datetime(2026, 10, 1, tzinfo=UTC)
    for hours in (1, 30, 95, 96, 200, 744, 2_000):
        lines = [line("GPU-1", start + timedelta(hours=n), busy=n + 1) for n in range(hours)]
        found = timeline(lines, _ms(start), _ms(start + timedelta(hours=hours)), ZoneInfo("UTC"))
        assert len(found.starts) <= 97
        assert sum(cell.busy for cell in found.strips[0].cells) == hours * (hours + 1) // 2
        assert found.strips[0].cells[0].busy == sum(range(1, min(found.hours, hours) + 1))


def test_the_busiest_of_many_gpus_are_shown_in_their_order():
    at = datetime(2026, 10, 1, tzinfo=UTC)
    lines = [line(f"GPU-{n:04}", at, busy=n) for n in range(40)]
    found = timeline(lines, _ms(at), _ms(at + timedelta(hours=1)), ZoneInfo("UTC"))
    assert (len(found.strips), found.more) == (MOST_STRIPS, 8)
    assert [strip.name for strip in found.strips] == [f"GPU-{n:04}" for n in range(8, 40)]


def test_a_name_cannot_break_out_of_the_drawing():
    at = datetime(2026, 10, 1, tzinfo=UTC)
    found = timeline([line(EVIL, at, busy=HOUR_US)], _ms(at), _ms(at + timedelta(hours=1)), ZoneInfo("UTC"))
    assert "<script" not in drawn(found, EVIL)


def test_devices_asked_for_are_counted():
    def asked(**requests: str) -> int:
        named = {name.replace("_", "/"): amount for name, amount in requests.items()}
        return views.gpus_asked(
            PodFacts(seq=1, uid="u", namespace="n", name="p", node="", requests=named, observed_ms=0)
        )

    assert asked(**{"nvidia.com_gpu": "8", "cpu": "4"}) == 8
    assert asked(**{"nvidia.com_mig-1g.10gb": "2"}) == 2
    assert asked(**{"nvidia.com_gpu": "many"}) == 1
    assert asked(cpu="4") == 0


def _ms(at: datetime) -> int:
    return round(at.timestamp()) * 1000
