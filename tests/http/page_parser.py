"""An HTML parser that checks nesting and ids of pages, and a test for control characters."""

from __future__ import annotations

import re
import unicodedata
from html import unescape
from html.parser import HTMLParser

VOID = {"meta", "link", "br", "hr", "img", "input"}
EVIL = "<script>alert(1)</script>&\"'"


class Reader(HTMLParser):
    """Checks that elements are nested correctly; stores elements, attributes and text."""

    def __init__(self):
        super().__init__()
        self.open, self.tags, self.attributes, self.texts, self.faults = [], [], [], [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, name, value) for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, name, value) for name, value in attrs]

    def handle_endtag(self, tag):
        if not self.open or self.open.pop() != tag:
            self.faults.append(f"</{tag}>")

    def handle_data(self, data):
        self.texts.append(data)


def read(text):
    reader = Reader()
    reader.feed(text)
    assert reader.faults == []
    assert reader.open == []
    ids = [value for _, name, value in reader.attributes if name == "id"]
    assert len(ids) == len({*ids}), ids
    return reader


ALLOWED = {"\u200c", "\u200d", "\n", "\t", "\xa0", "\u2009", "\u202f"}


def steering(text: str) -> set[str]:
    """Return the characters that are controls, formats, separators or unassigned."""
    return {c for c in text if unicodedata.category(c) in ("Cc", "Cf", "Co", "Cn", "Zl", "Zp")} - ALLOWED


def rows_after(found: Reader, caption: str, row: str) -> list[str]:
    """The texts that follow a row's name in the table with this caption."""
    texts = [text.strip() for text in found.texts if text.strip()]
    start = next(i for i, text in enumerate(texts) if text.startswith(caption))
    at = next(i for i in range(start, len(texts)) if texts[i] == row)
    return texts[at + 1 : at + 8]


def tables(text: str) -> dict[str, tuple[str, list[list[str]]]]:
    """The head, and the cells of the body's rows, of each table by its caption."""
    found = {}
    for one in re.findall(r"<table.*?</table>", text, re.DOTALL):
        caption = plain(re.findall(r"<caption[^>]*>(.*?)</caption>", one, re.DOTALL)[0])
        head, _, body = one.partition("</thead>")
        rows = re.findall(r"<tr[^>]*>(.*?)</tr>", body.partition("</tbody>")[0], re.DOTALL)
        found[caption] = head, [re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row, re.DOTALL) for row in rows]
    return found


def plain(markup: str) -> str:
    return " ".join(unescape(re.sub(r"<[^>]*>", " ", markup)).split())


def figure(cell: str) -> float | None:
    """The figure that a cell begins with; None for a text or what is unknown."""
    text = plain(cell).replace(",", "").replace("−", "-")
    found = re.match(r"[+-]?\d+(\.\d+)?", text)
    return float(found[0]) if found else None
