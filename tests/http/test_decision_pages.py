"""The pages of decisions: from the overview in two clicks to usage, cost and the reason of a weight."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from datetime import UTC, datetime
from html import unescape

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from accountant.composition import Service
from accountant.wire import decision_text
from accountant.wire.policy_models import Decision, Policy
from fairshare.controller.cycle_report import TargetReport, WriteOutcome, hold_decision, weight_decisions
from fairshare.core.queues_and_weights import Standing
from fairshare.laws.weight_calculation import WeightInputs, calculate_weights
from fairshare.preemption.eviction import EvictionResult
from fairshare.preemption.preemption_cycle import PreemptionReport, VictimStop, decisions
from fairshare.preemption.victim_selection import decide
from fairshare.targets.weight_plan import Apply
from fairshare.usage.stale_usage_hold import UsageHold
from gputally.base.clock import VirtualClock
from gputally.server.tokens_and_grants import new_token
from gputally.testing.fake_accountant import usage_window
from tests.fairshare.preemption_cases import HOUR_MS, gang, situation
from tests.fairshare.preemption_cases import NOW_MS as THEIR_NOW_MS
from tests.fairshare.preemption_cases import policy as preempting_policy
from tests.http.conftest import HOUR_US, MINUTE_MS, NOW_MS, client_of, encoded, settings_in
from tests.http.page_parser import EVIL, read
from tests.hypothesis_examples import examples
from tests.price_books import price_book_text
from tests.usage_records import batch, deliver, interval, pod_facts, pod_holder

TREE = [{"name": "vision", "weight": 2, "deserved": 4}, {"name": "language", "weight": 1}]


def weights() -> list[Decision]:
    """A cycle in which language's weight falls, as the controller records it."""
    policy = Policy.model_validate({"k": 1.5, "queues": TREE})
    usage = {"vision": 20 * HOUR_US, "language": 70 * HOUR_US}
    window = usage_window(usage, 100 * HOUR_US, end_ms=NOW_MS, start_ms=NOW_MS - 86_400_000, coverage=0.997)
    standings = {"vision": Standing(24.0, 4.0, 2.0), "language": Standing(30.0, 12.0, 1.0)}
    made = calculate_weights(WeightInputs(policy, window, standings, 16.0, NOW_MS - 5_000))
    target = TargetReport("kai", "dry-run", standings, made.weights, made.entitlements, 16.0, window=window)
    news = tuple(
        WriteOutcome(Apply("kai", w.queue, f"queue/{w.queue}", w.previous, w.value, w.why, {}), "would-apply")
        for w in made.weights
    )
    return list(weight_decisions(target, news, policy.version(), NOW_MS - 5_000))


def preemptions() -> list[Decision]:
    """One pod waits for a guaranteed share, one is preempted, and a third is protected."""
    rules = preempting_policy({"vision": 8, "nlp": 8}, mode="enforce")
    at = NOW_MS - 4_000
    early = (THEIR_NOW_MS - at) / HOUR_MS
    running = [gang(name, "vision", [(node, 8)], hours=early + since) for name, node, since in
               (("went", "n0", 1), ("stays", "n1", 5))]  # fmt: skip
    here = situation(rules, {"n0": 8.0, "n1": 8.0}, [*running, gang("waits", "nlp", waiting=[8], hours=early + 2)])
    here = replace(here, now_ms=at)
    verdicts = decide(rules, here)
    stops = tuple(
        VictimStop(each.claimant, victim, EvictionResult("stopped")) for each in verdicts for victim in each.victims
    )
    return list(decisions(rules, PreemptionReport("kai", "enforce", here, verdicts, stops), {}))


HELD = hold_decision(UsageHold("StaleUsage", "usage is an hour old"), "p", NOW_MS - 3_000)
WEIGHTS, PREEMPTIONS = weights(), preemptions()
POSTED = [*WEIGHTS, *PREEMPTIONS, HELD]


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    settings = settings_in(
        tmp_path_factory.mktemp("why"), policy=json.dumps({"schema": 1, "queues": TREE}),
        prices=price_book_text(H100="2.40", source="framework contract"),
        inventory="schema: 1\ncluster: prod\nnamespaces:\n  - {name: ns, team: vision}\n",
    )  # fmt: skip
    with Service(settings, VirtualClock(NOW_MS)) as service:
        client = client_of(service, headers={"Accept": "text/html"})
        begin = NOW_MS - 40 * MINUTE_MS
        told = {"queue_ref": "policy:vision", "created_ms": begin, "node": "node-1"}
        facts = [
            pod_facts("went-0", begin, uid="u1", workload="Gang/went", scheduled_ms=begin, started_ms=begin, **told),
            pod_facts("waits-0", begin, uid="u2", workload="Gang/waits", requests={"nvidia.com/gpu": "4"}, **told),
        ]
        holder = pod_holder("went-0", uid="u1", container="main")
        rows = [
            interval(begin + i * MINUTE_MS, "GPU-1", holder, span_ms=MINUTE_MS, busy_us=30_000_000) for i in range(30)
        ]
        found = batch(rows, facts, cluster="prod", node="node-1")
        assert client.post("/v1/usage", content=encoded(found)).status_code == 200
        sent = [one.model_dump(mode="json") for one in POSTED]
        assert client.post("/v1/decisions", json=sent).json()["recorded"] == len(POSTED)
        yield client


def links(client, path):
    return {unescape(to) for to in re.findall(r'<a[^>]* href="(/[^"]*)"', client.get(path).text)}


def words(client, path):
    answer = client.get(path)
    assert answer.status_code == 200, path
    return " ".join(" ".join(read(answer.text).texts).split())


def test_two_clicks_answer_who_what_and_why(client):
    """The overview, the pages that it links to, and the pages that these link to."""
    first = links(client, "/")
    pages = dict.fromkeys(first, 1) | {"/": 0}
    for path in sorted(first):
        if path.startswith(("/decisions", "/team", "/month/2026-11/lines")) or path in ("/month/2026-11", "/prices"):
            pages |= {to: 2 for to in links(client, path) if to not in pages}
    job = next(path for path in pages if path.startswith("/job/") and "went" in path)
    assert pages[job] == 1, "who used what: on the overview itself, its page behind it"
    assert "0.5" in words(client, job)
    lines = next(path for path in pages if path.startswith("/month/2026-11/lines?team=vision"))
    assert pages[lines] == 1, "why it cost that"
    said = words(client, lines)
    assert "Gang/went" in said
    assert "framework contract" in said
    assert "1.20" in said
    changed = next(one for one in WEIGHTS if one.subject == "language")
    why = f"/decisions/{changed.at_ms}/{changed.id}"
    assert pages[why] == 2, "why a weight changed"
    assert "fair share" in words(client, why)
    victim = next(one for one in PREEMPTIONS if "claimant" in one.inputs)
    assert pages[f"/decisions/{victim.at_ms}/{victim.id}"] == 2


def test_a_weight_is_told_with_every_number_on_the_way(client):
    changed = next(one for one in WEIGHTS if one.subject == "language")
    said = words(client, f"/decisions/{changed.at_ms}/{changed.id}")
    steps = changed.inputs["explanation"]
    assert f"would go from {changed.previous:.4g} to {changed.value:.4g}" in said
    assert f"{steps['u'] * 100:.2f} %" in said
    assert f"{steps['n'] * 100:.2f} %" in said
    for name in ("k", "p", "proportional", "lower", "upper"):
        assert f"{steps[name]:.4g}" in said, name
    assert "70.0 GPU-h" in said
    assert "more than its fair share" in said
    assert "A dry run: nothing was written." in said
    assert "99.70 % of it metered" in said
    assert "vision 20.0 GPU-h 20.0 % 24 4" in said, "the other queue stands beside it"


def test_a_preemption_is_told_from_both_sides(client):
    claim = next(one for one in PREEMPTIONS if "verdict" in one.inputs)
    victim = next(one for one in PREEMPTIONS if "claimant" in one.inputs)
    said = words(client, f"/decisions/{claim.at_ms}/{claim.id}")
    assert "Gang/ns/waits asks for 8 GPUs because it waits" in said
    assert "ns/went" in said
    assert "Gang/ns/stays" in said, "who was spared, and why"
    assert "Others give way for it." in said
    page = f"/decisions/{victim.at_ms}/{victim.id}"
    said = words(client, page)
    assert "Why Gang/ns/went was preempted" in said
    assert victim.reason[:20].lower() in said.lower()
    assert "It was stopped." in said
    assert f"/decisions/{claim.at_ms}/{claim.id}" in links(client, page)
    record = next(one for one in PREEMPTIONS if one.subject == "*")
    assert f"/decisions/{record.at_ms}/{record.id}" in links(client, page)
    assert "nlp 8 8 unlimited 0" in words(client, f"/decisions/{record.at_ms}/{record.id}")


def test_a_hold_and_a_cycle_have_pages_too(client):
    assert "StaleUsage: usage is an hour old." in words(client, f"/decisions/{HELD.at_ms}/{HELD.id}")
    cycle = WEIGHTS[0]
    said = words(client, f"/decisions/{cycle.at_ms}/{cycle.id}")
    assert "Every queue at that time" in said
    assert len([to for to in links(client, f"/decisions/{cycle.at_ms}/{cycle.id}") if "/language" in to]) > 0


def test_a_cycle_shows_the_weights_from_before_and_those_that_it_decided(client):
    cycle, *decided = WEIGHTS
    rows = re.findall(
        r"<tr[^>]*><th[^>]*>(\w+)</th>(.*?)</tr>", client.get(f"/decisions/{cycle.at_ms}/{cycle.id}").text
    )
    cells = {queue: re.findall(r"<td[^>]*>([^<]*)</td>", row) for queue, row in rows}
    assert {one.subject: cells[one.subject][-2:] for one in decided} == {
        one.subject: [f"{one.previous:.4g}", f"{one.value:.4g}"] for one in decided
    }
    for queue in ("vision", "language"):
        listed = client.get(f"/decisions?subject={queue}").text.partition("</table>")[0]
        assert re.findall(r"<td[^>]*>([^<]*)</td>", listed)[-1] == cells[queue][-1], "the page that leads there agrees"
    (kept,) = decision_text.decision_text(cycle, [cycle]).grids
    assert {row[-2] == row[-1] for row in kept.rows} == {True}, "a weight that is not decided stays"


def test_a_hold_says_why_since_when_and_until_when_weights_are_kept(start_service):
    _, client = start_service()
    client.headers.update({"Accept": "text/html"})
    since_ms, until_ms = NOW_MS - 40 * MINUTE_MS, NOW_MS - 25 * MINUTE_MS
    hold = hold_decision(UsageHold("AccountantUnavailable", "http://here: 502 Bad Gateway"), "p", since_ms)
    again = [one.model_copy(update={"at_ms": until_ms}) for one in WEIGHTS]
    elsewhere = WEIGHTS[0].model_copy(update={"at_ms": since_ms + 1, "cluster": "other"})
    page, instants = f"/decisions/{hold.at_ms}/{hold.id}", []
    for posted in ([hold, elsewhere], again):
        assert client.post("/v1/decisions", json=[one.model_dump(mode="json") for one in posted]).status_code == 200
        said = words(client, page)
        assert "502 Bad Gateway" in said
        instants.append(re.findall(r"(\d{4}-\d\d-\d\d \d\d:\d\d) UTC", said))
        for address in (page, "/decisions?kind=hold"):
            assert not re.search(r'<span class="tag[^"]*">off</span>', client.get(address).text), "the hold is not off"
    since, until = (f"{datetime.fromtimestamp(at / 1000, UTC):%Y-%m-%d %H:%M}" for at in (since_ms, until_ms))
    assert instants == [[since], [since, until]]


def test_a_waiting_job_says_what_its_queue_has_and_what_was_decided(client):
    said = words(client, "/job/prod~ns~Gang~waits")
    assert "Why it waits" in said
    assert "Queue vision" in said
    assert "claim" in said
    assert any(to.startswith("/decisions/") for to in links(client, "/job/prod~ns~Gang~waits"))
    assert "gave way" in words(client, "/job/prod~ns~Gang~went")


def test_a_waiting_job_says_which_whole_gpus_are_free_and_on_how_many_nodes(tmp_path):
    made = {name: new_token(name, ("read",), teams=teams) for name, teams in (("all", None), ("lead", ("vision",)))}
    settings = settings_in(
        tmp_path, inventory="schema: 1\ncluster: prod\nnamespaces:\n  - {name: ns, team: vision}\n",
        tokens="tokens:\n" + "".join(entry for _, entry in made.values()),
    )  # fmt: skip
    begin, holder = NOW_MS - 40 * MINUTE_MS, pod_holder("went-0", uid="u1", container="main")
    waits = {"requests": {"nvidia.com/gpu": "4"}, "created_ms": begin, "workload": "Gang/waits"}
    with Service(settings, VirtualClock(NOW_MS)) as service:
        for node, gpus in (("n1", {"GPU-1": holder, "GPU-2": None, "GPU-3": None}), ("n2", {"GPU-4": None})):
            rows = [
                interval(begin + i * MINUTE_MS, gpu, by, span_ms=MINUTE_MS, busy_us=0)
                for i in range(40) for gpu, by in gpus.items()
            ]  # fmt: skip
            facts = [pod_facts("waits-0", begin, uid="u2", node=node, **waits)] if node == "n1" else []
            deliver(service.ledger, NOW_MS, batch(rows, facts, cluster="prod", node=node))
        said = {
            name: words(client_of(service, headers={"Accept": "text/html", "Authorization": f"Bearer {secret}"}),
                        "/job/prod~ns~Gang~waits").partition("Why it waits")[2]
            for name, (secret, _) in made.items()
        }  # fmt: skip
    assert all(told in said["all"] for told in ("3 whole GPUs", "2 nodes", "at most 2 on one"))
    assert "whole GPU" not in said["lead"], "what other teams leave is not for a reader of one team"
    assert "several nodes" in said["lead"]


def test_decisions_are_chosen_by_kind_and_subject(client):
    assert "language" not in words(client, "/decisions?kind=preemption")
    assert "Gang/ns/went" not in words(client, "/decisions?kind=weight")
    said = words(client, "/decisions?subject=vision")
    assert "What it had when last recorded" in said
    assert "the inputs of this cycle" not in words(client, "/decisions")
    assert "Nothing was decided like that" in words(client, "/decisions?subject=nobody")
    for path in ("/decisions?kind=x", "/decisions?days=0", "/decisions/x/y"):
        assert client.get(path).status_code == 422
    for path in ("/decisions/5/y", f"/decisions/{NOW_MS}/", "/decisions/-1/y", f"/decisions/{10**30}/y"):
        assert client.get(path).status_code == 404, path


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3) | st.just(EVIL),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)
KEYS = ("window", "standings", "gpus", "explanation", "verdict", "claimant", "situation", "cycle", "due", "notes",
        "pods", "victims", "accounts", "usage", "n", "u", "trace", "result", "detail", "published")  # fmt: skip
NESTED = st.dictionaries(st.sampled_from(KEYS), JSON | st.dictionaries(st.sampled_from(KEYS), JSON, max_size=4))


@settings(max_examples=examples(13, 80))
@given(st.sampled_from(["weight", "preemption", "hold"]), NESTED, NESTED, st.none() | st.floats())
def test_whatever_was_posted_can_be_told(kind, inputs, others, value):
    def one(name, content, subject):
        return Decision.model_construct(
            id=name, at_ms=1, kind=kind, target="kai", subject=subject, mode="enforce", value=value, previous=value,
            reason=EVIL, policy_version="p", inputs=content,
        )  # fmt: skip

    record = one("c", others, "*")
    told = decision_text.decision_text(one("c/1", {**inputs, "cycle": "c"}, "q"), [record])
    assert told.title
    assert all(len(row) == len(grid.columns) for grid in told.grids for row in grid.rows)
    assert decision_text.decision_text(record, [record]).title
    assert isinstance(decision_text.shares([record], ("q",)), list)


def test_a_queues_weight_is_the_newest_that_was_decided():
    """The record of a cycle has the weight from before it."""

    def one(at_ms, subject, value, inputs):
        return Decision(id=f"{at_ms}/{subject}", at_ms=at_ms, kind="weight", target="kai", subject=subject,
                        mode="enforce", value=value, reason="r", policy_version="p", inputs=inputs)  # fmt: skip

    before = ((9, 3.0), (5, 2.0))
    records = [one(at_ms, "*", None, {"standings": {"q": {"weight": weight}}}) for at_ms, weight in before]
    weights = [one(9, "q", 4.0, {}), one(5, "q", 3.0, {})]
    assert [share.weight for share in decision_text.shares([*records, *weights], ("q",))] == [4.0]
    assert [share.weight for share in decision_text.shares(records, ("q",))] == [3.0]
    assert [share.weight for share in decision_text.shares([*records, weights[1]], ("q",))] == [3.0], "an older one"


def test_the_steps_of_a_weight_have_words_and_a_known_zero_is_shown() -> None:
    trace = {"n": 0.375, "U": 0.299, "k": 5, "P": 0.7548, "owed_gpu_h": 0.0, "turn_until_ms": NOW_MS, "own step": 2}
    found = {step: figure for step, _, figure in decision_text.trace_in_words(trace)}
    assert list(found.values())[:5] == ["37.50 %", "29.90 %", "5", "0.7548", "0"]
    assert not found.keys() & (trace.keys() - {"own step"})
    assert found["own step"] == "2"
    (until,) = (figure for step, figure in found.items() if step.startswith("End"))
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d", until)
    assert decision_text.trace_in_words({"turn_until_ms": 1e19, "n": float("nan"), "U": "x"})[0][2] == "–"


def test_every_step_of_a_decision_is_in_one_table() -> None:
    weight = next(each for each in WEIGHTS if each.subject == "language")
    titles = [row[0] for grid in decision_text.decision_text(weight, WEIGHTS).grids[:1] for row in grid.rows]
    assert len(set(titles)) == len(titles)
    assert {"Fair share", "Share with history", "New weight"} <= set(titles)
