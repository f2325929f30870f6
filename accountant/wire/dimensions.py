"""The table of dimensions: by what usage and cost can be grouped and filtered, beside the exported labels of pods.

From `DIMENSIONS` are made the answers of ledger and lake, the lake's columns, the parameters `by` and `where.…` of the
API, the headings and choices of pages, the help of commands and assistants, and what is read of nodes. A new dimension
is a row of this table. In a ledger, its past has the values that are known; a lake has it as unknown ("") in days that
an earlier version published.

Example: the rack of a node, by a label of the Kubernetes node or by `rack:` in the inventory file:
`DeclaredDimension("rack", "Rack", "label", "rack of the node", labels=("example.com/rack",))`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import date
from typing import Final, Literal, NamedTuple

from accountant.wire.option_types import job_kind

DependsOn = Literal["holder", "cluster", "node", "model", "gpu", "part", "label", "time"]
"""What determines a value: who holds the GPU, its cluster or node, its model, the GPU itself, the MIG instance, what is
known of the node at the time (a label), or the time itself."""
_OF_DEVICES: Final[tuple[DependsOn, ...]] = ("cluster", "node", "model", "gpu", "part", "label")

_WEEKDAYS: Final = ("1 Monday", "2 Tuesday", "3 Wednesday", "4 Thursday", "5 Friday", "6 Saturday", "7 Sunday")
"""Numbered, so that names in order are in the order of the week."""


class DeclaredDimension(NamedTuple):
    """A dimension.

    name: in the API, in addresses and in files.
    title: its heading on pages.
    of: what determines its value.
    text: its meaning.
    source: of `holder` the column of the ledger's names of holders, or `team` or `queue`, which the policy tells; of
        `time` the unit of which one value is.
    read: makes the value of that of the source; None: they are equal. Without a holder there is nothing to read.
    column: the column of the lake, if the name is a reserved word in SQL.
    idle: whether time that nobody holds has the value IDLE; otherwise "".
    labels: of `label` the labels of Kubernetes nodes that tell it; the first that is set counts."""

    name: str
    title: str
    of: DependsOn
    text: str
    source: str = ""
    read: Callable[[str], str] | None = None
    column: str = ""
    idle: bool = False
    labels: tuple[str, ...] = ()


DIMENSIONS: Final = (
    DeclaredDimension(
        "team", "Team", "holder",
        "team that pays; `__idle__` where nothing holds the GPU, `__unassigned__` where nothing names a team",
        "team", idle=True,
    ),
    DeclaredDimension(
        "queue", "Queue", "holder",
        "queue of the policy in force; `__idle__` and `__unassigned__` as for the team", "queue", idle=True,
    ),
    DeclaredDimension("namespace", "Namespace", "holder", "namespace of the holder", "namespace"),
    DeclaredDimension(
        "job", "Job", "holder", "workload, `Kind/name`; of a pod that stands alone `Pod/name`", "job"
    ),
    DeclaredDimension(
        "kind", "Kind", "holder",
        "`notebook`, `service`, `batch` (training), or empty if the workload's kind tells none",
        "job", lambda job: job_kind(job) or "",
    ),
    DeclaredDimension("pod", "Pod", "holder", "name of the holder", "name"),
    DeclaredDimension(
        "container", "Container", "holder", "name of the container, if usage is known per container", "container"
    ),
    DeclaredDimension(
        "user", "User", "holder", "user who runs the pod, if a label names one", "user", column="user_name"
    ),
    DeclaredDimension("gpu_model", "GPU model", "model", "model of the GPU"),
    DeclaredDimension("gpu", "GPU", "gpu", "UUID of the GPU"),
    DeclaredDimension("node", "Node", "node", "name of the node"),
    DeclaredDimension("cluster", "Cluster", "cluster", "cluster of the node"),
    DeclaredDimension(
        "pool", "Pool", "label", "pool of the node",
        labels=(
            "gputally.dev/pool", "cloud.google.com/gke-nodepool", "eks.amazonaws.com/nodegroup",
            "karpenter.sh/nodepool", "karpenter.sh/provisioner-name", "alpha.eksctl.io/nodegroup-name",
            "kubernetes.azure.com/agentpool", "agentpool", "doks.digitalocean.com/node-pool",
        ),
    ),
    DeclaredDimension(
        "region", "Region", "label", "region of the node",
        labels=("topology.kubernetes.io/region", "failure-domain.beta.kubernetes.io/region"),
    ),
    DeclaredDimension(
        "zone", "Zone", "label", "zone of the node",
        labels=("topology.kubernetes.io/zone", "failure-domain.beta.kubernetes.io/zone"),
    ),
    DeclaredDimension(
        "instance_type", "Instance type", "label", "machine type of the node",
        labels=("node.kubernetes.io/instance-type", "beta.kubernetes.io/instance-type"),
    ),
    DeclaredDimension(
        "capacity_type", "Capacity type", "label",
        "`on-demand`, `spot`, `reserved`, `on-prem`, or empty if unknown",
    ),
    DeclaredDimension(
        "mig_profile", "MIG profile", "part", "profile of the MIG instance; empty for a whole GPU"
    ),
    DeclaredDimension("month", "Month", "time", "local month, `2026-10`", "month"),
    DeclaredDimension("day", "Day", "time", "local day, `2026-10-01`", "day"),
    DeclaredDimension("hour", "Hour", "time", "start of the local hour, `2026-10-01T13`", "hour"),
    DeclaredDimension(
        "weekday", "Day of the week", "time", "local day of the week, `1 Monday` to `7 Sunday`", "day",
        lambda day: _WEEKDAYS[date.fromisoformat(day).weekday()],
    ),
    DeclaredDimension(
        "hour_of_day", "Hour of the day", "time", "local hour of the day, `00:00` to `23:00`", "hour",
        lambda hour: f"{hour[11:13]}:00",
    ),
)  # fmt: skip
DECLARED: Final = {one.name: one for one in DIMENSIONS}


def names(*of: DependsOn) -> tuple[str, ...]:
    """The dimensions that one of these determines, in the order of the table."""
    return tuple(one.name for one in DIMENSIONS if one.of in of)


OF_HOLDERS: Final = frozenset(names("holder"))
OF_LABELS: Final = frozenset(names("label"))
OF_TIME: Final = frozenset(names("time"))
OF_GPUS: Final = frozenset(names(*_OF_DEVICES)) - frozenset(names("part"))
"""Those that also unmetered time has, because a GPU has them whatever holds it."""
IN_LAKE: Final = names("holder") + tuple(name for of in _OF_DEVICES for name in names(of))
"""Those that are a column of the lake: those of holders, then those of devices, from the cluster to the part."""


def depends_on(dimensions: Iterable[str]) -> frozenset[DependsOn]:
    """What determines these dimensions, which are no exported labels."""
    return frozenset(DECLARED[name].of for name in dimensions)


def sources(dimensions: Iterable[str]) -> frozenset[str]:
    """The sources of these dimensions; exported labels and those of devices have none."""
    return frozenset(DECLARED[name].source for name in dimensions if name in DECLARED)


def value_of(dimension: str, source: str) -> str:
    """The value of a dimension for that of its source."""
    read = DECLARED[dimension].read
    return source if read is None else read(source)
