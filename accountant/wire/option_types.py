"""Types and limits that models share with the options of commands. The module loads no model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

JobState = Literal["waiting", "running", "ended", "unknown"]
"""unknown: the node on which it ran has been silent since, so that nobody knows whether it still runs."""
JobOrder = Literal[
    "name", "cluster", "namespace", "team", "user", "queue", "state", "kind", "gpus", "waited", "gpu_hours", "busy",
    "utilisation", "idle", "unknown", "cost", "unpriced", "burn", "gpu_model", "pods", "created", "ended", "epochs",
]  # fmt: skip
"""The columns of a list of jobs."""
NodeOrder = Literal[
    "name", "cluster", "pool", "capacity_type", "model", "gpus", "silent", "capacity", "held", "busy", "utilisation",
    "idle", "unknown", "unallocated", "unmetered", "down",
]  # fmt: skip
"""The columns of a list of nodes. silent: by the newest record, the oldest first."""
JobKind = Literal["notebook", "service", "batch"]
"""notebook: somebody works in it. service: it runs until it is deleted. batch: it ends by itself, as training does."""

MOST: Final = 1e15
"""Maximum for GPUs of a quota and for weights; more is a mistake, and sums might overflow."""


def is_empty(value: object) -> bool:
    """Whether to leave a field out (`exclude_if`). Empty fields are left out so that a policy without them keeps its
    version, and because older callers refuse unknown keys."""
    return not value


@dataclass(frozen=True, slots=True)
class ChoiceTexts:
    """Says on a form what the words of a setting mean. For `Annotated`."""

    of: Mapping[str, str]
