"""Writes docs/metrics.md from the metric families.

The agent is asked for its families; those of the accountant and of fairshare, which need a ledger or a cluster
to answer, are read off the calls that make them.
"""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from agent.metrics.dcgm_compat import DcgmOutput
from agent.metrics.exporter import AgentMetrics
from agent.metrics.metric_families import Operations
from gputally.base.background_tasks import BackgroundTasks
from gputally.base.clock import VirtualClock

PAGE = Path(__file__).parents[1] / "docs" / "metrics.md"
MODULES = {
    "Accountant": (
        "accountant.runtime.service_metrics",
        "accountant.api.ledger_metrics",
        "accountant.compat.kai_usage_api",
        "gputally.server.logs_and_metrics",
    ),
    "Fairshare": (
        "fairshare.controller.controller_metrics",
        "gputally.server.logs_and_metrics",
    ),
}
_MAKERS = {
    "GaugeMetricFamily": "gauge", "Gauge": "gauge", "_gauge": "gauge", "CounterMetricFamily": "counter",
    "Counter": "counter", "Histogram": "histogram", "InfoMetricFamily": "info",
}  # fmt: skip
_SUFFIX = {"counter": "_total", "info": "_info"}

INTRO = """\
# Metrics

Written by `python -m scripts.metrics_reference`; edit the help texts in the code, not this page.

The agent serves its metrics on `:9401/metrics`, the accountant and fairshare on their own ports. They are a
second view for people and alerts: bills and weights come from the ledger alone.

- Times are seconds, energy joules, memory bytes. A counter never falls except at a restart.
- Device series (`gputally_gpu_…`) and series of holders (`gputally_pod_gpu_…`) have different names, so no sum
  counts a GPU twice. Over the holders of a GPU, busy time plus `gputally_gpu_unattributed_busy_seconds_total` is
  `gputally_gpu_busy_seconds_total`, and energy plus `gputally_gpu_unallocated_energy_joules_total` is
  `gputally_gpu_energy_joules_total`.
- `gputally_month_…` are gauges, from the beginning of the accountant's month up to five minutes ago: they begin
  again with the month, and fall where a price does or late rows take time out of `unmetered`. Read them as they
  are. How many GPUs stood in which account when is `gputally_account_gpus`, of the last settled quarter of an hour.
- A reading that is not to be had is no series, and never 0.
- The agent's counters move when an interval is closed (every 60 s by default); its gauges are the last reading.
- The series of a holder that is gone stay for two scrapes, then leave.
- `method` says how busy time was come by; see [attribution](attribution.md).
- A pod's uid is on `gputally_pod_info` only; join on `namespace` and `pod`.
"""


class Family(NamedTuple):
    """One metric as the page shows it."""

    name: str
    kind: str
    labels: tuple[str, ...]
    text: str

    @property
    def series(self) -> str:
        """As it is scraped."""
        return self.name.removesuffix("_total") + _SUFFIX.get(self.kind, "")


def of_the_agent() -> Iterator[Family]:
    metrics = AgentMetrics("node", "0", tasks=BackgroundTasks(VirtualClock(0)))
    metrics.operate(Operations(nvml_up=True, privilege="allocation"))
    for metric in metrics.collect():
        yield Family(metric.name, metric.kind, metric.labels, metric.text)


def in_source(module: str) -> Iterator[Family]:
    """The families a module makes, by the calls in its text; other expressions than text are evaluated there."""
    loaded = importlib.import_module(module)
    tree = ast.parse(Path(str(loaded.__file__)).read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name) or node.func.id not in _MAKERS:
            continue
        kind, arguments = _MAKERS[node.func.id], node.args
        if (
            len(arguments) < 2
            or not isinstance(arguments[0], ast.Constant)
            or not str(arguments[0].value).startswith(("gputally_", "training_"))
        ):
            continue
        given = [k.value for k in node.keywords if k.arg == "labels"] or [
            a for a in arguments[2:] if isinstance(a, ast.List)
        ]
        named = _evaluated(given[0], module, vars(loaded)) if given else ("version",) if kind == "info" else ()
        labels = tuple(str(label) for label in named)
        text = _evaluated(arguments[1], module, vars(loaded))
        yield Family(str(arguments[0].value), kind, labels, str(text))


def _evaluated(expression: ast.expr, module: str, names: dict[str, Any]) -> Any:
    return eval(compile(ast.Expression(expression), module, "eval"), names)  # noqa: S307 - our own source


def of_the_others() -> dict[str, list[Family]]:
    """Program -> its families, sorted."""
    return {
        title: sorted(family for module in modules for family in in_source(module))
        for title, modules in MODULES.items()
    }


def published() -> dict[str, frozenset[str]]:
    """Every series name that our programs can show -> the labels that they set themselves. A histogram has three."""
    found: dict[str, frozenset[str]] = {}
    for family in [*of_the_agent(), *(each for several in of_the_others().values() for each in several)]:
        labels = frozenset(family.labels)
        if family.kind == "histogram":
            found |= {
                f"{family.name}_bucket": labels | {"le"},
                f"{family.name}_sum": labels,
                f"{family.name}_count": labels,
            }
        else:
            found[family.series] = labels
    return found


def table(families: Iterable[Family]) -> str:
    lines = ["| Metric | Type | Labels | Meaning |", "|---|---|---|---|"]
    for family in families:
        labels = ", ".join(f"`{label}`" for label in family.labels) or "–"
        lines.append(f"| `{family.series}` | {family.kind} | {labels} | {family.text.rstrip('.')}. |")
    return "\n".join(lines) + "\n"


def page() -> str:
    """The whole page; the same text every time."""
    agent = list(of_the_agent())
    devices = [f for f in agent if f.name.startswith("gputally_gpu_")]
    holders = [f for f in agent if f.name.startswith("gputally_pod_")]
    rest = [f for f in agent if f not in devices and f not in holders]
    parts = [
        INTRO,
        "## Agent: GPUs\n",
        table(devices),
        "## Agent: holders\n",
        table(holders),
        "## Agent: itself\n",
        table(rest),
    ]
    for title, found in of_the_others().items():
        parts += [f"## {title}\n", table(found)]
    names = sorted(metric.name for metric in DcgmOutput("node").collect())
    parts.append(
        "## Names of dcgm-exporter\n\n"
        "With `--dcgm-names` the agent shows these too, for dashboards that were made for dcgm-exporter, with its\n"
        "labels and units. Each pod that shares a GPU has its own share; do not scrape both exporters into one\n"
        "dashboard.\n\n" + "\n".join(f"- `{name}`" for name in names) + "\n"
    )
    return "\n".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
