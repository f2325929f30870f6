"""Provides the console of every command, which prints text literally, without markup or control sequences
(`gputally.base.untrusted_text`)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Column, Table

from gputally.base.untrusted_text import for_terminal


class Terminal(Console):
    """A console that prints text literally: a name or an answer of an API server may contain what rich would treat as
    markup (`[denied]`, `:warning:`), or control sequences that a terminal would obey."""

    def __init__(self, **given: Any) -> None:
        """given: arguments of rich's Console, which override this class's defaults."""
        super().__init__(**({"highlight": False, "markup": False, "emoji": False} | given))

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Render with rich; its own control sequences stay separate segments."""
        for segment in super().render(renderable, options):
            shown = segment.text if segment.control else for_terminal(segment.text)
            yield segment if shown is segment.text else segment._replace(text=shown)


def table(
    title: str,
    columns: Sequence[str | Column],
    rows: Iterable[Sequence[RenderableType]] = (),
    *,
    total: Sequence[RenderableType] | None = None,
    caption: str = "",
) -> Table:
    """Return a command's table.

    columns: the headings of text columns, and columns from `figures`.
    total: a last row, in bold."""
    drawn = Table(
        *columns, title=title or None, caption=caption or None, title_justify="left", caption_justify="left",
        box=SIMPLE_HEAD, pad_edge=False,
    )  # fmt: skip
    for row in rows:
        drawn.add_row(*row)
    if total is not None:
        drawn.add_section()
        drawn.add_row(*total, style="bold")
    return drawn


def figures(*headings: str, **style: Any) -> list[Column]:
    """Return right-aligned columns. style: of each column, as in rich."""
    return [Column(heading.strip(), justify="right", **style) for heading in headings]
