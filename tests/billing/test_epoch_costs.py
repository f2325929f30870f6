"""Costs of epochs: together with the rest they are the job's cost, exactly, whatever the order of reports and the
prices."""

from __future__ import annotations

from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from accountant.billing.job_costs import epoch_lines, job, list_jobs, only_job
from accountant.ledger.protocols import EpochReport, JobKey
from accountant.prices.price_book import PriceBook, load
from accountant.storage.duckdb_ledger import DuckLedger, open_ledger
from gputally.base.clock import VirtualClock
from gputally.base.money import exact_sum
from tests.usage_records import batch, deliver, interval, pod_facts, pod_holder

START = 1_790_812_800_000  # 2026-10-01T00:00:00Z
MINUTE = 60_000
SPAN = 180 * MINUTE
KEY = JobKey("prod", "vision", "Job/train")

HEAD = "schema: 1\ncurrency: EUR\n"
ROW = (
    "  - {{id: {id}, model: H100, price: {price}, per: gpu-hour, {dates}, source: s, as_of: 2026-01-01, basis: gpu-only"
    "{more}}}\n"
)
BOOKS = {
    "one price": HEAD + "rows:\n" + ROW.format(id="a", price="2.345678", dates="valid_from: 2026-01-01", more=""),
    "a price that changes inside an hour": HEAD + "rows:\n"
    + ROW.format(id="a", price="1.1", dates="valid_from: 2026-01-01, valid_to: '2026-10-01T01:20:00+00:00'", more="")
    + ROW.format(id="b", price="3.3", dates="valid_from: '2026-10-01T01:20:00+00:00'", more=""),
    "a commitment for one of two GPUs": HEAD
    + "commitments:\n  - {id: c, gpus: 1, owner: platform}\nrows:\n"
    + ROW.format(id="a", price="4", dates="valid_from: 2026-01-01", more="")
    + ROW.format(id="r", price="1", dates="valid_from: 2026-01-01", more=", commitment: c"),
    "nothing has a price": HEAD + "rows:\n"
    + ROW.format(id="a", price="4", dates="valid_from: 2026-01-01", more="").replace("H100", "A100"),
}  # fmt: skip


PODS = {"a": "train", "b": "other"}
"""The job of each pod."""


@pytest.fixture(scope="module")
def ledger(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DuckLedger]:
    """Two GPUs for three hours: the job holds one throughout and the other at times; another job holds the rest."""
    opened = open_ledger(tmp_path_factory.mktemp("epochs") / "ledger.duckdb", VirtualClock(START + SPAN))
    facts = [pod_facts(name, START, namespace="vision", workload=f"Job/{job}") for name, job in PODS.items()]
    rows = []
    for minute in range(SPAN // MINUTE):
        busy_us = (minute * 977) % 60_001 * 1000
        for gpu in range(2):
            holder = pod_holder("a" if gpu == 0 or minute % 7 < 3 else "b", "vision")
            rows.append(interval(START + minute * MINUTE, f"g{gpu}", holder, span_ms=MINUTE, busy_us=busy_us))
    deliver(opened, START + SPAN, batch(rows, facts, cluster="prod"))
    yield opened
    opened.close()


def book(text: str, folder: Path) -> PriceBook:
    place = folder / "prices.yaml"
    place.write_text(text)
    return load(place)


@settings(max_examples=10, suppress_health_check=list(HealthCheck))
@given(
    instants=st.lists(st.tuples(st.integers(0, 40), st.integers(-5, SPAN + 5)), max_size=12),
    named=st.sampled_from(sorted(BOOKS)),
    length=st.integers(1, SPAN),
)
def test_epochs_and_rest_are_the_job(ledger, tmp_path, instants, named, length):
    prices = book(BOOKS[named], tmp_path)
    reports = [EpochReport(KEY, epoch, START + at, "w") for epoch, at in instants]
    span = START, START + length
    with ledger.moment() as moment:
        listed = list_jobs(moment, prices, *span, span[1])
        (whole,) = listed.built([one for one in listed.figures if one.key == KEY])
        lines = epoch_lines(moment, prices, reports, span, only_job(KEY), "UTC")
        shuffled = epoch_lines(moment, prices, reports[::-1], span, only_job(KEY), "UTC")
    assert shuffled == lines, "the order of reports decides nothing"
    edges, parts = zip(*lines, strict=True)
    assert (edges[0].start_ms, edges[-1].end_ms) == span
    assert sum(part.gpu_us for stretch in parts for part in stretch) == whole.accounts_gpu_us.allocated
    known = [part.cost for stretch in parts for part in stretch if part.cost is not None]
    if whole.cost is None:
        assert known == []
    else:
        assert exact_sum(known) == whole.cost


def test_a_price_change_between_two_epochs_is_theirs(ledger, tmp_path):
    """80 minutes at 1.1, then 40 at 3.3; the job holds one GPU, and another for 3 of every 7 minutes."""
    prices = book(BOOKS["a price that changes inside an hour"], tmp_path)
    reports = [EpochReport(KEY, n, START + at * MINUTE, "w") for n, at in ((1, 80), (2, 120))]
    ledger.report_epochs(reports, START + SPAN)
    with ledger.moment() as moment:
        found = job(moment, prices, KEY, (START, START + SPAN), START + SPAN)
    assert found is not None
    held = [sum(2 if m % 7 < 3 else 1 for m in range(a, b)) for a, b in ((0, 80), (80, 120), (120, 180))]
    assert [line.gpu_us for line in found.epochs] == [minutes * MINUTE * 1000 for minutes in held]
    for line, minutes, price in zip(found.epochs, held, ("1.1", "3.3", "3.3"), strict=True):
        assert line.cost is not None
        assert abs(line.cost - Decimal(price) * minutes / 60) < Decimal("1e-7")
    assert exact_sum(line.cost or Decimal(0) for line in found.epochs) == found.job.cost
    assert exact_sum(part.cost or Decimal(0) for part in found.parts) == found.job.cost


def test_ids_of_jobs_lead_back():
    for key in (KEY, JobKey("a.b", "", "Pod/x y"), JobKey("c~d", "n", "Weird=Kind/näme/with~all"), JobKey("", "", "X")):
        assert JobKey.parse(key.id) == key
        assert key.id.isascii()
        assert not set(key.id) & set("/%?# ")
    for text in ("", "a~b~c", "a~b~c~d~e", "a~b~c~d e", "a~b~c~=ZZ", "a~b~c~=61", "a~b~c~=FF", "a~b~c~ü"):
        with pytest.raises(ValueError, match="not the id of a job"):
            JobKey.parse(text)
