"""Posts a message to a Microsoft Teams channel, through an incoming webhook of Workflows: one Adaptive Card. Source:
adaptivecards.io, 1.4.

Names are text runs, which have no Markdown."""

from __future__ import annotations

from typing import Any, Final

from accountant.channels.protocol import Message, one_line, webhook_channel


def body(message: Message) -> dict[str, Any]:
    """The body of the webhook's request."""
    items: list[dict[str, Any]] = [_run(message.title, size="large", weight="bolder"), _run(one_line(message.text))]
    for label, value in message.facts:
        columns = [
            {"type": "Column", "width": 2, "items": [_run(one_line(label), subtle=True)]},
            {"type": "Column", "width": 3, "items": [_run(one_line(value))]},
        ]
        items.append({"type": "ColumnSet", "spacing": "small", "columns": columns})
    card: dict[str, Any] = {
        "$schema": "http://adaptivecards.io/schemas/adaptive-card.json",
        "type": "AdaptiveCard",
        "version": "1.4",
        "body": items,
    }
    if message.link is not None:
        card["actions"] = [{"type": "Action.OpenUrl", "title": message.link[0], "url": message.link[1]}]
    attachment = {"contentType": "application/vnd.microsoft.card.adaptive", "content": card}
    return {"type": "message", "attachments": [attachment]}


def _run(text: str, *, size: str = "default", weight: str = "default", subtle: bool = False) -> dict[str, Any]:
    run = {"type": "TextRun", "text": text, "size": size, "weight": weight, "isSubtle": subtle}
    return {"type": "RichTextBlock", "inlines": [run]}


CHANNEL: Final = webhook_channel("msteams", body, "docs/delivery.md")
