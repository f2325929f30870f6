"""Provides the console of every command, which prints text literally, without markup or control sequences
(`gputally.base.untrusted_text`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from gputally.base.untrusted_text import for_terminal


class Terminal(Console):
    """A console that prints text literally: a name or an answer of an API server may contain what rich would treat as
    markup (`[denied]`, `:warning:`), or control sequences that a terminal would obey.
    """

    def __init__(self, **given: Any) -> None:
        """given: the arguments of rich's Console."""
        super().__init__(**({"highlight": False, "markup": False, "emoji": False} | given))

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Render with rich; its own control sequences stay separate segments."""
        for segment in super().render(renderable, options):
            shown = segment.text if segment.control else for_terminal(segment.text)
            yield segment if shown is segment.text else segment._replace(text=shown)
