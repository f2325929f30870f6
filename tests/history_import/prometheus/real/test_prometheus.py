"""Imports a month without an agent from a real Prometheus 3: GPU-hours within 1 % of the truth, for both generations of
labels. An interrupted import continues, and a repeated one adds nothing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from accountant.__main__ import main
from accountant.core.periods import utc
from accountant.histories.prometheus.chunk_queries import PrometheusFailed, PrometheusHistory
from accountant.history_import import import_run
from accountant.history_import.import_run import ImportTarget
from fairshare.simulator.simulation_model import Outage
from gputally.base.accountant_connection import Unanswered
from gputally.base.clock import VirtualClock
from gputally.base.prometheus_api import Prometheus
from gputally.base.units import MS_PER_HOUR
from gputally.demo.ground_truth import GroundTruth
from gputally.demo.options import DemoOptions
from gputally.demo.scenario import START_MS, build
from tests.history_import.conftest import Books, Cut
from tests.history_import.exporter_samples import Scraped, openmetrics
from tests.moments import present
from tests.real.prometheus import backfill, prometheus
from tests.usage_records import batch, deliver, interval

pytestmark = [pytest.mark.real, pytest.mark.timeout(300)]

HOURS = 10
END_MS = START_MS + HOURS * MS_PER_HOUR
HOUR_US = 3_600_000_000
CLUSTERS = {"old": 60_000, "new": 30_000}
"""The generation of labels, and the scrape interval in milliseconds."""


@dataclass(frozen=True)
class Past:
    url: str
    truth: GroundTruth
    gpu_outages: tuple[Outage, ...]


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock(END_MS + 24 * MS_PER_HOUR)


@pytest.fixture(scope="module")
def past(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Past]:
    folder = tmp_path_factory.mktemp("past")
    scenario = build(DemoOptions(days=1))
    events = scenario.engine().events_until(END_MS)
    truth = GroundTruth(scenario.nodes, START_MS, 900_000)
    for event in events:
        truth.apply(event)
    truth.finish(END_MS)
    shown = [Scraped(scenario.nodes, name, name, scrape_ms) for name, scrape_ms in CLUSTERS.items()]  # type: ignore[arg-type]
    for one in shown:
        one.run(events, START_MS, END_MS)
    backfill(openmetrics(*shown), folder)
    with prometheus(folder) as server:
        begun = [one for one in scenario.outages if one.target == "gpu" and one.start_ms < END_MS]
        yield Past(server.url, truth, tuple(begun))


def imported(past: Past, books: Books, cluster: str) -> int:
    options = {
        "--start": utc(START_MS), "--end": utc(END_MS), "--match": f'cluster="{cluster}"', "--cluster": cluster,
    }  # fmt: skip
    words = [part for pair in options.items() for part in pair]
    return main(["import", "prometheus", past.url, *words, *books.by_admin.options])


@pytest.mark.parametrize("cluster", CLUSTERS)
def test_gpu_hours_are_those_that_happened(past, books, cluster, capsys):
    assert imported(past, books, cluster) == 0
    told = capsys.readouterr().out
    assert "GPU-hours of capacity" in told
    found = books.held(START_MS, END_MS, cluster)
    assert set(found) == set(past.truth.totals.teams)
    for team in past.truth.totals.teams:
        expected = past.truth.totals.held_us(team)
        assert found[team] == pytest.approx(expected, rel=0.01), team
    ledger = books.ledger
    assert present(ledger).imbalance(START_MS, END_MS).total_us == 0
    assert present(ledger).quarantined() == []
    (whole,) = present(ledger).usage((START_MS, END_MS), ()).lines()
    assert whole.accounts_gpu_us.total == 64 * HOURS * HOUR_US
    # A node that was not ready is down; that a single GPU was lost nobody recorded.
    lost = sum((END_MS if o.end_ms is None else min(o.end_ms, END_MS)) - o.start_ms for o in past.gpu_outages) * 1000
    assert whole.accounts_gpu_us.down == pytest.approx(past.truth.totals.accounts["down"] - lost, rel=0.01)
    # Busy time of what is not shared is known; of the truth it is what the exporter could see.
    assert whole.accounts_gpu_us.busy == pytest.approx(past.truth.totals.accounts["busy"], rel=0.03)
    # Nothing is sent twice.
    rows = len(present(ledger).acts("imported"))
    assert imported(past, books, cluster) == 0
    assert "was imported before" in capsys.readouterr().out
    assert books.held(START_MS, END_MS, cluster) == found
    assert len(present(ledger).acts("imported")) == rows


class LaterCut(Cut):
    left = 11


def test_an_import_that_was_cut_off_goes_on_and_agents_keep_what_they_metered(past, books):
    agent = "h100-1", START_MS + 5 * MS_PER_HOUR
    row = interval(agent[1], "GPU-h100-1-0", gpu_model="NVIDIA H100", busy_us=None, method="device")
    deliver(books.ledger, END_MS, batch([row], cluster="new", node=agent[0], epoch="0192-a"))
    history = PrometheusHistory(Prometheus(past.url, PrometheusFailed), match='cluster="new"')
    quiet = lambda *_: None  # noqa: E731
    wanted, chunk = (START_MS, START_MS + 6 * MS_PER_HOUR), 3 * MS_PER_HOUR

    broken = ImportTarget(books.by_admin.remote(LaterCut), "new", "prometheus", "p")
    with pytest.raises(Unanswered, match="network is gone"):
        import_run.run(broken, history.read, wanted, chunk, quiet)
    assert len(present(books.ledger).acts("imported")) == 1
    to = ImportTarget(books.by_admin.remote(), "new", "prometheus", "p")
    summary = import_run.run(to, history.read, wanted, chunk, quiet)
    assert (summary.before, summary.done) == (1, 1)
    assert summary.metered_us == 8 * HOUR_US // 4
    import_run.run(to, history.read, (wanted[0], wanted[1] + MS_PER_HOUR), chunk, quiet)
    assert import_run.run(to, history.read, (wanted[0], wanted[1] + MS_PER_HOUR), chunk, quiet).done == 0
    ledger = books.ledger
    assert present(ledger).quarantined() == []
    assert present(ledger).imbalance(START_MS, END_MS).total_us == 0
    (whole,) = present(ledger).usage((START_MS, wanted[1] + MS_PER_HOUR), ()).lines()
    # All that nobody imported is what the agent's node did not report of its other GPUs in its quarter-hour.
    assert whole.accounts_gpu_us.unmetered == 7 * HOUR_US // 4
    assert whole.accounts_gpu_us.total == 64 * 7 * HOUR_US
