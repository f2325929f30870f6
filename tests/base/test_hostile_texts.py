"""Texts from outside on which a regular expression could try every way to divide them. Each takes milliseconds of
processor time, and would take minutes to years otherwise."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any
from zoneinfo import ZoneInfo

import pytest

from accountant.api.problems import Refusal
from accountant.api.query_parameters import instant
from fairshare.core.gpu_demand import read_pod
from fairshare.schedulers.kueue.adapter import CONFIGURATION_KEY, Configuration, read_configuration
from fairshare.web.form_fields import Field
from fairshare.web.policy_form import value
from gputally.base.instants import duration_seconds
from gputally.kubernetes.objects import duration_s, quantity
from tests.fairshare.builders import pod_object

MOST_S = 10.0
"""Processor time of this process that one text may take; a thousand times what it takes."""
LONG = 250_000
DIGITS = "1" * LONG + "x"


class TooLongAtIt(BaseException):
    """A text took more processor time than it may."""


@pytest.fixture(autouse=True)
def processor_limit() -> Iterator[None]:
    assert threading.current_thread() is threading.main_thread()

    def stop(*_: object) -> None:
        raise TooLongAtIt

    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, MOST_S)
    yield
    signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    signal.signal(signal.SIGVTALRM, before)


def _configuration(text: str) -> Configuration | None:
    return read_configuration([{"data": {CONFIGURATION_KEY: text}}])


def _admission(**settings: str) -> Configuration:
    lines = ", ".join(f"{key}: {text!r}" for key, text in settings.items())
    found = _configuration(f"admissionFairSharing: {{{lines}}}")
    assert found is not None
    return found


@pytest.mark.parametrize("key", ["usageHalfLifeTime", "usageSamplingInterval"])
@pytest.mark.parametrize("text", ["0" * 60 + "1s", "0" * 100_000 + "1s", "1" * 100_000, "", "soon", "-1h"])
def test_a_duration_of_kueue_is_one_or_a_fault(key: str, text: str) -> None:
    found = _admission(**{"usageHalfLifeTime": "1h", key: text})
    assert bool(found.fault) != (len(text) == 62)


def test_a_duration_that_go_rounds_to_nothing_is_no_half_life() -> None:
    found = _admission(usageHalfLifeTime="0." + "0" * 50 + "1ns")
    assert (found.no_half_life, found.penalty, found.fault) == (True, 0.0, "")
    assert _admission(usageHalfLifeTime="1ns", usageSamplingInterval="2562047h").penalty == 1.0
    assert not _admission(usageHalfLifeTime="+1h30m").no_half_life


@pytest.mark.parametrize(
    ("line", "fair"), [("#" * 60, True), ("# " * 60 + "\n\n \t# more\n", True), ("#" * 60 + "\n{}", False)]
)
def test_a_banner_before_the_first_document_is_a_comment(line: str, fair: bool) -> None:
    good = "fairSharing: {preemptionStrategies: [LessThanInitialShare]}"
    found = _configuration(f"{line}\n---\n{good}\n")
    assert found is not None
    assert found.fair == fair


def _annotated(text: str) -> object:
    obj = pod_object("p", gpus=0, annotations={"gpu-fraction": text})
    obj["spec"]["schedulerName"] = "kai-scheduler"
    return read_pod(obj)


def _of_form(text: str) -> object:
    return value(Field(("k",), "k", "number"), text)


def _instant(text: str) -> object:
    with suppress(Refusal):
        return instant("start", text, ZoneInfo("UTC"))
    return None


def _duration(text: str) -> object:
    with suppress(ValueError):
        return duration_seconds(text)
    return None


READERS: list[tuple[Callable[[str], Any], str, Any]] = [
    (_annotated, DIGITS, None),
    (quantity, DIGITS, None),
    (duration_s, DIGITS, None),
    (_of_form, DIGITS, DIGITS),
    (_duration, DIGITS, None),
    (_duration, "1h30", None),
    (_duration, "1h30m", 5_400),
    (_instant, "T" * LONG, None),
    (_instant, "2026-10-01T09:00:00 02:00", 1_790_838_000_000),
]


@pytest.mark.parametrize(("read", "text", "wanted"), READERS)
def test_a_long_text_is_read_once(read: Callable[[str], Any], text: str, wanted: Any) -> None:
    assert read(text) == wanted
