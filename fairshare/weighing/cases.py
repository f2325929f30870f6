"""Divisions to be made, read from JSON: one case, a list of cases, or `{"meta": ..., "vectors": [...]}`. Pure.

A case: `name, total, kValue, queues[], function, resource`; a queue: `name, request, deserved, limit,
overQuotaWeight, usage, priority, creation, parent, initialFairShare`. What a conformance file carries
beside that (`expected` and its like) is let be; any other key is a fault, named with its case.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from math import inf, isfinite
from typing import Any, get_args

from accountant.wire import MOST
from fairshare.errors import DivisionError
from fairshare.model import UNLIMITED, Case, Claim, Function

_CASE_KEYS = {"name", "total", "kValue", "queues", "function", "resource"}
_IGNORED = {"source", "expected", "expectedRemaining", "deterministic", "alternatives", "note", "meta"}
_FIELDS: dict[str, tuple[str, float | None, float]] = {
    # key in the file: field of Claim, default (None: must be given), least value
    "request": ("request", None, 0.0),
    "deserved": ("deserved", 0.0, UNLIMITED),
    "limit": ("limit", UNLIMITED, UNLIMITED),
    "overQuotaWeight": ("weight", 1.0, 0.0),
    "usage": ("usage", 0.0, -inf),
    "initialFairShare": ("initial", 0.0, 0.0),
}
_WHOLE = {"priority": 100, "creation": 0}


def parse(text: str | bytes) -> tuple[Case, ...]:
    """Every case of a document. Raises DivisionError with the case and the key at fault."""
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DivisionError(f"not JSON: {error}") from error
    if isinstance(document, Mapping) and "vectors" in document:
        document = document["vectors"]
    cases = document if isinstance(document, list) else [document]
    if not cases:
        raise DivisionError("no case in the file")
    return tuple(_case(case, number) for number, case in enumerate(cases, 1))


def _case(raw: object, number: int) -> Case:
    if not isinstance(raw, Mapping):
        raise DivisionError(f"case {number}: expected an object, found {_kind(raw)}")
    name = raw.get("name", f"case {number}")
    if not isinstance(name, str):
        raise DivisionError(f"case {number}: name: expected text, found {_kind(name)}")
    where = f"case {name!r}"
    _closed(raw, _CASE_KEYS | _IGNORED, where)
    function = raw.get("function", "hierarchy")
    if function not in get_args(Function):
        raise DivisionError(f"{where}: function: {function!r} is none of {', '.join(get_args(Function))}")
    queues = raw.get("queues")
    if not isinstance(queues, list):
        raise DivisionError(f"{where}: queues: expected a list, found {_kind(queues)}")
    return Case(
        name,
        _number(raw, "total", None, 0.0, where),
        _number(raw, "kValue", 0.0, 0.0, where),
        tuple(_claim(queue, at, where) for at, queue in enumerate(queues)),
        function,
        str(raw.get("resource", "GPU")),
    )


def _claim(raw: object, at: int, case: str) -> Claim:
    where = f"{case}: queues[{at}]"
    if not isinstance(raw, Mapping):
        raise DivisionError(f"{where}: expected an object, found {_kind(raw)}")
    name = raw.get("name")
    if not isinstance(name, str) or not name:
        raise DivisionError(f"{where}: name: expected text, found {_kind(name)}")
    where = f"{case}: queue {name!r}"
    _closed(raw, {"name", "parent", *_FIELDS, *_WHOLE}, where)
    parent = raw.get("parent")
    if parent is not None and not isinstance(parent, str):
        raise DivisionError(f"{where}: parent: expected text, found {_kind(parent)}")
    numbers = {field: _number(raw, key, default, least, where) for key, (field, default, least) in _FIELDS.items()}
    for key in ("deserved", "limit"):
        if UNLIMITED < numbers[key] < 0:
            raise DivisionError(f"{where}: {key}: {numbers[key]:g} is neither -1 (unlimited) nor 0 or more")
    return Claim(
        name,
        parent=parent or None,
        **numbers,
        priority=_whole(raw, "priority", where),
        creation=_whole(raw, "creation", where),
    )


def _whole(raw: Mapping[str, Any], key: str, where: str) -> int:
    value = raw.get(key, _WHOLE[key])
    if not isinstance(value, int) or isinstance(value, bool):
        raise DivisionError(f"{where}: {key}: expected a whole number, found {_kind(value)}")
    return value


def _closed(raw: Mapping[str, Any], known: set[str], where: str) -> None:
    unknown = sorted(set(raw) - known)
    if unknown:
        raise DivisionError(f"{where}: {unknown[0]}: unknown key")


def _number(raw: Mapping[str, Any], key: str, default: float | None, least: float, where: str) -> float:
    value = raw.get(key, default)
    if value is None:
        raise DivisionError(f"{where}: {key}: missing")
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise DivisionError(f"{where}: {key}: expected a number, found {_kind(value)}")
    try:
        number = float(value)
    except OverflowError:
        number = inf
    if not isfinite(number):
        raise DivisionError(f"{where}: {key}: not a finite number")
    if number < least:
        raise DivisionError(f"{where}: {key}: {number:g} is below {least:g}")
    if abs(number) > MOST:  # products of such numbers are no numbers any more
        raise DivisionError(f"{where}: {key}: {number:g} is beyond {MOST:g}")
    return number


def _kind(value: object) -> str:
    names = {
        dict: "an object",
        list: "a list",
        str: f"the text {value!r}",
        bool: f"{value}".lower(),
        type(None): "nothing",
    }
    return names.get(type(value), f"{value!r}")
