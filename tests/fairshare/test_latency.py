"""When a latency asks for room: above its threshold for its time, known, and not otherwise."""

from __future__ import annotations

import httpx2
import pytest

from accountant.wire.policy_models import Policy
from fairshare.preemption.preemption_types import PreemptionCall
from fairshare.preemption.service_latency_objectives import (
    Alarms,
    Latency,
    LatencyUnknown,
    prometheus_latency,
    seconds_text,
)

SLO = {"name": "chat", "queue": "serving", "query": "p99", "above": "50ms", "sustained": "5m", "gpus": 2}
MINUTE_MS = 60_000


def _policy(**more: object) -> Policy:
    return Policy.model_validate({"queues": [{"name": "serving"}], "preemption": {"slos": [{**SLO, **more}]}})


def _alarms(values: dict[int, float | None]) -> Alarms:
    """Latency by minute; None: not known."""

    def latency(_query: str, at_ms: int) -> float:
        value = values[at_ms // MINUTE_MS]
        if value is None:
            raise LatencyUnknown("no answer")
        return value

    return Alarms(latency)


def _minutes(alarms: Alarms, policy: Policy, count: int) -> list[int]:
    """The minutes in which it asked."""
    return [minute for minute in range(count) if alarms(policy, minute * MINUTE_MS)]


def test_it_asks_once_it_has_lasted() -> None:
    alarms = _alarms(dict.fromkeys(range(8), 0.08))
    assert _minutes(alarms, _policy(), 8) == [5, 6, 7]
    why = "the latency of chat is 80 ms, above 50 ms for 7 min"
    assert alarms(_policy(), 7 * MINUTE_MS) == (PreemptionCall("serving", "", why, 2.0),)


@pytest.mark.parametrize("between", [0.05, None])
def test_a_good_or_unknown_reading_starts_the_time_anew(between: float | None) -> None:
    alarms = _alarms(dict.fromkeys(range(12), 0.08) | {4: between})
    assert _minutes(alarms, _policy(), 12) == [10, 11]


def test_a_fault_is_told_and_asks_for_nothing() -> None:
    alarms = _alarms({0: None})
    assert alarms(_policy(sustained=0), 0) == ()
    assert alarms.faults == {"chat": "no answer"}


def _answer(status: int, body: str) -> Latency:
    return prometheus_latency("http://p", transport=httpx2.MockTransport(lambda _: httpx2.Response(status, text=body)))


@pytest.mark.parametrize(
    ("status", "body", "words"),
    [
        (400, '{"status":"error","error":"parse error"}', r"http://p: parse error \(query: q\)"),
        (502, "<html>", "http://p: status 502"),
        (200, '{"status":"success","data":{"resultType":"vector","result":[]}}', "http://p: q: no value"),
        (200, '{"status":"success","data":{"resultType":"scalar","result":[1,"NaN"]}}', "http://p: q: no value"),
    ],
)
def test_what_is_no_number_is_unknown(status: int, body: str, words: str) -> None:
    latency = _answer(status, body)
    with pytest.raises(LatencyUnknown, match=words):
        latency("q", 0)


def test_the_largest_value_counts() -> None:
    body = '{"status":"success","data":{"resultType":"vector","result":[{"value":[1,"0.02"]},{"value":[1,"0.7"]}]}}'
    assert _answer(200, body)("q", 0) == 0.7
    assert (seconds_text(0.0501), seconds_text(1.25)) == ("50.1 ms", "1.25 s")
