"""OpenCost's rule on the answers of a real Prometheus 3 to its queries over a day gives the figures on the
documentation's page."""

from __future__ import annotations

from pathlib import Path

import pytest

import gputally
from tests.bench.opencost import CASES, RESOLUTIONS_S, measured

pytestmark = pytest.mark.real

PAGE = Path(gputally.__file__).parents[1] / "docs" / "from-opencost.md"


def test_the_page_has_the_figures_that_are_measured(tmp_path: Path) -> None:
    found = measured(tmp_path)
    page = PAGE.read_text(encoding="utf-8").splitlines()
    missing = [line for line in found.lines() if line not in page]
    assert not missing, "not in docs/from-opencost.md:\n" + "\n".join(missing)
    assert set(found.truth) == set(CASES)
    assert found.ours_named == found.pods
    assert all(abs(found.ours[name] / hours - 1) < 0.005 for name, hours in found.truth.items())
    for resolution in RESOLUTIONS_S:
        assert found.theirs[resolution]["steady"] == pytest.approx(192, abs=1e-6)  # where it is right
        assert found.gapped[resolution]["steady"] == pytest.approx(192, abs=1e-6)
