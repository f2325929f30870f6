"""The channel `slack` passes the suite of channels."""

from __future__ import annotations

from accountant.channels import slack
from tests.channels.webhooks import WebhookSuite


class TestSlack(WebhookSuite):
    __test__ = True
    plugin = slack.CHANNEL
