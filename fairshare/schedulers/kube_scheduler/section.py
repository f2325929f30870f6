"""The section of kube-scheduler in a policy, `targets.kube_scheduler`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, ConfigDict

from accountant.wire.option_types import ChoiceTexts
from accountant.wire.scheduler_sections import SchedulerSection
from gputally.server.config_loading import bare_off


class KubeSchedulerTarget(SchedulerSection):
    """How shares reach kube-scheduler.

    mode: with `extender`, the shares of queues with `policy:` refs take effect through the scheduler extender. With
        `off`, these queues are ignored."""

    model_config = ConfigDict(title="kube-scheduler")

    mode: Annotated[
        Literal["extender", "off"],
        BeforeValidator(bare_off),
        ChoiceTexts({"extender": "the scheduler asks gputally's extender"}),
    ] = "extender"
