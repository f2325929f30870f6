"""Teams in the tests that all chats pass."""

from __future__ import annotations

from typing import Any

from accountant.channels import msteams

body = msteams.body


def assert_takes(sent: dict[str, Any]) -> None:
    """Assert what Teams alone asks of a letter."""
    assert len(sent["attachments"]) == 1


def assert_reads_no_sign_in_a_name(sent: dict[str, Any], mark: str) -> None:
    """Assert that a name with this mark reaches Teams as runs of text alone."""
    (attachment,) = sent["attachments"]
    parts = attachment["content"]["body"]
    inlines = [run for block in parts for run in block.get("inlines", ())]
    assert {block["type"] for block in parts} == {"RichTextBlock", "ColumnSet"}
    assert {run["type"] for run in inlines} == {"TextRun"}, "a run knows no Markdown"
    assert any(mark in run["text"] for run in inlines)
