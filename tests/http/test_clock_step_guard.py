"""An accountant whose clock was set: it notices, books nothing with the wrong time, reports it by readiness, and a
command repairs the ledger."""

from __future__ import annotations

import json

import pytest
from msgspec import structs
from starlette.testclient import TestClient

from accountant.composition import Service
from accountant.core.settings import Settings
from accountant.runtime.clock_step_guard import AGREE_MS, LONG_MS, GuardedClock
from accountant.storage.duckdb_ledger import open_ledger
from accountant.wire.policy_models import Decision, Policy
from agent.wire import Batch
from gputally.base.clock import VirtualClock
from gputally.base.units import MS_PER_DAY, MS_PER_HOUR, MS_PER_MINUTE, MS_PER_SECOND
from gputally.server.https_server import serve
from tests.http.conftest import (
    NOW_MS,
    bearer,
    client_of,
    encoded,
    pod_minutes,
    refused,
    settings_in,
    token_entry,
    token_list,
)
from tests.moments import acks, present

YEAR_MS = 365 * MS_PER_DAY
POLICY = "schema: 1\nqueues:\n  - {name: vision, team: vision, refs: ['kai:vision'], deserved: 8}\n"
OTHER = POLICY.replace("deserved: 8", "deserved: 4")


@pytest.fixture
def settings(tmp_path) -> Settings:
    return settings_in(tmp_path, policy=POLICY, refresh_seconds=1)


@pytest.fixture
def service(settings, clock):
    with Service(settings, clock) as opened:
        yield opened


@pytest.fixture
def client(service) -> TestClient:
    return client_of(service)


def sent(client, first, sent_ms=None, node="node-1"):
    batch = pod_minutes(first, rows=1, node=node, sent_ms=sent_ms)
    return client.post("/v1/usage", content=encoded(batch))


@pytest.mark.parametrize("by_ms", [YEAR_MS, MS_PER_DAY, MS_PER_HOUR, -MS_PER_DAY, -YEAR_MS])
def test_nothing_is_dated_while_the_clock_is_set_and_all_is_well_when_it_is_back(
    service, client, clock, settings, by_ms
):
    """Without the guard, a clock a year ahead for some seconds blocks policies and agents for a year."""
    assert sent(client, 1).status_code == 200
    clock.step_wall(by_ms)
    settings.policy.write_text(OTHER)
    clock.advance(5 * MS_PER_SECOND)
    service.maintain()
    refused = sent(client, 2)
    assert (refused.status_code, client.get("/livez").status_code) == (503, 200)
    assert "set by" in refused.json()["detail"]
    ready = client.get("/readyz")
    assert (ready.status_code, "set by" in ready.json()["detail"]) == (503, True)
    assert len(service.ledger.status().policies(0, 2 * NOW_MS)) == 1
    clock.step_wall(-by_ms)
    clock.advance(5 * MS_PER_SECOND)
    service.maintain()
    assert client.get("/readyz").status_code == 200
    assert sent(client, 2).status_code == 200
    versions = service.ledger.status().policies(0, 2 * NOW_MS)
    assert [one.effective_ms - NOW_MS for one in versions] == [0, 10 * MS_PER_SECOND]
    assert all(act.at_ms <= clock.wall_ms() for act in present(service.ledger).acts())
    assert present(service.ledger).misdated(clock.wall_ms()) == ()


def test_a_correction_is_taken_over_when_the_agents_agree_with_it(client, clock):
    """The machine started with a wrong clock, and its time service corrected it."""
    clock.step_wall(MS_PER_DAY)
    assert sent(client, 1, clock.wall_ms(), "node-1").status_code == 503
    assert sent(client, 1, clock.wall_ms() + AGREE_MS // 2, "node-2").status_code == 200
    assert client.get("/readyz").status_code == 200
    assert client.get("/v1/clock").json()["doubt"] == ""


def test_agents_that_keep_the_old_time_do_not_vouch_for_the_new_one(client, clock):
    before = clock.wall_ms()
    clock.step_wall(YEAR_MS)
    for node in ("node-1", "node-2", "node-3"):
        assert sent(client, 1, before, node).status_code == 503
    clock.advance(2 * LONG_MS)
    assert client.get("/readyz").status_code == 503


def test_set_a_day_back_it_takes_nothing_until_it_has_caught_up(service, client, clock):
    assert sent(client, 1).status_code == 200
    before = acks(service.ledger, "node-1", "prod")
    clock.step_wall(-MS_PER_DAY)
    answer = sent(client, 2)
    assert "clock is" in refused(answer, "ledger-unavailable")["detail"]
    assert int(answer.headers["retry-after"]) >= 1
    assert acks(service.ledger, "node-1", "prod") == before
    clock.advance(MS_PER_DAY)
    assert sent(client, 2).json()["durable_seq"] == 2


def test_a_single_agent_may_be_the_same_machine_and_is_believed_later(client, clock):
    clock.step_wall(MS_PER_HOUR)
    assert sent(client, 1, clock.wall_ms()).status_code == 503
    clock.advance(LONG_MS)
    assert sent(client, 1, clock.wall_ms()).status_code == 200


def test_a_clock_that_was_wrong_from_the_start_is_contradicted_by_the_agents(client, clock):
    right = clock.wall_ms() - MS_PER_DAY
    for node, status in (("node-1", 200), ("node-2", 503), ("node-3", 503)):
        assert sent(client, 1, right, node).status_code == status
    assert "3 of 3 agents contradict the machine's clock" in client.get("/readyz").json()["detail"]
    clock.step_wall(-MS_PER_DAY)
    for node in ("node-1", "node-2", "node-3"):
        answer = sent(client, 2, right, node)
    assert "was set" not in answer.text
    assert client.get("/v1/clock").json()["doubt"] == ""


def test_one_agent_with_another_time_changes_nothing(client, clock):
    for node, told in (("node-1", clock.wall_ms()), ("node-2", clock.wall_ms()), ("node-3", clock.wall_ms() + YEAR_MS)):
        assert sent(client, 1, told, node).status_code == 200
    assert client.get("/readyz").status_code == 200


def test_imports_and_unbound_senders_have_no_vote(tmp_path, clock):
    """Otherwise forty empty imports of invented nodes stop all writes."""
    entries = token_entry("importer", "import", ", cluster: prod") + token_entry("boss", "admin")
    with Service(settings_in(tmp_path, tokens=token_list(entries)), clock) as service:
        client = client_of(service)
        ahead = clock.wall_ms() + MS_PER_HOUR
        for number in range(40):
            empty = Batch(
                cluster="prod", node=f"invented-{number}", boot_id="", epoch="import:slurm:00000000000000",
                first_seq=1, oldest_seq=1, sent_ms=ahead,
            )  # fmt: skip
            as_agent = structs.replace(empty, epoch="0192-epoch")
            assert client.post("/v1/imports/usage", content=encoded(empty), headers=bearer("importer")).is_success
            assert client.post("/v1/usage", content=encoded(as_agent), headers=bearer("boss")).is_success
        assert client.get("/readyz").status_code == 200
        assert client.get("/v1/clock", headers=bearer("boss")).json()["senders"] == 0


def test_the_issuer_of_another_cluster_has_one_vote_however_many_nodes_it_invents(clock):
    guard = GuardedClock(clock)
    guard.heard("prod", "node-1", clock.wall_ms())
    for number in range(500):
        guard.heard("edge", f"invented-{number}", clock.wall_ms() + MS_PER_HOUR)
    assert guard.doubt == ""
    clock.step_wall(MS_PER_DAY)
    assert guard.doubt
    for number in range(500):
        guard.heard("edge", f"invented-{number}", clock.wall_ms())
    guard.heard("prod", "node-1", clock.wall_ms() - MS_PER_DAY)
    assert guard.doubt, "one of two clusters cannot vouch for a time that the other contradicts"


def test_an_answer_tells_the_agent_what_time_it_is(client, clock):
    assert sent(client, 1).json()["clock_ms"] == clock.wall_ms()


def test_a_restart_within_one_boot_notices_the_jump_and_says_it(tmp_path, settings):
    """Entries from files at the start are dated once the time is known."""
    machine = VirtualClock(NOW_MS)
    GuardedClock(machine, tmp_path / "clock.json", "boot-1").keep()
    machine.advance(MS_PER_HOUR)
    machine.step_wall(YEAR_MS)
    again = GuardedClock(machine, tmp_path / "clock.json", "boot-1")
    assert "+365 days" in again.doubt
    with Service(settings, again) as service:
        assert service.ledger.status().policies(0, 2 * machine.wall_ms()) == []
        machine.step_wall(-YEAR_MS)
        machine.advance(2 * MS_PER_SECOND)
        service.maintain()
        (version,) = service.ledger.status().policies(0, 2 * machine.wall_ms())
        assert version.effective_ms == machine.wall_ms()
    assert GuardedClock(machine, tmp_path / "clock.json", "boot-2").doubt == ""


@pytest.fixture
def asked(settings, clock, run_command):
    """Return a function that runs `gputally accountant …` on a ledger written a year ahead by an earlier release."""
    ahead = VirtualClock(clock.wall_ms() + YEAR_MS)
    ledger = open_ledger(settings.ledger_file, ahead)
    policy = Policy.model_validate({"schema": 1, "queues": [{"name": "vision", "deserved": 2}]})
    ledger.put_policy(policy, ahead.wall_ms(), "ann")
    batch = pod_minutes(rows=2, node="node-9")
    rows = tuple(
        structs.replace(row, start_ms=row.start_ms + YEAR_MS, end_ms=row.end_ms + YEAR_MS) for row in batch.intervals
    )
    ledger.append([structs.replace(batch, intervals=rows)], ahead.wall_ms())
    ledger.checkpoint()
    decision = Decision(
        id="d-1", at_ms=ahead.wall_ms(), kind="weight", target="kai", subject="vision", mode="dry-run",
        policy_version=policy.version(), inputs={}, reason="x",
    )  # fmt: skip
    ledger.record_decisions([decision], ahead.wall_ms())
    ledger.close()
    with Service(settings, clock) as service, serve(service.app, "127.0.0.1", 0) as url:
        yield run_command.at(url), service


def test_what_was_dated_wrongly_is_named_and_healed(asked, clock):
    ask, service = asked
    client = client_of(service)
    assert sent(client, 1).status_code == 503
    assert "clock show" in client.get("/readyz").json()["detail"]
    code, out, _ = ask("clock", "show", "--output", "json")
    named = {one["kind"]: one for one in json.loads(out)["misdated"]}
    assert (code, set(named)) == (0, {"records", "policies", "decisions", "acts"})
    assert (named["records"]["count"], named["records"]["named"]) == (2, ["prod/node-9"])
    out = ask.shown("clock", "heal", "--reason", "the clock was a year ahead")
    assert "are quarantined" in out
    assert client.get("/readyz").status_code == 200
    assert sent(client, 1).status_code == 200
    versions = service.ledger.status().policies(0, 2 * NOW_MS)
    assert [one.effective_ms <= clock.wall_ms() + 10 for one in versions] == [True, True]
    assert [one.reason for one in present(service.ledger).quarantined()] == ["future-dated", "future-dated"]
    assert present(service.ledger).imbalance(0, NOW_MS + 2 * YEAR_MS).total_us == 0
    report = json.loads(ask("clock", "show", "--output", "json")[1])
    assert [one["kind"] for one in report["misdated"]] == ["acts"]  # their digests chain
    (act,) = present(service.ledger).acts("redated")
    assert ("the clock was a year ahead" in act.reason, act.at_ms) == (True, clock.wall_ms())


def test_nothing_of_the_future_is_left_when_sums_are_made(asked, settings, clock):
    ask, service = asked
    ask("clock", "heal", "--reason", "x")
    before = service.ledger.status().newest_ms, service.ledger.status().extent
    service.ledger.checkpoint()
    with service.ledger.moment() as moment:
        assert moment.status().newest_ms == before[0] <= clock.wall_ms() + 5 * MS_PER_MINUTE


def test_there_is_nothing_to_heal_where_nothing_is_wrong(service, client):
    assert client.post("/v1/clock/heal", json={"reason": "x"}).json() == []
    assert client.get("/v1/clock").json()["misdated"] == []
    assert client.post("/v1/clock/accept").json()["doubt"] == ""


def test_an_administrator_takes_the_new_time_for_right(service, client, clock):
    clock.step_wall(YEAR_MS)
    assert client.get("/readyz").status_code == 503
    assert client.post("/v1/clock/accept").json()["doubt"] == ""
    assert client.get("/readyz").status_code == 200
