"""gputally_job_cost and training_job_cost_usd: whole lives, bounded, gone some time after the end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.testclient import TestClient

from accountant.composition import Service
from accountant.core.settings import JobMetrics, Settings
from gputally.base.clock import VirtualClock
from tests import fresh
from tests.price_books import price_book_text
from tests.usage_records import batch, interval, pod_facts, pod_holder

NOW_MS = 1_793_534_400_000  # 2026-11-01T12:00:00Z
MINUTE = 60_000
BEGIN = NOW_MS - 60 * MINUTE
Series = dict[str, dict[tuple[str, ...], float]]
"""By name; the values of a series' labels in the order of the labels' names."""
Open = Callable[..., Callable[[], Series]]


@pytest.fixture
def scraped(tmp_path: Path, clock: VirtualClock) -> Iterator[Open]:
    """Three jobs of an hour on one, two and three GPUs; the first ended half an hour ago."""
    opened: list[Service] = []

    def build(currency: str = "USD", **metrics: object) -> Callable[[], Series]:
        (tmp_path / "prices.yaml").write_text(price_book_text(H100=6, currency=currency))
        chosen = Settings(
            data=fresh.data(tmp_path / "data"), auth="off", linger_ms=0, prices=tmp_path / "prices.yaml",
            job_metrics=JobMetrics.model_validate(metrics),
        )  # fmt: skip
        service = Service(chosen, clock)
        opened.append(service)
        facts, rows = [], []
        for job in range(1, 4):
            ended = BEGIN + 30 * MINUTE if job == 1 else None
            times = {"created_ms": BEGIN, "scheduled_ms": BEGIN, "started_ms": BEGIN, "ended_ms": ended}
            facts.append(pod_facts(f"p{job}", NOW_MS, namespace="vision", workload=f"Job/train-{job}", **times))
            until = NOW_MS if ended is None else ended
            for gpu in range(job):
                holder = pod_holder(f"p{job}", "vision")
                rows += [
                    interval(at, f"g{job}{gpu}", holder, span_ms=MINUTE, gpu_model="H100")
                    for at in range(BEGIN, until, MINUTE)
                ]
        one = batch(rows, facts, cluster="prod")
        service.ingest.submit(msgspec.json.encode(one)).result()

        def scrape() -> Series:
            text = TestClient(service.app, base_url="http://127.0.0.1").get("/metrics").text
            found: Series = {}
            for family in text_string_to_metric_families(text):
                if "job" in family.name:
                    found[family.name] = {tuple(s.labels[k] for k in sorted(s.labels)): s.value for s in family.samples}
            return found

        return scrape

    yield build
    for service in opened:
        service.close()


def test_running_and_just_ended_jobs_with_the_cost_of_their_lives(scraped: Open) -> None:
    found = scraped()()
    assert found == {
        "gputally_job_cost": {
            ("prod", "USD", "vision", "__unassigned__", "Job/train-1"): 3.0,
            ("prod", "USD", "vision", "__unassigned__", "Job/train-2"): 12.0,
            ("prod", "USD", "vision", "__unassigned__", "Job/train-3"): 18.0,
        },
        "gputally_job_series_omitted": {(): 0.0},
    }


def test_a_job_leaves_some_time_after_its_end(scraped: Open, clock: VirtualClock) -> None:
    scrape = scraped(keep="40m")
    assert len(scrape()["gputally_job_cost"]) == 3
    clock.advance(11 * MINUTE)
    assert [labels[4] for labels in scrape()["gputally_job_cost"]] == ["Job/train-2", "Job/train-3"]


def test_the_number_of_series_is_bounded_and_says_so(scraped: Open) -> None:
    found = scraped(most=1)()
    assert [labels[4] for labels in found["gputally_job_cost"]] == ["Job/train-3"], "what burns most stays"
    assert found["gputally_job_series_omitted"] == {(): 2.0}


def test_none_at_all(scraped: Open) -> None:
    assert scraped(most=0)() == {}


def test_the_name_others_use_is_opt_in_and_for_dollars(scraped: Open) -> None:
    found = scraped(training_job_cost_usd=True)()
    assert found["training_job_cost_usd"][("H100", "train-3", "vision", "__unassigned__")] == 18.0
    assert len(found["training_job_cost_usd"]) == 3


def test_a_euro_is_no_dollar(scraped: Open) -> None:
    found = scraped("EUR", training_job_cost_usd=True)()
    assert "training_job_cost_usd" not in found
    assert len(found["gputally_job_cost"]) == 3
