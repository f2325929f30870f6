"""Live panels on a real Prometheus that scrapes agents as in a cluster: every 30 s, with intervals of 60 s, an agent
that is replaced, and a second cluster whose nodes and queues have the same names.

An agent's counters grow by a whole interval at once; wherever a window's edges fall, a GPU counts as one GPU."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from zoneinfo import ZoneInfo

import pytest

from agent.core.readings import Allocation
from agent.metering.meter import Meter
from agent.metrics.exporter import AgentMetrics
from agent.simulation.simulated_node import H100, SimulatedNode, make_gpu
from agent.wire import Holder
from dashboards import lint
from dashboards.__main__ import DASHBOARDS
from tests.real.prometheus import Prometheus, backfill, prometheus
from tests.real.prometheus_history import Recorder

pytestmark = pytest.mark.real

T = 1_790_812_800_000
MINUTES = 40
SCRAPE_MS = 30_000
REPLACED_MS = 20 * 60_000
"""Time at which a new agent pod with another address takes over."""
PANELS = {
    f"{name}/{panel['title']}": panel
    for name, render in DASHBOARDS.items()
    for panel in lint.panels(json.loads(render()))
}


def metered(recorder: Recorder, cluster: str, first_scrape_ms: int) -> None:
    """Record a node with four GPUs: one pod holds two and uses half, one GPU has four parts of which one is held, and
    one is free."""
    gpus = [make_gpu(f"GPU-{i}", i, H100) for i in range(4)]
    node = SimulatedNode("n1", gpus, start_ms=T)

    def held_by(name: str, gpu: str, **sharing: object) -> None:
        holder = Holder(kind="pod", uid=f"uid-{name}", namespace="nlp", name=name, container="main")
        node.place(T, Allocation(gpu, holder, **sharing), 500_000, 2_048, None)  # type: ignore[arg-type]

    held_by("train", "GPU-0")
    held_by("train", "GPU-1")
    held_by("slice", "GPU-2", sharing="time-slicing", sharing_replicas=4)
    agents = [(Meter(60_000, ZoneInfo("UTC")), AgentMetrics("n1", "0"), f"10.0.0.{i}:9401") for i in (1, 2)]
    for at_ms in range(0, MINUTES * 60_000, 5_000):
        meter, metrics, instance = agents[at_ms >= REPLACED_MS]
        snapshot = node.snapshot(T + at_ms)
        metrics.observe(snapshot, meter.observe(snapshot))
        if at_ms % SCRAPE_MS == first_scrape_ms:
            page = metrics.exposition().decode()
            recorder.take(page, T + at_ms, cluster=cluster, job="gputally-agent", instance=instance)


QUEUES = """\
# TYPE gputally_queue_waiting_gpus gauge
gputally_queue_waiting_gpus{queue="nlp"} 8
# TYPE gputally_queue_allocated_gpus gauge
gputally_queue_allocated_gpus{queue="nlp",target="kai"} 4
# TYPE gputally_fairshare_stranded_gpus gauge
gputally_fairshare_stranded_gpus 2
# TYPE gputally_queue_info gauge
gputally_queue_info{queue="nlp",parent="",team="nlp"} 1
"""


def controlled(recorder: Recorder, cluster: str) -> None:
    """Record two replicas, of which one leads; both show the same."""
    for at_ms in range(0, MINUTES * 60_000, SCRAPE_MS):
        for replica in ("a", "b"):
            recorder.take(QUEUES, T + at_ms, cluster=cluster, job="gputally-fairshare", instance=replica)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    folder: Path = tmp_path_factory.mktemp("live")
    recorder = Recorder()
    for cluster, first_scrape_ms in (("east", 5_000), ("west", 20_000)):
        metered(recorder, cluster, first_scrape_ms)
        controlled(recorder, cluster)
    backfill(recorder.openmetrics(), folder)
    with prometheus(folder) as running:
        yield running


def sent(panel: str, query: int = 0, cluster: str = ".*") -> str:
    """Return a panel's query as Grafana sends it for the smallest step, with every variable that is not given set to
    All."""
    chosen = {"__rate_interval": "4m", "cluster": cluster}
    expr = PANELS[panel]["targets"][query]["expr"]
    return re.sub(r"\$(\w+)", lambda name: chosen.get(name[1], ".*"), expr)


def seen(server: Prometheus, panel: str, query: int = 0, cluster: str = ".*") -> list[float]:
    """Return the panel's values at odd instants of the first agent's life and, once its window is full, of the
    second's."""
    expr = sent(panel, query, cluster)
    spans = ((300, 1_190), (1_560, MINUTES * 60 - 30))
    found = [server.range(expr, T / 1000 + start, T / 1000 + end, 37) for start, end in spans]
    assert all(len(series) == 1 for series in found), [len(series) for series in found]
    return [float(value) for series in found for _, value in series[0]["values"]]


@pytest.mark.parametrize(
    ("panel", "query", "of_one_cluster"),
    [
        ("cluster/Allocated", 0, None),
        ("cluster/Busy", 0, None),
        ("cluster/Capacity, allocated, busy", 1, 2.25),
        ("cluster/Free, waiting, stranded", 0, 1.75),
        ("gpu/Held and busy", 0, 2.25),
        ("gpu/Busy", 0, None),
    ],
)
def test_a_gpu_is_one_gpu_wherever_the_windows_edges_fall(
    server: Prometheus, panel: str, query: int, of_one_cluster: float | None
) -> None:
    figures = seen(server, panel, query, "east")
    for figure in figures:
        assert figure == pytest.approx(of_one_cluster or figures[0], rel=1e-9)
    if of_one_cluster is not None:
        assert seen(server, panel, query)[0] == pytest.approx(2 * of_one_cluster, rel=1e-9)
    elif panel == "cluster/Allocated":
        assert figures[0] == pytest.approx(2.25 / 4, rel=1e-9)


@pytest.mark.parametrize("panel", ["cluster/Waiting", "fairshare/Waiting"])
def test_two_replicas_say_the_same_and_two_clusters_add_up(server: Prometheus, panel: str) -> None:
    assert set(seen(server, panel, cluster="east")) == {8.0}
    assert set(seen(server, panel)) == {16.0}


def test_what_clusters_have_in_pieces_adds_up(server: Prometheus) -> None:
    assert set(seen(server, "cluster/Stranded")) == {4.0}
    assert set(seen(server, "team/GPUs waited for", cluster="east")) == {8.0}
    assert set(seen(server, "fairshare/GPUs due and held", 1, "east")) == {4.0}


def test_while_an_agent_is_replaced_no_gpu_is_held_twice(server: Prometheus) -> None:
    (series,) = server.range(sent("cluster/Allocated", 0, "east"), T / 1000 + 1_140, T / 1000 + 1_560, 15)
    assert {round(float(value), 6) for _, value in series["values"]} == {0.5625}
