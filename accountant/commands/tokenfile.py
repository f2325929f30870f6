"""`gputally accountant token list|revoke|new`: what the token file lets in; an entry is taken out of it, or made.

The accountant reads the file again within a second of a change, so a revoked token ends with the next request. Only the
entry's own lines are taken out: comments and the other entries stay as they were written.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer
import yaml
from rich.box import SIMPLE_HEAD
from rich.table import Table

from accountant import yamlfile
from accountant.callers.auth import SCOPES, Scope, TokenEntry, TokenList, new_token
from accountant.commands.asking import Printed
from agent import wholefile
from agent.output import show
from agent.terminal import Terminal
from agent.yamlfile import FileFault

File = Annotated[Path, typer.Option("--file", help="The token file.")]


def register(app: typer.Typer) -> None:
    """Add `token` to the program."""
    token = typer.Typer(help="Bearer tokens for the token file.", no_args_is_help=True)
    token.command("list")(listed)
    token.command("revoke")(revoke)
    token.command("new")(new)
    app.add_typer(token, name="token")


def listed(file: File, output: Printed = "table") -> None:
    """Who holds a token, for what, and until when."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for heading in ("name", "scopes", "sees or reports", "until", "state"):
        table.add_column(heading)
    records: list[dict[str, object]] = []
    now = datetime.now(UTC)
    for entry in sorted(_entries(file), key=lambda entry: entry.name):
        until = "no end" if entry.expires is None else f"{entry.expires.astimezone(UTC):%Y-%m-%d %H:%M} UTC"
        state = "expired" if entry.expires is not None and entry.expires <= now else "valid"
        table.add_row(entry.name, ", ".join(entry.scopes), bound(entry), until, state)
        expires = None if entry.expires is None else entry.expires.astimezone(UTC).isoformat()
        bounds = {"teams": entry.teams, "cluster": entry.cluster, "node": entry.node}
        records.append({"name": entry.name, "scopes": entry.scopes, **bounds, "expires": expires, "state": state})
    show(output, lambda: table, records)


def revoke(name: Annotated[str, typer.Argument(help="As `token list` shows it.")], file: File) -> None:
    """Take a token out of the file: whoever holds it is turned away within a second."""
    if name not in {entry.name for entry in _entries(file)}:
        raise typer.BadParameter(f"{file}: no token is named {name!r}")
    try:
        text = without(file.read_text(encoding="utf-8"), name)
    except ValueError as error:
        raise typer.BadParameter(f"{file}: {error}") from error
    wholefile.write(file.resolve(), text.encode())
    Terminal(soft_wrap=True).print(f"{name} is revoked; {len(_entries(file))} tokens are left in {file}")


def new(
    name: Annotated[str, typer.Option(help="Who will hold it.")],
    scope: Annotated[list[str], typer.Option(help="ingest, import, read, progress, policy or admin (repeatable).")],
    cluster: Annotated[str | None, typer.Option(help="Bind an agent's token to a cluster …")] = None,
    node: Annotated[str | None, typer.Option(help="… and to a node.")] = None,
    team: Annotated[list[str] | None, typer.Option(help="Show only these teams (repeatable).")] = None,
    expires: Annotated[datetime | None, typer.Option(help="Last day it is valid (UTC).")] = None,
    file: Annotated[
        Path | None, typer.Option("--file", help="Add the entry to this token file, which is made where there is none.")
    ] = None,
    token_file: Annotated[Path | None, typer.Option(help="Write the token into this new file.")] = None,
) -> None:
    """Make a token: printed once, or written into a file of its own; the token file keeps only its hash."""
    if token_file is not None and token_file.exists():
        raise typer.BadParameter(f"{token_file} exists: its token would be lost; name another file, or remove it")
    if file is not None and file.exists() and name in {entry.name for entry in _entries(file)}:
        raise typer.BadParameter(f"{file}: a token is named {name!r} already; revoke it first")
    try:
        token, entry = new_token(
            name, _scopes(scope), cluster=cluster, node=node, teams=tuple(team) if team else None,
            expires=expires.replace(tzinfo=UTC) if expires else None,
        )  # fmt: skip
    except ValueError as error:
        raise typer.BadParameter(str(error).splitlines()[0]) from error
    if file is not None:
        text = file.read_text(encoding="utf-8") if file.exists() else "tokens: []\n"
        wholefile.write(file.resolve(), _with(text, entry, file).encode())
    if token_file is not None:
        token_file.touch(mode=0o600)
        token_file.write_text(token + "\n", encoding="utf-8")
    else:
        typer.echo(f"token, shown only now:\n\n  {token}\n")
    if file is None:
        typer.echo(f"entry for the token file, under `tokens:`:\n\n{entry}", nl=False)


def _with(text: str, entry: str, file: Path) -> str:
    """The token file's text with one entry more, which becomes the last. Raises typer.BadParameter where it is written
    on one line."""
    document = yaml.compose(text, yaml.SafeLoader)
    assert isinstance(document, yaml.MappingNode)
    tokens = next((value for key, value in document.value if key.value == "tokens"), None)
    if tokens is None or len(document.value) > 1 or (tokens.flow_style and tokens.value):
        raise typer.BadParameter(f"{file}: write its entries on lines of their own, under `tokens:` alone")
    whole = text if tokens.value else "tokens:\n"
    return whole + ("" if whole.endswith("\n") else "\n") + entry


def bound(entry: TokenEntry) -> str:
    """What an entry is bound to, in words."""
    if entry.teams is not None:
        return "teams " + ", ".join(entry.teams)
    where = [f"{kind} {value}" for kind, value in (("cluster", entry.cluster), ("node", entry.node)) if value]
    return ", ".join(where) or "everything"


def without(text: str, name: str) -> str:
    """The file's text without the entry of that name. Raises ValueError where entries share a line."""
    document = yaml.compose(text, yaml.SafeLoader)
    assert isinstance(document, yaml.MappingNode)
    key, tokens = next((key, value) for key, value in document.value if key.value == "tokens")
    starts = [item.start_mark.line for item in tokens.value]
    if tokens.flow_style or len(set(starts)) < len(starts):
        raise ValueError("its entries share a line: write each on lines of its own")
    item = next(one for one in tokens.value if ("name", name) in [(k.value, v.value) for k, v in one.value])
    lines = text.splitlines(keepends=True)
    if len(starts) == 1:
        lines[key.start_mark.line] = "tokens: []\n"
    return "".join(lines[: item.start_mark.line] + lines[_last_line(item) + 1 :])


def _last_line(node: yaml.Node) -> int:
    """Of the node's own text: where a block is said to end, comments that follow it are behind it already."""
    if isinstance(node, yaml.CollectionNode) and not node.flow_style:
        children = [child for part in node.value for child in (part if isinstance(part, tuple) else (part,))]
        return max(_last_line(child) for child in children)
    return int(node.end_mark.line)


def _entries(file: Path) -> tuple[TokenEntry, ...]:
    try:
        return yamlfile.load(file, TokenList).tokens
    except FileFault as error:
        raise typer.BadParameter(str(error)) from error


def _scopes(names: Sequence[str]) -> tuple[Scope, ...]:
    known: dict[str, Scope] = {scope: scope for scope in SCOPES}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise typer.BadParameter(f"no scope {unknown[0]!r}: one of {', '.join(known)}")
    return tuple(known[name] for name in names)
