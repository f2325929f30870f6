"""The section of KAI in a policy, `targets.kai`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import BeforeValidator, ConfigDict, Field

from accountant.wire.option_types import ChoiceTexts
from accountant.wire.scheduler_sections import Apply, SchedulerSection
from gputally.server.config_loading import bare_off

if TYPE_CHECKING:
    from accountant.wire.policy_models import Policy


class KaiTarget(SchedulerSection):
    """How shares reach KAI.

    mode: with `usage`, KAI counts history by the same rule itself and reads exact usage from the accountant; weights
        are changed only during a turn. With `weight`, the controller publishes `overQuotaWeight`, and the shard's
        kValue must be 0, since history would count twice otherwise. With `off`, nothing is changed.
    endpoint: URL at which KAI should query usage. In mode `usage` it is compared with the `connectionString` of KAI's
        shards."""

    model_config = ConfigDict(title="KAI")

    mode: Annotated[
        Literal["weight", "usage", "off"], BeforeValidator(bare_off), ChoiceTexts({"usage": "KAI reads usage"})
    ] = "weight"
    apply: Apply = "dry-run"
    endpoint: str | None = Field(
        default=None, pattern="^https?://[^/]+", max_length=500, title="KAI reads usage at",
        description="an address; for the mode usage",
    )  # fmt: skip

    def faults(self, policy: Policy, /) -> Iterator[tuple[int, str]]:
        """Yield the first queue in which usage of other clusters should count although KAI reads the usage itself."""
        if not policy.usage.clusters or self.mode != "usage":
            return
        for i, queue in enumerate(policy.queues):
            if any(ref.startswith("kai:") for ref in queue.refs):
                reason = (
                    f"queue {queue.name!r} has a ref of kai, and in mode usage KAI reads the history of one cluster:"
                    " set targets.kai.mode: weight, or remove usage.clusters"
                )
                yield i, reason
