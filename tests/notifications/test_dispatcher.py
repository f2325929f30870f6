"""Deliveries from trigger to channel: each due message is sent once, whatever happens on the way."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from accountant.__main__ import main
from accountant.bookkeeping.corrections_and_adjustments import NewAdjustment
from accountant.channels.protocol import DeliveryUncertain, Message, Refused
from accountant.composition import Service
from accountant.core.settings import Settings
from accountant.exports.protocol import exports
from accountant.notifications.dispatcher import CACHE_MS, Dispatcher
from accountant.prices.price_book import Billing, IdlePolicy
from gputally.base.clock import VirtualClock
from gputally.base.units import MS_PER_DAY
from gputally.testing.http_receiver import ACCEPTS, HANGS_UP, http_receiver
from tests import empty_ledger
from tests.billing.usage_rows import at, held, price_book, quota_policy, unheld
from tests.exports.format_cases import TEXT
from tests.fakes.list_ledger import Row
from tests.moments import present
from tests.notifications.delivery_site import OCTOBER, PRICES, Basket, Site
from tests.usage_records import running_accountant

pytestmark = pytest.mark.usefixtures("logs")


def serving(folder: Path, orders: str) -> Settings:
    (folder / "deliveries.yaml").write_text(orders)
    return Settings(data=empty_ledger.data(folder / "data"), auth="off", deliveries=folder / "deliveries.yaml")


@pytest.fixture
def rows() -> list[Row]:
    return [
        held("2026-10-01", "2026-11-01", 2, 0.5, team="vision", namespace="vision", job="train"),
        held("2026-10-01", "2026-11-01", 3, 0.7, team="language", namespace="language", job="serve"),
    ]


def test_a_report_goes_out_when_its_month_is_closed_and_never_again(rows):
    forms = [name for name, export in exports().items() if export.charges or not export.binary]
    site = Site(f"reports:\n  - {{forms: {forms}, to: [disk]}}\n  - {{team: vision, to: [chat]}}\n", rows)
    assert site.run() == []
    site.close_october()
    assert site.run() == ["GPU report 2026-10, all teams", "GPU report 2026-10, team vision"]
    whole, chat = site.basket.letters
    assert [file.name for file in whole.attachments] == [f"gputally-2026-10.{exports()[form].suffix}" for form in forms]
    assert whole.link == ("Open in gputally", "https://gputally.example.com/month/2026-10")
    assert chat.attachments == ()
    assert chat.link is not None
    assert chat.link[1].endswith("/team/vision?month=2026-10")
    stated = site.books.month(OCTOBER)
    assert dict(chat.facts)["Cost, USD"] == f"{stated.payable['vision']:,.2f}", "to the cent what the statement says"
    assert site.run() == []
    site.restart()
    site.clock.advance(MS_PER_DAY)
    assert site.run() == [], "the journal remembers"


def test_what_was_refused_is_tried_again_and_what_may_have_arrived_is_not(rows):
    site = Site(f"reports:\n  - {{forms: [{TEXT.name}], to: [disk]}}\n", rows)
    site.close_october()
    site.basket.trouble = [Refused("disk full"), DeliveryUncertain("hung up")]
    assert site.run() == []
    assert site.run() == [], "not at once"
    site.clock.advance(60_000)
    assert site.run() == []
    (state,) = site.dispatcher.known()
    assert (state.outcome, state.tries, state.detail) == ("unsure", 2, "hung up")
    site.clock.advance(10 * MS_PER_DAY)
    assert site.run() == []
    site.dispatcher.again(state.key, "ann", "it is not there")
    assert site.run() == ["GPU report 2026-10, all teams"]
    assert site.basket.letters[0].key == state.key
    assert site.run() == []


def test_a_process_that_died_while_sending_leaves_it_to_a_person(rows):
    class Died(BaseException):
        pass

    site = Site(f"reports:\n  - {{forms: [{TEXT.name}], to: [disk]}}\n", rows)
    site.close_october()

    def deliver(letter: Message) -> str:
        site.basket.letters.append(letter)
        site.ledger.record = died  # the process ends before it records the outcome
        return "delivered"

    def died(*_: object, **__: object) -> None:
        raise Died

    site.basket.deliver = deliver
    with pytest.raises(Died):
        site.run()
    del site.ledger.record
    site.basket = Basket()
    site.restart()
    assert site.run() == []
    (state,) = site.dispatcher.known()
    assert (state.outcome, state.detail) == ("unsure", "the accountant ended while it sent the message")


def test_a_defect_in_sending_leaves_that_delivery_unsure_and_the_others_are_sent(rows):
    site = Site(f"reports:\n  - {{forms: [{TEXT.name}], to: [disk]}}\n  - {{team: vision, to: [chat]}}\n", rows)
    site.close_october()
    site.basket.trouble = [ZeroDivisionError("a defect")]
    assert site.run() == ["GPU report 2026-10, team vision"]
    assert sorted(state.outcome for state in site.dispatcher.known()) == ["delivered", "unsure"]


def test_a_report_that_cannot_be_made_is_tried_again_and_the_others_are_sent(rows):
    site = Site(f"reports:\n  - {{forms: [{TEXT.name}], to: [disk]}}\n  - {{team: vision, to: [chat]}}\n", rows)
    site.close_october()
    defects, moment = [ZeroDivisionError("a defect")], site.ledger.moment

    def failing_once(*span):
        if defects:
            raise defects.pop()
        return moment(*span)

    site.ledger.moment = failing_once
    assert site.run() == ["GPU report 2026-10, team vision"]
    assert sorted(state.outcome for state in site.dispatcher.known()) == ["delivered", "refused"], "nothing was sent"
    site.clock.advance(60_000)
    assert site.run() == ["GPU report 2026-10, all teams"]


def test_a_destination_that_fails_for_days_is_given_up(rows):
    site = Site(f"reports:\n  - {{forms: [{TEXT.name}], to: [disk]}}\n", rows)
    site.close_october()
    site.basket.trouble = [Refused("no route")] * 100
    for _ in range(200):
        site.run()
        site.clock.advance(3_600_000)
    (state,) = site.dispatcher.known()
    assert state.outcome == "given-up"
    assert 10 < state.tries < 25
    assert sum(act.kind == "delivery" for act in present(site.ledger).acts()) == 2 * state.tries


def test_budgets_are_told_at_every_threshold_once():
    site = Site("notices:\n  - {about: [budgets], to: [chat]}\n", [], "2026-10-10")
    site.put_budget(name="vision <b>", limit="1000", thresholds=[0.5, 0.8, 1.0])
    site.ledger.add(held("2026-10-01", "2026-10-08", 3, team="vision", queue="v"))
    assert site.run() == ["Budget vision <b>: 50 % of 2026-10 used"]
    assert site.run() == []
    site.ledger.add(held("2026-10-08", "2026-10-10", 12, team="vision", queue="v"))
    site.clock.advance(CACHE_MS)
    assert site.run() == ["Budget vision <b>: 108 % of 2026-10 used"]
    facts = dict(site.basket.letters[-1].facts)
    assert (facts["Spent"], facts["Budget"]) == ("1,080.0 GPU-hours", "1,000.0 GPU-hours")


def test_the_ledger_is_asked_seldom_and_hardly_where_everything_was_told(rows):
    site = Site(
        f"reports:\n  - {{each_team: true, forms: [{TEXT.name}], to: [disk]}}\n"
        "notices:\n  - {about: [budgets], to: [chat]}\n",
        rows, "2026-11-06",
    )  # fmt: skip
    site.put_budget(limit="10")
    site.close_october()
    assert len(site.run()) == 2
    asked = []
    usage = site.ledger.usage

    def counted(edges, by, *options):
        asked.append(by)
        return usage(edges, by, *options)

    site.ledger.usage = counted
    for _ in range(9):
        site.clock.advance(60_000)
        assert site.run() == []
    assert asked == []
    site.clock.advance(60_000)
    assert site.run() == []
    assert len(asked) == 1, "of the budgets: every report was sent"
    site.ledger.add(held("2026-11-06", "2026-11-07", 3, team="vision", queue="v"))
    site.clock.advance(MS_PER_DAY)
    assert site.run() == ["Budget vision: 720 % of 2026-11 used"]
    asked.clear()
    for _ in range(6):
        site.clock.advance(CACHE_MS)
        assert site.run() == []
    assert [by[0] for by in asked] == ["team"], (
        "once more after the last letter; then every report was sent, and every threshold told"
    )
    site.ledger.add(held("2026-10-31T23:00Z", "2026-11-01", 1, team="speech"))
    site.clock.advance(MS_PER_DAY)
    assert site.run() == ["GPU report 2026-10, team speech"], "it had no time when the others were asked for"


def test_a_team_that_only_pays_gets_its_report_too(rows):
    """For its unused guarantee, or for a manual charge."""
    site = Site(f"reports:\n  - {{each_team: true, forms: [{TEXT.name}], to: [disk]}}\n", rows)
    site.ledger.add(unheld("2026-10-01", "2026-11-01"))
    site.ledger.put_policy(quota_policy(robotics=1), 0)
    book = price_book(PRICES).model_copy(update={"billing": Billing(idle=IdlePolicy(guaranteed="owner"))})
    site.books.prices.take(book, "file", "prices.yaml", "", at("2026-11-06"))
    credit = {"month": "2026-10", "team": "guests", "amount": "-5", "reason": "a gift", "approved_by": "cfo"}
    site.books.credits.adjust(NewAdjustment.model_validate(credit), "ann")
    site.close_october()
    assert site.run() == [f"GPU report 2026-10, team {team}" for team in ("guests", "language", "robotics", "vision")]
    guests, language, robotics, _ = (dict(letter.facts) for letter in site.basket.letters)
    assert robotics["Cost, USD"] == "1,562.40"
    assert "Due with corrections and credits, USD" not in language
    assert (guests["Cost, USD"], guests["Due with corrections and credits, USD"]) == ("0.00", "\N{MINUS SIGN}5.00")


def test_an_odd_day_is_told_the_morning_after():
    calm = held("2026-09-20", "2026-10-19", 2, team="vision")
    site = Site("notices:\n  - {about: [anomalies], teams: [vision], to: [chat]}\n", [calm], "2026-10-19T05:59")
    site.ledger.add(held("2026-10-18", "2026-10-19", 10, team="vision"))
    assert site.run() == []
    site.clock.advance(60_000)
    assert site.run() == ["Team vision held 288.0 GPU-hours on 2026-10-18"]
    assert site.run() == []


def test_an_odd_day_is_told_though_its_records_came_late_or_nobody_was_there_that_morning():
    """Agents keep their records while the accountant is down for a long weekend."""
    calm = held("2026-09-10", "2026-10-19", 2, team="vision")
    text = "notices:\n  - {about: [anomalies], to: [chat]}\n"
    site = Site(text, [calm], "2026-10-19T09:00")
    assert site.run() == []
    site.ledger.add(held("2026-10-16", "2026-10-17", 10, team="vision"))
    site.ledger.add(held("2026-10-18", "2026-10-19", 30, team="__unassigned__"))
    site.clock.advance(60_000)
    assert site.run() == [], "looked for once a day"
    site.restart()
    said = "Team vision held 288.0 GPU-hours on 2026-10-16"
    assert site.run() == [said]
    site.clock.advance(MS_PER_DAY)
    site.restart()
    assert site.run() == [], "told once"


def test_pods_of_no_team_are_no_team_of_a_strange_name():
    calm = held("2026-09-20", "2026-10-19", 2, team="__unassigned__")
    site = Site("notices:\n  - {about: [anomalies], to: [chat]}\n", [calm], "2026-10-19T09:00")
    site.ledger.add(held("2026-10-18", "2026-10-19", 10, team="__unassigned__"))
    assert site.run() == ["Pods of no team held 288.0 GPU-hours on 2026-10-18"]


def test_a_budget_that_was_used_up_in_the_last_hours_of_its_month_is_told_in_the_next():
    site = Site("notices:\n  - {about: [budgets], to: [chat]}\n", [], "2026-10-31T23:50")
    site.put_budget(limit="1000")
    site.put_budget(at("2026-11-01"), limit="9000")
    site.ledger.add(held("2026-10-01", "2026-10-22", 1, team="vision", queue="v"))
    assert site.run() == ["Budget vision: 50 % of 2026-10 used"]
    site.ledger.add(held("2026-10-22", "2026-11-03", 2, team="vision", queue="v"))
    site.clock.advance(3 * MS_PER_DAY)
    assert site.run() == [], "984 of 1,000"
    site.ledger.add(held("2026-10-31", "2026-11-01", 1, team="vision", queue="v"))
    site.clock.advance(CACHE_MS)
    assert site.run() == ["Budget vision: 101 % of 2026-10 used"]
    site.ledger.add(held("2026-10-30", "2026-10-31", 99, team="vision", queue="v"))
    site.clock.advance(10 * MS_PER_DAY)
    assert site.run() == [], "its grace is over"


def test_a_message_says_unpriced_and_not_nothing_and_how_much_of_its_span_was_metered(rows):
    more = held("2026-10-01", "2026-11-01", team="new", gpu_model="B9"), unheld("2026-10-01", "2026-11-01", "unmetered")
    site = Site("reports:\n  - {of: month, to: [chat]}\n", [*rows, *more])
    site.close_october()
    site.run()
    facts = dict(site.basket.letters[0].facts)
    assert (facts["Cost, USD"], facts["new"]) == ("7,812.00 + unpriced", "unpriced")
    assert facts["Metered share of the cluster's capacity"] == "85.7 %", "6 of 7 GPUs"


def test_the_service_delivers_and_shows_what_it_delivered(tmp_path):
    clock = VirtualClock(at("2026-11-02T12:00"))
    with http_receiver() as hook:
        (tmp_path / "url").write_text(f"{hook.url}/services/s3cret")
        name = f"gputally-2026-W44.{TEXT.suffix}"
        hook.answer = HANGS_UP
        settings = serving(
            tmp_path,
            "schema: 1\ndestinations:\n"
            f"  disk: {{shelf: {{path: {tmp_path}}}}}\n  chat: {{bell: {{url_file: {tmp_path}/url}}}}\n"
            f"reports:\n  - {{of: week, forms: [{TEXT.name}], to: [disk, chat]}}\n",
        )
        with Service(settings, clock) as service:
            client = TestClient(service.app, base_url="http://127.0.0.1")
            assert service.deliveries is not None
            service.deliveries.run()
            states = {one["key"].split("/")[3]: one for one in client.get("/v1/deliveries").json()}
            assert (states["disk"]["outcome"], states["disk"]["detail"]) == ("delivered", name)
            assert (states["chat"]["outcome"], states["chat"]["next_ms"]) == ("unsure", None)
            assert 'gputally_deliveries{outcome="unsure"} 1.0' in client.get("/metrics").text
            ordered = {"key": states["chat"]["key"], "reason": "nobody saw it"}
            assert client.post("/v1/deliveries/again", json=ordered).json()["outcome"] == "again"
            assert client.post("/v1/deliveries/again", json={"key": "x", "reason": "y"}).status_code == 404
            hook.answer = ACCEPTS
            service.deliveries.run()
            trail = client.get("/v1/audit").json()["acts"]
        assert [act["kind"] for act in trail] == ["delivery"] * 7
        assert (tmp_path / name).read_text()
        assert [b"GPU report 2026-W44, all teams" in body for body in hook.bodies] == [True] * 2
        with Service(settings, clock) as service:
            assert service.deliveries is not None
            service.deliveries.run()
        assert len(hook.bodies) == 2


def test_without_orders_there_is_nothing_to_show(tmp_path):
    with Service(Settings(data=tmp_path, auth="off"), VirtualClock(at("2026-11-02"))) as service:
        client = TestClient(service.app, base_url="http://127.0.0.1")
        assert client.get("/v1/deliveries").json()["detail"].startswith("this accountant delivers nothing")


def test_the_command_lists_and_orders_once_more(tmp_path, capsys):
    settings = serving(
        tmp_path,
        f"schema: 1\ndestinations: {{disk: {{shelf: {{path: {tmp_path}}}}}}}\n"
        f"reports: [{{of: week, forms: [{TEXT.name}], to: [disk]}}]\n",
    )
    with running_accountant(settings, VirtualClock(at("2026-11-02T12:00"))) as (service, url):
        assert service.deliveries is not None
        service.deliveries.run()
        (key,) = [one.key for one in service.deliveries.known()]
        assert main(["deliveries", "--url", url, "--again", key, "--reason", "lost"]) == 0
        assert main(["deliveries", "--url", url, "--again", key]) != 0
        service.deliveries.run()
        assert main(["deliveries", "--url", url, "--output", "json"]) == 0
    shown = capsys.readouterr().out
    assert "again" in shown
    assert '"outcome": "delivered"' in shown


def test_a_channel_that_hangs_stops_no_other_and_gets_no_further_message_until_it_has_ended():
    go, worked = threading.Event(), threading.Event()

    class Hanging:
        def deliver(self, letter: Message) -> str:
            go.wait(60)
            worked.set()
            return "taken"

    site = Site(
        f"reports:\n  - {{when: ended, forms: [{TEXT.name}], to: [disk, chat]}}\n", [held("2026-10-01", "2026-10-02")]
    )
    site.dispatcher = Dispatcher(
        site.ledger, site.books, Settings(auth="off"), site.clock, lambda: site.deliveries_file,
        lambda to: Hanging() if to.channel.name == "shelf" else site.basket, most_s=0.05,
    )  # fmt: skip
    site.dispatcher.run()
    outcomes = {delivery.key.split("/")[3]: delivery.outcome for delivery in site.dispatcher.known()}
    assert outcomes == {"disk": "unsure", "chat": "delivered"}
    (unsure,) = [delivery for delivery in site.dispatcher.known() if delivery.outcome == "unsure"]
    site.dispatcher.again(unsure.key, "ann", "once more")
    site.dispatcher.run()
    assert {d.outcome for d in site.dispatcher.known() if d.key == unsure.key} == {"refused"}, "it is still busy"
    go.set()
    assert worked.wait(30)
    site.clock.advance(MS_PER_DAY)
    site.dispatcher.run()
    assert {d.outcome for d in site.dispatcher.known() if d.key == unsure.key} == {"delivered"}
