"""Loads settings (file < environment < command line) and YAML files into closed pydantic models, and reads a file again
when it changes.

Every fault names its place: `file:line` for the file, the variable for the environment, the option for the command
line.

A new version of a file counts as read once it is in force. If something else prevents that (a file that cannot be read,
a full disk), the version is tried again at every check. A version that is itself invalid waits for the file to change.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any, Generic, Self, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer, ValidationError

from gputally.base.atomic_file import Stamp, stamp
from gputally.base.errors import SettingsFault
from gputally.base.yaml_file import Document, FileFault, Key, Unreadable, read

S = TypeVar("S", bound=BaseModel)
_SERVICE_LINK = re.compile(r"SERVICE_(HOST|PORT.*)|PORT(_\d+_(TCP|UDP)(_(PROTO|PORT|ADDR))?)?")
"""Environment variables that Kubernetes sets in every pod for a Service with the program's name."""


def load_settings(
    model: type[S], prefix: str, path: Path | None, environ: Mapping[str, str], flags: Mapping[str, object]
) -> S:
    """Read and merge the three sources. Raises SettingsFault with one line per fault.

    environ: PREFIX + `LIMITS__BODY_BYTES` sets `limits.body_bytes`.
    flags: only those the user gave, with dots for nested keys."""
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
    """Return the error with which a validator names the setting at fault. key: has dots for nested settings."""
    fault = ValueError(message)
    fault.path = tuple(key.split("."))  # type: ignore[attr-defined]  # read by _line
    return fault


@dataclass(frozen=True, slots=True)
class _GivenValue:
    path: tuple[str, ...]
    value: object
    place: str


def _from_environment(prefix: str, environ: Mapping[str, str]) -> list[_GivenValue]:
    names = sorted(name for name in environ if name.startswith(prefix))
    keys = {name: name.removeprefix(prefix) for name in names}
    return [
        _GivenValue(tuple(key.lower().split("__")), environ[name], name)
        for name, key in keys.items()
        if not _SERVICE_LINK.fullmatch(key)
    ]


def _from_flags(flags: Mapping[str, object]) -> list[_GivenValue]:
    return [_GivenValue(tuple(key.split(".")), flags[key], "--" + re.sub("[_.]", "-", key)) for key in sorted(flags)]


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


M = TypeVar("M", bound=BaseModel)


def load_yaml(path: Path, model: type[M]) -> M:
    """Read and validate a YAML file. Raises gputally.base.yaml_file.FileFault naming every fault."""
    return validate(read(path), model)


def validate(document: Document, model: type[M]) -> M:
    """Validate a parsed document. Raises FileFault.

    A validator that knows the place of a fault raises a ValueError with a `path` attribute."""
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
    """Return the paths of booleans in `data` that validation would accept as the numbers 1 and 0, as Python does."""
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
    """Return (path, reason) of every fault in plain data, in the words of `validate`; empty if there is none."""
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


_NUMBER = re.compile(r"\d+(\.\d+)?")
_DURATION = re.compile(r"(\d+)(w|d|h|m|s)")
_SECONDS = {"w": 604_800, "d": 86_400, "h": 3_600, "m": 60, "s": 1}
_WHOLE = re.compile("[0-9]{1,12}")


def parse_duration(value: object) -> object:
    """Return the seconds of `7d`, `1h30m`, `1w` or a plain integer, also as text in a query string. Raises ValueError
    for anything else."""
    if not isinstance(value, str):
        return value
    if _WHOLE.fullmatch(value):
        return int(value)
    parts = _DURATION.findall(value)
    if not parts or "".join(n + u for n, u in parts) != value:
        raise ValueError(f"not a duration: {value!r} (write for example 7d, 12h, 1h30m)")
    return sum(int(n) * _SECONDS[u] for n, u in parts)


def parse_seconds(value: object) -> object:
    """Return the seconds of `50ms`, of text such as `2s` or `1m`, or of a plain number. Raises ValueError for anything
    else."""
    if isinstance(value, str) and value.endswith("ms") and _NUMBER.fullmatch(value[:-2]):
        return float(value[:-2]) / 1000
    return parse_duration(value)


Duration = Annotated[int, BeforeValidator(parse_duration), Field(ge=0)]
"""Whole seconds, read from `7d`-style text or an integer."""


def _plain_decimal(value: Decimal) -> str:
    return format(value, "f")


Exact = Annotated[Decimal, PlainSerializer(_plain_decimal, return_type=str, when_used="json")]
"""An exact amount, written without an exponent however small it is."""


class Model(BaseModel):
    """A frozen model that refuses unknown keys. Numbers are finite, because JSON has no others and sums need them."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @classmethod
    def from_object(cls, found: object) -> Self:
        """The model with the fields of an object that has attributes of these names."""
        return cls.model_validate(found, from_attributes=True)


def bare_off(value: object) -> object:
    """Convert false back to `off`, because YAML 1.1 reads a bare `off` as false."""
    return "off" if value is False else value


T = TypeVar("T")


class ReloadedFile(Generic[T]):
    """The value that `load` made of a file's last good version. Raises FileFault if the first version is invalid.

    enforce: puts later versions in force; the owner puts the first one in force. If it raises, the previous version
        stays in force, and the new one is tried again at the next check.
    beside: further files that `load` reads."""

    def __init__(
        self,
        path: Path,
        load: Callable[[Path], T],
        enforce: Callable[[T], None] | None = None,
        beside: Sequence[Path] = (),
    ) -> None:
        self._path = path
        self._files = (path, *beside)
        self._load = load
        self._enforce = enforce
        self._stamps = self._stamped()
        self._again = False
        """Whether the version that was checked last must be tried again."""
        self._raised = ""
        """The fault that was raised last."""
        self.refused = False
        """Whether the file's newest version is not in force."""
        self.current = load(path)

    def enforce_again(self) -> None:
        """Put the version in `current` in force at the next check, because this failed at the start."""
        self._again = True
        self.refused = True

    def _stamped(self) -> tuple[Stamp | None, ...]:
        return tuple(map(stamp, self._files))

    def renew(self) -> bool:
        """Read the file and put it in force, if it has changed or could not be put in force before; returns True if
        another version is now in force.

        Raises FileFault once for a version that is not put in force, and the exceptions of `enforce` each time."""
        found = self._stamped()
        if found == self._stamps and not self._again:
            return False
        if found != self._stamps:
            self._stamps, self._raised = found, ""
        self._again = True
        try:
            value = self._load(self._path)
            if self._enforce is not None:
                self._again_after_enforcing(value)
        except FileFault as fault:
            self.refused = True
            self._again = isinstance(fault, (Unreadable, FileNotInForce))
            told, self._raised = self._raised, str(fault)
            if str(fault) == told:
                return False
            raise
        except BaseException:
            self.refused = True
            raise
        self.current = value
        self._again, self._raised, self.refused = False, "", False
        return True

    def _again_after_enforcing(self, value: T) -> None:
        assert self._enforce is not None
        try:
            self._enforce(value)
        except FileFault as fault:
            raise FileNotInForce(fault.faults) from fault


class FileNotInForce(FileFault):
    """The file is readable but conflicts with something else, which may change."""


class WatchedFile(ReloadedFile[T]):
    """A reloaded file whose faults are reported instead of raised.

    report: called with the faults (`file:line: reason`) of a version that is not put in force."""

    def __init__(
        self,
        path: Path,
        load: Callable[[Path], T],
        report: Callable[[str], None],
        enforce: Callable[[T], None] | None = None,
    ) -> None:
        super().__init__(path, load, enforce)
        self._report = report

    def look(self) -> bool:
        """See renew."""
        try:
            return self.renew()
        except FileFault as fault:
            self._report(str(fault))
            return False
