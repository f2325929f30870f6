"""Runs axe on a page, and in each table on one row of every kind.

Axe takes a time that grows with the elements of a page, most of which are in rows that one template wrote. Rows are
alike that differ only in what their texts, addresses and numbers are, not in elements, classes, names of attributes, or
in what is empty: what axe says of one of them, it says of all."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page

_MARK_ROWS = """() => {
  for (const body of document.querySelectorAll("tbody")) {
    const seen = new Set();
    for (const row of body.rows) {
      const kind = row.outerHTML
        .replace(/ data-alike(="")?/g, "")
        .replace(/ (?!class=|style=)([\\w-]+)="[^"]+"/g, " $1")
        .replace(/[\\d.,]+/g, "0")
        .replace(/>[^<]*[^<\\s][^<]*(?=<)/g, ">text");
      row.toggleAttribute("data-alike", seen.has(kind));
      seen.add(kind);
    }
  }
  return document.querySelectorAll("[data-alike]").length;
}"""


def violations(page: Page, options: Mapping[str, Any]) -> list[Any]:
    """What axe finds on the page as it is now. options: axe's own."""
    alike = page.evaluate(_MARK_ROWS)
    context = {"exclude": [["[data-alike]"]]} if alike else None
    found: list[Any] = Axe().run(page, context=context, options=dict(options)).response["violations"]
    return found
