"""The deliveries of an accountant over plain rows, on a virtual clock, with a channel that keeps what it gets. Its file
names the channels of gputally.testing, which a test has installed."""

from __future__ import annotations

from accountant.bookkeeping.bookkeeper import Bookkeeper
from accountant.channels.protocol import Message
from accountant.core.periods import Month
from accountant.core.settings import Settings
from accountant.notifications.dispatcher import Dispatcher
from accountant.notifications.subscriptions import DeliveriesFile
from accountant.wire.policy_models import Policy
from gputally.base.clock import VirtualClock
from gputally.base.yaml_file import parse
from gputally.server import config_loading
from tests.billing.usage_rows import at, price_book
from tests.fakes.list_ledger import ListLedger, Row

OCTOBER = Month(2026, 10)
HEAD = """\
schema: 1
link: https://gputally.example.com
destinations:
  disk: {shelf: {path: /reports}}
  chat: {bell: {url_file: /url}}
"""
PRICES = "id: h100, model: H100, price: '2.10', valid_from: 2026-01-01"


class Basket:
    """Accepts messages, or refuses as often as it should."""

    def __init__(self) -> None:
        self.letters: list[Message] = []
        self.trouble: list[Exception] = []

    def deliver(self, letter: Message) -> str:
        if self.trouble:
            raise self.trouble.pop(0)
        self.letters.append(letter)
        return "taken"


class Site:
    """An accountant's deliveries over plain rows, on a virtual clock."""

    def __init__(self, text: str, rows: list[Row], now: str = "2026-11-06") -> None:
        self.clock = VirtualClock(at(now))
        self.ledger = ListLedger(rows)
        self.books = Bookkeeper(self.ledger, self.clock)
        self.books.prices.take(price_book(PRICES), "file", "prices.yaml", "", at(now))
        self.basket = Basket()
        self.settings = Settings(auth="off")
        self.deliveries_file = config_loading.validate(parse(HEAD + text, "deliveries.yaml"), DeliveriesFile)
        self.restart()

    def restart(self) -> None:
        self.dispatcher = Dispatcher(
            self.ledger,
            self.books,
            self.settings,
            self.clock,
            lambda: self.deliveries_file,
            lambda _: self.basket,
        )

    def close_october(self) -> None:
        self.books.close(OCTOBER, "ann", "sure", ("coverage", "unpriced"))

    def put_budget(self, since_ms: int = 0, **budget: object) -> None:
        """A budget of team vision, in force from then on."""
        whole = {"name": "vision", "team": "vision", "thresholds": [0.5, 1.0], **budget}
        policy = {"schema": 1, "queues": [{"name": "v", "team": "vision"}], "budgets": [whole]}
        self.ledger.put_policy(Policy.model_validate(policy), since_ms)

    def run(self) -> list[str]:
        """Return the subjects of the messages sent now."""
        before = len(self.basket.letters)
        self.dispatcher.run()
        return [letter.subject for letter in self.basket.letters[before:]]
