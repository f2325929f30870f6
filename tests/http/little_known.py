"""Ledgers that say little: what is put into them, and the words of a page."""

from __future__ import annotations

import re

from gputally.base.units import MS_PER_DAY

PRICES = (
    "schema: 1\ncurrency: EUR\nrows:\n  - {id: h100, model: H100, price: 2.40, per: gpu-hour,"
    " valid_from: 2026-01-01, valid_to: 2026-12-01, source: contract, as_of: 2026-01-01, basis: gpu-only}\n"
)
POLICY = "schema: 1\nqueues:\n  - {name: llm, team: llm, deserved: 8}\n  - {name: vision, team: vision, deserved: 8}\n"
STOPPED_MS = 52 * MS_PER_DAY


def words(page: str) -> str:
    return " ".join(re.sub(r"<style.*?</style>|<[^>]+>", " ", page, flags=re.DOTALL).split())
