"""Composes PromQL expressions from a few patterns.

These rules always hold:

- Every selector contains the dashboard's variables.
- A counter is read through `rate` or `increase`, and summed only afterwards.
- The window of a rate is `$__rate_interval`, so that it fits the scrape interval and the zoom.
- An agent raises its counters of held and busy time only when an interval closes, by the whole interval at once, so
  `rate` alone shows steps. That rate is therefore divided by the rate of the GPU's metered time, held and not held, in
  the same window (`metered`).

The functions return text. The tests parse every expression."""

from __future__ import annotations

from collections.abc import Sequence

PREFIX = "gputally_"
SCOPE = {"cluster": "=~$cluster", "job": "=~$job"}
"""Label matchers of every selector. Prometheus treats a missing label as "", which the `.*` of "All" matches, so a
single cluster without the label `cluster` works."""


PEAK_WINDOW = "$__range:15m"
"""Window of a subquery over the displayed time: a sample every quarter of an hour, as in the ledger's sums."""


def series(metric: str, **labels: str) -> str:
    """Return an instant selector of one of gputally's metrics. A label's value `=~x`, `!=x` or `!~x` has its
    operator."""
    matchers = []
    for label, value in {**SCOPE, **labels}.items():
        operator = next((o for o in ("=~", "!=", "!~") if value.startswith(o)), "=")
        matchers.append(f'{label}{operator}"{value.removeprefix(operator)}"')
    return f"{PREFIX}{metric}{{{','.join(matchers)}}}"


def rate(metric: str, **labels: str) -> str:
    """Return the growth of a counter per second. For GPU-seconds it is a number of GPUs, for joules it is watts."""
    return f"rate({series(metric, **labels)}[$__rate_interval])"


def metered(growth: str) -> str:
    """Return the growth of a counter per metered second of the same window, for counters that agents raise only when an
    interval closes.

    These counters move by a whole interval at once, and `rate` counts the steps between scrapes: with 60 s intervals
    and 30 s scrapes, `rate` alone shows 0.86 or 1.14 GPUs for a GPU that is held all the time. The GPU's total time has
    the same steps."""
    whole = f"({rate('gpu_allocated_seconds_total')} + {rate('gpu_unallocated_seconds_total')})"
    return f"({growth} / on (cluster, gpu_uuid) group_left () {total(whole, 'cluster', 'gpu_uuid')})"


def increase(metric: str, **labels: str) -> str:
    """Return the growth of a counter over the whole time range of the dashboard."""
    return f"increase({series(metric, **labels)}[$__range])"


def total(expression: str, *by: str) -> str:
    """Return the sum by these labels, or over all series."""
    return _aggregate("sum", expression, by)


def max_by(expression: str, *by: str) -> str:
    """Return the maximum by these labels, or over all series."""
    return _aggregate("max", expression, by)


def smallest(expression: str, *by: str) -> str:
    """Return the minimum by these labels, or over all series."""
    return _aggregate("min", expression, by)


def top(count: int, expression: str) -> str:
    """Return the `count` series with the largest values."""
    return f"topk({count}, {expression})"


def of_clusters(gauge: str, *by: str) -> str:
    """Return a controller's figure by cluster. If two replicas export the same series, one counts."""
    return max_by(gauge, "cluster", *by)


def grouped(expression: str, *by: str) -> str:
    """Return one series of value 1 for each combination of these labels."""
    return _aggregate("group", expression, by)


def not_elsewhere(of_nodes: str) -> str:
    """Leave out nodes that are known to be in other pools than the chosen ones. A node without a known pool stays."""
    elsewhere = grouped(series("node_info", pool="!~$pool"), "cluster", "node")
    return f"({of_nodes} unless on (cluster, node) {elsewhere})"


def devices() -> str:
    """Return one series of value 1 for each physical GPU of the chosen pools, nodes and models.

    `max` merges the series of an agent's old and new pod, which overlap for some minutes after a roll-out. Without it
    the join in `of_device` would be ambiguous."""
    info = series("gpu_info", node="=~$node", gpu_model="=~$gpu_model")
    return not_elsewhere(max_by(info, "cluster", "gpu_uuid", "gpu_model", "node"))


def of_device(expression: str, chosen: str = "") -> str:
    """Add the labels `gpu_model` and `node` of the GPU to series that have only `gpu_uuid`, and drop GPUs that are not
    chosen. chosen: the series of the chosen GPUs; "" for those of `devices`."""
    return f"{expression} * on (cluster, gpu_uuid) group_left (gpu_model, node) {chosen or devices()}"


def with_pool(of_nodes: str) -> str:
    """Add the label `pool` to series with the label `node`, and drop nodes without a known pool."""
    pools = max_by(series("node_info", pool="=~$pool"), "cluster", "node", "pool")
    return f"{of_nodes} * on (cluster, node) group_left (pool) {pools}"


def named(expression: str, label: str, name: str) -> str:
    """Set `label` to `name` in series without the label."""
    return f'label_replace({expression}, "{label}", "{name}", "{label}", "")'


def where(expression: str, labels: str, known: str) -> str:
    """Return only series whose `labels` match a series of `known`."""
    return f"{expression} and on ({labels}) {known}"


def at_peak(gauge: str) -> str:
    """Return the mean over the displayed time, in which only the hours of the day from $peak_from up to $peak_to (UTC)
    count."""
    hours_of_day = f"({gauge} and on () (hour() >= $peak_from < $peak_to))"
    return f"avg_over_time({hours_of_day}[{PEAK_WINDOW}])"


def quantile(q: float, histogram: str, *by: str) -> str:
    """Return a quantile of a histogram's newest observations, in its unit."""
    return f"histogram_quantile({q}, {total(rate(histogram + '_bucket'), 'le', *by)})"


def ratio(part: str, whole: str) -> str:
    """Return one expression divided by another."""
    return f"{part} / {whole}"


def hours(seconds: str) -> str:
    """Convert seconds to hours."""
    return f"{seconds} / 3600"


def age(timestamp: str) -> str:
    """Return the seconds since a UNIX timestamp."""
    return f"time() - {timestamp}"


def values(label: str, selector: str) -> str:
    """Return the query of a dashboard variable: the values of a label among the selected series."""
    return f"label_values({selector}, {label})"


def _aggregate(operator: str, expression: str, by: Sequence[str]) -> str:
    grouping = f" by ({', '.join(by)}) " if by else ""
    return f"{operator}{grouping}({expression})"
