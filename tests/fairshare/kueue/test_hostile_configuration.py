"""Texts in Kueue's configuration that cost time or mean nothing."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from fairshare.schedulers.kueue.adapter import CONFIGURATION_KEY, Configuration, read_configuration
from tests.processor_limit import processor_limit


@pytest.fixture(autouse=True)
def _limited() -> Iterator[None]:
    with processor_limit():
        yield


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
