"""A dictionary of edges: for each kind of value, those at which calendars, integers and decimals end.

Generators of random values find none of them. A kind is that of a parameter of a route or of a field of a body.
`KIND_OF_PARAMETER` names the kind of every parameter of every route, so that a new parameter needs a kind here."""

from __future__ import annotations

import math
from typing import Any

DAY_MS = 86_400_000
YEAR_1_MS, YEAR_10000_MS = -62_135_596_800_000, 253_402_300_800_000

INTEGERS = (
    0, -1, 1, 2**31 - 1, 2**31, 2**53, 2**63 - 1, 2**63, -(2**63), -(2**63) - 1, 2**64, 10**30,
    YEAR_1_MS, YEAR_1_MS - 1, YEAR_10000_MS - 1, YEAR_10000_MS,
)  # fmt: skip
DECIMALS = (
    "0", "-0", "1e-30", "1e30", "1E+999999", "-1E+999999", "1e-999999", "1e308", "1e309", "NaN", "sNaN",
    "Infinity", "-Infinity", "0.1", "1" * 40, "0." + "0" * 40 + "1", "1_0", "٣", "",
)  # fmt: skip
FLOATS = (1.5, -0.0, 5e-324, 1e308, math.nan, math.inf, -math.inf)
"""JSON has no last three, but many programs write them."""
MONTHS = ("0000-01", "0001-01", "1969-12", "1970-01", "1970-12", "1971-01", "2026-00", "2026-13", "9998-12", "9999-01",
          "9999-12", "10000-01", "٢٠٢٦-١٠")  # fmt: skip
INSTANTS = (
    "0001-01-01", "0001-01-01T00:00:00+14:00", "0001-01-01T00:00:00Z", "1582-10-14", "1969-12-31", "1970-01-01",
    "1970-01-01T00:00:00+14:00", "2026-02-29", "2026-03-29T02:30:00+01:00", "9998-12-31", "9999-12-30", "9999-12-31",
    "9999-12-31T23:59:59Z", "9999-12-31T23:59:59-14:00", "10000-01-01", "2026-10-01T24:00:00Z",
    "2026-10-01T00:00:00+99:99", "2026-10-01T00:00:00.1Z", "2026-W01-1", *map(str, INTEGERS), "٣",
)  # fmt: skip
DURATIONS = (*map(str, INTEGERS), "0s", "1s", "1d", "3650000d", "99999999999999d", "9" * 40 + "s", "-1d", "1e9", "")
COUNTS = (*map(str, INTEGERS), "1.0", "1e3", "0x1", "true", "٣", "")
FRACTIONS = ("0", "1", "-0.0", "1.0000001", "5e-324", "1e308", "1e309", "nan", "inf", "-inf")
ZONES = (
    "",
    "UTC",
    "Etc/GMT+12",
    "Pacific/Kiritimati",
    "America/Santiago",
    "../../etc/passwd",
    "localtime",
    "UTC\0",
    "é",
)
TEXTS = ("", " ", "\0", "\u202e", "😀", "%", "'", '"', "/", "..", "*", "~", "a~b~c~d", "x" * 254, "x" * 5_000)
IDS = (*TEXTS, "~~~", "c~n~Job~", "prod~vision~Job~" + "x" * 253, "prod~vision~~train", "-" * 16, "0" * 16)
CRONS = (
    "0 0 * * 1",
    "* * * * *",
    "0 0 31 2 *",
    "0 0 29 2 *",
    "60 0 * * *",
    "*/0 * * * *",
    "0-59/1 0 1 1 *",
    "@daily",
    "",
)
PAGES = ("", "AAAA", "////", "W10", "=" * 8, "x" * 4096, "WyIiLDAsMCwwLCIiLDBd")
WEIGHTS = (*(f"H100:{weight}" for weight in DECIMALS), ":1", "a:b:1", "H100")
WORDS = ("", "html", "unknown", "HTML", "\0")
_SECONDS = (
    "0001-01-01T00:00:00Z", "1970-01-01T00:00:00Z", "2026-10-31T00:00:00Z", "2026-11-01T00:00:00Z",
    "9999-12-31T23:59:59Z", "10000-01-01T00:00:00Z", "٢٠٢٦-١٠-٠١T٠٠:٠٠:٠٠Z",
)  # fmt: skip
WINDOWS = (
    *DURATIONS, "today", "lastweek", "month", "week", "7w", "999999w", "1d offset 999999w", "1d offset 0d", "٣d",
    "0,1", "0,99999999999", "99999999998,99999999999", "1-2", ",", "1d,",
    *(f"{begin},{end}" for begin in _SECONDS for end in _SECONDS),
)  # fmt: skip
FILTERS = (
    "", '"', 'namespace:"', 'namespace:"a"', 'label[]:"a"', 'label[a]<~:"x"', "(" * 100, "namespace:" + '"a",' * 900,
    'namespace!:"a"+node:"b"|pod:"c"', "\u202e", "x" * 5_000,
)  # fmt: skip
FLAGS = ("", "true", "false", "True", "1", "٣", "weighted")
UNITS = ("", "true", "hour", "day", "week", "weeknow", "month", "quarter", "all", "year")
FIGURES = ("", "name", "totalCost", "gpuHours", "gpuEfficiency", "minutes", "x")

EDGES: dict[str, tuple[str, ...]] = {
    "instant": INSTANTS, "month": MONTHS, "duration": DURATIONS, "count": COUNTS, "fraction": FRACTIONS,
    "zone": ZONES, "text": TEXTS, "id": IDS, "cron": CRONS, "page": PAGES, "weight": WEIGHTS, "word": WORDS,
    "window": WINDOWS, "filter": FILTERS, "flag": FLAGS, "unit": UNITS, "figure": FIGURES, "decimal": DECIMALS,
}  # fmt: skip
OPENCOST_PARAMETERS: dict[str, str] = {
    "window": "window", "step": "duration", "resolution": "duration", "aggregate": "text", "filter": "filter",
    "filterNamespaces": "text", "filterTypes": "text", "limit": "count", "offset": "count", "sort": "figure",
    "order": "word", "format": "word", **dict.fromkeys(("accumulate", "accumulateBy"), "unit"),
    **dict.fromkeys(("idle", "includeIdle", "idleByNode", "shareIdle", "splitIdle", "sharelb"), "flag"),
}  # fmt: skip
"""The kind of each parameter of the OpenCost port."""
PROMQL_DURATIONS = ("0s", "1ms", "1s", "7d", "36500d", "999999y", "9" * 30 + "d", "-1d", "1e9", "٣d", "")
PROMQL_NUMBERS = (
    "0", "-1", "0.5", "1e308", "1e309", "-1e308", "5e-324", "NaN", "Inf", "1e-400", "253402300800", "-62135596800", "٣",
    "1" * 400, "",
)  # fmt: skip
KIND_OF_PARAMETER: dict[str, str] = {
    **dict.fromkeys(("start", "end", "at", "since"), "instant"),
    **dict.fromkeys(("month", "booked_in"), "month"),
    **dict.fromkeys(("size", "half_life", "calc_period"), "duration"),
    **dict.fromkeys(("limit", "after", "days", "number", "at_ms"), "count"),
    **dict.fromkeys(("id", "proposal", "name", "before"), "id"),
    **dict.fromkeys(
        ("by", "kind", "state", "format", "measure", "decay", "source", "show", "account", "apply", "keep", "lake",
         "moved", "breakdown", "payers", "sort", "columns", "compare", "add", "across", "idle", "stopped", "lost",
         "amounts"),
        "word",
    ),
    **dict.fromkeys(
        ("cluster", "node", "gpu", "team", "namespace", "user", "shard", "subject", "reason", "model", "gpu_model",
         "capacity_type", "price_row", "search", "value", "who", "approved_by"),
        "text",
    ),
    "min_coverage": "fraction", "timezone": "zone", "cron": "cron", "gpu_weight": "weight", "page": "page",
    "amount": "decimal",
}  # fmt: skip


def edges_of(parameter: str) -> tuple[str, ...]:
    """Return the edges of a parameter. A parameter without a kind is a KeyError: give it one above."""
    if parameter.startswith("where."):  # twenty of one kind: a few edges of each suffice
        return TEXTS[2:4] + TEXTS[-1:]
    return EDGES[KIND_OF_PARAMETER[parameter]]


def of_value(value: Any) -> tuple[Any, ...]:
    """Return what may stand in a body instead of a value."""
    if isinstance(value, bool):
        return (1, None)
    if isinstance(value, int | float):
        return (*INTEGERS, *FLOATS, None, "0")
    if isinstance(value, str):
        fitting = INSTANTS if value[:4].isdigit() and "-" in value else DECIMALS if value[:1].isdigit() else TEXTS
        return (*fitting, None, 0)
    return (None, 0, "")


def mutations(body: Any) -> list[Any]:
    """Return the body with one of its values replaced, for each of its values and each edge of the value's kind."""
    found: list[Any] = list(of_value(body))
    if isinstance(body, dict):
        found += [{**body, name: other} for name, value in body.items() for other in mutations(value)]
    elif isinstance(body, list):
        found += [[*body[:at], other, *body[at + 1 :]] for at, value in enumerate(body) for other in mutations(value)]
    return found
