"""What a delivery says, and its form in each medium: plain text, mail, Slack, Microsoft Teams. Pure.

Names in it come from users of the cluster. In no medium are they more than text: mail's HTML is escaped, Slack's blocks
are `plain_text`, Teams' cards are text runs, which know no Markdown. A subject is one line.
"""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from typing import Any

from agent.plaintext import escaped

_HEADER = 150
_FIELD = 2_000
_FIELDS = 10
"""Bounds of Slack's header block, of a field's text and of a section's fields (Slack's Block Kit reference)."""
_STYLE = "font:15px/1.5 system-ui,sans-serif;color:#1b1f24"


@dataclass(frozen=True, slots=True)
class Attachment:
    name: str
    media_type: str
    content: bytes


@dataclass(frozen=True, slots=True)
class Letter:
    """key: what is sent where, the same for every attempt. at_ms: when it was first sent. facts: label and value, in
    order. link: a label, and where to read on."""

    key: str
    at_ms: int
    subject: str
    text: str
    facts: tuple[tuple[str, str], ...] = ()
    link: tuple[str, str] | None = None
    attachments: tuple[Attachment, ...] = ()

    @property
    def title(self) -> str:
        """The subject on one line, whatever a name in it holds."""
        return one_line(self.subject)


def one_line(text: str) -> str:
    """On one line, without characters that steer what shows it."""
    return escaped(" ".join(text.split()))


def plain(letter: Letter) -> str:
    """As a text file, or the text part of a mail."""
    width = max((len(label) for label, _ in letter.facts), default=0)
    facts = [f"{label:<{width}}  {one_line(value)}" for label, value in letter.facts]
    link = [f"{letter.link[0]}: {letter.link[1]}"] if letter.link is not None else []
    parts = ("\n".join(part) for part in ([letter.title], [letter.text], facts, link) if part)
    return "\n\n".join(parts) + "\n"


def html(letter: Letter) -> str:
    """The HTML part of a mail."""
    rows = "".join(
        f'<tr><td style="padding:2px 16px 2px 0;color:#57606a">{escape(label)}</td>'
        f'<td style="padding:2px 0;text-align:right">{escape(one_line(value))}</td></tr>'
        for label, value in letter.facts
    )
    link = f'<p><a href="{escape(letter.link[1], quote=True)}">{escape(letter.link[0])}</a></p>' if letter.link else ""
    return (
        f'<!doctype html><html lang="en"><body style="{_STYLE}"><h1 style="font-size:18px">{escape(letter.title)}</h1>'
        f"<p>{escape(letter.text)}</p><table>{rows}</table>{link}</body></html>\n"
    )


def slack(letter: Letter) -> dict[str, Any]:
    """The body for an incoming webhook of Slack. Source: Slack's Block Kit reference."""
    blocks: list[dict[str, Any]] = [
        {"type": "header", "text": _slack_text(letter.title, _HEADER)},
        {"type": "section", "text": _slack_text(letter.text, _FIELD)},
    ]
    fields = [_slack_text(f"{label}\n{one_line(value)}", _FIELD) for label, value in letter.facts]
    blocks += [
        {"type": "section", "fields": fields[first : first + _FIELDS]} for first in range(0, len(fields), _FIELDS)
    ]
    if letter.link is not None:
        button = {"type": "button", "text": _slack_text(letter.link[0], 75), "url": letter.link[1]}
        blocks.append({"type": "actions", "elements": [button]})
    # `text` is what notifications show, and the one part that Slack would read its own signs in.
    return {"text": _shortened(escape(letter.title, quote=False), _FIELD), "blocks": blocks}


def msteams(letter: Letter) -> dict[str, Any]:
    """The body for an incoming webhook of Workflows in Teams: one Adaptive Card. Source: adaptivecards.io, 1.4."""
    body: list[dict[str, Any]] = [_run(letter.title, size="large", weight="bolder"), _run(letter.text)]
    for label, value in letter.facts:
        columns = [
            {"type": "Column", "width": 2, "items": [_run(label, subtle=True)]},
            {"type": "Column", "width": 3, "items": [_run(one_line(value))]},
        ]
        body.append({"type": "ColumnSet", "spacing": "small", "columns": columns})
    card: dict[str, Any] = {
        "$schema": "http://adaptivecards.io/schemas/adaptive-card.json",
        "type": "AdaptiveCard",
        "version": "1.4",
        "body": body,
    }
    if letter.link is not None:
        card["actions"] = [{"type": "Action.OpenUrl", "title": letter.link[0], "url": letter.link[1]}]
    attachment = {"contentType": "application/vnd.microsoft.card.adaptive", "content": card}
    return {"type": "message", "attachments": [attachment]}


def _slack_text(text: str, most: int) -> dict[str, Any]:
    return {"type": "plain_text", "text": _shortened(text, most) or " ", "emoji": False}


def _run(text: str, *, size: str = "default", weight: str = "default", subtle: bool = False) -> dict[str, Any]:
    run = {"type": "TextRun", "text": text, "size": size, "weight": weight, "isSubtle": subtle}
    return {"type": "RichTextBlock", "inlines": [run]}


def _shortened(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"
