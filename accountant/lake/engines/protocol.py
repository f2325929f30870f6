"""What a query engine is: a program or a library that answers queries over the tables of the lake.

A query is a SQLGlot expression over the tables of `accountant.lake.tables`, by their plain names, and names every
column that it reads. It only adds up integers and exact decimals, counts, and filters by name. Dividing, pricing and
rounding are done in Python, so every engine gives the same figures. A sum is asked for as a decimal, and no engine may
answer with a floating-point number. `accountant.lake.engines.sql_text` puts a query into an engine's dialect.

A column that a ledger's table lacks, because an earlier version publishes it, is null in all its rows.

An engine answers from the newest version of a table: a page that is loaded after a publication shows it. Several
threads may call it at one time. What cannot be read at present is answered with `LakeUnavailable`.

This module imports little, and a manifest's module should import little too: completion and the help of `gputally
fleet` load every manifest, but libraries only have to be there once an engine is opened."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

from gputally.base.untrusted_text import known_plugin_name

if TYPE_CHECKING:
    from datetime import date

    import pyarrow as pa
    from sqlglot import exp

    from accountant.core.settings import Lake

SEAM: Final = "gputally.engines"
_LONGEST_URLS: Final = 60


class Engine(Protocol):
    """An open engine."""

    def namespaces(self) -> Sequence[str]:
        """The namespaces of all ledgers, ascending and each once: those that begin with
        `accountant.lake.iceberg_catalog.PREFIX` and have the table `ledgers`. Raises LakeUnavailable."""
        ...

    def query(self, question: exp.Select, namespace: str, days: tuple[date, date] | None = None) -> pa.Table:
        """The rows of the answer, in any order, with the columns of the query. Raises LakeUnavailable.

        namespace: that of the ledger whose tables are asked.
        days: the first and the last day, both inclusive, of all rows that the query selects; None: any."""
        ...

    def close(self) -> None:
        """Release what the engine holds: connections, processes. Called once, after the last query, also if there was
        none."""
        ...


@dataclass(frozen=True, slots=True)
class EnginePlugin:
    """The manifest of an engine.

    name: the word behind `--engine`, also the name of the entry point.
    open: `open(lake, url)` returns the engine for a lake with these settings. url: its address from `--engine-url`;
        "" if the user gives none. Raises accountant.core.errors.LakeUnavailable, also if this machine lacks a library.
    urls: the form of its addresses, for help: `http(s)://…`; "" if it takes none.
    reaches: what a query reads and connects to, for the operator.
    page: the page about it."""

    name: str
    open: Callable[[Lake, str], Engine]
    urls: str
    reaches: str
    page: str

    def __post_init__(self) -> None:
        known_plugin_name(self.name)
        if not (self.urls.isprintable() and len(self.urls) <= _LONGEST_URLS):
            raise ValueError(f"the form of addresses {self.urls!r} is too long or not printable")
