"""The engine of Trino without Trino's client."""

from __future__ import annotations

import sys
from importlib.util import find_spec

import pytest

from accountant.__main__ import main
from tests.fleet.conftest import TwoLedgers


@pytest.mark.skipif(find_spec("trino") is not None, reason="trino is installed")
def test_that_the_client_is_not_installed_is_said_in_a_line(
    two: TwoLedgers, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "trino", None)
    assert main(["fleet", "usage", "--engine", "trino", "--lake", two.warehouse]) in (1, 2)
    told = " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert "the package trino is not installed: run pip install trino" in told
