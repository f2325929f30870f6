"""Runs `serve`, `backup`, `backups`, `restore`, `token` and `clock`.

`serve` exits with 0 after a requested stop, and with 70 if the process has to be started again, because the database
failed or because another replica took over the Lease.

The accountant reads the token file again within a second of a change, so a revoked token is refused from the next
request on. `token revoke` deletes only the lines of the entry; comments and other entries stay as they are."""

from __future__ import annotations

import os
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Argument, Option

from accountant.cli.connection_options import (
    Books,
    LedgerOptions,
    Printed,
    Server,
    Timezone,
    print_answer,
    write_file,
)
from gputally.base.clock import SystemClock
from gputally.base.command_options import refuse_ignored, with_option_groups
from gputally.base.command_output import show

if TYPE_CHECKING:
    from accountant.storage.backups import Backup
    from accountant.storage.folder_or_object_store import FileStore


app = typer.Typer(add_completion=False, rich_markup_mode=None)
token_app = typer.Typer(help="Bearer tokens for the token file.", no_args_is_help=True)
app.add_typer(token_app, name="token")
clock_app = typer.Typer(help="The accountant's clock, and items that it misdated.", no_args_is_help=True)
app.add_typer(clock_app, name="clock")


@app.command()
def serve(
    config: Annotated[Path | None, Option(help="Settings file (YAML).")] = None,
    data: Annotated[Path | None, Option(help="Folder of the ledger.")] = None,
    listen: Annotated[str | None, Option(help="host:port to serve on.")] = None,
    auth: Annotated[str | None, Option(help="tokens: requests need a token; off: only on loopback.")] = None,
    tokens: Annotated[Path | None, Option(help="Token file.")] = None,
    prices: Annotated[Path | None, Option(help="Price book (YAML).")] = None,
    inventory: Annotated[Path | None, Option(help="Inventory file (YAML).")] = None,
    callers: Annotated[Path | None, Option(help="Callers file: issuers, grants and clusters (YAML).")] = None,
    tls_cert: Annotated[Path | None, Option(help="Certificate (PEM) for HTTPS.")] = None,
    tls_key: Annotated[Path | None, Option(help="Private key of the certificate (PEM).")] = None,
    tls_client_ca: Annotated[Path | None, Option(help="CA certificates for client certificates (PEM).")] = None,
    policy: Annotated[Path | None, Option(help="Policy file (YAML).")] = None,
    timezone: Timezone = None,
    log_level: Annotated[str | None, Option(help="Lowest level that is logged: debug, info, warning or error.")] = None,
    print_config: Annotated[bool, Option("--print-config", help="Print the settings in force and stop.")] = False,
) -> None:
    """Serve the ledger until SIGTERM or Ctrl-C."""
    from accountant.cli.serving import lead
    from accountant.core.settings import load
    from accountant.runtime.leadership import leadership
    from gputally.server import logs_and_metrics

    flags = {
        "data": data, "listen": listen, "auth": auth, "tokens": tokens, "prices": prices,
        "inventory": inventory, "policy": policy, "callers": callers, "tls_cert": tls_cert, "tls_key": tls_key,
        "tls_client_ca": tls_client_ca, "timezone": timezone, "log_level": log_level,
    }  # fmt: skip
    settings = load(config, os.environ, {name: value for name, value in flags.items() if value is not None})
    if print_config:
        typer.echo(settings.as_yaml(), nl=False)
        return
    logs_and_metrics.configure(settings.log_level)
    leader = leadership(settings, SystemClock())
    with leader.standing():
        code = lead(settings, leader)
    raise typer.Exit(code)


Archive = Annotated[str | None, Option(help="Place of the archive (archive.to): a folder, s3://…, gs://… or abfs://….")]
ObjectStore = Annotated[
    Path | None,
    Option(
        "--object-storage",
        help="File (YAML) of properties of the object store, for example s3.endpoint (default: the environment).",
    ),
]


@app.command()
@with_option_groups
def backup(
    to: Annotated[Path | None, Option(help="Local folder for the backup (default: that of the accountant).")] = None,
    keep: Annotated[int | None, Option(min=1, help="Number of newest backups to keep in --to (default: all).")] = None,
    archive: Archive = None,
    object_storage: ObjectStore = None,
    output: Printed = "table",
    *,
    at: LedgerOptions,
) -> None:
    """Copy the whole ledger and verify the copy; a running accountant continues meanwhile."""
    from accountant.cli import terminal_tables
    from accountant.storage import backups
    from accountant.storage.duckdb_ledger import open_ledger
    from accountant.storage.folder_or_object_store import in_folder

    if keep is not None and to is None:
        raise typer.BadParameter("--keep needs --to: it removes old backups from that folder")
    if at.db is None:
        refuse_ignored("without --db", "archive", "object_storage")
    else:
        refuse_ignored("with --db", "url", "token_file", "ca_file")
    if at.db is not None:
        if not at.db.is_file():
            raise backups.NoBackup(f"{at.db}: there is no ledger file: give --db an existing one")
        clock = SystemClock()
        ledger = open_ledger(at.db, clock, archive=_store(archive, object_storage, at.db.parent))
        try:
            folder = to or at.db.parent / "backups"
            new_backup = backups.make(ledger, in_folder(folder), clock.wall_ms())
        finally:
            ledger.close()
    else:
        new_backup = _fetched(at, to)
    if to is not None and keep is not None:
        backups.prune(in_folder(to), keep)
    print_answer(output, new_backup, lambda row: terminal_tables.backups([row]))


def _fetched(at: Server, to: Path | None) -> Backup:
    from accountant.storage.backups import Backup
    from accountant.storage.folder_or_object_store import sha256
    from gputally.base.accountant_connection import Unanswered

    with at.connection() as remote:
        new_backup = remote.act(Backup, "/v1/backups", {})
        if to is not None:
            path = to / f"{new_backup.name}.duckdb"
            remote.save(f"/v1/backups/{new_backup.name}", path)
            if sha256(path) != new_backup.sha256:
                path.unlink()
                raise Unanswered(
                    f"{path}: the received copy has another SHA-256 than the backup, so it was removed: try again"
                )
            write_file(path.with_suffix(".json"), (new_backup.model_dump_json(indent=2) + "\n").encode())
    return new_backup


@app.command("backups")
@with_option_groups
def list_backups(output: Printed = "table", *, at: Server) -> None:
    """List the accountant's backups (`backups.to`), newest first."""
    from accountant.cli import terminal_tables
    from accountant.storage.backups import Backup

    stored = at.ask(tuple[Backup, ...], "/v1/backups")
    print_answer(output, stored, terminal_tables.backups)


@app.command()
def restore(
    ledger: Annotated[Path, Argument(help="Ledger file to make, which must not exist yet.")],
    source: Annotated[str | None, Option("--from", help="The .duckdb file of a backup, a path or URL.")] = None,
    archive: Archive = None,
    object_storage: ObjectStore = None,
    output: Printed = "table",
) -> None:
    """Rebuild a lost ledger from a backup, from the archive, or from both, and check that it balances.

    When the accountant runs again, agents send the records that are missing."""
    from accountant.cli import terminal_tables
    from accountant.core.settings import ObjectStorage
    from accountant.storage import backups
    from accountant.storage.duckdb_ledger import open_ledger
    from accountant.storage.folder_or_object_store import open_store

    if source is None and archive is None:
        raise typer.BadParameter("give --from BACKUP, --archive PLACE, or both")
    with backups.restoring(ledger) as built:
        if source is not None:
            folder, _, file = source.rpartition("/")
            store = open_store(folder or ".", ObjectStorage(secrets=object_storage), ledger.parent)
            backups.restore(store, file, built)
        parts = _store(archive, object_storage, ledger.parent)
        with closing(open_ledger(built, SystemClock(), archive=parts)) as restored:
            start, end = restored.status().extent
            with restored.moment(start, end) as moment:
                imbalance = moment.imbalance(start, end)
                newest = moment.acts(after=moment.status().last_act - 1, limit=1)
    act = newest[0] if newest else None
    record = {
        "ledger": str(ledger), "start_ms": start, "end_ms": end, "imbalance_gpu_us": imbalance.total_us,
        "act": act.number if act else 0, "act_ms": act.at_ms if act else None,
    }  # fmt: skip
    document = {**record, "lines": [str(line) for line in imbalance.lines]}
    show(output, lambda: terminal_tables.restored(ledger, start, end, act, imbalance), document, [record])
    if imbalance.total_us:
        raise typer.Exit(1)


def _store(address: str | None, object_storage: Path | None, staging: Path) -> FileStore | None:
    from accountant.core.settings import ObjectStorage
    from accountant.storage.folder_or_object_store import open_store

    return None if address is None else open_store(address, ObjectStorage(secrets=object_storage), staging)


File = Annotated[Path, Option("--file", help="The token file.")]


@token_app.command("list")
def list_tokens(file: File, output: Printed = "table") -> None:
    """List the holders of tokens, with scopes and expiry."""
    from accountant.cli.token_file import bound, entries
    from gputally.base.terminal import table

    rows: list[tuple[str, ...]] = []
    records: list[dict[str, object]] = []
    now = datetime.now(UTC)
    for entry in sorted(entries(file), key=lambda entry: entry.name):
        until = "no end" if entry.expires is None else f"{entry.expires.astimezone(UTC):%Y-%m-%d %H:%M} UTC"
        state = "expired" if entry.expires is not None and entry.expires <= now else "valid"
        rows.append((entry.name, ", ".join(entry.scopes), bound(entry), until, state))
        expires = None if entry.expires is None else entry.expires.astimezone(UTC).isoformat()
        bounds = {"teams": entry.teams, "cluster": entry.cluster, "node": entry.node}
        records.append({"name": entry.name, "scopes": entry.scopes, **bounds, "expires": expires, "state": state})
    show(output, lambda: table("", ["name", "scopes", "sees or reports", "until", "state"], rows), records)


@token_app.command()
def revoke(name: Annotated[str, Argument(help="Name of the token, as `token list` shows it.")], file: File) -> None:
    """Remove a token from the file. The accountant refuses it within a second."""
    from accountant.cli.token_file import entries, without
    from gputally.base.terminal import Terminal

    if name not in {entry.name for entry in entries(file)}:
        raise typer.BadParameter(f"{file}: no token is named {name!r}: `token list` shows the names")
    try:
        text = without(file.read_text(encoding="utf-8"), name)
    except ValueError as error:
        raise typer.BadParameter(f"{file}: {error}") from error
    write_file(file.resolve(), text.encode())
    Terminal(soft_wrap=True).print(f"{name} is revoked. Tokens left in {file}: {len(entries(file))}")


@token_app.command()
def new(
    name: Annotated[str, Option(help="Name of the token: the person or program that uses it.")],
    scope: Annotated[
        list[str],
        Option(help="Permission: ingest, import, read, progress, policy or admin (repeatable)."),
    ],
    cluster: Annotated[str | None, Option(help="Cluster that the token reports for; needed with ingest.")] = None,
    node: Annotated[str | None, Option(help="Node that the token reports for; needed with ingest.")] = None,
    team: Annotated[list[str] | None, Option(help="Only this team's figures may be read (repeatable).")] = None,
    expires: Annotated[
        datetime | None, Option(help="Instant at which the token expires (UTC; default: never).")
    ] = None,
    file: Annotated[Path | None, Option("--file", help="Token file that gets the entry, made if absent.")] = None,
    token_file: Annotated[Path | None, Option(help="New file for the token, instead of printing it.")] = None,
) -> None:
    """Create a token. It is printed once, or written to a file; the token file contains only its hash."""
    from pydantic import ValidationError

    from accountant.cli.token_file import entries, scopes_named, with_entry
    from gputally.server.config_loading import fault_text
    from gputally.server.tokens_and_grants import new_token

    if token_file is not None and token_file.exists():
        raise typer.BadParameter(
            f"{token_file} exists, and its token would be lost: give another file, or remove this one"
        )
    if file is not None and file.exists() and name in {entry.name for entry in entries(file)}:
        raise typer.BadParameter(f"{file}: a token with the name {name!r} exists: revoke it first")
    try:
        token, entry = new_token(
            name, scopes_named(scope), cluster=cluster, node=node, teams=tuple(team) if team else None,
            expires=expires.replace(tzinfo=UTC) if expires else None,
        )  # fmt: skip
    except ValidationError as error:
        reasons = (fault_text(fault) for fault in error.errors(include_url=False))
        raise typer.BadParameter("; ".join(reasons)) from error
    if file is not None:
        text = file.read_text(encoding="utf-8") if file.exists() else "tokens: []\n"
        try:
            text = with_entry(text, entry)
        except ValueError as error:
            raise typer.BadParameter(f"{file}: {error}") from error
    if token_file is not None:
        write_file(token_file, f"{token}\n".encode(), 0o600)
    if file is not None:
        write_file(file.resolve(), text.encode())
    if token_file is None:
        typer.echo(f"token, shown only now:\n\n  {token}\n")
    if file is None:
        typer.echo(f"entry for the token file, under `tokens:`:\n\n{entry}", nl=False)


@clock_app.command("show")
@with_option_groups
def show_clock(output: Printed = "table", *, at: Books) -> None:
    """Show whether the clock is trusted, and which stored items it dated in the future."""
    from accountant.cli import terminal_tables
    from accountant.ledger.protocols import ClockReport

    report = at.ask(ClockReport, "/v1/clock")
    print_answer(output, report, terminal_tables.clock)


@clock_app.command()
@with_option_groups
def accept(output: Printed = "table", *, at: Books) -> None:
    """Accept the clock of the accountant's machine as right after it was set."""
    from accountant.cli import terminal_tables
    from accountant.ledger.protocols import ClockReport

    report = at.act(ClockReport, "/v1/clock/accept", {})
    print_answer(output, report, terminal_tables.clock)


@clock_app.command()
@with_option_groups
def heal(
    reason: Annotated[str, Option(help="Reason, which the audit trail records.")],
    output: Printed = "table",
    *,
    at: Books,
) -> None:
    """Correct records, policies, pod facts and decisions that a wrong clock dated in the future. Set the clock right
    first."""
    from accountant.cli import terminal_tables
    from accountant.ledger.protocols import MisdatedRecords

    records = at.act(tuple[MisdatedRecords, ...], "/v1/clock/heal", {"reason": reason})
    print_answer(output, records, terminal_tables.misdated_table)
