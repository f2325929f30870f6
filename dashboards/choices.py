"""The variables of the dashboards, in the order in which they are chosen: each list follows from the choices before it.

Data source → cluster → job → pool → GPU model → node → GPU → namespace → pod; team → queue; target. A dashboard
takes those that its panels use. A cluster without pools in its inventory still has nodes: a node is left out
only where it is known to be in another pool.
"""

from __future__ import annotations

from dashboards import panels, promql

REFRESH_ON_TIME_RANGE_CHANGE = 2
LABEL_VALUES, QUERY_RESULT = 1, 3
"""Grafana's names for the two ways in which its Prometheus source reads a variable."""

PROGRAMS = '{__name__=~"gputally_.+_build_info"}'


def datasource() -> panels.Variable:
    """Which Prometheus is asked; every other variable and every panel refers to it."""
    return panels.Variable(name="datasource", label="Data source", type="datasource", query="prometheus")


def scope() -> list[panels.Variable]:
    """What every dashboard begins with."""
    return [
        datasource(),
        _chained("cluster", "Cluster", promql.values("cluster", PROGRAMS)),
        _chained("job", "Job", promql.values("job", PROGRAMS.replace("}", ',cluster=~"$cluster"}'))),
    ]


def devices() -> list[panels.Variable]:
    """Pool, model and node of the GPUs."""
    return [
        _chained("pool", "Pool", promql.values("pool", promql.series("node_info"))),
        _chained("gpu_model", "GPU model", promql.values("gpu_model", promql.series("gpu_info"))),
        node(),
    ]


def node() -> panels.Variable:
    """Nodes with GPUs of the chosen model, but those of other pools."""
    ours = promql.grouped(promql.series("gpu_info", gpu_model="=~$gpu_model"), "cluster", "node")
    return _chained("node", "Node", f"query_result({promql.not_elsewhere(ours)})", QUERY_RESULT, '/node="([^"]+)"/')


def gpu() -> panels.Variable:
    """One device of the chosen nodes."""
    chosen = promql.series("gpu_info", node="=~$node", gpu_model="=~$gpu_model")
    return _chained("gpu", "GPU", promql.values("gpu_uuid", chosen))


def namespace() -> panels.Variable:
    """Namespaces whose pods hold GPUs of the chosen nodes."""
    return _chained("namespace", "Namespace", promql.values("namespace", promql.series("pod_info", node="=~$node")))


def pod() -> panels.Variable:
    """Pods of the chosen namespaces on the chosen nodes."""
    chosen = promql.series("pod_info", node="=~$node", namespace="=~$namespace")
    return _chained("pod", "Pod", promql.values("pod", chosen))


def team() -> panels.Variable:
    """Teams that used anything this month."""
    return _chained("team", "Team", promql.values("team", promql.series("month_team_gpu_seconds")))


def queue_of_team() -> panels.Variable:
    """Queues that the chosen teams pay for."""
    return _chained("queue", "Queue", promql.values("queue", promql.series("queue_info", team="=~$team")))


def target() -> panels.Variable:
    """Schedulers that the controller writes to."""
    return _chained("target", "Scheduler", promql.values("target", promql.series("queue_weight")))


def queue_of_target() -> panels.Variable:
    """Queues of the chosen schedulers."""
    return _chained("queue", "Queue", promql.values("queue", promql.series("queue_weight", target="=~$target")))


def hour(name: str, label: str, value: int) -> panels.Variable:
    """An hour of the day, UTC, that people may type in."""
    return panels.Variable(name=name, label=label, type="textbox", query=str(value))


def _chained(name: str, label: str, query: str, kind: int = LABEL_VALUES, regex: str = "") -> panels.Variable:
    """Several or all of a list that is read again when the time range moves."""
    return panels.Variable(
        name=name,
        label=label,
        query=query,
        type="query",
        refresh=REFRESH_ON_TIME_RANGE_CHANGE,
        includeAll=True,
        allValue=".*",
        multi=True,
        regex=regex or None,
        sort=1,
        query_kind=kind,
    )
