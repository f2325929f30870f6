"""The history of Slurm passes the suite of histories."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from accountant.histories.slurm import command as slurm
from gputally.base.units import MS_PER_SECOND
from gputally.testing.histories import HistorySuite, Use


class TestSlurm(HistorySuite):
    plugin = slurm.HISTORY
    not_bookable = "5000"

    @pytest.fixture
    def written(self, tmp_path: Path) -> Callable[[Sequence[Use]], list[str]]:
        def write(uses: Sequence[Use]) -> list[str]:
            file = tmp_path / "sacct.json"
            file.write_text(json.dumps({"jobs": [_record(one) for one in uses]}))
            return [str(file)]

        return write


def _record(one: Use) -> dict[str, Any]:
    count = int(one.gpus) if re.fullmatch(r"-?\d{1,12}", one.gpus) else one.gpus
    return {
        "job_id": one.number, "name": one.text, "account": one.account, "user": one.text, "nodes": one.node,
        "partition": one.text, "state": {"current": ["COMPLETED"]},
        "time": {"start": one.start_ms // MS_PER_SECOND, "end": one.end_ms // MS_PER_SECOND},
        "tres": {"allocated": [{"type": "gres", "name": "gpu", "count": count}]},
    }  # fmt: skip
