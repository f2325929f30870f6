"""PDF passes the suite of exports."""

from __future__ import annotations

import pytest

from accountant.exports.pdf import EXPORT
from gputally.testing.exports import ExportSuite

pytestmark = pytest.mark.real


class TestPdf(ExportSuite):
    plugin = EXPORT
    forbidden = ("<script>",)

    def due(self, content: bytes) -> None:
        return None
