"""The report of a whole month, and a page of it as its reader has it."""

from __future__ import annotations

from html.parser import HTMLParser

from accountant.core.periods import Month, zone
from accountant.reports.report_builder import build

OCTOBER = Month(2026, 10)
HOUR = 3_600_000_000


def build_month(ledger, book, month, timezone="UTC", team=None):
    """The report of a whole calendar month."""
    return build(ledger, book, *month.span(zone(timezone)), timezone, team=team)


class Page(HTMLParser):
    """Every tag must be closed by its own; keeps tags, attributes and text."""

    VOID = frozenset({"meta", "br", "link", "img", "hr"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data
