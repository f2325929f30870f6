"""KAI's usage queries: exact figures where Prometheus samples, and no figure for stale history."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from accountant.compat.kai_usage_api import KaiMetrics, KaiUsageSource, QueryRefused, UnknownQuery, create_app, parse
from accountant.core.settings import KaiUsage, Limits
from accountant.ledger.protocols import Facts, NodeFacts
from accountant.prices.price_book import PriceBook, load
from accountant.storage.duckdb_ledger import open_ledger
from accountant.wire.policy_models import Policy
from gputally.base.clock import VirtualClock
from tests.compat.conftest import Site, book, vectors
from tests.compat.opencost_day import START_MS
from tests.compat.prometheus_sampling import Sampling, integral
from tests.price_books import price_book_text
from tests.usage_records import batch, deliver, interval, pod_facts, pod_holder

GPU_CAPACITY = 'sum_over_time((sum(kube_node_status_capacity{resource="nvidia_com_gpu"}))[10m:1m0s])'
GPU_USAGE = "sum_over_time((kai_queue_allocated_gpus)[10m:1m0s])"
QUEUES = {"a": [(0, 300, 8.0)], "b": [(0, 99_999, 2.0)]}


def ten_minutes(site: Site) -> None:
    """Book QUEUES on ten GPUs, and let the time pass."""
    book(site.ledger, QUEUES, 10, 600)
    site.clock.advance(600_000)


def at(seconds: float) -> str:
    return f"{START_MS / 1000 + seconds:.3f}"


def asked(site: Site, query: str, seconds: float) -> dict[str, float]:
    """Return the values by queue; the capacity has the key ""."""
    result: Any = site.source.answer(query, at(seconds))["data"]
    assert result["resultType"] == "vector"
    return {row["metric"].get("queue_name", ""): float(row["value"][1]) for row in result["result"]}


@pytest.mark.parametrize("vector", vectors(), ids=lambda v: v.get("name"))
def test_the_model_of_prometheus_is_the_one_that_was_run(vector) -> None:
    for left_closed, expected in ((True, "usage_prom2_leftClosed"), (False, "usage_prom3_leftOpen")):
        sampling = Sampling(
            vector["windowSeconds"], vector["resolutionSeconds"], vector["scrapeInterval"], vector["halfLifeSeconds"],
            left_closed,
        )  # fmt: skip
        capacity = sampling.sum([(0, 99_999, vector["capacity"])], vector["now"])
        if left_closed:
            assert capacity == pytest.approx(vector["rawCapacity_prom2"], abs=1e-9)
        for queue, share in vector[expected].items():
            used = sampling.sum(vector["segments"][queue], vector["now"])
            assert used / capacity == pytest.approx(share, abs=1e-9), queue


@pytest.mark.parametrize("vector", vectors(), ids=lambda v: v.get("name"))
def test_usage_is_the_exact_integral(site: Site, vector) -> None:
    book(site.ledger, vector["segments"], vector["capacity"], vector["now"])
    site.clock.advance(vector["now"] * 1000)
    # KAI puts the present into the query where it decays.
    moved = vector["gpuAllocationQuery"].replace(f"({vector['now']} - time()", f"({at(vector['now'])} - time()")
    moved_capacity = vector["gpuCapacityQuery"].replace(f"({vector['now']} - time()", f"({at(vector['now'])} - time()")
    used, capacity = asked(site, moved, vector["now"]), asked(site, moved_capacity, vector["now"])[""]
    begin, end, half_life = vector["now"] - vector["windowSeconds"], vector["now"], vector["halfLifeSeconds"]
    whole = integral([(0, 99_999, vector["capacity"])], begin, end, half_life)
    assert capacity * vector["resolutionSeconds"] == pytest.approx(whole, rel=1e-7)
    for queue, segments in vector["segments"].items():
        exact = integral(segments, begin, end, half_life) / whole
        # Whole microseconds per booked row, against a real number.
        assert used[queue] / capacity == pytest.approx(exact, abs=1e-7)


def test_where_sampling_goes_wrong_we_do_not(site: Site) -> None:
    """8 of 10 GPUs for half of the window are 40 %: Prometheus 2 answers 36 %, Prometheus 3 32 %."""
    ten_minutes(site)
    assert asked(site, GPU_USAGE, 600)["a"] / asked(site, GPU_CAPACITY, 600)[""] == 0.4


def test_the_window_ends_where_metering_ends(site: Site) -> None:
    book(site.ledger, {"a": [(0, 9_999, 5.0)], "b": []}, 10, 600)
    site.clock.advance(690_000)
    assert asked(site, GPU_USAGE, 690)["a"] / asked(site, GPU_CAPACITY, 690)[""] == 0.5


def test_parents_contain_their_children_and_every_name_has_one_row(site: Site) -> None:
    tree = [
        {"name": "org", "refs": ["kai:org"]},
        {"name": "team-a", "parent": "org", "refs": ["kai:a"]},
        {"name": "team-b", "parent": "org", "refs": ["kai:b"]},
        {"name": "elsewhere", "refs": ["kueue:x/y"]},
    ]
    site.ledger.put_policy(Policy.model_validate({"queues": tree}), START_MS)
    ten_minutes(site)
    assert asked(site, GPU_USAGE, 600) == {"a": 40.0, "b": 20.0, "org": 60.0}


@pytest.mark.parametrize("resource", ["cpu", "memory"])
def test_what_is_not_metered_has_capacity_and_no_usage(site: Site, resource: str) -> None:
    ten_minutes(site)
    capacity = f'sum_over_time((sum(kube_node_status_capacity{{resource="{resource}"}}))[10m:1m0s])'
    metric = {"cpu": "kai_queue_allocated_cpu_cores", "memory": "kai_queue_allocated_memory_bytes"}[resource]
    assert asked(site, capacity, 600)[""] > 0
    assert asked(site, f"sum_over_time(({metric})[10m:1m0s])", 600) == {}


def test_usage_that_is_too_old_is_an_error_and_later_no_usage_at_all(site: Site) -> None:
    book(site.ledger, QUEUES, 10, 600)
    site.clock.advance(600_000 + 86_400_000)
    client = TestClient(create_app(site.source))

    def get(seconds: float, query: str = GPU_USAGE) -> Any:
        return client.get("/api/v1/query", params={"query": query, "time": at(seconds)})

    assert get(600 + 900).status_code == 200
    late = get(600 + 915)
    assert late.status_code == 503
    assert late.json() == {
        "status": "error",
        "errorType": "stale",
        "error": "usage is 915 s old, more than 900 s: keep the usage you have",
    }
    assert get(600 + 86_415).json()["data"]["result"] == []
    (capacity,) = get(600 + 86_415, GPU_CAPACITY).json()["data"]["result"]
    assert float(capacity["value"][1]) > 0
    # One grain of 15 s is one fetch: what it was told first holds for it.
    counts = {result: site.registry.get_sample_value("gputally_kai_usage_answers_total", {"result": result})
              for result in ("usage", "stale", "plain", "refused")}  # fmt: skip
    assert counts == {"usage": 1, "stale": 1, "plain": 2, "refused": 0}
    assert site.registry.get_sample_value("gputally_kai_usage_age_seconds") == 86_415


def test_an_empty_ledger_leaves_the_configured_weights(site: Site) -> None:
    assert asked(site, GPU_USAGE, 0) == {}
    assert asked(site, GPU_CAPACITY, 0)[""] == 10  # ten steps of one: never 0, which KAI would divide by


def test_both_ways_of_asking_and_what_is_refused(site: Site) -> None:
    ten_minutes(site)
    client = TestClient(create_app(site.source))
    form = {"query": GPU_USAGE, "time": at(600)}
    posted, got = client.post("/api/v1/query", data=form), client.get("/api/v1/query", params=form)
    assert posted.json() == got.json()
    assert [row["metric"] for row in got.json()["data"]["result"]] == [{"queue_name": "a"}, {"queue_name": "b"}]
    for bad in ({"query": "up"}, {}, {**form, "time": "tomorrow"}, {**form, "time": "nan"}, {**form, "time": "1e30"}):
        refused = client.post("/api/v1/query", data=bad)
        assert (refused.status_code, refused.json()["errorType"]) == (400, "bad_data"), bad
    for reference in ("Inf", "NaN", "-1e300"):
        decayed = f"sum_over_time((kai_queue_allocated_gpus * (0.5^(({reference} - time()) / 60)))[10m:1m])"
        refused = client.get("/api/v1/query", params={"query": decayed, "time": at(600)})
        assert (refused.status_code, refused.json()["errorType"]) == (400, "bad_data"), reference
    assert client.post("/api/v1/query", content=b"query=" + b"x" * 20_000).status_code == 413
    assert client.post("/api/v1/query", content=b"\xff\xfe").status_code == 400
    assert client.post("/api/v1/query_range", data=form).status_code == 400
    assert client.get("/-/healthy").status_code == client.get("/api/v1/status/config").status_code == 200


def test_without_a_policy_nothing_says_which_queues_there_are(tmp_path) -> None:
    clock = VirtualClock(START_MS)
    ledger = open_ledger(tmp_path / "ledger.duckdb", clock)
    source = KaiUsageSource(ledger, clock, KaiUsage(listen="127.0.0.1:0"), KaiMetrics(CollectorRegistry()))
    answer = TestClient(create_app(source)).get("/api/v1/query", params={"query": GPU_USAGE})
    ledger.close()
    assert answer.status_code == 503
    assert "no policy yet" in answer.json()["error"]


ALLOCATION: dict[str, Any] = {"gpu_model": "H100", "busy_us": None, "method": "allocation"}


def shards(site: Site) -> None:
    """Queue a holds the GPUs of shard `blue`, queue b half of the three of shard `green`; the rest belong to no
    shard."""
    nodes = {"n1": ("blue", 2, "a", 2), "n2": ("green", 3, "b", 1), "n3": ("", 1, "", 0)}
    site.ledger.observe(Facts(nodes=tuple(NodeFacts("prod", n, shard=of[0]) for n, of in nodes.items())), START_MS)
    for node, (_, gpus, queue, held) in nodes.items():
        rows = [
            interval(START_MS + minute * 60_000, f"{node}-{gpu}", holder, span_ms=60_000, **ALLOCATION)
            for gpu, holder in enumerate([pod_holder(f"pod-{queue}")] * held + [None] * (gpus - held))
            for minute in range(10)
        ]
        facts = [pod_facts(f"pod-{queue}", START_MS, node=node, queue_ref=f"kai:{queue}")]
        deliver(site.ledger, START_MS + 600_000, batch(rows, facts, cluster="prod", node=node, epoch="0192-a"))
    site.clock.advance(600_000)


def told(client: TestClient, base: str, query: str) -> dict[str, float]:
    """Return the values by queue; the capacity has the key ""."""
    answer = client.post(f"{base}/api/v1/query", data={"query": query, "time": at(600)})
    assert answer.status_code == 200, answer.text
    return {r["metric"].get("queue_name", ""): float(r["value"][1]) for r in answer.json()["data"]["result"]}


def test_each_shard_has_an_address_with_its_own_usage_and_capacity(site: Site) -> None:
    """Shards send the same query, and none may see the nodes of another."""
    shards(site)
    client = TestClient(create_app(site.source))
    held = {"": (6, 2, 1), "/shards/blue": (2, 2, 0), "/shards/green": (3, 0, 1), "/shards": (1, 0, 0)}
    for base, (capacity, a, b) in held.items():
        steps = 10
        assert told(client, base, GPU_CAPACITY) == {"": capacity * steps}, base
        assert told(client, base, GPU_USAGE) == {"a": a * steps, "b": b * steps}, base
        for resource in ("cpu", "memory"):
            assert told(client, base, GPU_CAPACITY.replace("nvidia_com_gpu", resource))[""] > 0
        assert client.get(f"{base}/-/ready").status_code == 200
    unknown = client.get("/shards/red/api/v1/query", params={"query": GPU_USAGE, "time": at(600)})
    assert (unknown.status_code, unknown.json()["status"]) == (404, "error")
    assert "no node belongs to shard 'red'" in unknown.json()["error"]


def test_each_cluster_of_several_has_an_address(site: Site) -> None:
    """Both have a shard `blue` and a queue `a`."""
    shards(site)
    site.ledger.observe(Facts(nodes=(NodeFacts("staging", "n1", shard="blue"),)), START_MS)
    rows = [
        interval(START_MS, f"n1-{gpu}", pod_holder("pod-a") if gpu else None, span_ms=600_000, **ALLOCATION)
        for gpu in range(4)
    ]
    facts = [pod_facts("pod-a", START_MS, node="n1", queue_ref="kai:a")]
    deliver(site.ledger, START_MS + 600_000, batch(rows, facts, cluster="staging", node="n1", epoch="0192-a"))
    client = TestClient(create_app(site.source))
    held = {
        "": (10, 5, 1), "/clusters/prod": (6, 2, 1), "/clusters/staging": (4, 3, 0),
        "/shards/blue": (6, 5, 0), "/clusters/prod/shards/blue": (2, 2, 0), "/clusters/prod/shards": (1, 0, 0),
    }  # fmt: skip
    for base, (capacity, a, b) in held.items():
        assert told(client, base, GPU_CAPACITY) == {"": capacity * 10}, base
        assert told(client, base, GPU_USAGE) == {"a": a * 10, "b": b * 10}, base
    for base, why in (("/clusters/test", "no cluster 'test'"), ("/clusters/staging/shards/green", "shard 'green'")):
        unknown = client.get(f"{base}/api/v1/query", params={"query": GPU_USAGE, "time": at(600)})
        assert (unknown.status_code, why in unknown.json()["error"]) == (404, True), unknown.text


def test_a_shard_is_stale_by_its_own_nodes(site: Site) -> None:
    shards(site)
    site.clock.advance(3_600_000)
    rows = [interval(START_MS + 4_140_000, f"n1-{gpu}", span_ms=60_000, **ALLOCATION) for gpu in range(2)]
    later = batch(rows, cluster="prod", node="n1", epoch="0192-a", first_seq=22)
    deliver(site.ledger, START_MS + 4_200_000, later)
    blue = site.source.answer(GPU_CAPACITY, at(4200), "blue")
    assert blue["status"] == "success"
    with pytest.raises(QueryRefused, match="keep the usage you have"):
        site.source.answer(GPU_CAPACITY, at(4200), "green")


def test_usage_may_be_measured_in_cost(site: Site, tmp_path: Path) -> None:
    """An H100 of queue a costs four times an A100 of queue b: shares are those of the cost."""
    (tmp_path / "prices.yaml").write_text(price_book_text(H100=4, A100=1))
    of = {"a": "H100", "b": "A100"}
    facts = [pod_facts(queue, START_MS, node="n1", queue_ref=f"kai:{queue}") for queue in of]
    rows = [
        interval(START_MS, model, pod_holder(queue), span_ms=600_000, **{**ALLOCATION, "gpu_model": model})
        for queue, model in of.items()
    ]
    deliver(site.ledger, START_MS + 600_000, batch(rows, facts, cluster="prod", node="n1", epoch="0192-a"))
    site.clock.advance(600_000)
    book, metrics = load(tmp_path / "prices.yaml"), KaiMetrics(CollectorRegistry())

    def measuring_cost(*books: Callable[[], PriceBook]) -> Site:
        usage = KaiUsage(listen="127.0.0.1:0", measure="cost")
        return replace(site, source=KaiUsageSource(site.ledger, site.clock, usage, metrics, *books))

    priced = measuring_cost(lambda: book)
    capacity = asked(priced, GPU_CAPACITY, 600)[""]
    shares = {queue: value / capacity for queue, value in asked(priced, GPU_USAGE, 600).items()}
    assert shares == pytest.approx({"a": 0.8, "b": 0.2}, abs=1e-8)  # a cost is told to a billionth of a euro
    with pytest.raises(QueryRefused, match="without a price book"):
        asked(measuring_cost(), GPU_CAPACITY, 600)


@pytest.mark.parametrize("base", ["", "/shards/blue", "/clusters/prod"])
def test_a_range_is_refused_as_prometheus_would_and_told_what_to_change(site: Site, base: str) -> None:
    """The query that KAI sends for tumbling and cron windows."""
    client = TestClient(create_app(site.source))
    form = {"query": "sum_over_time(kai_queue_allocated_gpus)", "start": "0", "end": "60", "step": "60"}
    for answer in (client.post(f"{base}/api/v1/query_range", data=form), client.get(f"{base}/api/v1/query_range")):
        assert (answer.status_code, answer.json()["status"], answer.json()["errorType"]) == (400, "error", "bad_data")
        assert "windowType: sliding" in answer.json()["error"]


def test_an_unknown_selector_is_named_in_prometheus_form(site: Site) -> None:
    query = 'sum_over_time((kube_node_status_capacity{resource="nvidia_com_gpu",node=~"gpu.*"})[1w:1m])'
    answer = TestClient(create_app(site.source)).post("/api/v1/query", data={"query": query})
    assert (answer.status_code, answer.json()["errorType"]) == (400, "bad_data")
    assert "node=~'gpu.*'" in answer.json()["error"]


def test_a_window_that_adds_up_too_much_is_refused_before_it_is_read(site: Site) -> None:
    """Ten minutes of twenty GPUs are three GPU-hours."""
    book(site.ledger, QUEUES, 20, 600)
    site.clock.advance(600_000)
    settings, metrics = KaiUsage(listen="127.0.0.1:0"), KaiMetrics(CollectorRegistry())
    source = KaiUsageSource(site.ledger, site.clock, settings, metrics, limits=Limits(question_gpu_hours=2))
    with pytest.raises(QueryRefused, match="3 GPU-hours to add up, and 2 are the most") as caught:
        source.answer(GPU_CAPACITY, at(600))
    assert caught.value.status == 422
    source = KaiUsageSource(site.ledger, site.clock, settings, metrics, limits=Limits(question_gpu_hours=3))
    assert source.answer(GPU_CAPACITY, at(600))["status"] == "success"


ALLOCATED = "kai_queue_allocated_gpus"


@pytest.mark.parametrize("vector", vectors(), ids=lambda v: v.get("name"))
def test_every_vector_is_understood(vector) -> None:
    for query, of in ((vector["gpuAllocationQuery"], "allocation"), (vector["gpuCapacityQuery"], "capacity")):
        asked = parse(query)
        assert (asked.resource, asked.of) == ("gpu", of)
        assert (asked.window_s, asked.resolution_s) == (vector["windowSeconds"], vector["resolutionSeconds"])
        assert asked.half_life_s == vector["halfLifeSeconds"]
        assert asked.reference_s == (vector["now"] if vector["halfLifeSeconds"] else None)


def test_a_week_is_604800_seconds_and_aggregations_change_nothing() -> None:
    plain = parse(f"sum_over_time(({ALLOCATED})[1w:1m0s])")
    assert plain.window_s == 604_800
    assert parse(f"sum_over_time((max by (queue_name) ({ALLOCATED}))[168h0m0s:60s])") == plain


def test_a_capacity_may_be_that_of_a_node_pool() -> None:
    asked = parse('sum_over_time((sum(resources_per_nodepool{resource="memory",nodepool="h100"}))[1d:1m])')
    assert (asked.resource, asked.of, asked.pool) == ("memory", "capacity", "h100")


@pytest.mark.parametrize(
    ("query", "reason"),
    [
        ("", "not PromQL"),
        ("((", "not PromQL"),
        ("up", r"expected sum_over_time"),
        (f"sum_over_time({ALLOCATED}[5m])", "expected a subquery"),
        (f"sum_over_time(({ALLOCATED})[5m:])", "no resolution"),
        (f"sum_over_time(({ALLOCATED})[1w:1m] offset 5m)", "expected a subquery"),
        (f"sum_over_time(({ALLOCATED} offset 5m)[1w:1m])", "expected one metric"),
        (f"sum_over_time(({ALLOCATED})[10ms:1m])", "whole number of seconds"),
        (f"sum_over_time((({ALLOCATED}) * 2)[1w:1m])", "half_life"),
        (f"sum_over_time((({ALLOCATED}) * (0.4^((1 - time()) / 5)))[1w:1m])", "decay"),
        (f"sum_over_time((({ALLOCATED}) * (0.5^((1 - time()) / 1e300)))[1w:1m])", "half-life"),
        ("sum_over_time((node_load1)[1w:1m])", "unknown metric 'node_load1'"),
        ('sum_over_time((kube_node_status_capacity{resource="pods"})[1w:1m])', "unknown metric"),
        ('sum_over_time((kube_node_status_capacity{resource="cpu",node="a"})[1w:1m])', "unknown selector node='a'"),
        (
            'sum_over_time((kube_node_status_capacity{resource="nvidia_com_gpu",node=~"gpu.*"})[1w:1m])',
            "unknown selector node=~'gpu",
        ),
        (
            'sum_over_time((resources_per_nodepool{resource="cpu",nodepool!="a"})[1w:1m])',
            "unknown selector nodepool!='a'",
        ),
        ('sum_over_time((kube_node_status_capacity{resource=~"nvidia.*"})[1w:1m])', "unknown metric"),
        ("x" * 5_000, "more than 4096 characters"),
    ],
)
def test_what_is_no_question_of_kai_is_refused_with_the_part_at_fault(query, reason) -> None:
    with pytest.raises(UnknownQuery, match=reason):
        parse(query)


@given(
    st.text(max_size=80) | st.from_regex(r"sum_over_time\(\(\(kai_queue_allocated_gpus\)[^\"]{0,40}", fullmatch=True)
)
def test_no_text_gives_anything_but_a_question_or_a_refusal(text: str) -> None:
    with contextlib.suppress(UnknownQuery):
        assert parse(text).window_s > 0


MINUTE, WINDOW_END = 60, 24 * 3_600
DAY = Sampling(WINDOW_END, MINUTE, MINUTE, None, left_closed=False)


@pytest.mark.parametrize("minutes", [1, 26, 27, 28, 600])
def test_usage_that_reaches_the_windows_end_has_one_look_more_than_minutes(minutes: int) -> None:
    """The sample at the end itself is the one of the minute that has just ended."""
    held = [(WINDOW_END - minutes * 60.0, float(WINDOW_END), 1.0)]
    exact = integral(held, 0, WINDOW_END, None) / MINUTE
    assert DAY.sum(held, WINDOW_END) == minutes + 1
    assert exact == minutes
    # 3.57 % where a queue's only usage in the window is its last 27 minutes.
    assert 1 - exact / DAY.sum(held, WINDOW_END) == pytest.approx(1 / (minutes + 1))


@pytest.mark.parametrize("minutes", [1, 27, 600])
def test_a_series_that_ends_inside_the_window_is_looked_at_for_the_rest_of_five_minutes(minutes: int) -> None:
    """Its last sample is a minute before its end, and counts until it is five minutes old."""
    held = [(7_200.0, 7_200.0 + minutes * 60, 1.0)]
    assert DAY.sum(held, WINDOW_END) == minutes + 4
    assert integral(held, 0, WINDOW_END, None) / MINUTE == minutes


def test_usage_on_both_sides_of_the_windows_ends_is_exact() -> None:
    held = [(-7_200.0, WINDOW_END + 7_200.0, 1.0)]
    assert DAY.sum(held, WINDOW_END) == integral(held, 0, WINDOW_END, None) / MINUTE
