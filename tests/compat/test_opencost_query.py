"""OpenCost's windows and filters as its clients write them."""

from __future__ import annotations

import contextlib
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accountant.compat import opencost_query
from accountant.compat.opencost_query import NotAFilter, NotAWindow

NOW = "2026-11-18T10:30:00Z"  # a Wednesday


def ms(text: str) -> int:
    return round(datetime.fromisoformat(text).timestamp() * 1000)


def spelled(instant_ms: int) -> str:
    return datetime.fromtimestamp(instant_ms / 1000, UTC).isoformat().replace("+00:00", "Z")


@pytest.mark.parametrize(
    ("window", "start", "end"),
    [
        ("today", "2026-11-18T00:00:00Z", "2026-11-19T00:00:00Z"),
        ("yesterday", "2026-11-17T00:00:00Z", "2026-11-18T00:00:00Z"),
        ("week", "2026-11-15T00:00:00Z", NOW),
        ("lastweek", "2026-11-08T00:00:00Z", "2026-11-15T00:00:00Z"),
        ("month", "2026-11-01T00:00:00Z", NOW),
        ("lastmonth", "2026-10-01T00:00:00Z", "2026-11-01T00:00:00Z"),
        ("7d", "2026-11-12T00:00:00Z", "2026-11-19T00:00:00Z"),
        ("2h", "2026-11-18T09:00:00Z", "2026-11-18T11:00:00Z"),
        ("2w", "2026-11-05T00:00:00Z", "2026-11-19T00:00:00Z"),
        ("24h offset 14h", "2026-11-16T21:00:00Z", "2026-11-17T21:00:00Z"),
        ("1d offset 1w", "2026-11-11T00:00:00Z", "2026-11-12T00:00:00Z"),
        ("1790812800,1790899200", "2026-10-01T00:00:00Z", "2026-10-02T00:00:00Z"),
        ("1790812800-1790899200", "2026-10-01T00:00:00Z", "2026-10-02T00:00:00Z"),
        ("2026-10-01T00:00:00Z,2026-10-01T23:59:59Z", "2026-10-01T00:00:00Z", "2026-10-01T23:59:59Z"),
    ],
)
def test_every_form_of_a_window(window: str, start: str, end: str) -> None:
    assert tuple(map(spelled, opencost_query.parse_window(window, ms(NOW)))) == (start, end)


def test_a_duration_that_ends_at_a_full_hour_ends_there() -> None:
    assert opencost_query.parse_window("1h", ms("2026-11-18T10:00:00Z"))[1] == ms("2026-11-18T10:00:00Z")


@pytest.mark.parametrize(
    "window",
    ["", "0d", "7y", "tomorrow", "2026-10-01,2026-10-02", "2026-13-01T00:00:00Z,2026-10-02T00:00:00Z", "5,5", "6-5",
     "2026-10-02T00:00:00Z,2026-10-01T00:00:00Z", "2026-10-01T00:00:00+02:00,2026-10-02T00:00:00Z", "9" * 40],
)  # fmt: skip
def test_what_is_no_window_is_refused(window: str) -> None:
    with pytest.raises(NotAWindow, match=r"expected|after|month"):
        opencost_query.parse_window(window, ms(NOW))


KEYS = frozenset({"namespace", "pod", "node", "cluster", "controllerName", "label"})
POD = {"namespace": "vision", "pod": "train-0", "node": "n1", "cluster": "prod", "label[app]": "resnet"}


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("", True),
        ('namespace:"vision"', True),
        ('namespace:"nlp","vision"', True),
        ('namespace!:"nlp","vision"', False),
        ('namespace:"vision"+pod:"other"', False),
        ('namespace:"nlp"|pod:"train-0"', True),
        ('pod~:"ain"', True),
        ('pod<~:"train"+pod~>:"-0"', True),
        ('pod!<~:"train"', False),
        ('pod!~>:"-1"', True),
        ('namespace:"vision","nlp"+label[app]!:"x"', True),
        ('(namespace:"nlp" | namespace:"vision") + node:"n1"', True),
        ('namespace:"nlp"+(node:"n1"|cluster:"prod")', False),
        ('controllerName:""', True),  # without a controller
        ('label[app.kubernetes.io/name]:"x"', False),
    ],
)
def test_filters_keep_what_they_say(text: str, kept: bool) -> None:
    assert opencost_query.parse_filter(text, KEYS)(POD) is kept


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("namespace", "expected more"),
        ("namespace:vision", "expected a value in quotes"),
        ('namespace:"a"+pod:"b"|node:"c"', "need parentheses"),
        ('(namespace:"a"', r"expected \)"),
        ('namespace:"a")', "follows the end"),
        ('owner:"me"', "character 1: unknown property 'owner'; there are cluster"),
        ('namespace>:"a"', "expected an operator"),
        ('namespace:"a",', "expected more"),
        (";drop", "not part of a filter"),
        ("(" * 40 + 'namespace:"a"' + ")" * 40, "nested parentheses"),
        ("x" * 5_000, "more than 4096"),
    ],
)
def test_what_is_no_filter_is_refused_with_its_place(text: str, reason: str) -> None:
    with pytest.raises(NotAFilter, match=reason):
        opencost_query.parse_filter(text, KEYS)


@given(st.text(alphabet='nmpod:!~<>"+|,()[] label\\', max_size=40) | st.text(max_size=40))
def test_no_text_escapes_as_anything_but_a_refusal(text: str) -> None:
    with contextlib.suppress(NotAFilter):
        assert opencost_query.parse_filter(text, KEYS)(POD) in (True, False)
    with contextlib.suppress(NotAWindow):
        start, end = opencost_query.parse_window(text, ms(NOW))
        assert start < end
