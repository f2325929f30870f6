"""The Prometheus with which other suites compare is a real one: it back-fills, scrapes nothing, and evaluates
queries."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from scripts.reference_pages import Family, agent_families, families_by_program
from tests.real.programs import built
from tests.real.prometheus import backfill, prometheus, promtool

pytestmark = pytest.mark.real

HOUR = 3600
FROM_DCGM = Path(__file__).parents[2] / "docs" / "from-dcgm-exporter.md"


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


def test_the_pages_query_of_held_and_idle_gpus_counts_each_pod_by_itself(tmp_path: Path) -> None:
    """Two pods share a GPU: one uses more than its half and the other is idle, so half a GPU is held and idle. The use
    of a third pod is unknown."""
    (recipe,) = re.findall(r"```promql\n(.*?)```", FROM_DCGM.read_text(encoding="utf-8"), re.DOTALL)
    rates = {
        "allocated": {"a": 0.5, "b": 0.5, "c": 1.0},
        "busy": {"a": 0.0, "b": 1.0},
    }
    text = []
    for what, pods in rates.items():
        text.append(f"# TYPE gputally_pod_gpu_{what}_seconds counter")
        for pod, rate in pods.items():
            labels = f'cluster="c",gpu_uuid="g",namespace="n",pod="{pod}",container="m"'
            name = f"gputally_pod_gpu_{what}_seconds_total{{{labels}}}"
            text += [f"{name} {rate * t} {t}" for t in range(0, 2 * HOUR + 1, 60)]
    backfill("\n".join([*text, "# EOF"]) + "\n", tmp_path)
    with prometheus(tmp_path) as server:
        (series,) = server.instant(recipe, at=2 * HOUR)
    assert series["metric"] == {"namespace": "n"}
    assert float(series["value"][1]) == pytest.approx(0.5)


def test_promtool_finds_no_fault_in_any_metric() -> None:
    """Every family, as scraped, passes `promtool check metrics`."""
    programs = [list(agent_families()), *families_by_program().values()]
    families = {family.series: family for program in programs for family in program}
    assert len(families) > 50
    done = subprocess.run(
        [str(built("prometheus.sh") / "promtool"), "check", "metrics"],
        input="".join(map(exposed, families.values())), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert not done.stderr


def exposed(family: Family) -> str:
    """Return one series of the family as text."""
    name, labels = family.series, [f'{label}="x"' for label in family.labels]
    head = f"# HELP {name} {family.text}\n# TYPE {name} {'gauge' if family.kind == 'info' else family.kind}\n"
    if family.kind != "histogram":
        return head + f"{name}{{{','.join(labels)}}} 1\n"
    rest = f"{{{','.join(labels)}}} 1\n"
    bucket = ",".join([*labels, 'le="+Inf"'])
    return head + f"{name}_bucket{{{bucket}}} 1\n{name}_sum{rest}{name}_count{rest}"


def test_promtool_tells_what_is_wrong(tmp_path: Path) -> None:
    (tmp_path / "rules.yml").write_text("groups: [{name: g, rules: [{record: 'a:b:c', expr: 'sum('}]}]")
    with pytest.raises(RuntimeError, match="parse error"):
        promtool("check", "rules", "rules.yml", cwd=tmp_path)
