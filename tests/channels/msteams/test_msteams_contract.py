"""The channel `msteams` passes the suite of channels."""

from __future__ import annotations

from accountant.channels import msteams
from tests.channels.webhooks import WebhookSuite


class TestTeams(WebhookSuite):
    __test__ = True
    plugin = msteams.CHANNEL
