"""The doctor's checks of the ledger as a tool of an assistant."""

from __future__ import annotations

from typing import Any, Final, NoReturn

from accountant.assistant.protocol import AssistantTool
from accountant.assistant.tools import envelope
from accountant.wire.typed_accountant_client import AccountantClient
from gputally.base.clock import SystemClock
from gputally.base.units import MS_PER_DAY
from gputally.doctor.findings import CannotCheck

OF_THE_LEDGER: Final = ("accountant", "freshness", "idle", "oversized", "unowned", "prices")
"""The checks that need the accountant alone; the others look at a machine or a cluster."""


def doctor(accountant: AccountantClient) -> dict[str, Any]:
    """Common faults that the ledger shows: old records, held and idle GPUs, requests far above use, busy time without
    an owner, GPU models without a price. Each with its figures and remedy. A check that the token may not make says
    why. The command `gputally doctor` also checks a machine and a cluster."""
    from gputally.doctor.__main__ import document, run_checks
    from gputally.doctor.check_inputs import DoctorOptions, Sources

    clock = SystemClock()
    sources = Sources(
        clock,
        DoctorOptions(url=accountant.url),
        machine=_elsewhere,
        kubelet=_elsewhere,
        cluster=_elsewhere,
        accountant=lambda: accountant,
    )
    found = document(run_checks(sources, OF_THE_LEDGER))
    now_ms = clock.wall_ms()
    return envelope(
        accountant, "findings", now_ms - 7 * MS_PER_DAY, now_ms, None, found["checks"], "/coverage",
        "each check names its own span",
    )  # fmt: skip


def _elsewhere() -> NoReturn:
    raise CannotCheck("run gputally doctor on the machine")


TOOL: Final = AssistantTool("doctor", doctor, page="docs/doctor.md")
