"""The console of every command: text is shown as it is, without markup, and steers no terminal
(`gputally.base.untrusted_text`)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from gputally.base.untrusted_text import for_terminal


class Terminal(Console):
    """A name or an answer of an API server may hold what rich would take for markup (`[denied]`, `:warning:`) and leave
    out, or what a terminal would obey."""

    def __init__(self, **given: Any) -> None:
        """given: as rich takes it."""
        super().__init__(**({"highlight": False, "markup": False, "emoji": False} | given))

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """What rich renders; its own control sequences are segments of their own."""
        for segment in super().render(renderable, options):
            shown = segment.text if segment.control else for_terminal(segment.text)
            yield segment if shown is segment.text else segment._replace(text=shown)
