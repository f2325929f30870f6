"""Usage windows as they are asked for: by time, by cost, by GPU weights and by shard, after each batch.

Queue left holds an H100 on n1 (shard blue), queue right an A100 on n2 (shard green), a minute at a time from 0:00 on.
The window is the last 40 minutes before 1:00. An H100 is 2 an hour and an A100 1; as weights 4 and 1."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from gputally.base.clock import VirtualClock
from tests.seams.site import A100, H100, MINUTE_MS, Site, book, site, uid_of
from tests.seams.small_month import at, running
from tests.usage_records import interval, pod_holder

INVENTORY = """\
schema: 1
cluster: prod
nodes: [{name: n1, shard: blue}, {name: n2, shard: green}]
"""
POLICY = """\
schema: 1
queues: [{name: left, refs: ["kai:left"]}, {name: right, refs: ["kai:right"]}]
"""
PRICES = book("id: h, model: H100, price: 2", "id: a, model: A100, price: 1")
OF_NODE = {"n1": ("A", H100, "left"), "n2": ("B", A100, "right")}
MINUTE_US = MINUTE_MS * 1_000


def report(of: Site, minutes: range, node: str = "", busy_us: int | None = MINUTE_US // 2) -> None:
    """Report minutes of both nodes, or of one. Each is half busy."""
    for name, (gpu, model, queue) in OF_NODE.items():
        if node in ("", name):
            holder = pod_holder(queue, "ns", uid_of(f"ns/{queue}"))
            rows = [
                interval(
                    at(0) + minute * MINUTE_MS, gpu, holder, span_ms=MINUTE_MS, gpu_model=model, busy_us=busy_us
                )
                for minute in minutes
            ]  # fmt: skip
            facts = [running(f"ns/{queue}", at(0), f"Job/{queue}", queue_ref=f"kai:{queue}", node=name)]
            of.send(rows, facts, node=name)


def usage(of: Site, **query: Any) -> dict[str, float]:
    """Return the usage by queue in minutes, or in thousandths of money."""
    found = of.get("/v1/windows", **{"size": "40m", "at": str(at(1)), "min_coverage": "0", **query})
    unit = 1_000_000 if query.get("measure") == "cost" else MINUTE_US
    return {queue: number / unit for queue, number in found["usage"].items()}


QUESTIONS: list[tuple[dict[str, Any], tuple[float, float]]] = [
    ({}, (1, 1)),
    ({"measure": "busy"}, (0.5, 0.5)),
    ({"gpu_weight": ["H100:4", "A100:1"]}, (4, 1)),
    ({"shard": "blue"}, (1, 0)),
    ({"shard": "green", "gpu_weight": ["H100:4", "A100:1"]}, (0, 1)),
    ({"cluster": "prod"}, (1, 1)),
]
"""Questions, and what a minute of left and of right counts in their answers."""


def test_a_window_grows_with_each_batch_by_the_weight_of_its_minutes(tmp_path: Path) -> None:
    """Ten minutes of the first batch are after 0:20. More come in the same quarter-hour, and late ones of one node.
    With a price book, a window of GPU time stays GPU time."""
    given: dict[str, Any] = {"prices": PRICES, "inventory": INVENTORY, "policy": POLICY}
    batches = [(range(30), ""), (range(30, 38), ""), (range(39, 41), ""), (range(38, 39), "n1"), (range(38, 39), "n2")]
    with site(tmp_path, VirtualClock(at(1)), **given) as found:
        counts = [0, 0]
        for minutes, node in batches:
            report(found, minutes, node)
            counts = [
                count + sum(minute >= 20 for minute in minutes) * (node in ("", name))
                for count, name in zip(counts, OF_NODE, strict=True)
            ]
            for query, weights in QUESTIONS:
                answer = usage(found, **query)
                shown = [answer.get(queue, 0) for queue in ("left", "right")]
                assert shown == [count * weight for count, weight in zip(counts, weights, strict=True)], query


@pytest.mark.parametrize(
    ("begin", "minutes"), [(5.5, 10), (10, 4), (12.25, 1.5)], ids=["cuts minutes", "is in the newest quarter", "both"]
)
def test_a_window_has_what_lies_between_its_edges(tmp_path: Path, begin: float, minutes: float) -> None:
    """Fourteen minutes are known, and the window may end later."""
    known = min(begin + minutes, 14) - begin
    given: dict[str, Any] = {"prices": PRICES, "inventory": INVENTORY, "policy": POLICY}
    with site(tmp_path, VirtualClock(at(1)), **given) as found:
        report(found, range(14))
        span = {"size": f"{round(minutes * 60)}s", "at": str(at((begin + minutes) / 60))}
        for query, (left, right) in [*QUESTIONS, ({"measure": "cost"}, (2_000 / 60, 1_000 / 60))]:
            answer = usage(found, **span, **query)
            shown = [answer.get(queue, 0) for queue in ("left", "right")]
            assert shown == pytest.approx([known * left, known * right], rel=1e-6), query


def test_held_time_of_unknown_use_is_allocated_and_nobody_knows_how_much_of_it_was_busy(tmp_path: Path) -> None:
    """Also where it comes after a question, and where an edge cuts its minute."""
    with site(tmp_path, VirtualClock(at(1)), inventory=INVENTORY, policy=POLICY) as found:
        report(found, range(20, 60), "n2")
        report(found, range(20, 55), "n1")
        assert usage(found) == {"left": 35, "right": 40}
        report(found, range(55, 60), "n1", busy_us=None)
        assert usage(found) == {"left": 40, "right": 40}
        assert usage(found, measure="busy") == {"left": 17.5, "right": 20}
        window = {"size": "40m", "at": str(at(1)), "min_coverage": "0"}
        assert found.get("/v1/windows", **window)["coverage"] == 1
        assert found.get("/v1/windows", measure="busy", **window)["coverage"] == 75 / 80
        cut = {"size": "10m", "at": str(at(59.5 / 60))}
        assert usage(found, **cut) == {"left": 10, "right": 10}
        assert usage(found, measure="busy", **cut) == {"left": 2.75, "right": 5}


def test_a_window_by_cost_has_the_cost_of_its_minutes_after_each_batch(tmp_path: Path) -> None:
    given: dict[str, Any] = {"prices": PRICES, "inventory": INVENTORY, "policy": POLICY}
    with site(tmp_path, VirtualClock(at(1)), **given) as found:
        shares = []
        for minutes in (range(30), range(30, 35), range(35, 41)):
            report(found, minutes)
            cost = usage(found, measure="cost")
            assert cost["left"] == pytest.approx(2 * cost["right"])
            shares.append(cost["left"])
        # 10, 15 and 21 minutes at 2 an hour.
        assert shares == pytest.approx([shares[0], shares[0] * 1.5, shares[0] * 2.1])
        found_window = found.get("/v1/windows", size="40m", at=str(at(1)), min_coverage="0", measure="cost")
        assert found_window["usage"]["left"] / found_window["capacity"] == pytest.approx(21 * 2 / (40 * 3), rel=1e-6)


@pytest.mark.parametrize("half_life", [10, 30], ids="{} minutes".format)
def test_a_decayed_minute_counts_by_its_age_also_if_it_comes_after_the_question(tmp_path: Path, half_life: int) -> None:
    """Ages from a to b count for the integral of 2^(-age / half-life): half-life / ln 2 x (2^(-a / half-life) - 2^(-b /
    half-life)). At 1:00 the three batches are 10 to 20, 5 to 10 and 0 to 5 minutes old."""

    def integral(begin: int, end: int) -> float:
        return float(half_life / math.log(2) * (0.5 ** (begin / half_life) - 0.5 ** (end / half_life)))

    given: dict[str, Any] = {"prices": PRICES, "inventory": INVENTORY, "policy": POLICY}
    with site(tmp_path, VirtualClock(at(1)), **given) as found:
        for minutes, ages in ((range(40, 50), (10, 20)), (range(50, 55), (5, 20)), (range(55, 60), (0, 20))):
            report(found, minutes)
            assert usage(found, half_life=f"{half_life}m")["left"] == pytest.approx(integral(*ages), rel=1e-6)


def test_two_schedulers_that_decay_differently_at_one_time_each_get_their_own(tmp_path: Path) -> None:
    """Forty minutes, at half-lives of 10 and 20 minutes: 10 / ln 2 x (1 - 1/16) and 20 / ln 2 x (1 - 1/4)."""
    given: dict[str, Any] = {"prices": PRICES, "inventory": INVENTORY, "policy": POLICY}
    with site(tmp_path, VirtualClock(at(1)), kai_usage={"listen": "127.0.0.1:0"}, **given) as found:
        report(found, range(20, 60))
        client, now_s = found.listener("kai_usage"), at(1) // 1_000

        def asked(half_life_s: int) -> float:
            decayed = f"((kai_queue_allocated_gpus) * (0.5^(({now_s} - time()) / {half_life_s}.000000)))"
            query = {"query": f"sum_over_time(({decayed})[40m:1m0s])", "time": str(now_s)}
            answer = client.get("/api/v1/query", params=query)
            assert answer.status_code == 200, answer.text
            values = {row["metric"]["queue_name"]: float(row["value"][1]) for row in answer.json()["data"]["result"]}
            return values["left"]

        found_values = [asked(600), asked(1_200), asked(600)]
        # KAI's steps are minutes.
        assert found_values == pytest.approx(
            [10 / math.log(2) * 15 / 16, 20 / math.log(2) * 3 / 4, 10 / math.log(2) * 15 / 16], rel=1e-6
        )


def test_usage_of_no_queue_is_beside_the_usage_of_the_queues(tmp_path: Path) -> None:
    """Ten minutes of left, five of a pod without a queue, five of a queue that the policy does not have."""
    given: dict[str, Any] = {"inventory": INVENTORY, "policy": POLICY}
    with site(tmp_path, VirtualClock(at(1)), **given) as found:
        report(found, range(50, 60), "n1")
        for gpu, pod, queue_ref in (("C", "none", ""), ("D", "other", "kai:other")):
            minutes = [
                interval(at(1) - n * MINUTE_MS, gpu, pod_holder(pod, "ns", uid_of(f"ns/{pod}")), span_ms=MINUTE_MS)
                for n in range(5, 0, -1)
            ]
            facts = [running(f"ns/{pod}", at(0.5), f"Job/{pod}", queue_ref=queue_ref)]
            found.send(minutes, facts, epoch=f"of-{pod}")
        answer = found.get("/v1/windows", size="40m", at=str(at(1)), min_coverage="0")
        assert {queue: gpu_us / MINUTE_US for queue, gpu_us in answer["usage"].items() if gpu_us} == {"left": 10}
        assert answer["unassigned"] == 10 * MINUTE_US
        assert answer["capacity"] == 20 * MINUTE_US
