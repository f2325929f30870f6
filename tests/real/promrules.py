"""The rules as files, and promtool over tests of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from dashboards import prometheus_rules
from dashboards.prometheus_rules import Group
from tests.real.prometheus import promtool


def proven(folder: Path, what: str, tests: Sequence[tuple[str, dict[str, Any]]]) -> None:
    """Tests of promtool, each on its alert and the records alone: hours of all other rules would take minutes."""
    files = []
    for alert in prometheus_rules.ALERTS:
        own = [test for name, test in tests if name == alert.name]
        if own:
            only = Group("gputally.alone", (alert,))
            (folder / f"{alert.name}.rules.yaml").write_text(
                prometheus_rules.render_groups([prometheus_rules.RECORD_GROUP, only])
            )
            document = {"rule_files": [f"{alert.name}.rules.yaml"], "evaluation_interval": "1m", "tests": own}
            files.append(f"{alert.name}.{what}.yaml")
            (folder / files[-1]).write_text(yaml.safe_dump(document, sort_keys=False))
    assert "SUCCESS" in promtool("test", "rules", *files, cwd=folder)
