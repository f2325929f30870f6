"""Runs `mcp`: lets an assistant ask a running accountant over standard input and output."""

from __future__ import annotations

import typer

from accountant.cli.connection_options import Server
from gputally.base.command_options import with_option_groups

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command()
@with_option_groups
def mcp(*, at: Server) -> None:
    """Let an assistant ask a running accountant (Model Context Protocol on standard input and output).

    It only reads, and sees what the token may see."""
    from accountant.assistant.mcp_server import server

    with at.connection():  # a wrong address, certificate or token file is told before the assistant asks
        pass
    server(lambda *_: at.connection()).run("stdio")
