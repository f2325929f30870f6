"""KAI's own query text on a real Prometheus 3 with the same history gives the same answer, within its sampling."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.compat.conftest import START_MS, Site, book
from tests.compat.prometheus_sampling import Sampling, integral
from tests.real.prometheus import backfill, prometheus

pytestmark = pytest.mark.real

QUEUES = {"a": [(0, 4_200, 8.0), (4_200, 99_999, 0.0)], "b": [(0, 99_999, 2.0)]}
HOUR, NOW, HALF_LIFE = 3_600, 7_200, 1_800


def test_the_same_history_asked_by_kai_of_both(site: Site, tmp_path: Path) -> None:
    book(site.ledger, QUEUES, 10, NOW)
    site.clock.advance(NOW * 1000)
    base = START_MS // 1000
    lines = ["# HELP kai_queue_allocated_gpus GPUs.", "# TYPE kai_queue_allocated_gpus gauge"]
    for name, segments in QUEUES.items():
        for step in range(0, NOW + 1, 30):
            value = next((v for start, end, v in segments if start <= step < end), 0)
            lines.append(f'kai_queue_allocated_gpus{{queue_name="{name}"}} {value} {base + step}')
    backfill("\n".join([*lines, "# EOF"]) + "\n", tmp_path)
    at = base + NOW
    query = f"sum_over_time((((kai_queue_allocated_gpus) * (0.5^(({at} - time()) / {HALF_LIFE:.6f}))))[1h:1m0s])"
    with prometheus(tmp_path) as server:
        theirs = {row["metric"]["queue_name"]: float(row["value"][1]) for row in server.instant(query, at)}
    answer = site.source.answer(query, f"{at}")["data"]
    ours = {row["metric"]["queue_name"]: float(row["value"][1]) for row in answer["result"]}  # type: ignore[index]
    sampling = Sampling(HOUR, 60, 30, HALF_LIFE, left_closed=False)
    for name, segments in QUEUES.items():
        assert theirs[name] == pytest.approx(sampling.sum(segments, NOW), rel=1e-9)  # the model is the real thing
        assert ours[name] == pytest.approx(integral(segments, NOW - HOUR, NOW, HALF_LIFE) / 60, rel=1e-6)
        # What sampling is off by: at most one step at each of the two edges of a holding.
        assert abs(theirs[name] - ours[name]) <= 2 * max(value for _, _, value in segments)
