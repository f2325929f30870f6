"""A mail server on the loopback: enough SMTP for one client, and the refusals of real servers."""

from __future__ import annotations

import base64
import socketserver
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from email import message_from_bytes, policy
from email.message import EmailMessage


@dataclass
class MailServer:
    """unknown: recipients it refuses. busy: number of messages it defers with 451. silent: it accepts the message and
    hangs up without an answer. password: required before anything else."""

    host: str = "127.0.0.1"
    port: int = 0
    unknown: set[str] = field(default_factory=set)
    busy: int = 0
    silent: bool = False
    password: str | None = None
    letters: list[EmailMessage] = field(default_factory=list)
    envelopes: list[tuple[str, list[str]]] = field(default_factory=list)

    @property
    def address(self) -> str:
        return f"{self.host}:{self.port}"


@contextmanager
def mail_server(tls: ssl.SSLContext | None = None) -> Iterator[MailServer]:
    """Run a server until the block ends. tls: it offers STARTTLS and requires it."""
    state = MailServer()

    class Handler(socketserver.StreamRequestHandler):
        def say(self, text: str) -> None:
            self.wfile.write(text.encode() + b"\r\n")

        def handle(self) -> None:
            self.secure, self.known = tls is None, state.password is None
            sender, to = "", []
            self.say("220 here")
            while raw := self.rfile.readline():
                line = raw.decode().strip()
                verb = line.split(" ")[0].upper()
                if verb in ("EHLO", "HELO"):
                    offers = (["STARTTLS"] if not self.secure else []) + (["AUTH PLAIN"] if state.password else [])
                    for offer in ["here", *offers]:
                        self.say(f"250-{offer}")
                    self.say("250 8BITMIME")
                elif verb == "STARTTLS" and tls is not None:
                    self.say("220 go on")
                    self.connection = tls.wrap_socket(self.connection, server_side=True)
                    self.rfile, self.wfile = self.connection.makefile("rb"), self.connection.makefile("wb", 0)
                    self.secure = True
                elif not self.secure and verb != "QUIT":
                    self.say("530 not in the open")
                elif verb == "AUTH":
                    said = base64.b64decode(line.split(" ")[2]).decode().split("\0")[2]
                    self.known = said == state.password
                    self.say("235 welcome" if self.known else "535 who are you?")
                elif verb == "MAIL":
                    sender, to = line[len("MAIL FROM:<") :].partition(">")[0], []
                    self.say("250 yes" if self.known else "530 who are you?")
                elif verb == "RCPT":
                    who = line[len("RCPT TO:<") :].partition(">")[0]
                    if who in state.unknown:
                        self.say("550 no such person")
                    else:
                        to.append(who)
                        self.say("250 yes")
                elif verb == "DATA":
                    self.say("354 go on")
                    lines = list(iter(self.rfile.readline, b".\r\n"))
                    body = b"".join(lines)
                    if not all(each.endswith(b"\r\n") for each in lines):
                        self.say("550 bare line feed")
                        continue
                    if state.busy:
                        state.busy -= 1
                        self.say("451 not now")
                        continue
                    letter = message_from_bytes(body.replace(b"\r\n..", b"\r\n."), policy=policy.default)
                    assert isinstance(letter, EmailMessage)
                    state.letters.append(letter)
                    state.envelopes.append((sender, to))
                    if state.silent:
                        return
                    self.say("250 taken")
                elif verb == "QUIT":
                    self.say("221 bye")
                    return
                else:
                    self.say("500 what?")

        def finish(self) -> None:
            super().finish()
            self.connection.close()

    class Server(socketserver.ThreadingTCPServer):
        allow_reuse_address = True
        daemon_threads = True

        def handle_error(self, request: object, client_address: object) -> None:
            """Ignore a client that hangs up because it rejects the certificate."""

    with Server(("127.0.0.1", 0), Handler) as server:
        state.port = server.server_address[1]
        thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        try:
            yield state
        finally:
            server.shutdown()
            thread.join()
