"""What another weight of a queue would give, as a tool of an assistant."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any, Final

from pydantic import Field

from accountant.assistant.protocol import AssistantTool
from accountant.assistant.tools import MOST_ROWS, envelope, from_offset
from accountant.wire.decision_text import EVERYTHING
from accountant.wire.policy_models import Decision, PolicyVersion
from accountant.wire.typed_accountant_client import AccountantClient
from accountant.wire.usage_cost_and_job_models import GuaranteesAnswer
from fairshare.explain import try_weight as trying
from gputally.base.errors import FairshareError
from gputally.base.units import MS_PER_HOUR


def try_weight(
    accountant: AccountantClient,
    queue: Annotated[str, Field(min_length=1, max_length=253, description="The queue, by its full name.")],
    weight: Annotated[float, Field(ge=0, le=1e15, description="Its other weight, for example twice the present one.")],
    offset: Annotated[int, Field(ge=0, le=1_000_000, description="Rows to skip: `next_offset`.")] = 0,
    limit: Annotated[int, Field(ge=1, le=MOST_ROWS, description="Rows of one page.")] = 50,
) -> dict[str, Any]:
    """What happens with another weight of a queue: the part of the cluster (0..1) and the GPUs to which quotas and
    weights entitle every queue, now and then, if all request more than they get, of the GPUs that the controller's
    newest cycle at each target (scheduler) divided (`divided`). Past usage is left out: `gputally fairshare what-if`
    replays it for a past span, where a queue may lose that gains here. Needs a token that may see all teams."""
    policy = accountant.ask(PolicyVersion, "/v1/policy").policy
    found = accountant.ask(GuaranteesAnswer, "/v1/guarantees")
    cycles = accountant.ask(
        list[Decision], "/v1/decisions",
        {"start": str(found.end_ms - trying.LOOK_BACK_MS), "end": str(found.end_ms + MS_PER_HOUR),
         "subject": EVERYTHING, "kind": "weight", "limit": str(trying.MOST_RECORDS)},
    )  # fmt: skip
    parts = trying.divided(cycles, float(found.gpus or 0))
    try:
        tried = [
            {"target": part.target, **asdict(row)}
            for part in parts
            for row in trying.try_weight(policy, part.gpus, queue, weight)
        ]
    except FairshareError as error:
        raise ValueError(str(error)) from error
    shown, following = from_offset(tried, offset, limit)
    return envelope(
        accountant, "part of the cluster; GPUs", found.start_ms, found.end_ms, found.coverage, shown,
        "/v1/policy", queues=len(tried), divided=[asdict(part) for part in parts],
        next_offset=following, next_page=None,
    )  # fmt: skip


TOOL: Final = AssistantTool("try_weight", try_weight, page="docs/controller-pages.md")
