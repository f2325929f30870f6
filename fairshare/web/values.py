"""What stands in a field and what that is in the file, both ways; what nobody touched comes back as it was. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from agent.yamlfile import FileFault, Plain, parse
from fairshare.web.editing import flow
from fairshare.web.field import Field

_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")
_WHOLE = re.compile(r"[+-]?\d+")
_MINUS = "\u2212"


def shown(each: Field, value: Any) -> str:
    """What the file has, as the field shows it; "" for what it leaves out."""
    if value is False and each.kind == "choice":
        return "off"  # which YAML reads as a truth value
    if each.kind == "yaml" and value is not None:
        return _lines(value)
    return text_of(value)


def value(each: Field, text: str) -> Plain:
    """What stands in the file for a field's text; None: the key goes. What cannot be read stays text, which the policy
    then refuses (`unreadable`)."""
    if not text:
        return None
    if each.kind == "list":
        return [part for part in re.split(r"[\s,]+", text) if part]
    if each.kind in ("number", "duration"):
        plain = text.replace(_MINUS, "-")
        if _WHOLE.fullmatch(plain):
            return int(plain)
        return float(plain) if each.kind == "number" and _NUMBER.fullmatch(plain) else text
    if each.kind == "switch":
        return {"true": True, "false": False}.get(text, text)
    if each.kind == "yaml":
        try:
            return parse(text, each.label).data
        except FileFault:
            return text
    return text


def unreadable(each: Field, text: str) -> str:
    """Why a field's text is no YAML, in its own lines; "" where it is, or need not be."""
    if each.kind != "yaml" or not text:
        return ""
    try:
        parse(text, "line")
    except FileFault as fault:
        return fault.faults[0]
    return ""


def text_of(value: Any) -> str:
    """A plain value as people write it."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        return str(int(value))
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return str(value)


def look(data: Any, path: Sequence[str]) -> Any:
    """What stands at a path; None where nothing does."""
    for key in path:
        data = data.get(key) if isinstance(data, Mapping) else None
    return data


def _lines(value: Any) -> str:
    """One entry a line."""
    if isinstance(value, list):
        return "\n".join(f"- {flow(entry)}" for entry in value)
    if isinstance(value, Mapping):
        return "\n".join(f"{flow(key)}: {flow(entry)}" for key, entry in value.items())
    return flow(value)
