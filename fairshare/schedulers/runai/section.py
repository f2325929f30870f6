"""The section of Run:ai in a policy, `targets.runai`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import BeforeValidator, ConfigDict, Field

from accountant.wire.scheduler_sections import Apply, SchedulerSection
from gputally.server.config_loading import bare_off

if TYPE_CHECKING:
    from accountant.wire.policy_models import Policy


class RunaiTarget(SchedulerSection):
    """How shares reach Run:ai. mode weight: publish `overQuotaWeight` of projects and departments through Run:ai's API.

    url: its control plane.
    node_pool: the node pool of refs that name none.
    cluster: Run:ai's id of the cluster; None: it has only one."""

    model_config = ConfigDict(title="Run:ai")

    mode: Annotated[Literal["weight", "off"], BeforeValidator(bare_off)] = "weight"
    apply: Apply = "dry-run"
    url: str | None = Field(
        default=None, pattern="^https?://[^/]+", max_length=500, title="Run:ai at", description="https://…"
    )
    node_pool: str = Field(default="default", min_length=1, max_length=253, title="Run:ai's node pool")
    cluster: str | None = Field(
        default=None, max_length=100, title="Run:ai's cluster", description="the id; needed if there are several"
    )

    def faults(self, policy: Policy, /) -> Iterator[tuple[int, str]]:
        """Yield queues of Run:ai while its URL is missing, and those whose history would reach its scheduler twice,
        because it is KAI's."""
        if self.mode == "off":
            return
        for i, queue in enumerate(policy.queues):
            if not any(ref.partition(":")[0] in ("runai", "runai-department") for ref in queue.refs):
                continue
            if self.url is None:
                reason = "has a ref of Run:ai: set the URL of its control plane in targets.runai.url"
                yield i, f"queue {queue.name!r} {reason}"
            if policy.targets.of("kai").mode != "off" and any(ref.startswith("kai:") for ref in queue.refs):
                reason = (
                    f"queue {queue.name!r} has refs of kai and of runai, so its past usage would reach Run:ai's"
                    " scheduler twice: set targets.kai.mode to off, or set targets.runai.mode to off and"
                    " targets.kai.mode to usage"
                )
                yield i, reason
