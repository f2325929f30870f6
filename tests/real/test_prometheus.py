"""The Prometheus that other suites measure against is a real one: it back-fills, scrapes nothing, and computes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.real.prometheus import backfill, prometheus, promtool

pytestmark = pytest.mark.real

HOUR = 3600


def test_backfilled_history_is_integrated_as_prometheus_does(tmp_path: Path) -> None:
    counter = [f'gputally_pod_gpu_busy_seconds_total{{pod="p"}} {0.8 * t} {t}' for t in range(0, 6 * HOUR + 1, 60)]
    text = [
        "# HELP gputally_pod_gpu_busy_seconds Busy.",
        "# TYPE gputally_pod_gpu_busy_seconds counter",
        *counter,
        "# EOF",
    ]
    backfill("\n".join(text) + "\n", tmp_path)
    with prometheus(tmp_path) as server:
        query = "sum(increase(gputally_pod_gpu_busy_seconds_total[6h])) / 3600"
        (series,) = server.instant(query, at=6 * HOUR)
        # Prometheus 3 ranges exclude their left edge and extrapolate: 0.8 × 6 h, within one scrape interval.
        assert float(series["value"][1]) == pytest.approx(4.8, rel=0.003)
        assert len(server.range(query, 4 * HOUR, 6 * HOUR, 600)[0]["values"]) == 13


def test_promtool_tells_what_is_wrong(tmp_path: Path) -> None:
    (tmp_path / "rules.yml").write_text("groups: [{name: g, rules: [{record: 'a:b:c', expr: 'sum('}]}]")
    with pytest.raises(RuntimeError, match="parse error"):
        promtool("check", "rules", "rules.yml", cwd=tmp_path)
