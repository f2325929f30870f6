"""Due messages, unusual days, and the next step of a delivery: decided without a clock or a network."""

from __future__ import annotations

import json
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accountant.bookkeeping.month_closing import ClosedMonth
from accountant.exports.protocol import exports
from accountant.ledger.journal import numbered
from accountant.notifications import subscriptions, triggers
from accountant.notifications.messages import compose
from accountant.notifications.subscriptions import (
    PATIENCE_MS,
    DeliveriesFile,
    deliveries_from_acts,
    next_attempt,
    outcome_of_refusal,
)
from accountant.notifications.triggers import LEAST_US, TeamDay, unusual
from accountant.wire.usage_cost_and_job_models import BudgetState
from gputally.base.units import MS_PER_DAY, MS_PER_HOUR, US_PER_HOUR
from gputally.base.yaml_file import FileFault, parse
from gputally.server import config_loading

BERLIN = ZoneInfo("Europe/Berlin")
GRACE_MS = 5 * MS_PER_DAY
HEAD = "schema: 1\ndestinations:\n  disk: {shelf: {path: /reports}}\n  chat: {bell: {url_file: /url}}\n"


def at(text: str) -> int:
    return round(datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp()) * 1000


def deliveries_file(text: str, head: str = HEAD) -> DeliveriesFile:
    return config_loading.validate(parse(head + text, "deliveries.yaml"), DeliveriesFile)


def closed(month: str, when: str, digest: str = "ab" * 32) -> ClosedMonth:
    return ClosedMonth(month, digest, "{}", "v1", at(when), "ann")


def reports(text: str, now: str, *months: ClosedMonth, teams: tuple[str, ...] = ("vision", "language")):
    return triggers.reports(deliveries_file(text), months, at(now), BERLIN, GRACE_MS, lambda *_: teams)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("reports:\n  - {to: [nobody]}\n", "deliveries.yaml:6: reports.0.to.0: `destinations` has no 'nobody'"),
        ("reports:\n  - {team: a, each_team: true, to: [disk]}\n", "give team or each_team, not both"),
        ("reports:\n  - {forms: [docx], to: [disk]}\n", "deliveries.yaml:6: reports.0.forms.0"),
        ("notices:\n  - {about: [gossip], to: [chat]}\n", "deliveries.yaml:6: notices.0.about.0"),
        (f"  {'x' * 64}: {{shelf: {{path: /a}}}}\n", f"deliveries.yaml:5: destinations.{'x' * 64}"),
        ("link: javascript:alert(1)\n", "deliveries.yaml:5: link"),
        ("link: https://here\ncolour: red\n", "deliveries.yaml:6: colour: unknown key"),
    ],
)
def test_a_fault_in_the_orders_is_told_with_its_line(text, fault):
    with pytest.raises(FileFault) as told:
        deliveries_file(text)
    assert fault in str(told.value)


@pytest.mark.parametrize("of", ["month", "week"])
def test_an_order_without_a_form_gets_one_that_is_installed(of):
    (order,) = deliveries_file(f"reports:\n  - {{of: {of}, to: [disk]}}\n").reports
    assert set(order.forms) < exports().keys()


@pytest.mark.parametrize("form", [name for name, export in exports().items() if export.charges])
def test_a_form_with_every_charge_of_a_month_is_for_no_week(form):
    with pytest.raises(FileFault, match=f"{form} is only for a month, and this report covers a week"):
        deliveries_file(f"reports:\n  - {{of: week, forms: [{form}], to: [disk]}}\n")


@pytest.mark.parametrize(
    ("destination", "faults"),
    [
        ("{}", ["give exactly one channel: ", "bell or ", "shelf"]),
        ("{shelf: {path: /x}, bell: {url_file: /y}}", ["give exactly one channel: ", "bell or ", "shelf"]),
        ("{shelf: {}}", ["one.shelf.path"]),
        ("{shelf: {path: /x, colour: red}}", ["one.shelf.colour"]),
    ],
)
def test_a_destination_is_one_channel_and_whole(destination, faults):
    with pytest.raises(FileFault) as told:
        deliveries_file(f"schema: 1\ndestinations:\n  one: {destination}\n", head="")
    assert [fault for fault in faults if fault not in str(told.value)] == []


def test_a_closed_month_is_due_once_per_destination_and_team():
    found = reports(
        "reports:\n  - {each_team: true, to: [disk, chat]}\n", "2026-11-07", closed("2026-10", "2026-11-06")
    )
    assert [(due.destination, due.team, due.period.name) for due in found] == [
        ("disk", "language", "2026-10"), ("disk", "vision", "2026-10"),
        ("chat", "language", "2026-10"), ("chat", "vision", "2026-10"),
    ]  # fmt: skip
    assert found[0].period.start_ms == at("2026-09-30T22:00"), "the month of the zone, in summer time"
    assert len({due.key for due in found}) == 4


def test_a_month_that_was_closed_anew_is_another_edition_and_an_old_one_is_no_news():
    text = "reports:\n  - {to: [disk]}\n"
    first = reports(text, "2026-11-07", closed("2026-10", "2026-11-06", "aa" * 32))
    second = reports(text, "2026-11-07", closed("2026-10", "2026-11-07", "bb" * 32))
    assert first[0].key != second[0].key
    assert not reports(text, "2027-01-10", closed("2026-10", "2026-11-06"))


def test_an_ended_month_waits_for_its_grace():
    text = "reports:\n  - {when: ended, to: [disk]}\n"
    assert [due.period.name for due in reports(text, "2026-11-05T22:59")] == [], "the one before is no news any more"
    assert [due.period.name for due in reports(text, "2026-11-05T23:00")] == ["2026-10"]


def test_a_week_is_monday_to_sunday_and_waits_a_little():
    text = "reports:\n  - {of: week, team: vision, to: [chat]}\n"
    (due,) = reports(text, "2026-10-26T04:59")
    assert (due.period.name, due.team, due.period.month) == ("2026-W42", "vision", None)
    (due,) = reports(text, "2026-10-26T05:00")
    assert due.period.name == "2026-W43"
    assert due.period.end_ms - due.period.start_ms == 7 * MS_PER_DAY + MS_PER_HOUR, "the clocks went back in it"


def state(name: str, team: str | None, threshold: float | None) -> BudgetState:
    return BudgetState(
        name=name, queue=None, team=team, month="2026-10", unit="EUR", limit=Decimal(100), spent=Decimal(80), ratio=0.8,
        threshold=threshold, forecast=None, forecast_low=None, forecast_high=None, as_of_ms=0,
    )  # fmt: skip


def test_a_budget_is_told_to_those_it_concerns_once_per_threshold():
    told = deliveries_file(
        "notices:\n  - {about: [budgets], teams: [vision], to: [chat]}\n  - {about: [budgets], to: [disk]}\n"
    )
    states = [state("v", "vision", 0.8), state("l", "language", 0.5), state("calm", "vision", None)]
    found = triggers.budgets(told, states)
    assert [(due.destination, due.budget.name) for due in found] == [("chat", "v"), ("disk", "v"), ("disk", "l")]
    later = triggers.budgets(told, [state("v", "vision", 1.0)])
    assert later[0].key != found[0].key
    raised = state("v", "vision", 0.8).model_copy(update={"limit": Decimal(200)})
    again = state("v", "vision", 0.8).model_copy(update={"limit": Decimal("1E+2")})
    keys = [triggers.budgets(told, [one])[0].key for one in (raised, again)]
    assert [key == found[0].key for key in keys] == [False, True], "a raised budget reaches its thresholds anew"
    assert triggers.anomalies(told, []) == []


def test_a_notice_names_the_share_of_a_budget_until_it_is_used_up():
    told = deliveries_file("notices:\n  - {about: [budgets], to: [chat]}\n")

    def text(ratio: float) -> str:
        spent = state("v", "vision", 0.8).model_copy(update={"ratio": ratio})
        return compose(
            triggers.budgets(told, [spent])[0], 0, lambda _: pytest.fail("not asked"), None, files=False
        ).text

    assert "80 %" in text(0.8)
    assert "%" not in text(1.2)


def test_a_day_is_odd_against_the_four_weeks_before():
    day = date(2026, 10, 29)
    calm = {day - timedelta(days=back): TeamDay(100 * US_PER_HOUR, 10 * US_PER_HOUR) for back in range(1, 29)}
    wild = calm | {day: TeamDay(400 * US_PER_HOUR, 10 * US_PER_HOUR)}
    idle = calm | {day: TeamDay(120 * US_PER_HOUR, 90 * US_PER_HOUR)}
    found = triggers.of_day({"wild": wild, "idle": idle, "calm": calm | {day: calm[day - timedelta(days=1)]}}, day)
    assert [(one.team, one.what, one.usual_us // US_PER_HOUR) for one in found] == [
        ("idle", "idle", 10),
        ("wild", "held", 100),
    ]
    assert triggers.of_day({"new": {day: TeamDay(400 * US_PER_HOUR)}}, day) == [], "nothing is usual yet"


@given(st.lists(st.integers(0, 10**13), min_size=28, max_size=28), st.integers(0, 10**13))
def test_only_far_above_the_usual_is_unusual(before, value):
    usual = unusual(before, value)
    if usual is not None:
        assert value > usual + LEAST_US - 1
        assert sum(value > one for one in before) * 2 >= len(before)
        assert unusual(before, value + 1) == usual, "more is no less unusual"


def test_days_without_use_make_no_other_day_odd():
    """A ledger of ten days, and a team that works from Tuesday to Thursday."""
    day = date(2026, 10, 22)
    usual = TeamDay(100 * US_PER_HOUR, 10 * US_PER_HOUR)
    young = {day - timedelta(days=back): usual for back in range(11)}
    midweek = {one: usual for one in (day - timedelta(days=back) for back in range(29)) if 1 <= one.weekday() <= 3}
    assert triggers.of_day({"young": young, "midweek": midweek}, day) == []
    wild = TeamDay(400 * US_PER_HOUR, 10 * US_PER_HOUR)
    found = triggers.of_day({"young": young | {day: wild}, "midweek": midweek | {day: wild}}, day)
    assert [(one.team, one.usual_us) for one in found] == [("midweek", usual.held_us), ("young", usual.held_us)]


def test_a_team_that_runs_a_large_job_every_saturday_is_told_of_the_first_two():
    saturday = date(2026, 10, 31)
    assert saturday.weekday() == 5
    days = {saturday - timedelta(days=back): TeamDay(100 * US_PER_HOUR) for back in range(63)}
    told = []
    for weeks in range(4, -1, -1):
        day = saturday - timedelta(weeks=weeks)
        days[day] = TeamDay((500 + weeks) * US_PER_HOUR)
        told.append(len(triggers.of_day({"batch": {one: use for one, use in days.items() if one <= day}}, day)))
    assert told == [1, 1, 0, 0, 0]
    days[saturday] = TeamDay(900 * US_PER_HOUR)
    assert triggers.of_day({"batch": days}, saturday), "far above those too"


OUTCOMES = st.sampled_from(["sending", "refused", "delivered", "unsure", "given-up", "again"])


@given(st.lists(st.tuples(OUTCOMES, st.integers(0, 10**9)), min_size=1, max_size=12))
def test_what_the_journal_says_is_what_was_known(history):
    known, acts = None, []
    for outcome, moment in history:
        known = next_attempt(known, "k", outcome, moment, "because")
        acts += numbered([subscriptions.act(known)], len(acts), acts[-1].digest if acts else "0" * 64)
    assert deliveries_from_acts(acts)["k"] == known
    assert json.loads(acts[-1].content) == {"outcome": known.outcome}
    if known.outcome in ("delivered", "unsure", "given-up", "sending"):
        assert known.due_ms is None, "nothing that may have arrived is sent again by itself"


def test_pauses_grow_and_patience_ends():
    known = next_attempt(None, "k", "sending", 0)
    moment, pauses = 0, []
    while True:
        outcome = outcome_of_refusal(known, moment)
        known = next_attempt(known, "k", outcome, moment)
        if outcome == "given-up":
            break
        assert known.due_ms is not None
        pauses.append((known.due_ms - moment) // 60_000)
        moment = known.due_ms
        known = next_attempt(known, "k", "sending", moment)
    assert pauses[:10] == [1, 2, 4, 8, 16, 32, 64, 128, 256, 360]
    assert moment >= PATIENCE_MS
    again = next_attempt(next_attempt(known, "k", "again", moment), "k", "sending", moment + 1)
    assert (again.tries, again.first_ms, outcome_of_refusal(again, moment + 2)) == (1, moment + 1, "refused")
