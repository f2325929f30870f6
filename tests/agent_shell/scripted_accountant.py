"""A scripted accountant: a real HTTP server on the loopback that answers each batch as a test says."""

from __future__ import annotations

import gzip
import ssl
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from agent.wire import PROBLEM, Ack, Batch
from tests.fakes.http_server import Handler, LoopbackServer


@dataclass
class Reply:
    """One scripted answer; body bytes as they are, anything else as JSON."""

    status: int
    body: Any = b""
    headers: dict[str, str] = field(default_factory=dict)


def refuse(status: int, slug: str, **members: Any) -> Reply:
    return Reply(status, {"type": PROBLEM + slug, "title": slug, "status": status, "detail": slug, **members})


def accept(batch: Batch, durable: int | None = None, checkpointed: int = 0, archived: int | None = None) -> Reply:
    """Takes the batch: everything up to its last number, unless told otherwise."""
    last = max(r.seq for r in (*batch.intervals, *batch.facts, *batch.skipped))
    return Reply(
        200,
        Ack(
            epoch=batch.epoch,
            durable_seq=last if durable is None else durable,
            checkpointed_seq=checkpointed,
            archived_seq=archived,
        ),
    )


class ScriptedAccountant:
    """A real HTTP server on the loopback that answers each batch with what `script` says."""

    def __init__(self) -> None:
        self.script: Callable[[Batch], Reply] = accept
        self.batches: list[Batch] = []
        self.headers: list[dict[str, str]] = []
        self.connections: set[tuple[str, int]] = set()
        self.hang_up = False
        outer = self

        class Batches(Handler):
            protocol_version = "HTTP/1.1"
            timeout = 10
            disable_nagle_algorithm = True

            def do_POST(self) -> None:
                batch = msgspec.json.decode(gzip.decompress(self.content()), type=Batch)
                outer.batches.append(batch)
                outer.headers.append({**dict(self.headers), "path": self.path})
                outer.connections.add(self.client_address)
                reply = outer.script(batch)
                body = reply.body if isinstance(reply.body, bytes) else msgspec.json.encode(reply.body)
                self.say(reply.status, body, **reply.headers)
                if outer.hang_up:
                    self.close_connection = True

        self._server = LoopbackServer(Batches)
        self.url = self._server.url

    def start_tls(self, certificate: Path, key: Path, client_ca: Path | None = None) -> str:
        """Speak TLS from now on; returns the url under the certificate's name. client_ca: clients have to show a
        certificate of this authority."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate, key)
        if client_ca is not None:
            context.verify_mode = ssl.CERT_REQUIRED
            context.load_verify_locations(client_ca)
        return self._server.speak_tls(context)

    def close(self) -> None:
        self._server.close()
