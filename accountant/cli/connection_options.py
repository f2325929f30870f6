"""Defines the options of commands that call a running accountant, or, with `--db`, open a stopped ledger; prints
answers and writes files.

A command has one parameter of type `Server`, `LedgerOptions`, `ZonedLedger` or `Priced`. The decorator
`with_option_groups` (`gputally.base.command_options`) makes each field of that type an option of the command."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeVar
from zoneinfo import ZoneInfo

import typer
from typer import Option

from accountant.wire.dimensions import DECLARED
from accountant.wire.option_types import ORDER_HELP, Orders
from gputally.base import atomic_file
from gputally.base.command_options import refuse_ignored
from gputally.base.command_output import Output, show
from gputally.base.errors import CannotStart

if TYPE_CHECKING:
    from pydantic import BaseModel
    from rich.console import RenderableType

    from accountant.wire.typed_accountant_client import AccountantClient
    from gputally.base.accountant_connection import Query


Printed = Annotated[Output, Option("--output", help="Format of the output.")]
ListOutput = Literal["table", "json", "csv", "parquet"]
ListPrinted = Annotated[
    ListOutput, Option("--output", help="Format of the output; parquet: a file with exactly these rows and columns.")
]


def _known_timezone(name: str | None) -> str | None:
    """Raises BadParameter for an unknown time zone."""
    from accountant.core import periods

    if name is not None:
        try:
            periods.zone(name)
        except ValueError as error:
            raise typer.BadParameter(f"{error}; IANA names are those like Europe/Berlin") from error
    return name


Timezone = Annotated[str | None, Option(help="IANA time zone of months and days.", callback=_known_timezone)]
By = Annotated[str, Option(help=f"Dimensions to group by, joined by commas: {', '.join(DECLARED)}, label:NAME.")]
Start = Annotated[
    str | None,
    Option(
        "--start", "--since", help="Start of the span: 7d before its end, a date or RFC 3339 (default: this month)."
    ),
]
End = Annotated[str | None, Option(help="End of the span, exclusive: a date, RFC 3339 or 7d ago (default: now).")]
Compare = Annotated[
    bool,
    Option("--compare", help="Compare with the span before, of the same length, or with the month before."),
]
Where = Annotated[list[str] | None, Option(help="Only this value of a dimension: team=vision (repeatable).")]


@dataclass(frozen=True, kw_only=True)
class Grouping:
    """The options that select usage or cost and divide it into groups."""

    by: By = "team"
    start: Start = None
    end: End = None
    where: Where = None
    sort: Annotated[
        str,
        Option(help=f"{ORDER_HELP} A dimension of --by or a column (default: by time, then the largest first)."),
    ] = ""
    search: Annotated[str, Option(help="Only lines with this text in a name.")] = ""
    limit: Annotated[
        int | None, Option(min=1, help="Number of lines to show (default: 50 in a table, all in JSON and CSV).")
    ] = None


def filters(where: Sequence[str] | None) -> dict[str, list[str]]:
    """The parameters of filters, of texts such as `team=vision`. Raises BadParameter."""
    values_of: dict[str, list[str]] = {}
    for text in where or ():
        dimension, equals, value = text.partition("=")
        if not equals:
            raise typer.BadParameter(f"--where {text}: write DIMENSION=VALUE, for example team=vision")
        values_of.setdefault(f"where.{dimension}", []).append(value)
    return values_of


Chosen = TypeVar("Chosen", bound=str)


def chosen_columns(text: str | None, known: Collection[Chosen]) -> tuple[Chosen, ...]:
    """The columns that `--columns` names, separated by commas. Raises BadParameter."""
    from gputally.base.near_names import nearest

    names = {str(name): name for name in known}
    found = tuple(name for name in (text or "").split(",") if name)
    for name in found:
        if name not in names:
            raise typer.BadParameter(f"there is no column {name!r}{nearest(name, names)}", param_hint="--columns")
    return tuple(names[name] for name in found)


def chosen_order(text: str, orders: Orders) -> str:
    """The whole text of an order. Raises BadParameter."""
    try:
        return orders.text(text)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--sort") from error


def write_binary(content: bytes) -> None:
    """Writes a file to standard output, which must not be a terminal. Raises CannotStart."""
    import sys

    if sys.stdout.isatty():
        raise CannotStart(
            "a Parquet file is no text for a terminal: redirect the output to a file, as in > jobs.parquet"
        )
    sys.stdout.buffer.write(content)


M = TypeVar("M")
R = TypeVar("R", bound="BaseModel | Sequence[BaseModel]")


def print_answer(
    output: Output, answer: R, table: Callable[[R], RenderableType], records: Iterable[BaseModel] | None = None
) -> None:
    """Prints an answer.

    table: makes the table that people read.
    records: the rows of CSV; None: the models of `answer`. They get the answer's currency, because no amount stands
        without one."""
    from pydantic import BaseModel

    models = [answer] if isinstance(answer, BaseModel) else list(answer)
    document = _dumped(answer) if isinstance(answer, BaseModel) else [_dumped(model) for model in models]
    rows = [_dumped(model) for model in (models if records is None else records)]
    if isinstance(document, dict) and "currency" in document:
        rows = [{**row, "currency": row.get("currency", document["currency"])} for row in rows]
    show(output, lambda: table(answer), document, rows)


def write_file(path: Path, content: bytes, mode: int | None = None) -> None:
    """Writes a file atomically. mode: see `gputally.base.atomic_file.write`. Raises CannotStart."""
    try:
        atomic_file.write(path, content, mode)
    except OSError as error:
        raise CannotStart(f"{path}: {error.strerror}") from error


def _dumped(model: BaseModel) -> dict[str, Any]:
    return model.model_dump(mode="json")


@contextlib.contextmanager
def _serve_offline(ledger: Path, **more_settings: Any) -> Iterator[AccountantClient]:
    """Serves a stopped ledger on a free loopback port with a temporary token. A price file is tried out and not
    recorded.

    Raises CannotStart if there is no ledger."""
    import secrets

    # Imported here, because a command to a running accountant should not wait for these modules.
    from accountant.composition import Service
    from accountant.core.settings import Settings
    from accountant.wire.typed_accountant_client import AccountantClient
    from gputally.base.clock import SystemClock
    from gputally.server import logs_and_metrics
    from gputally.server.https_server import serve
    from gputally.server.tokens_and_grants import SingleToken

    if not ledger.is_file():
        raise CannotStart(f"{ledger}: there is no ledger file: give --db an existing one")
    logs_and_metrics.configure("error")
    token = secrets.token_urlsafe()
    settings = Settings(data=ledger.parent, ledger=ledger.name, listen="127.0.0.1:0", auth="off", **more_settings)
    with (
        Service(settings, SystemClock(), authenticator=SingleToken(token), trial=True) as service,
        serve(service.app, settings.host, settings.port) as url,
    ):
        yield AccountantClient(url, token)


@dataclass(frozen=True, kw_only=True)
class Server:
    """Options for a running accountant."""

    url: Annotated[str, Option(envvar="GPUTALLY_URL", help="URL of a running accountant.")] = "http://127.0.0.1:8080"
    token_file: Annotated[
        Path | None, Option(envvar="GPUTALLY_TOKEN_FILE", help="File with the bearer token for --url.")
    ] = None
    ca_file: Annotated[
        Path | None,
        Option(envvar="GPUTALLY_CA_FILE", help="CA certificates to trust for https, PEM (default: the system's)."),
    ] = None

    def ask(self, model: type[M], path: str, query: Query | None = None) -> M:
        """GETs a JSON answer as a model."""
        with self.connection() as remote:
            return remote.ask(model, path, query)

    def act(self, model: type[M], path: str, content: Mapping[str, object]) -> M:
        """POSTs JSON; returns the answer as a model."""
        with self.connection() as remote:
            return remote.act(model, path, content)

    @contextlib.contextmanager
    def connection(self) -> Iterator[AccountantClient]:
        """A client of the accountant, for the time of the context."""
        from accountant.wire.typed_accountant_client import AccountantClient
        from gputally.base.accountant_connection import Unanswered
        from gputally.base.http_calls import read_token

        token = read_token(self.token_file, Unanswered) if self.token_file is not None else None
        yield AccountantClient(self.url, token, self.ca_file)


@dataclass(frozen=True, kw_only=True)
class LedgerOptions(Server):
    """Options for a running accountant, or for a stopped ledger.

    FOR_FILES: the options that only a stopped ledger needs; a running accountant has settings of its own."""

    FOR_FILES: ClassVar[tuple[str, ...]] = ()

    db: Annotated[Path | None, Option(help="File of a stopped ledger to read instead of --url.")] = None

    @contextlib.contextmanager
    def connection(self) -> Iterator[AccountantClient]:
        if self.db is None:
            refuse_ignored("without --db", *self.FOR_FILES)
            with super().connection() as remote:
                yield remote
            return
        refuse_ignored("with --db", "url", "token_file", "ca_file")
        with _serve_offline(self.db, **self._settings()) as remote:
            yield remote

    def _settings(self) -> dict[str, Any]:
        """Further settings for the accountant on a stopped ledger."""
        return {}


@dataclass(frozen=True, kw_only=True)
class ZonedLedger(LedgerOptions):
    """Options for months and days, which depend on a time zone."""

    timezone: Timezone = None

    @property
    def zone(self) -> ZoneInfo:
        """The time zone."""
        from accountant.core import periods

        return periods.zone(self.timezone or "UTC")

    def _settings(self) -> dict[str, Any]:
        return {**super()._settings(), "timezone": self.timezone or "UTC"}


@dataclass(frozen=True, kw_only=True)
class Books(ZonedLedger):
    """Options for the books, whose time zone is a setting of the accountant."""

    FOR_FILES = ("timezone",)

    timezone: Annotated[
        str | None, Option(help="IANA time zone of months and days, for --db.", callback=_known_timezone)
    ] = None


@dataclass(frozen=True, kw_only=True)
class Priced(ZonedLedger):
    """Options for amounts of money, which need a price book."""

    FOR_FILES = ("prices",)

    prices: Annotated[Path | None, Option(help="Price book (YAML) for --db.")] = None

    def _settings(self) -> dict[str, Any]:
        return {**super()._settings(), "prices": self.prices}
