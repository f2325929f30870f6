"""The page passes the suite of exports."""

from __future__ import annotations

from accountant.exports.html import EXPORT
from gputally.testing.exports import ExportSuite


class TestHtml(ExportSuite):
    plugin = EXPORT
    forbidden = ("<script>",)

    def due(self, content: bytes) -> None:
        return None
