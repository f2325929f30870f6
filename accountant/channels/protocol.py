"""What a channel is, and what several channels need: texts of a message, secrets in files, a POST to a webhook.

A channel has one of three outcomes: it returns a short text after delivery, raises `Refused` (not delivered, may be
tried again), or raises `DeliveryUncertain` (handed over, but no answer came). It does not retry, and its texts contain
no secrets. Names in a message come from users of the cluster, so a channel sends them as text that its medium does not
interpret. A subject is one line."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from html import escape
from pathlib import Path
from typing import Any, Final, Generic, Protocol, TypeVar

import httpx2

from gputally.base import http_calls
from gputally.base.errors import AccountantError
from gputally.base.untrusted_text import escaped, known_plugin_name
from gputally.server.config_loading import Model
from gputally.server.loopback import is_loopback

SEAM: Final = "gputally.channels"
TIMEOUT_SECONDS: Final = 20.0
"""The longest wait for an answer of a server."""
_MOST_ANSWER_BYTES: Final = 64 * 1024
_MOST_SECRET = 4_096
_STYLE = "font:15px/1.5 system-ui,sans-serif;color:#1b1f24"
S_contra = TypeVar("S_contra", bound=Model)


class Refused(AccountantError):
    """The message was not delivered and can be tried again."""


class DeliveryUncertain(AccountantError):
    """The message was handed over, but no answer says whether it was delivered."""


@dataclass(frozen=True, slots=True)
class Attachment:
    name: str
    media_type: str
    content: bytes


@dataclass(frozen=True, slots=True)
class Message:
    """A message in a form that each medium can render.

    key: identifies content and destination, the same for every attempt.
    at_ms: time of the first attempt.
    subject: as it was put together, with names of users; `title` is the same on one line, for media to show.
    text: one or two sentences.
    facts: labels and values, in order.
    link: a label and a URL. Both are gputally's own, no name of a user.
    attachments: files; none for a channel whose manifest says `files=False`."""

    key: str
    at_ms: int
    subject: str
    text: str
    facts: tuple[tuple[str, str], ...] = ()
    link: tuple[str, str] | None = None
    attachments: tuple[Attachment, ...] = ()

    @property
    def title(self) -> str:
        """The subject on one line, without control characters."""
        return one_line(self.subject)

    @property
    def digest(self) -> str:
        """64 hex digits that stand for the key, for media that want an id."""
        return hashlib.sha256(self.key.encode()).hexdigest()


class Channel(Protocol):
    def deliver(self, message: Message) -> str:
        """Delivers a message; returns a short text for the log of deliveries. Raises Refused, DeliveryUncertain."""
        ...


@dataclass(frozen=True, slots=True)
class ChannelPlugin(Generic[S_contra]):
    """The manifest of a channel.

    name: the word in the deliveries file, also the name of the entry point.
    settings: the model of what the file says under that word.
    open: makes the channel of a destination from its settings. It connects to nothing yet.
    files: whether the medium takes files; otherwise a message has the main figures and a link instead.
    reaches: what a delivery reads, writes and connects to, for the operator.
    page: the page about it."""

    name: str
    settings: type[S_contra]
    open: Callable[[S_contra], Channel]
    files: bool
    reaches: str
    page: str

    def __post_init__(self) -> None:
        known_plugin_name(self.name)


def one_line(text: str) -> str:
    """The text on one line, without control characters."""
    return escaped(" ".join(text.split()))


def plain(message: Message) -> str:
    """The message as a text file, or as the text part of a mail."""
    width = max((len(label) for label, _ in message.facts), default=0)
    facts = [f"{one_line(label):<{width}}  {one_line(value)}" for label, value in message.facts]
    link = [f"{message.link[0]}: {message.link[1]}"] if message.link is not None else []
    parts = ("\n".join(part) for part in ([message.title], [one_line(message.text)], facts, link) if part)
    return "\n\n".join(parts) + "\n"


def html(message: Message) -> str:
    """The message as an HTML document."""
    rows = "".join(
        f'<tr><td style="padding:2px 16px 2px 0;color:#57606a">{escape(one_line(label))}</td>'
        f'<td style="padding:2px 0;text-align:right">{escape(one_line(value))}</td></tr>'
        for label, value in message.facts
    )
    link = (
        f'<p><a href="{escape(message.link[1], quote=True)}">{escape(message.link[0])}</a></p>' if message.link else ""
    )
    return (
        f'<!doctype html><html lang="en"><body style="{_STYLE}"><h1 style="font-size:18px">{escape(message.title)}</h1>'
        f"<p>{escape(one_line(message.text))}</p><table>{rows}</table>{link}</body></html>\n"
    )


def shortened(text: str, most: int) -> str:
    """The text, with an ellipsis at its end if it has more than `most` characters."""
    return text if len(text) <= most else text[: most - 1] + "…"


class UrlFile(Model):
    """The settings of an incoming webhook. Its URL is a secret, because it is enough to post messages, so it is in a
    file of its own."""

    url_file: Path


class Webhook:
    """Posts a JSON body to the URL that a file contains. body: makes the JSON body from the message."""

    def __init__(
        self,
        settings: UrlFile,
        body: Callable[[Message], Mapping[str, Any]],
        transport: httpx2.BaseTransport | None = None,
    ) -> None:
        self._url_file = settings.url_file
        self._body = body
        self._transport = transport

    def deliver(self, message: Message) -> str:
        url = secret(self._url_file)
        return sent("POST", url, str(self._url_file), json=dict(self._body(message)), transport=self._transport)


def sent(
    method: str,
    url: str,
    place: str,
    *,
    json: Any = None,
    content: bytes | None = None,
    headers: Mapping[str, str] | None = None,
    transport: httpx2.BaseTransport | None = None,
) -> str:
    """Send a message over HTTP, and return a short text for the log. Reads a bounded part of the answer, for a bounded
    time. The texts name the host alone, because a URL can be a secret.

    place: where the URL stands, for faults in it. headers: with them secrets are sent, so the URL begins with https://,
    or leads to this machine.

    Raises Refused, DeliveryUncertain."""
    try:
        to = httpx2.URL(url)
    except httpx2.InvalidURL as error:
        raise Refused(f"{place}: the text is not a URL") from error
    if to.scheme != "https" and not (to.scheme == "http" and is_loopback(to.host)):
        raise Refused(f"{place}: the URL must begin with https://")
    trusted = http_calls.tls_context_for(to, None, Refused)
    try:
        with (
            http_calls.client(trusted, TIMEOUT_SECONDS, transport=transport) as client,
            client.stream(method, to, json=json, content=content, headers=headers) as answer,
        ):
            if answer.is_success:  # whatever it says, and for how long
                return f"accepted by {to.host}"
            said = b""
            with contextlib.suppress(httpx2.ReadError, httpx2.ReadTimeout):  # the status says it all
                said = http_calls.read_bounded(answer, _MOST_ANSWER_BYTES, TIMEOUT_SECONDS) or b""
    except (httpx2.ConnectError, httpx2.ConnectTimeout, httpx2.PoolTimeout) as error:
        raise Refused(f"{to.host}: no connection ({type(error).__name__})") from error
    except httpx2.HTTPError as error:
        raise DeliveryUncertain(f"{to.host}: no answer ({type(error).__name__})") from error
    reason = one_line(said.decode("utf-8", "replace"))[:200]
    raise Refused(f"{to.host}: {answer.status_code} {reason}".rstrip())


def webhook_channel(name: str, body: Callable[[Message], Mapping[str, Any]], page: str) -> ChannelPlugin[UrlFile]:
    """The manifest of a chat with an incoming webhook, whose settings are a `UrlFile`. body: see Webhook. page: the
    page about it."""
    return ChannelPlugin(
        name=name,
        settings=UrlFile,
        open=partial(Webhook, body=body),
        files=False,
        reaches="posts to the URL in url_file",
        page=page,
    )


def secret(path: Path) -> str:
    """The secret that a file contains on one line. It is read at every use. Raises Refused."""
    try:
        text = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise Refused(f"{path}: {getattr(error, 'strerror', None) or 'the file is not UTF-8 text'}") from error
    if not text or len(text) > _MOST_SECRET or "\n" in text:
        raise Refused(f"{path}: the file must contain the secret on one line of at most {_MOST_SECRET} characters")
    return text
