"""Reads service latencies from Prometheus and decides when one may ask for room.

A latency that cannot be read, or has no value, is unknown: it never asks for anything, and starts the time
anew. What it must not do: decide who gives way.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from math import isfinite
from pathlib import Path
from typing import Any

import httpx2

from accountant.wire.policy_models import Policy, SloPolicy
from fairshare.preemption.preemption_types import PreemptionCall
from gputally.base import http_calls
from gputally.base.errors import FairshareError
from gputally.base.units import MS_PER_SECOND


class LatencyUnknown(FairshareError):
    """The Prometheus did not answer, or the query has no one number."""


Latency = Callable[[str, int], float]
"""Seconds that a query tells at an instant. Raises LatencyUnknown."""


class Prometheus:
    """The HTTP API of a Prometheus, or of anything that speaks it. Close it, or use it as a context manager."""

    def __init__(
        self,
        url: str,
        *,
        token_file: Path | None = None,
        timeout_s: float = 10.0,
        transport: httpx2.BaseTransport | None = None,
    ) -> None:
        self._url = url.rstrip("/")
        self._token_file = token_file
        self._http = http_calls.client(http_calls.trust_context(None, LatencyUnknown), timeout_s, transport=transport)

    def __enter__(self) -> Prometheus:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def latency(self, query: str, at_ms: int) -> float:
        """The largest value of an instant query, in seconds. Raises LatencyUnknown."""
        headers = {"Accept": "application/json"}
        try:
            if self._token_file is not None:
                headers["Authorization"] = f"Bearer {http_calls.read_token(self._token_file, LatencyUnknown)}"
            form = {"query": query, "time": f"{at_ms / MS_PER_SECOND:.3f}"}
            response = self._http.request("POST", f"{self._url}/api/v1/query", data=form, headers=headers)
            answer: Any = json.loads(response.content)
        except (httpx2.HTTPError, httpx2.InvalidURL, ValueError) as error:
            raise LatencyUnknown(f"{self._url}: {http_calls.reason(error)}") from error
        if not isinstance(answer, dict) or answer.get("status") != "success":
            told = answer.get("error") if isinstance(answer, dict) else None
            raise LatencyUnknown(f"{self._url}: {query}: {told or response.status_code}")
        numbers = [number for number in _values(answer.get("data")) if isfinite(number)]
        if not numbers:
            raise LatencyUnknown(f"{self._url}: {query}: no value")
        return max(numbers)


class Alarms:
    """Since when each SLO of a policy is broken. Called once or more per cycle; not made for threads."""

    def __init__(self, latency: Latency) -> None:
        self._latency = latency
        self._since: dict[str, int] = {}
        self._asked: tuple[str, int] | None = None
        self._calls: tuple[PreemptionCall, ...] = ()
        self.readings: dict[str, float] = {}
        """Seconds by SLO, as last read; those unknown are left out."""
        self.faults: dict[str, str] = {}
        """Why an SLO could not be read, by name."""

    def __call__(self, policy: Policy, now_ms: int) -> Sequence[PreemptionCall]:
        """The queues to make room for now."""
        if self._asked != (policy.version(), now_ms):
            self._asked = (policy.version(), now_ms)
            self.readings, self.faults = {}, {}
            calls = [self._look(slo, now_ms) for slo in policy.preemption.slos]
            self._since = {slo.name: self._since[slo.name] for slo in policy.preemption.slos if slo.name in self._since}
            self._calls = tuple(call for call in calls if call is not None)
        return self._calls

    def _look(self, slo: SloPolicy, now_ms: int) -> PreemptionCall | None:
        try:
            value = self._latency(slo.query, now_ms)
        except LatencyUnknown as error:
            self.faults[slo.name] = str(error)
            self._since.pop(slo.name, None)
            return None
        self.readings[slo.name] = value
        if value <= slo.above:
            self._since.pop(slo.name, None)
            return None
        lasted_ms = now_ms - self._since.setdefault(slo.name, now_ms)
        if lasted_ms < slo.sustained * MS_PER_SECOND:
            return None
        return call_for(slo, value, lasted_ms)


def call_for(slo: SloPolicy, value: float, lasted_ms: int) -> PreemptionCall:
    """What a broken SLO asks for, with its sentence."""
    lasted = f" for {lasted_ms / MS_PER_SECOND / 60:.0f} min" if lasted_ms else ""
    why = f"the latency of {slo.name} is {shown(value)}, above {shown(slo.above)}{lasted}"
    return PreemptionCall(slo.queue or "", slo.workload or "", why, slo.gpus)


def shown(seconds: float) -> str:
    """50 ms, 1.2 s."""
    return f"{seconds * 1000:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def _values(data: Any) -> list[float]:
    """The numbers of an instant vector or a scalar."""
    if not isinstance(data, dict):
        return []
    result = data.get("result") or ()
    rows: list[Any] = (
        [result] if data.get("resultType") == "scalar" else [row.get("value") for row in result if row.get("value")]
    )
    found = []
    for row in rows:
        try:
            found.append(float(row[1]))
        except (TypeError, ValueError, IndexError):
            continue
    return found
