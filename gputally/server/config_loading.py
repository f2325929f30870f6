"""Loads settings and YAML files into pydantic models that refuse unknown keys, and reads a file again when it changes.

Settings come from a file, from the environment, which overrides the file, and from the command line, which overrides
both. Every fault names its place: `file:line` for the file, the variable for the environment, the option for the
command line.

A `ReloadedFile` checks a file for a new version and puts it in force. A version that is invalid is tried again once the
file has changed. A version that cannot be read, or cannot be put in force for a reason outside the file (such as a full
disk), is tried again at every check."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any, Final, Generic, Self, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer, ValidationError

from gputally.base.atomic_file import Stamp, stamp
from gputally.base.errors import SettingsFault
from gputally.base.instants import MOST_DURATION_S, duration_seconds
from gputally.base.yaml_file import Document, FileFault, Key, Unreadable, read

S = TypeVar("S", bound=BaseModel)
_SERVICE_LINK = re.compile(r"SERVICE_(HOST|PORT.*)|PORT(_\d+_(TCP|UDP)(_(PROTO|PORT|ADDR))?)?")
"""Matches the names, without the prefix, of the environment variables that Kubernetes sets in every pod for a Service
with the program's name. They are no settings."""


def load_settings(
    model: type[S], prefix: str, path: Path | None, environ: Mapping[str, str], flags: Mapping[str, object]
) -> S:
    """Read and merge file, environment and command line. Raises SettingsFault with one line per fault.

    environ: the environment variables; with the prefix `P_`, `P_LIMITS__BODY_BYTES` sets `limits.body_bytes`.
    flags: the options that the user gave, with dots for nested keys."""
    try:
        document = read(path) if path is not None else Document("settings", {}, {})
    except FileFault as error:
        raise SettingsFault(str(error)) from error
    if document.data is None:
        document = Document(document.name, {}, document.lines)
    if not isinstance(document.data, dict):
        raise SettingsFault(f"{document.place(())}: settings are a mapping of keys to values")
    merged: dict[str, Any] = {k: dict(v) if isinstance(v, dict) else v for k, v in document.data.items()}
    places: dict[tuple[Key, ...], str] = {}
    for override in [*_from_environment(prefix, environ), *_from_flags(flags)]:
        places[override.path] = override.place
        inner = merged
        for part in override.path[:-1]:
            inner = inner.setdefault(part, {})
            if not isinstance(inner, dict):
                raise SettingsFault(f"{override.place}: {part} is not a group of settings")
        inner[override.path[-1]] = override.value
    try:
        return model.model_validate(merged)
    except ValidationError as error:
        raise SettingsFault("\n".join(sorted(_line(document, places, fault) for fault in error.errors()))) from error


def at(key: str, message: str) -> ValueError:
    """Return a ValueError that names the setting at fault, for a validator to raise.

    key: the setting's name, with dots for nested settings."""
    fault = ValueError(message)
    fault.path = tuple(key.split("."))  # type: ignore[attr-defined]  # read by _line
    return fault


@dataclass(frozen=True, slots=True)
class _Override:
    """A value from the environment or the command line. path: its setting. place: its variable or option."""

    path: tuple[str, ...]
    value: object
    place: str


def _from_environment(prefix: str, environ: Mapping[str, str]) -> list[_Override]:
    names = sorted(name for name in environ if name.startswith(prefix))
    keys = {name: name.removeprefix(prefix) for name in names}
    return [
        _Override(tuple(key.lower().split("__")), environ[name], name)
        for name, key in keys.items()
        if not _SERVICE_LINK.fullmatch(key)
    ]


def _from_flags(flags: Mapping[str, object]) -> list[_Override]:
    return [_Override(tuple(key.split(".")), flags[key], "--" + re.sub("[_.]", "-", key)) for key in sorted(flags)]


def _line(document: Document, places: Mapping[tuple[Key, ...], str], fault: Any) -> str:
    """Return the message for one of pydantic's faults. places: the places of values that do not come from the
    document."""
    cause = fault.get("ctx", {}).get("error")
    path: tuple[Key, ...] = getattr(cause, "path", None) or fault["loc"]
    where = ".".join(str(part) for part in path)
    if fault["type"] == "missing" and len(path) == 1:
        return f"{where} is missing: give --{where.replace('_', '-')} or set it in the settings file"
    reason = fault_text(fault, "no such setting")
    if path in places:
        return f"{places[path]}: {reason}"
    return f"{document.place(path)}: {where}: {reason}" if path in document.lines else f"{where}: {reason}"


M = TypeVar("M", bound=BaseModel)


def load_yaml(path: Path, model: type[M]) -> M:
    """Read and validate a YAML file. Raises gputally.base.yaml_file.FileFault with a line per fault."""
    return validate(read(path), model)


def validate(document: Document, model: type[M]) -> M:
    """Validate a parsed document. Raises FileFault with a line per fault.

    A validator that knows the place of a fault raises a ValueError with the attribute `path`."""
    try:
        validated = model.model_validate(document.data)
        if booleans := booleans_as_numbers(document.data, validated):
            raise FileFault([f"{document.place(path)}: {'.'.join(map(str, path))}: {NO_NUMBER}" for path in booleans])
        return validated
    except ValidationError as error:
        faults = []
        for path, message in _faults(error):
            where = ".".join(str(part) for part in path)
            faults.append(f"{document.place(path)}: {where + ': ' if where else ''}{message}")
        raise FileFault(sorted(faults)) from error


NO_NUMBER = "a number is needed, not true or false"


def booleans_as_numbers(data: object, validated: object) -> list[tuple[Key, ...]]:
    """Return the paths of the booleans in `data` that pydantic converted to the numbers 1 and 0.

    validated: the model, or the models, that pydantic made of the data."""
    return list(_booleans(data, _plain(validated), ()))


def _plain(validated: object) -> object:
    if isinstance(validated, BaseModel):
        return validated.model_dump(by_alias=True)
    return [_plain(item) for item in validated] if isinstance(validated, (list, tuple)) else validated


def _booleans(data: object, validated: object, path: tuple[Key, ...]) -> Iterator[tuple[Key, ...]]:
    if isinstance(data, bool):
        if not isinstance(validated, bool) and isinstance(validated, (int, float, Decimal)):
            yield path
    elif isinstance(data, dict) and isinstance(validated, dict):
        for key, value in data.items():
            yield from _booleans(value, validated.get(key), (*path, key))
    elif isinstance(data, list) and isinstance(validated, (list, tuple)):
        for index, (value, item) in enumerate(zip(data, validated, strict=False)):
            yield from _booleans(value, item, (*path, index))


def faults_of(data: object, model: type[BaseModel]) -> tuple[tuple[tuple[Key, ...], str], ...]:
    """Return (path, reason) of every fault in plain data; empty if there is none. The reasons are those of
    `validate`."""
    try:
        model.model_validate(data)
    except ValidationError as error:
        return tuple(_faults(error))
    return ()


def _faults(error: ValidationError) -> Iterator[tuple[tuple[Key, ...], str]]:
    found = error.errors(include_url=False)
    inside = {fault["loc"][:-length] for fault in found for length in range(1, len(fault["loc"]))}
    for fault in found:
        if fault["type"] == "too_short" and fault["loc"] in inside:
            continue  # pydantic counts only the valid items; those at fault are reported
        cause = fault.get("ctx", {}).get("error")
        path: tuple[Key, ...] = getattr(cause, "path", None) or fault["loc"]
        yield path, fault_text(fault, "unknown key")


_WANTED: Final[Mapping[str, str]] = {
    "missing": "is missing",
    "literal_error": "give {expected}",
    "enum": "give {expected}",
    "greater_than": "must be above {gt}",
    "greater_than_equal": "must be at least {ge}",
    "less_than": "must be below {lt}",
    "less_than_equal": "must be at most {le}",
    "multiple_of": "must be a multiple of {multiple_of}",
    "finite_number": "must be a finite number",
    "string_too_short": "must have {min_length} or more characters",
    "string_too_long": "must have at most {max_length} characters",
    "too_short": "must have {min_length} or more entries",
    "too_long": "must have at most {max_length} entries",
    "string_pattern_mismatch": "must have the form {pattern}",
    "json_invalid": "is not JSON: {error}",
    "decimal_max_digits": "must have at most {max_digits} digits",
    "decimal_max_places": "must have at most {decimal_places} decimal places",
    "decimal_whole_digits": "must have at most {whole_digits} digits before the point",
}
"""What a value must be, by the name of pydantic's fault and with the fault's own figures."""
_TYPES: Final[Mapping[str, str]] = {
    "int": "a whole number", "float": "a number", "decimal": "a number", "bool": "true or false", "string": "a text",
    "date": "a date such as 2026-10-01", "datetime": "a date and time such as 2026-10-01T09:00:00Z",
    "timezone": "an instant with its offset from UTC", "list": "a list", "tuple": "a list", "set": "a list",
    "frozen": "a list", "dict": "a mapping", "mapping": "a mapping", "model": "a mapping", "dataclass": "a mapping",
    "path": "a path", "url": "an address", "none": "empty", "bytes": "bytes",
}  # fmt: skip
"""The kind of value that is needed, by the first word of the name of pydantic's fault."""


def fault_text(fault: Mapping[str, Any], unknown: str = "unknown name") -> str:
    """Return the reason of one of pydantic's faults, in the words of a person who wrote the value.

    unknown: the reason for a name that the model does not have."""
    kind, context = str(fault["type"]), fault.get("ctx", {})
    cause = context.get("error")
    if isinstance(cause, Exception):
        return str(cause)
    if kind == "extra_forbidden":
        return unknown
    if kind in _WANTED:
        figures = {name: f"{each:.15g}" if isinstance(each, float) else each for name, each in context.items()}
        return _WANTED[kind].format_map(figures)
    wanted = _TYPES.get(kind.partition("_")[0])
    return str(fault["msg"]).removeprefix("Value error, ") if wanted is None else f"must be {wanted}"


_NUMBER = re.compile(r"\d+(\.\d+)?")


def parse_duration(value: object) -> object:
    """Return the seconds of a text (`duration_seconds`). Return a value that is no text unchanged."""
    return duration_seconds(value) if isinstance(value, str) else value


def parse_seconds(value: object) -> object:
    """Return the seconds of a text such as `50ms`, `2s` or `1m`. Return a value that is no text unchanged. Raises
    ValueError for any other text."""
    if isinstance(value, str) and value.endswith("ms") and _NUMBER.fullmatch(value[:-2]):
        return float(value[:-2]) / 1000
    return parse_duration(value)


Duration = Annotated[int, BeforeValidator(parse_duration), Field(ge=0, le=MOST_DURATION_S)]
"""Whole seconds, read from an integer or a text such as `7d`."""


def _plain_decimal(value: Decimal) -> str:
    return format(value, "f")


Exact = Annotated[Decimal, PlainSerializer(_plain_decimal, return_type=str, when_used="json")]
"""An exact amount. JSON shows it as text without an exponent."""


class Model(BaseModel):
    """A frozen model that refuses unknown keys. Its numbers are finite, because JSON has no infinity and no NaN."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @classmethod
    def from_object(cls, source: object) -> Self:
        """Return the model whose fields are the attributes of the same names of another object."""
        return cls.model_validate(source, from_attributes=True)


def bare_off(value: object) -> object:
    """Convert false back to `off`, because YAML 1.1 reads a bare `off` as false."""
    return "off" if value is False else value


T = TypeVar("T")


class ReloadedFile(Generic[T]):
    """The value that `load` returns for a file's last good version. Raises FileFault if the first version is invalid.

    enforce: puts a later version in force. If it raises an exception, the previous version stays in force, and the new
        version is tried again at the next check. The owner puts the first version in force.
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
        self._stamps = self._current_stamps()
        self._retry = False
        """True if the version that was checked last must be tried again."""
        self._raised = ""
        """The fault that was raised last."""
        self.refused = False
        """True while the file's newest version is not in force."""
        self.current = load(path)

    def enforce_again(self) -> None:
        """Put the version in `current` in force at the next check, because that failed at the start."""
        self._retry = True
        self.refused = True

    def _current_stamps(self) -> tuple[Stamp | None, ...]:
        return tuple(map(stamp, self._files))

    def renew(self) -> bool:
        """Read the file and put it in force, if the file has changed or its version could not be put in force before.
        Return True if another version is now in force.

        Raises FileFault once for a version that is not put in force, and the exceptions of `enforce` each time."""
        stamps = self._current_stamps()
        if stamps == self._stamps and not self._retry:
            return False
        if stamps != self._stamps:
            self._stamps, self._raised = stamps, ""
        self._retry = True
        try:
            value = self._load(self._path)
            if self._enforce is not None:
                try:
                    self._enforce(value)
                except FileFault as fault:
                    raise _FileNotInForce(fault.faults) from fault
        except FileFault as fault:
            self.refused = True
            self._retry = isinstance(fault, (Unreadable, _FileNotInForce))
            already_raised = self._raised == str(fault)
            self._raised = str(fault)
            if already_raised:
                return False
            raise
        except BaseException:
            self.refused = True
            raise
        self.current = value
        self._retry, self._raised, self.refused = False, "", False
        return True


class _FileNotInForce(FileFault):
    """`enforce` refused a valid version of the file because of a conflict that a change elsewhere can end."""


class WatchedFile(ReloadedFile[T]):
    """A reloaded file that reports faults instead of raising them.

    report: the function that gets the faults (`file:line: reason`) of a version that is not put in force."""

    def __init__(
        self,
        path: Path,
        load: Callable[[Path], T],
        report: Callable[[str], None],
        enforce: Callable[[T], None] | None = None,
    ) -> None:
        super().__init__(path, load, enforce)
        self._report = report

    def check(self) -> bool:
        """Call `renew`, and report a fault instead of raising it."""
        try:
            return self.renew()
        except FileFault as fault:
            self._report(str(fault))
            return False
