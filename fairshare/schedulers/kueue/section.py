"""The section of Kueue in a policy, `targets.kueue`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, ConfigDict, Field

from accountant.wire.scheduler_sections import Apply, SchedulerSection
from gputally.server.config_loading import bare_off


class KueueTarget(SchedulerSection):
    """How shares reach Kueue.

    mode: with `weight`, the controller publishes `fairSharing.weight`.
    config: namespace/name of the ConfigMap with Kueue's configuration, which shows whether Kueue uses weights."""

    model_config = ConfigDict(title="Kueue")

    mode: Annotated[Literal["weight", "off"], BeforeValidator(bare_off)] = "weight"
    apply: Apply = "dry-run"
    config: str = Field(
        default="kueue-system/kueue-manager-config", pattern="^[^/]+/[^/]+$", title="Kueue's configuration",
        description="namespace/name",
    )  # fmt: skip
