"""The section of Volcano in a policy, `targets.volcano`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, ConfigDict, Field

from accountant.wire.option_types import ChoiceTexts
from accountant.wire.scheduler_sections import Apply, SchedulerSection
from gputally.server.config_loading import bare_off


class VolcanoTarget(SchedulerSection):
    """How shares reach Volcano.

    mode: the field that Volcano's active plugin reads: `weight` with the plugin proportion, `deserved` with capacity,
        `hierarchy` with drf and its option hierarchy.
    config: namespace/name of the scheduler's ConfigMap, which shows the active plugin."""

    model_config = ConfigDict(title="Volcano")

    mode: Annotated[
        Literal["weight", "deserved", "hierarchy", "off"],
        BeforeValidator(bare_off),
        ChoiceTexts({"deserved": "for its plugin capacity", "hierarchy": "for its plugin drf"}),
    ] = "weight"
    apply: Apply = "dry-run"
    config: str = Field(
        default="volcano-system/volcano-scheduler-configmap", pattern="^[^/]+/[^/]+$", title="Volcano's configuration",
        description="namespace/name",
    )  # fmt: skip
