"""The condition of Run:ai."""

from __future__ import annotations

import pytest

from fairshare.schedulers.runai.adapter import effective


@pytest.mark.parametrize(
    ("enabled", "wanted"), [(True, ("False", "HistoryCountedTwice")), (False, ("Unknown", "SettingNotSeen"))]
)
def test_run_ai_tells_of_its_own_history_and_not_of_its_setting(enabled: bool, wanted: tuple[str, str]) -> None:
    pool = {"metadata": {"name": "default"}, "spec": {"timeBasedFairShare": {"enabled": enabled}}}
    told = effective([pool], {"default"})
    assert (told.status, told.reason) == wanted
