"""Posts a message to an incoming webhook of Slack. Source: Slack's Block Kit reference.

Names are `plain_text` blocks, in which Slack interprets no markup."""

from __future__ import annotations

from html import escape
from typing import Any, Final

from accountant.channels.protocol import Message, one_line, shortened, webhook_channel

_HEADER = 150
_FIELD = 2_000
_FIELDS = 10
_BUTTON = 75
"""Limits of Slack's header block, of a field's text, of a section's fields, and of a button's text."""


def body(message: Message) -> dict[str, Any]:
    """The body of the webhook's request."""
    blocks: list[dict[str, Any]] = [
        {"type": "header", "text": _text(message.title, _HEADER)},
        {"type": "section", "text": _text(one_line(message.text), _FIELD)},
    ]
    fields = [_text(f"{one_line(label)}\n{one_line(value)}", _FIELD) for label, value in message.facts]
    blocks += [
        {"type": "section", "fields": fields[first : first + _FIELDS]} for first in range(0, len(fields), _FIELDS)
    ]
    if message.link is not None:
        button = {"type": "button", "text": _text(message.link[0], _BUTTON), "url": message.link[1]}
        blocks.append({"type": "actions", "elements": [button]})
    # `text` is shown in notifications; it is the only part in which Slack interprets markup.
    return {"text": shortened(escape(message.title, quote=False), _FIELD), "blocks": blocks}


def _text(text: str, most: int) -> dict[str, Any]:
    return {"type": "plain_text", "text": shortened(text, most) or " ", "emoji": False}


CHANNEL: Final = webhook_channel("slack", body, "docs/delivery.md")
