"""Texts from outside on which a regular expression could try every way to divide them. Each takes milliseconds of
processor time, and would take minutes to years otherwise."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any
from zoneinfo import ZoneInfo

import pytest

from accountant.api.problems import Refusal
from accountant.api.query_parameters import instant
from fairshare.core.gpu_demand import read_pod
from fairshare.web.form_fields import Field
from fairshare.web.policy_form import value
from gputally.base.instants import duration_seconds
from gputally.kubernetes.objects import duration_s, quantity
from tests.fairshare.builders import pod_object
from tests.processor_limit import processor_limit

LONG = 250_000
DIGITS = "1" * LONG + "x"


@pytest.fixture(autouse=True)
def _limited() -> Iterator[None]:
    with processor_limit():
        yield


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
