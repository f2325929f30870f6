"""GPUs that went for good, by command and over HTTP."""

from __future__ import annotations

import json

import pytest

from accountant.composition import Service
from accountant.core.settings import Settings
from gputally.base.units import MS_PER_DAY, US_PER_HOUR
from gputally.server.https_server import serve
from tests import fresh

GPU = "GPU-node-1"


@pytest.fixture
def asked(tmp_path, clock, kit, run_command, monkeypatch):
    """`gputally accountant …` of an accountant two days after its only GPU's last record."""
    monkeypatch.setenv("COLUMNS", "180")
    settings = Settings(data=fresh.data(tmp_path / "data"), auth="off", linger_ms=0, timezone="Europe/Berlin")
    with Service(settings, clock) as service:
        service.ingest.submit_batch(kit.batch(rows=60)).result()
        clock.advance(2 * MS_PER_DAY)
        with serve(service.app, "127.0.0.1", 0) as url:
            yield lambda *arguments: run_command(*arguments, "--url", url)


def test_a_node_is_retired_and_the_capacity_ends(asked):
    code, out, err = asked("retire", "--node", "node-1", "--since", "2026-11-02", "--reason", "sold")
    assert (code, err) == (0, "")
    assert "2026-11-01 23:00:00" in out  # the first instant of the second, in Berlin
    _, out, _ = asked("usage", "--by", "gpu", "--start", "2026-11-01T00:00:00Z", "--output", "json")
    (line,) = json.loads(out)["lines"]
    accounts = line["accounts_gpu_us"]
    assert sum(accounts.values()) == 12 * US_PER_HOUR
    assert accounts["unmetered"] == 11 * US_PER_HOUR


def test_the_answer_is_for_programs_too(asked):
    _, out, _ = asked("retire", "--gpu", GPU, "--reason", "sold", "--output", "json")
    (one,) = json.loads(out)
    assert (one["cluster"], one["node"], one["gpu_uuid"]) == ("prod", "node-1", GPU)
    assert one["end_ms"] - one["last_ms"] == 2 * MS_PER_DAY


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "name GPUs, a node or a cluster"),
        (("--node", "node-7"), "no GPU that was seen on node 'node-7' last"),
        (("--node", "node-1", "--since", "yesterday"), "since: not a date: 'yesterday'"),
        (("--node", "node-1", "--since", "2027-01-01"), "is in the future"),
    ],
)
def test_what_is_refused_says_why_in_a_line(asked, words, said):
    code, out, err = asked("retire", *words, "--reason", "sold")
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert said in err
