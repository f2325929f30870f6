"""Defines groups of options once for all commands that have them.

A command takes a parameter whose type is a dataclass of options, and `with_option_groups` replaces it by the options of
that class. Only the standard library is imported; the annotations belong to the option library."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Any, get_type_hints


def with_option_groups(command: Callable[..., None]) -> Callable[..., None]:
    """Replace each parameter whose type is a group by the options of the group. Every option of a group needs a
    default."""
    types = get_type_hints(command, include_extras=True)
    groups = {name: types.pop(name) for name, kind in tuple(types.items()) if is_dataclass(kind)}
    names = {name: tuple(field.name for field in fields(group)) for name, group in groups.items()}

    @functools.wraps(command)
    def run(**given: Any) -> None:
        made = {name: group(**{key: given.pop(key) for key in names[name]}) for name, group in groups.items()}
        command(**given, **made)

    signature = inspect.signature(command)
    own = [each.replace(annotation=types[name]) for name, each in signature.parameters.items() if name not in groups]
    options = [
        inspect.Parameter(
            field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=hints[field.name]
        )
        for group in groups.values()
        for hints in [get_type_hints(group, include_extras=True)]
        for field in fields(group)
    ]
    parameters = (*own, *options)
    run.__annotations__ = {each.name: each.annotation for each in parameters}
    vars(run)["__signature__"] = signature.replace(parameters=parameters)
    return run
