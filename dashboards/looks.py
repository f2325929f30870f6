"""Units and colours that several dashboards share, so that a thing looks the same wherever it is drawn."""

from __future__ import annotations

from dashboards import palette
from dashboards.board import fixed
from dashboards.panels import Json

GPUS = "suffix: GPUs"
GPU_HOURS = "suffix: GPU-h"
CURRENCIES = ("USD", "EUR", "GBP", "CHF", "JPY")

MODELS: dict[str, Json] = {name: fixed(color) for name, color in palette.MODELS.items()}
ACCOUNTS: dict[str, Json] = {f"^{name}$": fixed(color) for name, color in palette.ACCOUNTS.items()}
MONEY: dict[str, Json] = {f"{code}$": {"unit": f"currency{code}"} for code in CURRENCIES}
"""A series whose name ends in a currency has its sign."""
CAPACITY: dict[str, Json] = {
    "^capacity$": fixed(palette.GREY),
    "^allocated$": fixed(palette.ORANGE),
    "^busy$": fixed(palette.GREEN),
}
