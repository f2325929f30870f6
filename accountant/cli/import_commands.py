"""Runs the commands of histories: `import NAME`, and `NAME import` for the names of holders.

The histories are plug-ins. A command has the options of its history and the shared ones. A history that cannot be
loaded, or that declares options that cannot be read, has no command; who calls it is told why."""

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeVar, get_type_hints

import typer
from typer import Option
from typer.core import TyperCommand, TyperGroup

from accountant.cli.connection_options import Printed, ZonedLedger
from accountant.history_import.protocol import (
    SEAM,
    CannotImport,
    Chunk,
    Fault,
    HistoryPlugin,
    HolderNames,
    Import,
    known_limits,
)
from gputally.base.clock import SystemClock
from gputally.base.command_options import refuse_ignored, with_option_groups
from gputally.base.command_output import Output, show
from gputally.base.errors import AccountantError
from gputally.base.instants import parse_edge
from gputally.base.plugins import MOST_LOADING_S, NoPlugin, Plugin, plugins, within
from gputally.base.units import MS_PER_HOUR, MS_PER_MINUTE, US_PER_HOUR

if TYPE_CHECKING:
    from zoneinfo import ZoneInfo

    from rich.console import RenderableType

    from accountant.history_import.gpu_assignment import NodeHistory
    from accountant.history_import.import_run import ImportTarget, Summary


T = TypeVar("T")
_SETTLED_MS = 10 * MS_PER_MINUTE
"""After this time no more samples or records are expected for an instant."""
_SHOWN = 20
PART = 5_000
"""Number of holders sent at a time."""


Partial = Annotated[bool, Option("--partial", help="Exit 0 although records were left out.")]
Replace = Annotated[
    bool, Option("--replace", help="Withdraw what was imported of this time before, with an admin's token.")
]
Reason = Annotated[str, Option(help="Why the earlier import is withdrawn, for the audit trail.")]


@dataclass(slots=True)
class _Asked:
    """The user of one command. left_out: records that were left out so far."""

    at: ZonedLedger
    replaces: bool = False
    now_ms: int = field(default_factory=lambda: SystemClock().wall_ms())
    left_out: int = 0

    @property
    def zone(self) -> ZoneInfo:
        return self.at.zone

    def end(self, text: str | None) -> int:
        return self._edge("--end", text, self.now_ms, self.now_ms - _SETTLED_MS)

    def start(self, text: str | None, end_ms: int, otherwise: int = 0) -> int:
        return self._edge("--start", text, end_ms, otherwise)

    def _edge(self, option: str, text: str | None, until_ms: int, otherwise: int) -> int:
        try:
            found = otherwise if text is None else parse_edge(text, self.zone, until_ms)
        except ValueError as error:
            raise CannotImport(f"{option}: {error}") from error
        return found // MS_PER_HOUR * MS_PER_HOUR

    def leave_out(self, place: str, faults: Sequence[Fault]) -> None:
        self.left_out += len(faults)
        for fault in faults[:_SHOWN]:
            self.tell(f"{place}: {fault.place}: {fault.reason}")
        if len(faults) > _SHOWN:
            self.tell(f"{place}: and {len(faults) - _SHOWN} more faults")

    def tell(self, text: str) -> None:
        from gputally.base.terminal import Terminal

        Terminal(stderr=True).print(text, soft_wrap=True)


def _import_command(plugin: HistoryPlugin) -> Callable[..., None]:
    """The command `import NAME`."""

    def run(
        output: Printed = "table",
        *,
        replace: Replace = False,
        reason: Reason = "imported again",
        partial: Partial = False,
        at: ZonedLedger,
        **own: Any,
    ) -> None:
        from accountant.history_import.import_run import ImportTarget

        if not replace:
            refuse_ignored("without --replace", "reason")
        asked = _Asked(at, replace)
        summaries: list[tuple[ImportTarget, Summary]] = []
        with contextlib.ExitStack() as stack:
            remote = None
            found = _safely(plugin, lambda: iter(plugin.imports(asked, **own)))
            while (one := _safely(plugin, lambda: next(found, None))) is not None:
                if not isinstance(one, Import):
                    raise CannotImport(
                        f"the history {plugin.name} failed: it yields the type {type(one).__name__}, not Import"
                    )
                remote = remote or stack.enter_context(at.connection())
                to = ImportTarget(remote, one.cluster, plugin.name, one.origin)
                summaries.append((to, _run(plugin, to, one, reason if replace else "")))
        _print_summaries(summaries, output)
        if not partial and (asked.left_out or any(summary.unplaced_us for _, summary in summaries)):
            raise typer.Exit(1)

    return _with_options_of(plugin.imports, run)


def _names_command(plugin: HistoryPlugin, names: Callable[..., HolderNames]) -> Callable[..., None]:
    """The command `NAME import`."""

    def run(*, partial: Partial = False, at: ZonedLedger, **own: Any) -> None:
        import msgspec

        from accountant.api.bookkeeping_models import ObservedPods, PodReport
        from gputally.base.terminal import Terminal

        found = _safely(plugin, lambda: names(_Asked(at), **own))
        with at.connection() as remote:
            for begin in range(0, len(found.facts), PART):
                report = PodReport(found.cluster, found.origin, tuple(found.facts[begin : begin + PART]))
                remote.send(ObservedPods, "/v1/pods", msgspec.json.encode(report), "application/json")
        Terminal().print(
            f"jobs of {found.cluster} stored: {len(found.facts):,}; faulty records left out: {found.left_out:,}"
        )
        if found.left_out and not partial:
            raise typer.Exit(1)

    return _with_options_of(names, run)


def _with_options_of(own: Callable[..., object], run: Callable[..., None]) -> Callable[..., None]:
    """A typer command with the options of a history's function, and then the shared ones. Raises what typer and Python
    raise for options that cannot be read."""
    options = _parameters(own)[1:]
    shared = [one for one in _parameters(run) if one.kind is not inspect.Parameter.VAR_KEYWORD]
    every = [one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in (*options, *shared)]
    run.__annotations__ = {one.name: one.annotation for one in every}
    vars(run)["__signature__"] = inspect.Signature(every)
    run.__doc__ = own.__doc__
    return with_option_groups(run)


def _parameters(of: Callable[..., object]) -> list[inspect.Parameter]:
    """The parameters with their types. One without a type is a text, as for typer."""
    types = get_type_hints(of, include_extras=True)
    return [one.replace(annotation=types.get(one.name, str)) for one in inspect.signature(of).parameters.values()]


def _safely(plugin: HistoryPlugin, call: Callable[[], T]) -> T:
    """The result of a history's code, of which any other failure is one of the history."""
    try:
        return call()
    except (AccountantError, typer.Exit, typer.Abort, typer.BadParameter):
        raise
    except Exception as error:
        raise CannotImport(
            f"the history {plugin.name} failed: {type(error).__name__}: {error}"[:_MOST_REASON]
        ) from error


_MOST_REASON: Final = 300


def _run(plugin: HistoryPlugin, to: ImportTarget, one: Import, replace: str) -> Summary:
    from accountant.history_import.import_run import run

    def read(chunk: Chunk) -> Sequence[NodeHistory]:
        found = _safely(plugin, lambda: one.read(chunk))
        if any(node.unplaced_us < 0 for node in found):
            raise CannotImport(f"the history {plugin.name} failed: it counts negative time on no GPU")
        return found

    with _bar(f"{to.source} → {to.cluster}") as progress:
        return run(to, read, one.span, one.chunk_ms, progress, left_out=one.left_out, replace=replace)


@contextlib.contextmanager
def _bar(what: str) -> Iterator[Callable[[int, int], None]]:
    """A progress bar on stderr, if that is a terminal."""
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    from gputally.base.terminal import Terminal

    console = Terminal(stderr=True)
    bar = Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn(),
        console=console, disable=not console.is_terminal,
    )  # fmt: skip
    with bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _print_summaries(summaries: Sequence[tuple[ImportTarget, Summary]], output: Output) -> None:
    """Prints the result for each cluster."""
    from rich.console import Group

    records = [
        {
            "cluster": to.cluster, "source": to.source, "origin": to.origin, **asdict(summary),
            "coverage": _coverage(summary), "limits": known_limits(to.source),
        }
        for to, summary in summaries
    ]  # fmt: skip
    show(output, lambda: Group(*(part for to, summary in summaries for part in _summary_text(to, summary))), records)


def _coverage(summary: Summary) -> float | None:
    """The share of the known time that was sent; None if nothing was known. A bound if records were left out."""
    known_us = summary.sent_us + summary.missing_us + summary.unplaced_us
    return summary.sent_us / known_us if known_us else None


def _summary_text(to: ImportTarget, summary: Summary) -> Iterator[RenderableType]:
    """The result for one cluster: a table, and the known limits of the source."""
    from rich.table import Table
    from rich.text import Text

    if not summary.done:
        yield Text(f"{to.cluster}: all of this history was imported before, so nothing was sent (--replace redoes it)")
        return
    table = Table(title=f"Imported into {to.cluster} from {to.origin}", title_justify="left", show_header=False)
    table.add_column()
    table.add_column(justify="right")
    for name, us in (
        ("GPU-hours of capacity", summary.sent_us),
        ("  of it held", summary.held_us),
        ("  of that with unknown use", summary.unknown_us),
        ("metered by agents, so not sent", summary.metered_us),
        ("of known GPUs, but not recorded", summary.missing_us),
        ("held, but on no known GPU", summary.unplaced_us),
    ):
        table.add_row(name, f"{us / US_PER_HOUR:,.1f}")
    coverage = _coverage(summary)
    bound = "at most " if summary.left_out else ""
    table.add_row("coverage", "–" if coverage is None else f"{bound}{_floor(coverage):.2%}")
    if summary.left_out:
        table.add_row("records left out", f"{summary.left_out:,}")
    table.add_row("GPUs, nodes", f"{summary.gpus:,}, {summary.nodes:,}")
    yield table
    for limit in known_limits(to.source):
        yield Text(f"- {limit}")


def _floor(share: float) -> float:
    """A share with two digits of its percentage, rounded down: only all of it is 100 %."""
    return math.floor(share * 10_000) / 10_000


def _command_of(plugin: HistoryPlugin) -> TyperCommand:
    """`import NAME`. Raises what typer and Python raise for options that cannot be read."""
    one = typer.Typer(add_completion=False, rich_markup_mode=None)
    one.command(plugin.name)(_import_command(plugin))
    command = typer.main.get_command(one)
    assert isinstance(command, TyperCommand)  # a group needs more than one command
    return command


def _group_of(plugin: HistoryPlugin, names: Callable[..., HolderNames]) -> typer.Typer:
    """`NAME import`. Raises what typer and Python raise for options that cannot be read."""
    one = typer.Typer(help=f"Names, users and accounts of {plugin.title} jobs.", no_args_is_help=True)
    one.command("import")(_names_command(plugin, names))
    typer.main.get_group(one)
    return one


def _commands_of(plugin: HistoryPlugin) -> tuple[TyperCommand, typer.Typer | None]:
    return _command_of(plugin), _group_of(plugin, plugin.names) if plugin.names is not None else None


app = typer.Typer(add_completion=False, rich_markup_mode=None)
_imports: dict[str, TyperCommand] = {}
_titles: list[str] = []
_left_out: dict[str, Plugin[HistoryPlugin]] = {}
"""The histories without a command, by name, with the reason."""
for _one in plugins(SEAM, HistoryPlugin):
    if (_plugin := _one.manifest) is None:
        _left_out[_one.name] = _one
        continue
    try:
        _command, _naming = within(MOST_LOADING_S, partial(_commands_of, _plugin))
    except Exception as error:  # noqa: BLE001 - code of others: its options are whatever it says
        _fault = f"its options cannot be read: {type(error).__name__}: {error}"[:_MOST_REASON]
        _left_out[_one.name] = Plugin(_one.name, _one.package, _one.version, None, _fault)
        continue
    _imports[_one.name] = _command
    if _naming is not None:
        app.add_typer(_naming, name=_one.name)
    _titles.append(_plugin.title)


class _Imports(TyperGroup):
    """The group `import`. The name of a history that was left out is answered with the reason."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**{**given, "commands": _imports})

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        found = super().get_command(ctx, cmd_name)
        if found is None and (one := _left_out.get(cmd_name)) is not None:
            raise NoPlugin(f"{one.name} of the package {one.package} {one.version} cannot be used: {one.fault}")
        return found


_sources = " or ".join(filter(None, (", ".join(_titles[:-1]), *_titles[-1:])))
import_app = typer.Typer(cls=_Imports, help=f"Usage from before the agents, from {_sources}.", no_args_is_help=True)
app.add_typer(import_app, name="import")


@import_app.callback()
def _group() -> None:
    """Makes Typer treat the app as a group; the group has no options."""
