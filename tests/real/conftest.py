"""What several of the real suites read."""

from __future__ import annotations

from pathlib import Path

import pytest

from dashboards import prometheus_rules


@pytest.fixture(scope="module")
def rules_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All alerts and records in `rules.yaml`."""
    path: Path = tmp_path_factory.mktemp("rules")
    (path / "rules.yaml").write_text(prometheus_rules.render_rules())
    return path
