"""Groups of options that several commands share, and the refusal of options that another option makes meaningless."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import fields, is_dataclass
from http import HTTPStatus
from types import MappingProxyType
from typing import Any, get_type_hints

import typer

from gputally.base.errors import AccountantError, FairshareError

_CONTEXT = "typer_context"
_given: ContextVar[Mapping[str, str]] = ContextVar("_given", default=MappingProxyType({}))
"""The options that the user gave to the running command, by the names of its parameters."""


def with_option_groups(command: Callable[..., None]) -> Callable[..., None]:
    """Return a typer command in which the fields of a dataclass are options of their own.

    A command that takes a parameter with a dataclass as its type gets one option for each field of the dataclass. The
    annotation of a field is that of a typer option, and every field has a default. Several commands can therefore share
    a group of options that is defined once. `refuse_ignored` knows the options that the user gave to such a command."""
    types = get_type_hints(command, include_extras=True)
    groups = {name: types.pop(name) for name, kind in tuple(types.items()) if is_dataclass(kind)}
    names = {name: tuple(field.name for field in fields(group)) for name, group in groups.items()}

    @functools.wraps(command)
    def run(**values: Any) -> None:
        context = values.pop(_CONTEXT)
        grouped = {name: group(**{key: values.pop(key) for key in names[name]}) for name, group in groups.items()}
        source = context.get_parameter_source
        given = {each.name: each.opts[0] for each in context.command.params if source(each.name).name == "COMMANDLINE"}
        token = _given.set(given)
        try:
            command(**values, **grouped)
        except (AccountantError, FairshareError) as error:
            _explain(error, context.command.params)
            raise
        finally:
            _given.reset(token)

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
    context = inspect.Parameter(_CONTEXT, inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)
    parameters = (*own, context, *options)
    run.__annotations__ = {each.name: each.annotation for each in parameters}
    vars(run)["__signature__"] = signature.replace(parameters=parameters)
    return run


def _explain(error: Exception, options: Sequence[Any]) -> None:
    """Add to an error of the accountant which option of the command, or which variable, may cure it: an accountant that
    is not reached, a missing token, or a value that it refuses."""
    from gputally.base.accountant_connection import Unanswered

    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, Unanswered):
        cause = cause.__cause__
    names = {each.name: f"{each.opts[0]} or {each.envvar}" if each.envvar else each.opts[0] for each in options}
    if cause is None or "url" not in names:
        return
    if cause.status is None and cause.unreached:
        error.add_note(f"give the accountant's address with {names['url']}")
    elif cause.status == HTTPStatus.UNAUTHORIZED:
        error.add_note(f"give a token with {names['token_file']}")


def lines_of(error: Exception) -> list[str]:
    """Return the lines in which a command tells an error, one for each fault: its message, and what may cure it."""
    return "; ".join([str(error), *getattr(error, "__notes__", ())]).splitlines()


def refuse_ignored(why: str, *names: str) -> None:
    """Raise typer.BadParameter if the user gave one of these options to a command that would ignore it.

    why: the reason that they would be ignored, such as `without --to`."""
    given = _given.get()
    if ignored := [given[name] for name in names if name in given]:
        raise typer.BadParameter(f"{', '.join(ignored)} has no effect {why}")
