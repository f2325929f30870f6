"""Types and limits that models share with the options of commands. The module loads no model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

JobState = Literal["waiting", "running", "ended"]
JobOrder = Literal["cost", "gpu_hours", "idle", "waited", "name"]
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
