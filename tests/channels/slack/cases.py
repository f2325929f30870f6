"""Slack in the tests that all chats pass."""

from __future__ import annotations

from typing import Any

from accountant.channels import slack

body = slack.body


def assert_takes(sent: dict[str, Any]) -> None:
    """Assert what Slack alone asks of a letter."""
    assert "<!channel>" not in sent["text"], "notifications read Slack's own signs"
    assert {block["type"] for block in sent["blocks"]} == {"header", "section", "actions"}
    assert all(len(block["text"]["text"]) <= 150 for block in sent["blocks"] if block["type"] == "header")


def assert_reads_no_sign_in_a_name(sent: dict[str, Any], mark: str) -> None:
    """Assert that a name with this mark reaches Slack as plain text alone."""
    assert "<" not in sent["text"], "what notifications show is the one part that it would read them in"
    texts = [block["text"] for block in sent["blocks"] if "text" in block]
    texts += [field for block in sent["blocks"] for field in block.get("fields", ())]
    assert {text["type"] for text in texts} == {"plain_text"}
    assert any(mark in text["text"] for text in texts)
