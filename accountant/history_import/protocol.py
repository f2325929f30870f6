"""What a history is: a plug-in that makes usage from before the agents out of another system's records.

A history offers a function with the options of its command. The function reads the records and yields one `Import` for
each cluster; what an import is, its progress, coverage and repetition, is the core's (`import_run`). Nothing is
guessed: time whose holder is not known has no rows, use that was not recorded is None, and a record that cannot be read
is named with its place, is left out, and is counted.

This module imports little, because help and completion load every manifest."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Final, Protocol

from typer import Option

from gputally.base.errors import AccountantError
from gputally.base.plugins import usable
from gputally.base.untrusted_text import known_plugin_name

if TYPE_CHECKING:
    from zoneinfo import ZoneInfo

    from accountant.core.claim_overlap import Span
    from accountant.history_import.gpu_assignment import NodeHistory
    from agent.wire import PodFacts

SEAM: Final = "gputally.histories"


class CannotImport(AccountantError):
    """The history cannot be imported. The message names the place and the reason in one line."""


@dataclass(frozen=True, slots=True)
class Fault:
    """A record that was left out, or that may be misread: its place, such as a line of the file, and the reason."""

    place: str
    reason: str


@dataclass(frozen=True, slots=True)
class Chunk:
    """A span that is queried, sent and recorded as a unit. epoch: the epoch of its outboxes."""

    epoch: str
    start_ms: int
    end_ms: int


@dataclass(frozen=True, slots=True)
class Import:
    """The history of one cluster.

    cluster: its name in the ledger.
    origin: the records' file or address, without credentials.
    read: the nodes of a chunk. The same chunk gives the same rows whenever it is read.
    span: what is imported, in whole hours.
    chunk_ms: the span that is read and sent at once, in whole hours.
    left_out: records that were left out."""

    cluster: str
    origin: str
    read: Callable[[Chunk], Sequence[NodeHistory]]
    span: Span
    chunk_ms: int
    left_out: int = 0


@dataclass(frozen=True, slots=True)
class HolderNames:
    """What another system knows about holders of which agents know only a number. origin: as in `Import`."""

    cluster: str
    origin: str
    facts: Sequence[PodFacts]
    left_out: int = 0


class Asked(Protocol):
    """What the user asked for beside the history's own options, and the ways to answer beside its imports."""

    @property
    def now_ms(self) -> int: ...

    @property
    def zone(self) -> ZoneInfo:
        """The zone of local times, from --timezone."""
        ...

    @property
    def replaces(self) -> bool:
        """Whether earlier imports of the span are withdrawn first."""
        ...

    def end(self, text: str | None) -> int:
        """The end of the history from the option --end, in ms: by default the last full hour that is complete. Raises
        CannotImport."""
        ...

    def start(self, text: str | None, end_ms: int, otherwise: int = 0) -> int:
        """The start of the history from the option --start, in ms, rounded down to a whole hour: an instant, or a
        duration before the end; that of `otherwise` without a text. Raises CannotImport."""
        ...

    def leave_out(self, place: str, faults: Sequence[Fault]) -> None:
        """Tells the user what is left out of a file; the command then exits with 1."""
        ...

    def tell(self, text: str) -> None:
        """Tells the user something else, on stderr."""
        ...


@dataclass(frozen=True, slots=True)
class HistoryPlugin:
    """The manifest of a history.

    name: the word behind `gputally import`, also the name of the entry point and that of the source in the ledger.
    title: the name of the other system.
    records: what of it is imported, as words for reports.
    imports: `imports(asked, …)` yields the imports. Its other parameters are the options of the command, annotated as
        for typer, and its docstring is the command's help. Raises CannotImport.
    limits: what the records cannot show, as sentences for reports.
    names: `names(asked, …)` gives facts about holders that agents metered, as the command `NAME import`; None if the
        other system knows nothing about them.
    reaches: what an import reads and connects to, for the operator.
    page: the page about it."""

    name: str
    title: str
    records: str
    imports: Callable[..., Iterable[Import]]
    limits: tuple[str, ...]
    reaches: str
    page: str
    names: Callable[..., HolderNames] | None = None

    def __post_init__(self) -> None:
        known_plugin_name(self.name)


End = Annotated[
    str | None,
    Option(
        help="End of the history, exclusive: a date, RFC 3339 or 7d ago (default: ten minutes ago); rounded down to an "
        "hour."
    ),
]
"""The option --end, for `Asked.end`."""


def known_records(source: str) -> str:
    """What a source has, as words for reports."""
    found = usable(SEAM, HistoryPlugin).get(source)
    return found.records if found is not None else source


def known_limits(source: str) -> tuple[str, ...]:
    """What the records of a source cannot show, as sentences for reports."""
    found = usable(SEAM, HistoryPlugin).get(source)
    return found.limits if found is not None else (f"{source} is not installed here, which knows its limits",)
