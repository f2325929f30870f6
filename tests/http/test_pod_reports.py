"""Reported holders, the trail of acts, and a token that nobody can vouch for now."""

from __future__ import annotations

import msgspec
import pytest

from accountant.api.bookkeeping_models import PodReport
from accountant.billing.queue_waits import KnownPod
from agent.wire import PROBLEM, PodFacts
from gputally.server.tokens_and_grants import AuthorityUnavailable, sha256


def pod(uid="101", **changes):
    plain = {"namespace": "vision", "name": "train", "node": "n1", "observed_ms": 7}
    return PodFacts(seq=0, uid=uid, **(plain | changes))


def test_reported_holders_are_taken_in_and_recorded(door, kit, tmp_path):
    opened = door(tokens=kit.token_file(tmp_path / "tokens.yaml"))
    admin = kit.bearer(kit.tokens["admin"])
    body = msgspec.json.encode(PodReport("hpc", "slurm (jobs.txt)", (pod(), pod("102"))))
    answer = opened.client.post("/v1/pods", content=body, headers=admin)
    assert (answer.status_code, answer.json()) == (200, {"pods": 2})
    opened.client.put("/v1/policy", json={"queues": [{"name": "a"}]}, headers=admin)
    trail = opened.client.get("/v1/audit", headers=admin).json()
    assert ("admin", "pods", "hpc") in [(act["who"], act["kind"], act["subject"]) for act in trail["acts"]]
    assert trail["broken_at"] is None
    assert trail["next_after"] is None


@pytest.mark.parametrize(
    ("body", "status", "slug"),
    [
        (b"{", 400, "malformed-body"),
        (b"\xff", 400, "malformed-body"),
        (b"{}", 422, "invalid-body"),
        (b'{"cluster": "c", "source": "s", "pods": [], "more": 1}', 422, "invalid-body"),
        (msgspec.json.encode(PodReport("", "s", ())), 422, "invalid-body"),
        (msgspec.json.encode(PodReport("c", "s", (pod(""),))), 422, "invalid-body"),
        (msgspec.json.encode(PodReport("c", "s", (pod(observed_ms=2**60),))), 422, "invalid-body"),
    ],
)
def test_a_report_that_is_none_is_refused(door, kit, tmp_path, body, status, slug):
    opened = door(tokens=kit.token_file(tmp_path / "tokens.yaml"))
    answer = opened.client.post("/v1/pods", content=body, headers=kit.bearer(kit.tokens["admin"]))
    assert (answer.status_code, answer.json()["type"]) == (status, PROBLEM + slug)


def test_the_trail_is_read_page_by_page(door):
    opened = door()
    for number in range(5):
        report = PodReport(f"c{number}", "s", ())
        opened.client.post("/v1/pods", content=msgspec.json.encode(report))
    seen, after = [], 0
    while after is not None:
        page = opened.client.get("/v1/audit", params={"after": after, "limit": 2}).json()
        assert page["broken_at"] is None
        seen += [act["subject"] for act in page["acts"] if act["kind"] == "pods"]
        after = page["next_after"]
    assert seen == ["c0", "c1", "c2", "c3", "c4"]
    opened.ledger._acts[2] = opened.ledger._acts[1]
    assert opened.client.get("/v1/audit").json()["broken_at"] == 3
    assert opened.client.get("/v1/audit", params={"after": 2}).json()["broken_at"] == 3


class Silent:
    """An authority that does not answer."""

    async def authenticate(self, token, address=""):
        raise AuthorityUnavailable("the API server cannot be reached: timed out")


def test_where_nobody_can_vouch_the_caller_is_asked_to_come_again(door, kit):
    opened = door()
    object.__setattr__(opened.app.state.deps, "authenticator", Silent())
    answer = opened.client.post("/v1/usage", content=b"{}", headers=kit.bearer("x"))
    assert (answer.status_code, answer.json()["type"]) == (503, PROBLEM + "authority-unavailable")
    assert int(answer.headers["retry-after"]) >= 1


def test_waits_are_shown_of_ones_own_teams(door, kit, tmp_path):
    entry = f"  - {{name: lead, token_sha256: {sha256('lead')}, scopes: [read], teams: [vision]}}\n"
    opened = door(tokens=kit.token_file(tmp_path / "tokens.yaml", entry))
    made = kit.now_ms - 60_000
    mine = pod(created_ms=made, scheduled_ms=made + 5_000, started_ms=made + 7_000)
    opened.ledger.known += [
        KnownPod("prod", "vision", "a", mine),
        KnownPod("staging", "speech", "b", pod("2", created_ms=made)),
    ]
    span = {"start": kit.now_ms - 3_600_000, "by": "team"}
    (line,) = opened.client.get("/v1/waits", params=span, headers=kit.bearer("lead")).json()
    five, two = ({"pods": 1, "median": s, "p95": s, "longest": s} for s in (5.0, 2.0))
    assert line == {"key": "vision", "pods": 1, "waiting": 0, "queued": five, "starting": two}
    everything = opened.client.get("/v1/waits", params=span, headers=kit.bearer(kit.tokens["read"])).json()
    assert [(one["key"], one["waiting"]) for one in everything] == [("speech", 1), ("vision", 0)]
    there = {**span, "cluster": "staging"}
    (alone,) = opened.client.get("/v1/waits", params=there, headers=kit.bearer(kit.tokens["read"])).json()
    assert alone == everything[0]
