"""Sends a message as one mail to all recipients, with a Message-ID that is the same for every attempt.

The HTML part is escaped, and no name becomes a header."""

from __future__ import annotations

import contextlib
import smtplib
import ssl
from datetime import UTC, datetime
from email import policy
from email.message import EmailMessage
from email.utils import format_datetime
from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import BeforeValidator, Field, model_validator

from accountant.channels.protocol import (
    TIMEOUT_SECONDS,
    ChannelPlugin,
    DeliveryUncertain,
    Message,
    Refused,
    html,
    one_line,
    plain,
    secret,
)
from accountant.core.settings import host_and_port
from gputally.base.units import MS_PER_SECOND
from gputally.server.config_loading import Model, bare_off

Address = Annotated[str, Field(max_length=254, pattern=r"^[^@\s,;<>\"]+@[^@\s,;<>\"]+$")]


class Smtp(Model):
    """A mail server. The password is read from its file at every use."""

    server: str = Field(pattern=r"^[^\s/@:]+:[0-9]{1,5}$")
    """host:port"""
    tls: Annotated[Literal["starttls", "tls", "off"], BeforeValidator(bare_off)] = "starttls"
    """`off` sends everything, including a password, unencrypted."""
    sender: Address = Field(alias="from")
    to: tuple[Address, ...] = Field(min_length=1, max_length=100)
    user: str | None = Field(default=None, max_length=254)
    password_file: Path | None = None
    ca_file: Path | None = None
    """CA certificates (PEM) to trust instead of the system's."""

    @model_validator(mode="after")
    def _whole(self) -> Smtp:
        if (self.user is None) != (self.password_file is None):
            raise ValueError("give both user and password_file, or neither")
        return self


class Mail:
    def __init__(self, smtp: Smtp) -> None:
        self._smtp = smtp

    def deliver(self, message: Message) -> str:
        email = self._email(message)
        try:
            server = self._connect()
            try:
                accepted = self._hand_over(server, email)
            except BaseException:
                server.close()
                raise
        except (smtplib.SMTPException, OSError, ValueError) as error:
            raise Refused(f"{self._smtp.server}: {_error_text(error)}") from error
        with contextlib.suppress(smtplib.SMTPException, OSError):  # the message is accepted already
            server.quit()
        return accepted

    def _connect(self) -> smtplib.SMTP:
        host, port = host_and_port(self._smtp.server)
        if self._smtp.tls == "off":
            server = smtplib.SMTP(host, port, timeout=TIMEOUT_SECONDS)
        else:
            context = ssl.create_default_context(cafile=self._smtp.ca_file)
            if self._smtp.tls == "tls":
                server = smtplib.SMTP_SSL(host, port, timeout=TIMEOUT_SECONDS, context=context)
            else:
                server = smtplib.SMTP(host, port, timeout=TIMEOUT_SECONDS)
                try:
                    server.starttls(context=context)
                except BaseException:
                    server.close()
                    raise
        try:
            if self._smtp.user is not None and self._smtp.password_file is not None:
                server.login(self._smtp.user, secret(self._smtp.password_file))
        except BaseException:
            server.close()
            raise
        return server

    def _hand_over(self, server: smtplib.SMTP, email: EmailMessage) -> str:
        server.ehlo_or_helo_if_needed()
        _require(server.mail(self._smtp.sender), 250)
        refused = {}
        for address in self._smtp.to:
            code, answer = server.rcpt(address)
            if code not in (250, 251):
                refused[address] = f"{code} {answer.decode(errors='replace')}"
        if len(refused) == len(self._smtp.to):
            raise Refused(f"{self._smtp.server}: {'; '.join(f'{who}: {why}' for who, why in refused.items())}")
        try:
            code, answer = server.data(email.as_bytes(policy=policy.SMTP))
        except smtplib.SMTPDataError:
            raise
        except (smtplib.SMTPServerDisconnected, OSError) as error:
            raise DeliveryUncertain(f"{self._smtp.server}: no answer to the mail ({_error_text(error)})") from error
        _require((code, answer), 250)
        accepted = f"accepted by {self._smtp.server} for {len(self._smtp.to) - len(refused)} of {len(self._smtp.to)}"
        return accepted + "".join(f"; {who}: {why}" for who, why in refused.items())

    def _email(self, message: Message) -> EmailMessage:
        email = EmailMessage()
        email["Subject"] = message.title
        email["From"] = self._smtp.sender
        email["To"] = ", ".join(self._smtp.to)
        email["Date"] = format_datetime(datetime.fromtimestamp(message.at_ms // MS_PER_SECOND, UTC))
        email["Message-ID"] = f"<{message.digest[:40]}@{self._smtp.sender.rpartition('@')[2]}>"
        email["Auto-Submitted"] = "auto-generated"
        email.set_content(plain(message))
        email.add_alternative(html(message), subtype="html")
        for file in message.attachments:
            kind, _, rest = file.media_type.partition("/")
            email.add_attachment(file.content, maintype=kind, subtype=rest.partition(";")[0], filename=file.name)
        return email


def _require(answer: tuple[int, bytes], code: int) -> None:
    if answer[0] != code:
        raise smtplib.SMTPResponseException(*answer)


def _error_text(error: Exception) -> str:
    if isinstance(error, smtplib.SMTPResponseException):
        text = error.smtp_error
        return f"{error.smtp_code} {text.decode(errors='replace') if isinstance(text, bytes) else text}"
    return one_line(str(error)) or type(error).__name__


CHANNEL: Final = ChannelPlugin(
    name="smtp",
    settings=Smtp,
    open=Mail,
    files=True,
    reaches="connects to the mail server; reads password_file and ca_file",
    page="docs/delivery.md",
)
