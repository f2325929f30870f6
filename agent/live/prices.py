"""What an hour of a GPU costs, for the live table only: bills are the accountant's, by its price book.

One price for everything, or a file:

    currency: USD
    per_hour:
      H100: 2.49
      H100 NVL: 2.29        # the entry with the most words of a GPU's name wins

A GPU that no entry names has no price: None, never 0. Nothing is guessed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from pathlib import Path

import msgspec

from agent import yamlfile
from agent.errors import SettingsError

_WORD = re.compile(r"[A-Za-z0-9.]+")
_CURRENCY = re.compile(r"[A-Z]{3}")
_MOST = Decimal(10**6)


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    per_hour: dict[str, int | float | str]
    currency: str = ""


@dataclass(frozen=True, slots=True)
class Prices:
    """Prices per GPU-hour by words of the model's name; `everything` where one price holds for all."""

    currency: str = ""
    by_words: tuple[tuple[frozenset[str], Decimal], ...] = ()
    everything: Decimal | None = None

    def of(self, model: str) -> Decimal | None:
        """The price of a GPU of this model."""
        words = frozenset(_WORD.findall(model.lower()))
        best = max(
            (entry for entry in self.by_words if entry[0] <= words), key=lambda entry: len(entry[0]), default=None
        )
        return best[1] if best else self.everything


def price(text: str) -> Decimal:
    """A price as it was written. Raises ValueError."""
    try:
        value = Decimal(text.strip())
    except InvalidOperation as error:
        raise ValueError(f"not a price: {text!r}") from error
    if not value.is_finite() or not 0 <= value <= _MOST:
        raise ValueError(f"not a price: {text!r}")
    return value


def uniform(text: str) -> Prices:
    """The same price for every GPU. Raises SettingsError."""
    try:
        return Prices(everything=price(text))
    except ValueError as error:
        raise SettingsError(f"--price-per-hour: {error}") from error


def load(path: Path) -> Prices:
    """A price file. Raises FileFault with the line of the fault."""
    return parse(yamlfile.read(path))


def parse(document: yamlfile.Document) -> Prices:
    """Raises FileFault."""
    file = yamlfile.convert(document, _File)
    entries: dict[frozenset[str], Decimal] = {}
    faults: list[str] = []
    if file.currency and not _CURRENCY.fullmatch(file.currency):
        faults.append(f"{document.place(('currency',))}: currency: three capital letters, not {file.currency!r}")
    for name, value in file.per_hour.items():
        place = document.place(("per_hour", name))
        words = frozenset(_WORD.findall(name.lower()))
        if not words:
            faults.append(f"{place}: names no GPU: {name!r}")
        elif words in entries:
            faults.append(f"{place}: {name!r} names the same GPUs as an earlier entry")
        try:
            entries[words] = price(str(value))
        except ValueError as error:
            faults.append(f"{place}: {error}")
    if faults:
        raise yamlfile.FileFault(faults)
    return Prices(file.currency, tuple(entries.items()))
