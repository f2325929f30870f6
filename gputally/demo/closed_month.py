"""Closes a month of the demo as its finance does, over the accountant's API: the provider's invoice is stored, and the
month is closed, with a reason for what stands against it, and published. A draft of the next month shows later what
changed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from decimal import Decimal
from typing import Any
from zoneinfo import ZoneInfo

from accountant.core.periods import Month
from fairshare.simulator.simulation_model import SimulatedNodeSpec
from gputally.base.units import MS_PER_HOUR
from gputally.demo.scenario import Scenario

Ask = Callable[[str, str, object], Any]
"""Sends a request: method, path, body; returns the answer. Raises if it is refused."""
SPOT = "spot"
_UTC = ZoneInfo("UTC")
_CURRENCY = "USD"
_RATES = {("H100", ""): Decimal("2.85"), ("A100", ""): Decimal("1.64"), ("A100", SPOT): Decimal("0.79")}
"""The provider's prices of a GPU-hour, those of the demo's price book."""
_EGRESS = Decimal("218.40")


def month_to_close(start_ms: int, now_ms: int, grace_ms: int) -> Month | None:
    """Return the month whose grace period ends at this instant and of which something is recorded; None if there is
    none. start_ms: when the records begin."""
    end_ms = now_ms - grace_ms
    month = Month.of(end_ms - 1, _UTC)
    return month if month.span(_UTC)[1] == end_ms > start_ms else None


def close_month(ask: Ask, scenario: Scenario, month: Month) -> None:
    """Store the invoice of the month, close the month and publish it, and keep a draft of the next one."""
    path = f"/v1/periods/{month}"
    objections = [objection["kind"] for objection in ask("GET", path, None)["objections"]]
    reason = {"reason": "agreed with the teams"}
    start_ms, end_ms = month.span(_UTC)
    invoice = provider_invoice(scenario, month, max(start_ms, scenario.start_ms), end_ms)
    ask("POST", f"/v1/reconciliation/{month}?keep=true", invoice)
    ask("POST", f"{path}/close", {**reason, "acknowledge": objections})
    ask("POST", f"{path}/publish", reason)
    ask("POST", f"/v1/periods/{month.next}/drafts", {"reason": "sent to the teams"})


def provider_invoice(scenario: Scenario, month: Month, start_ms: int, end_ms: int) -> dict[str, Any]:
    """Return the invoice of a provider who charges for every node in [start_ms, end_ms), for spot nodes only while it
    lends them, and for what leaves its network."""
    charged_ms: dict[tuple[str, str], int] = defaultdict(int)
    for node in scenario.nodes:
        charged_ms[node.gpus[0].model, SPOT if node.pool == SPOT else ""] += len(node.gpus) * (
            end_ms - start_ms - (_taken_back_ms(scenario, node, start_ms, end_ms) if node.pool == SPOT else 0)
        )
    lines = [
        {
            "item": f"8 × {model}" + (", spot" if capacity else ""),
            "gpu_model": model,
            "capacity_type": capacity,
            "amount": str((_rate(model, capacity) * ms / MS_PER_HOUR).quantize(Decimal("0.01"))),
            "currency": _CURRENCY,
        }
        for (model, capacity), ms in charged_ms.items()
    ]
    lines.append({"item": "network egress", "amount": str(_EGRESS), "currency": _CURRENCY})
    return {"source": f"provider-{month}.csv", "lines": lines}


def _taken_back_ms(scenario: Scenario, node: SimulatedNodeSpec, start_ms: int, end_ms: int) -> int:
    return sum(
        max(0, min(outage.end_ms or end_ms, end_ms) - max(outage.start_ms, start_ms))
        for outage in scenario.outages
        if outage.name == node.name
    )


def _rate(model: str, capacity: str) -> Decimal:
    return next(rate for (name, kind), rate in _RATES.items() if name in model and kind == capacity)
