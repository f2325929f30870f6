"""The table of a workstation's own GPUs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agent.__main__ import main
from agent.core.readings import (
    Gpu,
)
from tests.agent.sample_values import CID, MIB

H200 = Gpu("GPU-a", 0, "NVIDIA H200", 144_384)


def test_on_a_workstation(
    fake_nvml: Any, proc: Callable[..., Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    proc(10, comm="train.py", start=5, uid=0)
    root = proc(11, cgroup=f"0::/system.slice/docker-{CID}.scope")
    fake_nvml.show(
        "gpu GPU-a NVIDIA_H200", f"mem {144384 * MIB} {3 * 1024 * MIB}", "util 50 0", "power 350000 1000",
        f"proc 10 {1024 * MIB}", f"proc 11 {2048 * MIB}",
        "gpu GPU-b NVIDIA_H200", f"mem {144384 * MIB} 0", "util 0 0", "power 75000 1000",
    )  # fmt: skip
    assert main(["top", "--once", "--proc", str(root), "--price-per-hour", "4.20"]) == 0
    text = [line.split() for line in capsys.readouterr().out.splitlines() if line.strip()]
    (whole,) = [row for row in text if row[:4] == ["0", "H200", "2", "holders"]]
    assert whole[6:11] == ["3/141", "G", "350", "W", "4.20"]
    assert ["docker/9b3000000000", "0", "%", "2", "G", "2.10", "▁"] in text
    assert ["root/train.py", "0", "%", "1", "G", "2.10", "▁"] in text
    assert ["2", "GPUs,", "1", "held;", "4.20", "per", "hour", "held"] in text
