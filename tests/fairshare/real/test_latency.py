"""The latency of a workload, asked of a real Prometheus."""

from __future__ import annotations

from pathlib import Path

import pytest

from fairshare.preemption.service_latency_objectives import LatencyUnknown, prometheus_latency
from tests.real.prometheus import backfill, prometheus

pytestmark = pytest.mark.real
AT_S = 1_790_812_800
HISTORY = f"""# TYPE latency_seconds gauge
latency_seconds{{pod="a"}} 0.02 {AT_S}
latency_seconds{{pod="b"}} 0.08 {AT_S}
# EOF
"""


def test_a_query_is_one_number(tmp_path: Path) -> None:
    backfill(HISTORY, tmp_path)
    with prometheus(tmp_path) as server:
        latency = prometheus_latency(server.url)
        assert latency("latency_seconds", AT_S * 1000) == 0.08
        assert latency("scalar(min(latency_seconds))", AT_S * 1000) == 0.02
        with pytest.raises(LatencyUnknown, match="no value"):
            latency("absent_metric", AT_S * 1000)
        with pytest.raises(LatencyUnknown, match="parse error"):
            latency("latency_seconds{", AT_S * 1000)
