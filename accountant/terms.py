"""What every model of the published language is made of: closed frozen models, and durations as people write them."""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer

_NUMBER = re.compile(r"\d+(\.\d+)?")
_DURATION = re.compile(r"(\d+)(w|d|h|m|s)")
_SECONDS = {"w": 604_800, "d": 86_400, "h": 3_600, "m": 60, "s": 1}
_WHOLE = re.compile("[0-9]{1,12}")


def parse_duration(value: object) -> object:
    """Seconds from `7d`, `1h30m`, `1w` or a plain integer, which in a query string is text too. Raises ValueError for
    anything else."""
    if not isinstance(value, str):
        return value
    if _WHOLE.fullmatch(value):
        return int(value)
    parts = _DURATION.findall(value)
    if not parts or "".join(n + u for n, u in parts) != value:
        raise ValueError(f"not a duration: {value!r} (write for example 7d, 12h, 1h30m)")
    return sum(int(n) * _SECONDS[u] for n, u in parts)


def parse_seconds(value: object) -> object:
    """Seconds from `50ms`, from text such as `2s` or `1m`, or a plain number. Raises ValueError for anything else."""
    if isinstance(value, str) and value.endswith("ms") and _NUMBER.fullmatch(value[:-2]):
        return float(value[:-2]) / 1000
    return parse_duration(value)


Duration = Annotated[int, BeforeValidator(parse_duration), Field(ge=0)]
"""Whole seconds; read from `7d`-style text or an integer."""


def _plain(value: Decimal) -> str:
    return format(value, "f")


Exact = Annotated[Decimal, PlainSerializer(_plain, return_type=str, when_used="json")]
"""An exact amount; written without an exponent however small it is."""


class Model(BaseModel):
    """Frozen, closed against unknown keys. Numbers are finite: JSON knows no others, and no sum survives them."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


def bare_off(value: object) -> object:
    """YAML 1.1 reads a bare `off` as false."""
    return "off" if value is False else value
