"""The channel `slack` passes the suite of channels."""

from __future__ import annotations

import json
from typing import ClassVar

from accountant.channels import slack
from tests.channels.webhooks import WebhookSuite


class TestSlack(WebhookSuite):
    __test__ = True
    plugin = slack.CHANNEL
    # Blocks are plain text; only what notifications show reads markup.
    markup: ClassVar = {"angles": lambda body: [json.loads(body)["text"]]}
