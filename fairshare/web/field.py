"""One value of a policy in the form: where it is, how it is called, how it is written. Bounds and defaults are the
policy's model's own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel

Kind = Literal["number", "duration", "instant", "text", "choice", "switch", "list", "yaml"]
"""switch: true or false. yaml: a part of the file with a structure of its own, as the file has it."""


@dataclass(frozen=True, slots=True)
class Field:
    """One value. path: in the policy, or a key of a queue."""

    path: tuple[str, ...]
    label: str
    kind: Kind
    help: str = ""
    """Of yaml: how it is written, for example."""
    choices: tuple[tuple[str, str], ...] = ()

    @property
    def name(self) -> str:
        return ".".join(self.path)

    def default(self, model: type[BaseModel]) -> str:
        """What leaving it out means, as it would be written; "" where it cannot be left out."""
        found: Any = model
        for key in self.path:
            info = found.__pydantic_fields__[key]
            if info.is_required():
                return ""
            found = info.default
        if self.kind == "switch":
            return "yes" if found else "no"
        if found is None or self.kind == "yaml" or found == ():
            return "none"
        return written(found) if self.kind == "duration" else f"{found:g}" if isinstance(found, float) else str(found)


def written(seconds: int) -> str:
    """A duration as a policy writes it: `7d`, `90m`."""
    for length, unit in ((86_400, "d"), (3_600, "h"), (60, "m")):
        if seconds and seconds % length == 0:
            return f"{seconds // length}{unit}"
    return f"{seconds}s"


@dataclass(frozen=True, slots=True)
class Group:
    """Fields under one heading. folded: shown on demand."""

    title: str
    lead: str
    fields: tuple[Field, ...]
    folded: bool = False
