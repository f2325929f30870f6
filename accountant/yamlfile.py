"""Files people write, read into the frozen models of the house: every fault with file:line.

Used for the price book, the inventory and (by fairshare) the policy.
"""

from __future__ import annotations

from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from agent.yamlfile import Document, FileFault, Key, read

M = TypeVar("M", bound=BaseModel)


def load(path: Path, model: type[M]) -> M:
    """Read and validate a YAML file. Raises agent.yamlfile.FileFault naming every fault."""
    return validate(read(path), model)


def validate(document: Document, model: type[M]) -> M:
    """Validate a parsed document. Raises FileFault.

    A validator that knows better where the fault lies raises a ValueError with a `path` attribute."""
    try:
        found = model.model_validate(document.data)
        if wrong := booleans_as_numbers(document.data, found):
            raise FileFault([f"{document.place(path)}: {'.'.join(map(str, path))}: {NO_NUMBER}" for path in wrong])
        return found
    except ValidationError as error:
        faults = []
        for path, message in _faults(error):
            where = ".".join(str(part) for part in path)
            faults.append(f"{document.place(path)}: {where + ': ' if where else ''}{message}")
        raise FileFault(sorted(faults)) from error


NO_NUMBER = "a number is needed, and true or false is none"


def booleans_as_numbers(data: object, found: object) -> list[tuple[Key, ...]]:
    """Paths of the booleans in `data` that validation took for 1 and 0, as Python does."""
    return list(_booleans(data, _plain(found), ()))


def _plain(found: object) -> object:
    if isinstance(found, BaseModel):
        return found.model_dump(by_alias=True)
    return [_plain(one) for one in found] if isinstance(found, (list, tuple)) else found


def _booleans(data: object, found: object, path: tuple[Key, ...]) -> Iterator[tuple[Key, ...]]:
    if isinstance(data, bool):
        if not isinstance(found, bool) and isinstance(found, (int, float, Decimal)):
            yield path
    elif isinstance(data, dict) and isinstance(found, dict):
        for key, value in data.items():
            yield from _booleans(value, found.get(key), (*path, key))
    elif isinstance(data, list) and isinstance(found, (list, tuple)):
        for index, (value, one) in enumerate(zip(data, found, strict=False)):
            yield from _booleans(value, one, (*path, index))


def faults_of(data: object, model: type[BaseModel]) -> tuple[tuple[tuple[Key, ...], str], ...]:
    """(path, reason) of everything that is wrong with plain data, in the words of `validate`; empty: it is sound."""
    try:
        model.model_validate(data)
    except ValidationError as error:
        return tuple(_faults(error))
    return ()


def _faults(error: ValidationError) -> Iterator[tuple[tuple[Key, ...], str]]:
    for fault in error.errors(include_url=False):
        cause = fault.get("ctx", {}).get("error")
        path: tuple[Key, ...] = getattr(cause, "path", None) or fault["loc"]
        message = str(cause) if cause is not None else fault["msg"]
        yield path, "unknown key" if fault["type"] == "extra_forbidden" else message
