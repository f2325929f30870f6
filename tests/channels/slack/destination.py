"""Slack as a destination of a deliveries file."""

from __future__ import annotations

from tests.channels.webhooks import destination as destination

NAME = "slack"
