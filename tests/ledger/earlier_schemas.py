"""Ledger files of every earlier schema under golden/, and the number of schemas."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

KEPT = Path(__file__).parents[1] / "golden" / "ledger"
SCHEMAS = len([f for f in (resources.files("accountant.storage") / "migrations").iterdir() if f.name.endswith(".sql")])
