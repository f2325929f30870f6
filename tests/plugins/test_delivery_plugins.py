"""A channel or a format that is broken refuses its own messages, with its name, and stops no other delivery."""

from __future__ import annotations

from pathlib import Path

import pytest

from accountant.channels.protocol import Message
from accountant.exports.protocol import SEAM as EXPORTS
from accountant.notifications.dispatcher import Dispatcher
from accountant.notifications.subscriptions import DeliveriesFile, Destination
from gputally.base.units import MS_PER_DAY
from gputally.base.yaml_file import FileFault, parse
from gputally.server import config_loading
from tests.billing.usage_rows import held
from tests.exports.format_cases import TEXT
from tests.notifications.delivery_site import Site
from tests.plugins.installed import install, install_fake_channels

ORDERS = f"""\
schema: 1
destinations:
  disk: {{shelf: {{path: /reports}}}}
  phone: {{pager: {{number: 7}}}}
reports:
  - {{forms: [{TEXT.name}], to: [phone, disk]}}
  - {{forms: [{TEXT.name}, mine], to: [disk]}}
"""


class Opened(Site):
    """Deliveries whose broken destinations are opened as in a running accountant."""

    def restart(self) -> None:
        self.deliveries_file = config_loading.validate(parse(ORDERS, "deliveries.yaml"), DeliveriesFile)
        self.dispatcher = Dispatcher(
            self.ledger, self.books, self.settings, self.clock, lambda: self.deliveries_file, self.channel
        )

    def channel(self, destination: Destination) -> object:
        return destination.open() if destination.channel.name == "pager" else self.basket


def subjects(letters: list[Message]) -> list[str]:
    return [letter.subject for letter in letters]


@pytest.mark.usefixtures("logs")
@pytest.mark.parametrize("text", ["raise ValueError('no licence')", "CHANNEL = 1"])
def test_what_is_broken_refuses_its_own_messages_alone(folder: Path, text: str) -> None:
    points = {"gputally.channels": {"pager": "other_module:CHANNEL"}, EXPORTS: {"mine": "no_module:EXPORT"}}
    install(folder, "other-package", points, other_module=text)
    install_fake_channels(folder)
    site = Opened("", [held("2026-10-01", "2026-11-01", 2, 0.5, team="vision", namespace="vision", job="train")])
    site.close_october()
    assert site.run() == ["GPU report 2026-10, all teams"]
    outcomes = {one.key: one for one in site.dispatcher.known()}
    assert sorted(one.outcome for one in outcomes.values()) == ["delivered", "refused", "refused"]
    for one in outcomes.values():
        assert (one.outcome == "delivered") != ("other-package" in one.detail)
        assert (one.due_ms is not None) == (one.outcome == "refused")
    site.clock.advance(4 * MS_PER_DAY)
    assert site.run() == []
    assert sorted(one.outcome for one in site.dispatcher.known()) == ["delivered", "given-up", "given-up"]


@pytest.mark.parametrize("old", ["pager: {number: 7}", "mine"])
def test_a_name_that_nobody_has_is_a_fault_of_the_file(folder: Path, old: str) -> None:
    install_fake_channels(folder)
    points = {"pager: {number: 7}": "pagr: {}", "mine": "mien"}
    text = ORDERS.replace(", mine]", "]") if old != "mine" else ORDERS
    with pytest.raises(FileFault, match=points[old].partition(":")[0]):
        config_loading.validate(parse(text.replace(old, points[old]), "deliveries.yaml"), DeliveriesFile)
