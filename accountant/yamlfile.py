"""Files people write, read into the frozen models of the house: every fault with file:line.

Used for the price book, the inventory and (by fairshare) the policy.
"""

from __future__ import annotations

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
        return model.model_validate(document.data)
    except ValidationError as error:
        faults = []
        for fault in error.errors(include_url=False):
            cause = fault.get("ctx", {}).get("error")
            path: tuple[Key, ...] = getattr(cause, "path", None) or fault["loc"]
            where = ".".join(str(part) for part in path)
            message = str(cause) if cause is not None else fault["msg"]
            if fault["type"] == "extra_forbidden":
                message = "unknown key"
            faults.append(f"{document.place(path)}: {where + ': ' if where else ''}{message}")
        raise FileFault(sorted(faults)) from error
