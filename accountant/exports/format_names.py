"""The names of the installed formats, as the type of an option of a command."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from accountant.exports.protocol import exports

if TYPE_CHECKING:
    Format = str
else:
    Format = Literal[tuple(exports())]
