"""PromQL, put together from the few shapes that the dashboards need.

Invariants: every selector carries the dashboard's variables; a counter is read through `rate` or
`increase` and summed only afterwards; the window of a rate is `$__rate_interval`, so that it fits
the scrape interval and the zoom. Text in, text out: no knowledge of Grafana, no validation (the
tests parse every expression).
"""

from __future__ import annotations

from collections.abc import Sequence

PREFIX = "gputally_"
SCOPE = {"cluster": "=~$cluster", "job": "=~$job"}
"""What every selector is limited to. Prometheus treats a missing label as "", which the `.*` of
"All" matches: a single cluster without a `cluster` label works."""


def series(metric: str, **labels: str) -> str:
    """An instant selector of one of our metrics. A value `=~x`, `!=x` or `!~x` names its operator."""
    matchers = []
    for label, value in {**SCOPE, **labels}.items():
        operator = next((o for o in ("=~", "!=", "!~") if value.startswith(o)), "=")
        matchers.append(f'{label}{operator}"{value.removeprefix(operator)}"')
    return f"{PREFIX}{metric}{{{','.join(matchers)}}}"


def rate(metric: str, **labels: str) -> str:
    """Per-second growth of a counter: of GPU-seconds it is a number of GPUs, of joules it is watts."""
    return f"rate({series(metric, **labels)}[$__rate_interval])"


def increase(metric: str, **labels: str) -> str:
    """Growth of a counter over the whole time range of the dashboard."""
    return f"increase({series(metric, **labels)}[$__range])"


def total(expression: str, *by: str) -> str:
    """Sum, by some labels or over all."""
    return _aggregate("sum", expression, by)


def largest(expression: str, *by: str) -> str:
    """Maximum, by some labels or over all."""
    return _aggregate("max", expression, by)


def smallest(expression: str, *by: str) -> str:
    """Minimum, by some labels or over all."""
    return _aggregate("min", expression, by)


def top(count: int, expression: str) -> str:
    """The `count` series with the largest values."""
    return f"topk({count}, {expression})"


def devices() -> str:
    """One series of value 1 per physical GPU of the chosen nodes and models.

    `max` merges the series that an agent's old and new pod leave side by side for some minutes
    after a roll-out; without it the join of `of_device` would be ambiguous."""
    info = series("gpu_info", node="=~$node", gpu_model="=~$gpu_model")
    return largest(info, "gpu_uuid", "gpu_model", "node")


def of_device(expression: str) -> str:
    """Give series that know only `gpu_uuid` the labels `gpu_model` and `node` of their GPU, and drop
    those of GPUs that are not chosen."""
    return f"{expression} * on (gpu_uuid) group_left (gpu_model, node) {devices()}"


def ratio(part: str, whole: str) -> str:
    """One expression over another."""
    return f"{part} / {whole}"


def hours(seconds: str) -> str:
    """Seconds as hours."""
    return f"{seconds} / 3600"


def age(timestamp: str) -> str:
    """Seconds since a UNIX timestamp."""
    return f"time() - {timestamp}"


def values(label: str, selector: str) -> str:
    """The query of a dashboard variable: the values of a label among the selected series."""
    return f"label_values({selector}, {label})"


def _aggregate(operator: str, expression: str, by: Sequence[str]) -> str:
    grouping = f" by ({', '.join(by)}) " if by else ""
    return f"{operator}{grouping}({expression})"
