"""The seam of tools for an assistant: a tool is a function that asks an accountant and returns an answer.

[project.entry-points."gputally.assistant"]
advise = "gputally.advise.assistant_tool:TOOL"
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Concatenate, Final

from accountant.wire.typed_accountant_client import AccountantClient

SEAM: Final = "gputally.assistant"
"""The group of entry points."""


@dataclass(frozen=True, slots=True)
class AssistantTool:
    """A tool that an assistant may call. It only reads.

    ask: the function. Its first parameter is the AccountantClient of the caller, with the caller's own rights, and the
        others are the tool's parameters, with descriptions as `Annotated[..., Field(description=...)]`. Its docstring
        tells the assistant what it answers. It returns plain values for JSON, with unit, period, coverage and link.
        It may raise AccountantError or ValueError with a reason.
    reaches, page: what a use of it touches, and its documentation page."""

    name: str
    ask: Callable[Concatenate[AccountantClient, ...], dict[str, Any]]
    reaches: str = "asks the accountant with the caller's token"
    page: str = "docs/assistant.md"
