"""Decides in which format a command writes a file: the ending of the file's name says it.

A name that contradicts the format that a user asks for is an error, because the programs that open the file go by its
name."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

from gputally.base.errors import AccountantError, FairshareError

F = TypeVar("F", bound=str)


class WrongEnding(AccountantError, FairshareError):
    """The ending of a file's name contradicts the format, or names none. The message says which endings there are."""


def format_of_file(file: Path, endings: Mapping[F, str], asked: F | None, default: F) -> F:
    """Return the format of a file to write. `q3.pdf` is a PDF.

    endings: the ending of each format, without the dot. It may have several parts: where there are `csv` and
        `lines.csv`, a name that ends in `csv` alone is of the second format if the user asks for it.
    asked: the format that the user asked for; None: the name decides alone.
    default: for a name without any ending. A name with an ending that no format has needs `asked`.

    Raises WrongEnding."""
    name = file.name.lower()
    matching = [ending for ending in endings.values() if name.endswith(f".{ending}")]
    if matching:
        longest = max(matching, key=len)
        possible = [form for form, ending in endings.items() if f".{ending}".endswith(f".{longest}")]
        decided = next(form for form in possible if endings[form] == longest)
    else:
        last = file.suffix.lower().removeprefix(".")
        possible = [form for form, ending in endings.items() if ending.rpartition(".")[2] == last]
        if last and not possible and asked is None:
            wanted = ", ".join(f".{ending}" for ending in endings.values())
            raise WrongEnding(f"{file}: no format has this ending; let the name end in {wanted}, or name the format")
        possible, decided = possible or list(endings), possible[0] if possible else default
    if asked is not None and asked not in possible:
        raise WrongEnding(f"{file}: the name says {decided} and the format is {asked}: change one of them")
    return asked or decided
