"""The advice as a tool of an assistant."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from pydantic import Field

from accountant.assistant.protocol import AssistantTool
from accountant.assistant.tools import MOST_ROWS, envelope, from_offset
from accountant.core.periods import zone
from accountant.wire.typed_accountant_client import AccountantClient
from gputally.advise.autoscaling_spot_and_sharing import (
    THRESHOLD,
    RestartAssumptions,
    pool_advice,
    sharing_advice,
    spot_advice,
)
from gputally.base.clock import SystemClock
from gputally.base.instants import parse_edge

_ASSUMED: Final = RestartAssumptions(120.0, 600.0, 86_400.0)


def advise(
    accountant: AccountantClient,
    about: Annotated[
        Literal["sharing", "spot", "autoscaler"],
        Field(description="Smaller or shared GPUs, spot capacity, or how many nodes each pool needs."),
    ] = "sharing",
    start: Annotated[str, Field(max_length=40, description="28d before the end, or a date.")] = "28d",
    end: Annotated[str | None, Field(max_length=40, description="End of the window. Default: now.")] = None,
    offset: Annotated[int, Field(ge=0, le=1_000_000, description="Rows to skip: `next_offset`.")] = 0,
    limit: Annotated[int, Field(ge=1, le=MOST_ROWS, description="Rows of one page.")] = 20,
) -> dict[str, Any]:
    """What could be saved, from what jobs and nodes used. Needs a token that may see all teams."""
    from gputally.advise import advice_tables as tables

    utc_zone = zone("UTC")
    now_ms = SystemClock().wall_ms()
    end_ms = accountant.clock_ms(now_ms) if end is None else parse_edge(end, utc_zone, now_ms)
    window = tables.Window.whole_hours(parse_edge(start, utc_zone, end_ms), end_ms, "UTC")
    queries = tables.AdviceQueries(accountant, window)
    if about == "autoscaler":
        found, coverage = queries.node_hours()
        prices = queries.prices(sorted({row.pool for row in found}))
        rows = list(tables.pool_records(pool_advice(found, window.lengths, prices, THRESHOLD)))
        currency = queries.currency()
    else:
        report = queries.report()
        coverage, currency = report["summary"]["coverage"], report["summary"]["currency"]
        if about == "spot":
            hints = report["tables"]["spot"]
            rows = list(tables.spot_records(spot_advice(hints, queries.nodes_of(hints), _ASSUMED)))
        else:
            hints = report["tables"]["hints"]
            used = queries.uses_of([row for row in hints if row["kind"] == "slice"])
            rows = list(tables.sharing_records(sharing_advice(hints, used)))
    shown, following = from_offset(rows, offset, limit)
    return envelope(
        accountant, currency or "no price book", window.start_ms, window.end_ms, coverage,
        ({name: _plain(value) for name, value in row.items()} for row in shown),
        f"/v1/report?start={window.start_ms}&end={window.end_ms}",
        count=len(rows), next_offset=following,
    )  # fmt: skip


def _plain(value: object) -> object:
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


TOOL: Final = AssistantTool("advise", advise, page="docs/advise.md")
