"""Deliveries put together: what is due is sent once, whatever happens on the way."""

from __future__ import annotations

import pytest
from starlette.testclient import TestClient

from accountant.__main__ import main
from accountant.bookkeeping.bookkeeper import Bookkeeper
from accountant.bookkeeping.corrections_and_adjustments import NewAdjustment
from accountant.composition import Service
from accountant.core.periods import Month
from accountant.core.settings import Settings
from accountant.notifications.channels import DeliveryUncertain, Refused
from accountant.notifications.dispatcher import CACHE_MS, Dispatcher
from accountant.notifications.messages import Message
from accountant.notifications.subscriptions import DeliveriesFile
from accountant.prices.price_book import Billing, IdlePolicy
from accountant.wire.policy_models import Policy
from gputally.base.clock import VirtualClock
from gputally.base.units import MS_PER_DAY
from gputally.base.yaml_file import parse
from gputally.server import config_loading
from gputally.server.https_server import serve
from tests import fresh
from tests.billing.rows import at, held, price_book, quota_policy, unheld
from tests.fakes.rows import MomentLedger, Row
from tests.fakes.webhook import webhook

OCTOBER = Month(2026, 10)
HEAD = """\
schema: 1
link: https://gputally.example.com
destinations:
  disk: {folder: /reports}
  chat: {slack: {url_file: /url}}
"""
PRICES = "id: h100, model: H100, price: '2.10', valid_from: 2026-01-01"


class Basket:
    """Takes letters, or refuses as often as it is told to."""

    def __init__(self) -> None:
        self.letters: list[Message] = []
        self.trouble: list[Exception] = []

    def deliver(self, letter: Message) -> str:
        if self.trouble:
            raise self.trouble.pop(0)
        self.letters.append(letter)
        return "taken"


class Office:
    """An accountant's deliveries over plain rows, on a virtual clock."""

    def __init__(self, text: str, rows: list[Row], now: str = "2026-11-06") -> None:
        self.clock = VirtualClock(at(now))
        self.ledger = MomentLedger(rows)
        self.books = Bookkeeper(self.ledger, self.clock)
        self.books.prices.take(price_book(PRICES), "file", "prices.yaml", "", at(now))
        self.basket = Basket()
        self.deliveries_file = config_loading.validate(parse(HEAD + text, "deliveries.yaml"), DeliveriesFile)
        self.restart()

    def restart(self) -> None:
        self.dispatcher = Dispatcher(
            self.ledger,
            self.books,
            Settings(auth="off"),
            self.clock,
            lambda: self.deliveries_file,
            lambda _: self.basket,
        )

    def run(self) -> list[str]:
        """The subjects of what was sent now."""
        before = len(self.basket.letters)
        self.dispatcher.run()
        return [letter.subject for letter in self.basket.letters[before:]]


pytestmark = pytest.mark.usefixtures("logs")


@pytest.fixture
def rows() -> list[Row]:
    return [
        held("2026-10-01", "2026-11-01", 2, 0.5, team="vision", namespace="vision", job="train"),
        held("2026-10-01", "2026-11-01", 3, 0.7, team="language", namespace="language", job="serve"),
    ]


def test_a_report_goes_out_when_its_month_is_closed_and_never_again(rows):
    office = Office("reports:\n  - {forms: [csv, json, focus], to: [disk]}\n  - {team: vision, to: [chat]}\n", rows)
    assert office.run() == []
    office.books.close(OCTOBER, "ann", "sure", ("coverage", "unpriced"))
    assert office.run() == ["GPU report 2026-10, all teams", "GPU report 2026-10, team vision"]
    whole, chat = office.basket.letters
    assert [file.name for file in whole.attachments] == [
        "gputally-2026-10.csv",
        "gputally-2026-10.json",
        "gputally-2026-10.focus.zip",
    ]
    assert whole.link == ("Open in gputally", "https://gputally.example.com/month/2026-10")
    assert chat.attachments == ()
    assert chat.link is not None
    assert chat.link[1].endswith("/team/vision?month=2026-10")
    stated = office.books.month(OCTOBER)
    assert dict(chat.facts)["Cost, USD"] == f"{stated.payable['vision']:,.2f}", "to the cent what the statement says"
    assert office.run() == []
    office.restart()
    office.clock.advance(MS_PER_DAY)
    assert office.run() == [], "the journal remembers"


def test_what_was_refused_is_tried_again_and_what_may_have_arrived_is_not(rows):
    office = Office("reports:\n  - {forms: [csv], to: [disk]}\n", rows)
    office.books.close(OCTOBER, "ann", "sure", ("coverage", "unpriced"))
    office.basket.trouble = [Refused("disk full"), DeliveryUncertain("hung up")]
    assert office.run() == []
    assert office.run() == [], "not at once"
    office.clock.advance(60_000)
    assert office.run() == []
    (state,) = office.dispatcher.known()
    assert (state.outcome, state.tries, state.detail) == ("unsure", 2, "hung up")
    office.clock.advance(10 * MS_PER_DAY)
    assert office.run() == []
    office.dispatcher.again(state.key, "ann", "it is not there")
    assert office.run() == ["GPU report 2026-10, all teams"]
    assert office.basket.letters[0].key == state.key
    assert office.run() == []


def test_a_process_that_died_while_sending_leaves_it_to_a_person(rows):
    class Died(BaseException):
        pass

    office = Office("reports:\n  - {forms: [csv], to: [disk]}\n", rows)
    office.books.close(OCTOBER, "ann", "sure", ("coverage", "unpriced"))

    def deliver(letter: Message) -> str:
        office.basket.letters.append(letter)
        raise Died

    office.basket.deliver = deliver
    with pytest.raises(Died):
        office.run()
    office.basket = Basket()
    office.restart()
    assert office.run() == []
    (state,) = office.dispatcher.known()
    assert (state.outcome, state.detail) == ("unsure", "the accountant ended meanwhile")


def test_a_destination_that_fails_for_days_is_given_up(rows):
    office = Office("reports:\n  - {forms: [csv], to: [disk]}\n", rows)
    office.books.close(OCTOBER, "ann", "sure", ("coverage", "unpriced"))
    office.basket.trouble = [Refused("no route")] * 100
    for _ in range(200):
        office.run()
        office.clock.advance(3_600_000)
    (state,) = office.dispatcher.known()
    assert state.outcome == "given-up"
    assert 10 < state.tries < 25
    assert sum(act.kind == "delivery" for act in office.ledger.acts()) == 2 * state.tries


def test_budgets_are_told_at_every_threshold_once():
    office = Office("notices:\n  - {about: [budgets], to: [chat]}\n", [], "2026-10-10")
    budget = {"name": "vision <b>", "team": "vision", "limit": "1000", "thresholds": [0.5, 0.8, 1.0]}
    office.ledger.put_policy(
        Policy.model_validate({"schema": 1, "queues": [{"name": "v", "team": "vision"}], "budgets": [budget]}), 0
    )
    office.ledger.add(held("2026-10-01", "2026-10-08", 3, team="vision", queue="v"))
    assert office.run() == ["Budget vision <b>: 50 % of 2026-10 used"]
    assert office.run() == []
    office.ledger.add(held("2026-10-08", "2026-10-10", 12, team="vision", queue="v"))
    office.clock.advance(CACHE_MS)
    assert office.run() == ["Budget vision <b>: 108 % of 2026-10 used"]
    facts = dict(office.basket.letters[-1].facts)
    assert (facts["Spent"], facts["Budget"]) == ("1,080.0 GPU-hours", "1,000.0 GPU-hours")


def test_the_ledger_is_asked_seldom_and_hardly_where_everything_was_told(rows):
    office = Office(
        "reports:\n  - {each_team: true, forms: [csv], to: [disk]}\nnotices:\n  - {about: [budgets], to: [chat]}\n",
        rows, "2026-11-06",
    )  # fmt: skip
    budget = {"name": "vision", "team": "vision", "limit": "10", "thresholds": [0.5, 1.0]}
    office.ledger.put_policy(
        Policy.model_validate({"schema": 1, "queues": [{"name": "v", "team": "vision"}], "budgets": [budget]}), 0
    )
    office.books.close(OCTOBER, "ann", "sure", ("coverage", "unpriced"))
    assert len(office.run()) == 2
    asked = []
    usage = office.ledger.usage

    def counted(*question):
        asked.append(question[2])
        return usage(*question)

    office.ledger.usage = counted
    for _ in range(9):
        office.clock.advance(60_000)
        assert office.run() == []
    assert asked == []
    office.clock.advance(60_000)
    assert office.run() == []
    assert len(asked) == 1, "of the budgets: every report was sent"
    office.ledger.add(held("2026-11-06", "2026-11-07", 3, team="vision", queue="v"))
    office.clock.advance(MS_PER_DAY)
    assert office.run() == ["Budget vision: 720 % of 2026-11 used"]
    asked.clear()
    for _ in range(6):
        office.clock.advance(CACHE_MS)
        assert office.run() == []
    assert [by[0] for by in asked] == ["team"], (
        "once more after the last letter; then every report was sent, and every threshold told"
    )
    office.ledger.add(held("2026-10-31T23:00Z", "2026-11-01", 1, team="speech"))
    office.clock.advance(MS_PER_DAY)
    assert office.run() == ["GPU report 2026-10, team speech"], "it had no time when the others were asked for"


def test_a_team_that_only_pays_gets_its_report_too(rows):
    """For a guarantee that it left unused, or for what was booked by hand."""
    office = Office("reports:\n  - {each_team: true, forms: [csv], to: [disk]}\n", rows)
    office.ledger.add(unheld("2026-10-01", "2026-11-01"))
    office.ledger.put_policy(quota_policy(robotics=1), 0)
    book = price_book(PRICES).model_copy(update={"billing": Billing(idle=IdlePolicy(guaranteed="owner"))})
    office.books.prices.take(book, "file", "prices.yaml", "", at("2026-11-06"))
    credit = {"month": "2026-10", "team": "guests", "amount": "-5", "reason": "a gift", "approved_by": "cfo"}
    office.books.credits.adjust(NewAdjustment.model_validate(credit), "ann")
    office.books.close(OCTOBER, "ann", "sure", ("coverage", "unpriced"))
    assert office.run() == [f"GPU report 2026-10, team {team}" for team in ("guests", "language", "robotics", "vision")]
    guests, language, robotics, _ = (dict(letter.facts) for letter in office.basket.letters)
    assert robotics["Cost, USD"] == "1,562.40"
    assert "Due with corrections and credits, USD" not in language
    assert (guests["Cost, USD"], guests["Due with corrections and credits, USD"]) == ("0.00", "\N{MINUS SIGN}5.00")


def test_a_letter_says_unpriced_and_not_nothing(rows):
    office = Office(
        "reports:\n  - {to: [chat]}\n", [*rows, held("2026-10-01", "2026-11-01", team="new", gpu_model="B9")]
    )
    office.books.close(OCTOBER, "ann", "sure", ("coverage", "unpriced"))
    office.run()
    facts = dict(office.basket.letters[0].facts)
    assert (facts["Cost, USD"], facts["new"]) == ("7,812.00 + unpriced", "unpriced")


def test_an_odd_day_is_told_the_morning_after():
    calm = held("2026-09-20", "2026-10-19", 2, team="vision")
    office = Office("notices:\n  - {about: [anomalies], teams: [vision], to: [chat]}\n", [calm], "2026-10-19T05:59")
    office.ledger.add(held("2026-10-18", "2026-10-19", 10, team="vision"))
    assert office.run() == []
    office.clock.advance(60_000)
    assert office.run() == ["Team vision held 288.0 GPU-hours on 2026-10-18"]
    assert office.run() == []


def test_an_odd_day_is_told_though_its_records_came_late_or_nobody_was_there_that_morning():
    """Agents keep their records while the accountant is away for a long weekend."""
    calm = held("2026-09-10", "2026-10-19", 2, team="vision")
    text = "notices:\n  - {about: [anomalies], to: [chat]}\n"
    office = Office(text, [calm], "2026-10-19T09:00")
    assert office.run() == []
    office.ledger.add(held("2026-10-16", "2026-10-17", 10, team="vision"))
    office.ledger.add(held("2026-10-18", "2026-10-19", 30, team="__unassigned__"))
    office.clock.advance(60_000)
    assert office.run() == [], "looked for once a day"
    office.restart()
    said = "Team vision held 288.0 GPU-hours on 2026-10-16"
    assert office.run() == [said]
    office.clock.advance(MS_PER_DAY)
    office.restart()
    assert office.run() == [], "told once"


def test_pods_of_no_team_are_no_team_of_a_strange_name():
    calm = held("2026-09-20", "2026-10-19", 2, team="__unassigned__")
    office = Office("notices:\n  - {about: [anomalies], to: [chat]}\n", [calm], "2026-10-19T09:00")
    office.ledger.add(held("2026-10-18", "2026-10-19", 10, team="__unassigned__"))
    assert office.run() == ["Pods of no team held 288.0 GPU-hours on 2026-10-18"]


def test_a_budget_that_was_used_up_in_the_last_hours_of_its_month_is_told_in_the_next():
    office = Office("notices:\n  - {about: [budgets], to: [chat]}\n", [], "2026-10-31T23:50")
    budget = {"name": "vision", "team": "vision", "limit": "1000", "thresholds": [0.5, 1.0]}
    raised = budget | {"limit": "9000"}
    for policy, since in ((budget, 0), (raised, at("2026-11-01"))):
        queues = [{"name": "v", "team": "vision"}]
        office.ledger.put_policy(Policy.model_validate({"schema": 1, "queues": queues, "budgets": [policy]}), since)
    office.ledger.add(held("2026-10-01", "2026-10-22", 1, team="vision", queue="v"))
    assert office.run() == ["Budget vision: 50 % of 2026-10 used"]
    office.ledger.add(held("2026-10-22", "2026-11-03", 2, team="vision", queue="v"))
    office.clock.advance(3 * MS_PER_DAY)
    assert office.run() == [], "984 of 1,000"
    office.ledger.add(held("2026-10-31", "2026-11-01", 1, team="vision", queue="v"))
    office.clock.advance(CACHE_MS)
    assert office.run() == ["Budget vision: 101 % of 2026-10 used"]
    office.ledger.add(held("2026-10-30", "2026-10-31", 99, team="vision", queue="v"))
    office.clock.advance(10 * MS_PER_DAY)
    assert office.run() == [], "its grace is over"


def test_a_letter_says_how_much_of_its_span_was_metered(rows):
    office = Office("reports:\n  - {of: month, to: [chat]}\n", [*rows, unheld("2026-10-01", "2026-11-01", "unmetered")])
    office.books.close(OCTOBER, "ann", "sure", ("coverage", "unpriced"))
    office.run()
    assert dict(office.basket.letters[0].facts)["Metered, of the cluster's capacity"] == "83.3 %"


def test_the_service_delivers_and_shows_what_it_delivered(tmp_path):
    clock = VirtualClock(at("2026-11-02T12:00"))
    with webhook() as hook:
        (tmp_path / "url").write_text(hook.url)
        (tmp_path / "deliveries.yaml").write_text(
            "schema: 1\ndestinations:\n"
            f"  disk: {{folder: {tmp_path}/reports}}\n  chat: {{slack: {{url_file: {tmp_path}/url}}}}\n"
            "reports:\n  - {of: week, forms: [html], to: [disk, chat]}\n"
        )
        hook.answers = [0]
        settings = Settings(data=fresh.data(tmp_path / "data"), auth="off", deliveries=tmp_path / "deliveries.yaml")
        with Service(settings, clock) as service:
            client = TestClient(service.app, base_url="http://127.0.0.1")
            assert service.deliveries is not None
            service.deliveries.run()
            states = {one["key"].split("/")[3]: one for one in client.get("/v1/deliveries").json()}
            assert (states["disk"]["outcome"], states["disk"]["detail"]) == ("delivered", "gputally-2026-W44.html")
            assert (states["chat"]["outcome"], states["chat"]["next_ms"]) == ("unsure", None)
            assert 'gputally_deliveries{outcome="unsure"} 1.0' in client.get("/metrics").text
            ordered = {"key": states["chat"]["key"], "reason": "nobody saw it"}
            assert client.post("/v1/deliveries/again", json=ordered).json()["outcome"] == "again"
            assert client.post("/v1/deliveries/again", json={"key": "x", "reason": "y"}).status_code == 404
            service.deliveries.run()
            trail = client.get("/v1/audit").json()["acts"]
        assert [act["kind"] for act in trail] == ["delivery"] * 7
        assert (tmp_path / "reports" / "gputally-2026-W44.html").read_text().startswith("<!doctype html>")
        assert [body["text"] for body in hook.bodies] == ["GPU report 2026-W44, all teams"] * 2
        with Service(settings, clock) as service:
            assert service.deliveries is not None
            service.deliveries.run()
        assert len(hook.bodies) == 2


def test_without_orders_there_is_nothing_to_show(tmp_path):
    with Service(Settings(data=tmp_path, auth="off"), VirtualClock(at("2026-11-02"))) as service:
        client = TestClient(service.app, base_url="http://127.0.0.1")
        assert client.get("/v1/deliveries").json()["detail"].startswith("this accountant delivers nothing")


def test_the_command_lists_and_orders_once_more(tmp_path, capsys):
    (tmp_path / "deliveries.yaml").write_text(
        f"schema: 1\ndestinations: {{disk: {{folder: {tmp_path}/reports}}}}\n"
        "reports: [{of: week, forms: [csv], to: [disk]}]\n"
    )
    settings = Settings(data=fresh.data(tmp_path / "data"), auth="off", deliveries=tmp_path / "deliveries.yaml")
    with (
        Service(settings, VirtualClock(at("2026-11-02T12:00"))) as service,
        serve(service.app, "127.0.0.1", 0) as url,
    ):
        assert service.deliveries is not None
        service.deliveries.run()
        (key,) = [one.key for one in service.deliveries.known()]
        assert main(["deliveries", "--url", url, "--again", key, "--reason", "lost"]) == 0
        assert main(["deliveries", "--url", url, "--again", key]) != 0
        service.deliveries.run()
        assert main(["deliveries", "--url", url, "--format", "json"]) == 0
    shown = capsys.readouterr().out
    assert "again" in shown
    assert '"outcome": "delivered"' in shown
