"""Types and limits that models share with the options of commands. The module loads no model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple, get_args

from gputally.base.near_names import nearest, shown

JobState = Literal["waiting", "running", "ended", "failed", "unknown"]
"""failed: it ended with an error, and nothing started it again. ended: it ended otherwise. unknown: the node on which
it ran has been silent since, so that nobody knows whether it still runs."""
JobOrder = Literal[
    "name", "cluster", "namespace", "team", "user", "queue", "state", "kind", "gpus", "waited", "gpu_hours", "busy",
    "utilisation", "idle", "unknown", "cost", "unpriced", "burn", "gpu_model", "pods", "created", "ended", "epochs",
    "lost_gpu_hours",
]  # fmt: skip
"""The columns of a list of jobs."""
NodeOrder = Literal[
    "name", "cluster", "pool", "capacity_type", "model", "gpus", "silent", "agent", "errors", "capacity", "held",
    "busy", "utilisation", "idle", "unknown", "unallocated", "unmetered", "down",
]  # fmt: skip
"""The columns of a list of nodes. silent: by the newest record, the oldest first. agent: by the agent's
version, the oldest first. errors: by the newest error of a GPU, the newest first."""


class Order(NamedTuple):
    """The order of a list. descending: from Z, or from the largest; what is unknown is last either way.

    As text `cost:desc` or `cost:asc`. A column alone, `cost`, begins as one mostly wants it: names from A, figures from
    the largest."""

    column: str
    descending: bool = False

    @classmethod
    def read(cls, text: str, ascends: Callable[[str], bool]) -> Order:
        """The order of a text. ascends: whether a column alone begins with the smallest."""
        column, _, way = text.rpartition(":")
        if way not in ("asc", "desc") or column in ("", "label"):  # `label:asc` is a column
            return cls(text, not ascends(text))
        return cls(column, way == "desc")

    @property
    def turned(self) -> Order:
        return Order(self.column, not self.descending)

    def __str__(self) -> str:
        return f"{self.column}:{'desc' if self.descending else 'asc'}"


@dataclass(frozen=True, slots=True)
class Orders:
    """The orders of a list. ascending: the columns that alone begin with the smallest."""

    columns: tuple[str, ...]
    ascending: frozenset[str]

    def read(self, text: str) -> Order:
        """As `Order.read`. Raises ValueError for a column that the list does not have."""
        order = Order.read(text, self.ascending.__contains__)
        if order.column not in self.columns:
            name = order.column
            raise ValueError(f"the list cannot be sorted by {shown(name)}{nearest(name, self.columns)}: write a column"
                             " as in cost, cost:desc or cost:asc")  # fmt: skip
        return order

    def text(self, text: str) -> str:
        """The whole text of an order. Raises ValueError."""
        return str(self.read(text))

    @property
    def pattern(self) -> str:
        """A regular expression of the texts."""
        return f"^({'|'.join(self.columns)})(:(asc|desc))?$"


JOB_ORDERS: Final = Orders(
    get_args(JobOrder),
    frozenset({"name", "cluster", "namespace", "team", "user", "queue", "state", "kind", "gpu_model"}),
)
NODE_ORDERS: Final = Orders(
    get_args(NodeOrder), frozenset({"name", "cluster", "pool", "capacity_type", "model", "silent", "agent"})
)
ORDER_HELP: Final = (
    "The column to sort by, as cost, cost:desc or cost:asc; alone, names begin with A and figures with the largest."
)
WaitGroup = Literal["team", "queue", "namespace"]
JobKind = Literal["notebook", "service", "batch"]
"""notebook: somebody works in it. service: it runs until it is deleted. batch: it ends by itself, as training does."""
_NOTEBOOKS: Final = ("notebook", "workspace")
_SERVICES: Final = ("service", "deployment", "replicaset", "statefulset", "daemonset", "workerset")
_BATCH: Final = ("job", "jobset", "workflow")

MOST: Final = 1e15
"""Maximum for GPUs of a quota and for weights; more is a mistake, and sums might overflow."""


def is_empty(value: object) -> bool:
    """Whether to leave a field out (`exclude_if`). Empty fields are left out so that a policy without them keeps its
    version, and because older callers refuse unknown keys."""
    return not value


def job_kind(job: str) -> JobKind | None:
    """The kind of a job, by the name of its object's kind; None if that says nothing, as for a pod without an owner.
    job: `Kind/name`."""
    kind = job.partition("/")[0].lower()
    if kind.endswith(_NOTEBOOKS):
        return "notebook"
    if kind.endswith(_SERVICES):
        return "service"
    return "batch" if kind.endswith(_BATCH) else None


@dataclass(frozen=True, slots=True)
class ChoiceTexts:
    """Says on a form what the words of a setting mean. For `Annotated`."""

    of: Mapping[str, str]
