"""Names that would like to be formulas, markup, or no text at all."""

from __future__ import annotations

HOSTILE = (
    '=HYPERLINK("http://x")',
    "+1",
    "-1",
    "@SUM(A1)",
    "\tx",
    "\rx",
    "＝1",
    "<script>alert(1)</script>",
    "a\x00b\x0b",
)
