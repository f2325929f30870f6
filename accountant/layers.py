"""Settings from three layers, YAML file < environment < command line, into a program's own closed model.

Every fault names its place: `file:line` for the file, the variable for the environment, the option for the command
line. Published: the controller's settings are read the same way. Nothing here opens a file other than the settings'.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from accountant.errors import SettingsFault
from agent.yamlfile import Document, FileFault, Key, read

M = TypeVar("M", bound=BaseModel)
_SERVICE_LINK = re.compile(r"SERVICE_(HOST|PORT.*)|PORT(_\d+_(TCP|UDP)(_(PROTO|PORT|ADDR))?)?")
"""What Kubernetes puts into every pod's environment for a Service of the program's name."""


def load(model: type[M], prefix: str, path: Path | None, environ: Mapping[str, str], flags: Mapping[str, object]) -> M:
    """Read and merge the three layers. Raises SettingsFault with a line per fault.

    environ: PREFIX + `LIMITS__BODY_BYTES` sets `limits.body_bytes`. flags: only those the user gave, dots for nested
    keys."""
    try:
        document = read(path) if path is not None else Document("settings", {}, {})
    except FileFault as error:
        raise SettingsFault(str(error)) from error
    if document.data is None:
        document = Document(document.name, {}, document.lines)
    if not isinstance(document.data, dict):
        raise SettingsFault(f"{document.place(())}: settings are a mapping of keys to values")
    layers = [*_from_environment(prefix, environ), *_from_flags(flags)]
    merged: dict[str, Any] = {k: dict(v) if isinstance(v, dict) else v for k, v in document.data.items()}
    origin: dict[tuple[Key, ...], str] = {}
    for given in layers:
        origin[given.path] = given.place
        inner = merged
        for part in given.path[:-1]:
            inner = inner.setdefault(part, {})
            if not isinstance(inner, dict):
                raise SettingsFault(f"{given.place}: {part} is not a group of settings")
        inner[given.path[-1]] = given.value
    try:
        return model.model_validate(merged)
    except ValidationError as error:
        raise SettingsFault("\n".join(sorted(_line(document, origin, fault) for fault in error.errors()))) from error


def at(key: str, message: str) -> ValueError:
    """For a validator that knows which setting is at fault; dots for nested keys."""
    fault = ValueError(message)
    fault.path = tuple(key.split("."))  # type: ignore[attr-defined]  # read by _line
    return fault


@dataclass(frozen=True, slots=True)
class _Given:
    path: tuple[str, ...]
    value: object
    place: str


def _from_environment(prefix: str, environ: Mapping[str, str]) -> list[_Given]:
    names = sorted(name for name in environ if name.startswith(prefix))
    keys = {name: name.removeprefix(prefix) for name in names}
    return [
        _Given(tuple(key.lower().split("__")), environ[name], name)
        for name, key in keys.items()
        if not _SERVICE_LINK.fullmatch(key)
    ]


def _from_flags(flags: Mapping[str, object]) -> list[_Given]:
    return [_Given(tuple(key.split(".")), flags[key], "--" + re.sub("[_.]", "-", key)) for key in sorted(flags)]


def _line(document: Document, origin: Mapping[tuple[Key, ...], str], fault: Any) -> str:
    cause = fault.get("ctx", {}).get("error")
    path: tuple[Key, ...] = getattr(cause, "path", None) or fault["loc"]
    where = ".".join(str(part) for part in path)
    if fault["type"] == "missing" and len(path) == 1:
        return f"{where} is missing: give --{where.replace('_', '-')} or set it in the settings file"
    reason = "no such setting" if fault["type"] == "extra_forbidden" else str(cause or fault["msg"])
    if path in origin:
        return f"{origin[path]}: {reason}"
    return f"{document.place(path)}: {where}: {reason}" if path in document.lines else f"{where}: {reason}"
