"""Colours that people with any kind of colour vision can tell apart, and what each one means.

The eight of Okabe and Ito, "Color Universal Design" (2008). A thing has one colour in every panel.
Where nobody can know the names in advance (queues, namespaces) a name's first or last character decides; what
begins otherwise is drawn on the Cividis scale, made for the same purpose (Nuñez, Anderton, Renslow, PLOS ONE 2018).
"""

from __future__ import annotations

BLUE = "#0072B2"
SKY = "#56B4E9"
GREEN = "#009E73"
YELLOW = "#F0E442"
ORANGE = "#E69F00"
VERMILION = "#D55E00"
PURPLE = "#CC79A7"
GREY = "#999999"

PALETTE = (BLUE, SKY, GREEN, YELLOW, ORANGE, VERMILION, PURPLE, GREY)
OPEN_ENDED = "continuous-cividis"
"""Grafana's colour mode for series whose names are not known in advance."""

_LETTERS = ("ahov07", "bipw18", "cjqx29", "dkry3", "elz4", "fms5", "gntu6_")
_NAMED = (BLUE, ORANGE, GREEN, VERMILION, SKY, PURPLE, GREY)
FIRST = {f"^[{letters}{letters.upper()}]": color for letters, color in zip(_LETTERS, _NAMED, strict=True)}
LAST = {f"[{letters}{letters.upper()}]$": color for letters, color in zip(_LETTERS, _NAMED, strict=True)}
"""Regular expression of names -> colour, by their first or last character: so that a name keeps its colour whatever
its value is, and neighbours in a legend mostly differ. Without yellow, which is faint on white. Grafana has no
colour-blind safe palette by name of its own."""

GOOD, WARNING, BAD = GREEN, ORANGE, VERMILION

ACCOUNTS = {
    "busy": GREEN,
    "allocated_idle": ORANGE,
    "allocated_unknown": PURPLE,
    "unallocated": SKY,
    "unmetered": GREY,
    "down": VERMILION,
}
"""The accounts of a GPU-microsecond, in the order in which they are stacked."""

MODELS = {
    "B200": VERMILION,
    "H200": GREEN,
    "H100": BLUE,
    "A100": ORANGE,
    "L40S": SKY,
    "V100": YELLOW,
    "T4": PURPLE,
}
"""Families of GPU models, by a part of the name that the driver gives; others are drawn open-ended."""
