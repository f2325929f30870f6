"""Delivers a message to a folder, a mail server or a webhook.

A channel has one of three outcomes: it returns a short text after delivery, raises `Refused` (not delivered, may be
tried again), or raises `DeliveryUncertain` (handed over, but no answer came). It does not retry, and its texts contain
no secrets."""

from __future__ import annotations

import contextlib
import hashlib
import smtplib
import ssl
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from email import policy
from email.message import EmailMessage
from email.utils import format_datetime
from pathlib import Path
from typing import Any, Final, Protocol

import httpx2

from accountant.core.settings import host_and_port
from accountant.notifications import messages
from accountant.notifications.messages import Attachment, Message
from accountant.notifications.subscriptions import Destination, Smtp
from gputally.base import atomic_file, http_calls
from gputally.base.errors import AccountantError
from gputally.base.units import MS_PER_SECOND
from gputally.server.loopback import is_loopback

TIMEOUT_SECONDS: Final = 20.0
_MOST_SECRET = 4_096


class Refused(AccountantError):
    """The message was not delivered and can be tried again."""


class DeliveryUncertain(AccountantError):
    """The message was handed over, but no answer says whether it was delivered."""


class Channel(Protocol):
    def deliver(self, message: Message) -> str:
        """Delivers a message; returns a short text for the log of deliveries. Raises Refused, DeliveryUncertain."""
        ...


def channel_of(destination: Destination) -> Channel:
    """The channel of a destination."""
    if destination.folder is not None:
        return Folder(destination.folder)
    if destination.smtp is not None:
        return Mail(destination.smtp)
    if destination.slack is not None:
        return Webhook(destination.slack.url_file, messages.slack)
    assert destination.msteams is not None, "Destination has exactly one kind"
    return Webhook(destination.msteams.url_file, messages.msteams)


class Folder:
    """Writes the files of a message into a folder, each atomically. A message without files becomes a text file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def deliver(self, message: Message) -> str:
        note = Attachment(f"notice-{_digest(message.key)[:12]}.txt", "text/plain", messages.plain(message).encode())
        files = message.attachments or (note,)
        try:
            self._path.mkdir(parents=True, exist_ok=True)
            for file in files:
                atomic_file.write(self._path / file.name, file.content, 0o640)
        except OSError as error:
            raise Refused(f"{self._path}: {error.strerror or error}") from error
        return ", ".join(file.name for file in files)


class Mail:
    """Sends one mail to all recipients, with a Message-ID that is the same for every attempt."""

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
                server.login(self._smtp.user, _secret(self._smtp.password_file))
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
        email["Message-ID"] = f"<{_digest(message.key)[:40]}@{self._smtp.sender.rpartition('@')[2]}>"
        email["Auto-Submitted"] = "auto-generated"
        email.set_content(messages.plain(message))
        email.add_alternative(messages.html(message), subtype="html")
        for file in message.attachments:
            kind, _, rest = file.media_type.partition("/")
            email.add_attachment(file.content, maintype=kind, subtype=rest.partition(";")[0], filename=file.name)
        return email


class Webhook:
    """Posts a JSON body to the URL that a file contains. body: makes the JSON body from the message."""

    def __init__(
        self,
        url_file: Path,
        body: Callable[[Message], Mapping[str, Any]],
        transport: httpx2.BaseTransport | None = None,
    ) -> None:
        self._url_file = url_file
        self._body = body
        self._transport = transport

    def deliver(self, message: Message) -> str:
        url = self._url()
        trusted = http_calls.tls_context_for(url, None, Refused)
        try:
            with http_calls.client(trusted, TIMEOUT_SECONDS, transport=self._transport) as client:
                answer = client.post(url, json=dict(self._body(message)))
        except (httpx2.ConnectError, httpx2.ConnectTimeout, httpx2.PoolTimeout) as error:
            raise Refused(f"{url.host}: no connection ({type(error).__name__})") from error
        except httpx2.HTTPError as error:
            raise DeliveryUncertain(f"{url.host}: no answer ({type(error).__name__})") from error
        if not answer.is_success:
            raise Refused(f"{url.host}: {answer.status_code} {messages.one_line(answer.text)[:200]}".rstrip())
        return f"accepted by {url.host}"

    def _url(self) -> httpx2.URL:
        text = _secret(self._url_file)
        try:
            url = httpx2.URL(text)
        except httpx2.InvalidURL as error:
            raise Refused(f"{self._url_file}: the file does not contain a URL") from error
        if url.scheme != "https" and not (url.scheme == "http" and is_loopback(url.host)):
            raise Refused(f"{self._url_file}: the URL of a webhook must begin with https://")
        return url


def _require(answer: tuple[int, bytes], code: int) -> None:
    if answer[0] != code:
        raise smtplib.SMTPResponseException(*answer)


def _error_text(error: Exception) -> str:
    if isinstance(error, smtplib.SMTPResponseException):
        text = error.smtp_error
        return f"{error.smtp_code} {text.decode(errors='replace') if isinstance(text, bytes) else text}"
    return messages.one_line(str(error)) or type(error).__name__


def _secret(path: Path) -> str:
    try:
        text = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise Refused(f"{path}: {getattr(error, 'strerror', None) or 'the file is not UTF-8 text'}") from error
    if not text or len(text) > _MOST_SECRET or "\n" in text:
        raise Refused(f"{path}: the file must contain the secret on one line of at most {_MOST_SECRET} characters")
    return text


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()
