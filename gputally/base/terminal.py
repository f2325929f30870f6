"""Draws text and tables on a terminal.

Both are printed literally, without markup or control sequences (`gputally.base.untrusted_text`)."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from typing import Any, TextIO

from rich.box import SIMPLE_HEAD
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.segment import Segment
from rich.table import Column, Table
from rich.text import Text, TextType

from gputally.base.untrusted_text import for_terminal

_WIDEST = 10_000
"""More columns than any row has."""
WIDTH_WITHOUT_TERMINAL = 160
"""Width of a table in columns without a terminal and without COLUMNS, so that a table in a file keeps its shape."""


def draw(renderable: RenderableType, to: TextIO | None = None) -> None:
    """Print a rich renderable at the terminal's width."""
    stream = to or sys.stdout
    width = None if stream.isatty() or os.environ.get("COLUMNS", "").isdigit() else WIDTH_WITHOUT_TERMINAL
    Terminal(file=stream, width=width).print(renderable)


class Terminal(Console):
    """A rich console that prints text literally. A name or an answer of an API server can contain rich's markup
    (`[denied]`, `:warning:`), and control sequences that a terminal would obey."""

    def __init__(self, **options: Any) -> None:
        """Create the console with rich's `options`, which override this class's defaults."""
        super().__init__(**({"highlight": False, "markup": False, "emoji": False} | options))

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Render with rich, and escape the control characters in text. Rich's own control segments do not change."""
        for segment in super().render(renderable, options):
            text = segment.text if segment.control else for_terminal(segment.text)
            yield segment if text is segment.text else segment._replace(text=text)


class _FittingTable(Table):
    """A table that leaves out columns before it breaks a name or a number, and says which. Its title and its caption
    are as wide as the terminal, not as the table."""

    may_drop: Sequence[str] = ()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        dropped: list[str] = []
        if self.may_drop:
            wide = options.update(max_width=_WIDEST)
            need = {id(column): self._measure_column(console, wide, column).maximum for column in self.columns}
            for heading in self.may_drop:
                if sum(need[id(column)] for column in self.columns) + self._extra_width <= options.max_width:
                    break
                kept = [column for column in self.columns if column.header != heading]
                dropped += [heading] * (len(kept) < len(self.columns))
                self.columns = kept
            for index, column in enumerate(self.columns):
                column._index = index
        if dropped:
            self.caption = f"{self.caption or ''}\nnot shown at this width: {', '.join(dropped)}".lstrip()
        title, caption, self.title, self.caption = self.title, self.caption, None, None
        if title is not None:
            yield title if isinstance(title, Text) else Text(title, "table.title")
        yield from super().__rich_console__(console, options)
        if caption is not None:
            yield caption if isinstance(caption, Text) else Text(caption, "table.caption")


def table(
    title: TextType,
    columns: Sequence[str | Column],
    rows: Iterable[Sequence[RenderableType]] = (),
    *,
    total: Sequence[RenderableType] | None = None,
    caption: str = "",
    may_drop: Sequence[str] = (),
) -> Table:
    """Return a command's table.

    columns: the headings of text columns, and columns from `figures`.
    total: a last row, in bold.
    may_drop: the headings of columns that a narrow terminal does not show, the first one first."""
    drawn = _FittingTable(
        *columns, title=title or None, caption=caption or None, title_justify="left", caption_justify="left",
        box=SIMPLE_HEAD, pad_edge=False,
    )  # fmt: skip
    drawn.may_drop = may_drop
    for row in rows:
        drawn.add_row(*row)
    if total is not None:
        drawn.add_section()
        drawn.add_row(*total, style="bold")
    return drawn


def figures(*headings: str, **style: Any) -> list[Column]:
    """Return right-aligned columns with these headings. style: the style of each column, as in rich."""
    return [Column(heading.strip(), justify="right", **style) for heading in headings]
