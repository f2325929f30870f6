"""Reads service latencies from Prometheus and requests room for services whose latency is too high.

A latency that cannot be read, or has no value, is unknown. It never triggers a preemption, and the time for which it
must be too high starts again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import isfinite
from pathlib import Path

import httpx2

from accountant.wire.policy_models import Policy, SloPolicy
from fairshare.preemption.preemption_types import PreemptionCall
from gputally.base.errors import FairshareError
from gputally.base.prometheus_api import Prometheus, number
from gputally.base.units import MS_PER_SECOND

_TIMEOUT_S = 10.0


class LatencyUnknown(FairshareError):
    """Prometheus did not answer, or the query returned no number."""


Latency = Callable[[str, int], float]
"""Returns the seconds that a query gives at a time. Raises LatencyUnknown."""


def prometheus_latency(
    url: str, token_file: Path | None = None, transport: httpx2.BaseTransport | None = None
) -> Latency:
    """Return a function that reads latencies from a Prometheus: the largest value of an instant query, in seconds.

    Raises LatencyUnknown for an invalid address. transport: used instead of the network."""
    server = Prometheus(
        url, LatencyUnknown, token_file=token_file, timeout_s=_TIMEOUT_S, proxies=True, transport=transport
    )

    def latency(query: str, at_ms: int) -> float:
        values = [number(one.value[1]) for one in server.instant(query, at_ms) if one.value is not None]
        known = [value for value in values if isfinite(value)]
        if not known:
            raise LatencyUnknown(f"{server.origin}: {query}: no value")
        return max(known)

    return latency


class Alarms:
    """Watches the SLOs of a policy, and requests room for each that is violated long enough. Not thread-safe."""

    def __init__(self, latency: Latency) -> None:
        self._latency = latency
        self._since: dict[str, int] = {}
        self._evaluated: tuple[str, int] | None = None
        self._calls: tuple[PreemptionCall, ...] = ()
        self.readings: dict[str, float] = {}
        """Latest latency in seconds by SLO. Unknown ones are left out."""
        self.faults: dict[str, str] = {}
        """Why an SLO could not be read, by name."""

    def __call__(self, policy: Policy, now_ms: int) -> Sequence[PreemptionCall]:
        """Return the requests for room at this time. All targets of a cycle get the same result from one reading."""
        if self._evaluated != (policy.version(), now_ms):
            self._evaluated = (policy.version(), now_ms)
            self.readings, self.faults = {}, {}
            calls = [self._evaluate(slo, now_ms) for slo in policy.preemption.slos]
            self._since = {slo.name: self._since[slo.name] for slo in policy.preemption.slos if slo.name in self._since}
            self._calls = tuple(call for call in calls if call is not None)
        return self._calls

    def _evaluate(self, slo: SloPolicy, now_ms: int) -> PreemptionCall | None:
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
    """Return the request for room of a violated SLO, with the sentence that explains it."""
    lasted = f" for {lasted_ms / MS_PER_SECOND / 60:.0f} min" if lasted_ms else ""
    why = f"the latency of {slo.name} is {seconds_text(value)}, above {seconds_text(slo.above)}{lasted}"
    return PreemptionCall(slo.queue or "", slo.workload or "", why, slo.gpus)


def seconds_text(seconds: float) -> str:
    """Format a duration, for example as `50 ms` or `1.2 s`."""
    return f"{seconds * 1000:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"
