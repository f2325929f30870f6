"""A message whose texts try what they can."""

from __future__ import annotations

from accountant.channels.protocol import (
    Attachment,
    Message,
)

EVIL = "<!channel> <script>alert(1)</script> [x](http://evil) *b*\r\nBcc: all@example.com"
LETTER = Message(
    key="report/2026-10/pdf/finance//*",
    at_ms=1_793_534_400_000,
    subject=f"GPU report of {EVIL}",
    text=f"Team {EVIL} had",
    facts=(("GPU-hours", "1,234.5"), ("Team", EVIL)),
    link=("Open in gputally", "https://gputally.example.com/month/2026-10"),
    attachments=(Attachment("gputally-2026-10.pdf", "application/pdf", b"%PDF-1.7 \x00\xff"),),
)
