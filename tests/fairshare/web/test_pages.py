"""The controller's pages: access, content, and escaping."""

from __future__ import annotations

import re
from base64 import b64encode
from pathlib import Path

import pytest

from fairshare.controller.policy_file import digest
from fairshare.web.page_routing import link
from fairshare.web.policy_pages import ROUTES
from tests.fairshare.web.staging import Stage, addresses, stage, text

HOSTILE = "<script>alert(1)</script>\"'&{{7*7}}"


ROLES = {"": 401, "unknown": 401, "ingest": 403, "progress": 403}
"""Who gets nowhere, and how they are told."""


@pytest.mark.parametrize("role", ["", "unknown", "ingest", "progress", "team", "read", "policy", "both", "admin"])
def test_every_route_as_every_role(guarded: Stage, role: str) -> None:
    guarded.tokens["unknown"] = "not-a-token"
    may = {"read": {"read"}, "policy": {"policy"}, "both": {"read", "policy"}, "admin": {"read", "policy"}}
    for route in ROUTES:
        url = addresses(guarded)[route.method, route.prefix]
        mark = guarded.mark("both") if role == "both" else guarded.mark(role) if role == "admin" else ""
        found = guarded.get(url, role) if route.method == "GET" else guarded.post(url, {}, role, mark)
        if role in ROLES:
            assert found.status == ROLES[role], (role, url)
            assert ("WWW-Authenticate" in found.headers) == (found.status == 401)
        elif role == "team":
            assert found.status == (200 if route.for_teams else 403), (role, url)
        elif route.scope not in may[role]:
            assert found.status == 403, (role, url)
        elif route.method == "POST" and role == "policy":
            assert found.status == 403  # no form of theirs: they may not open the page it stands on
        else:
            assert found.status not in (401, 403, 500), (role, url, text(found))


def test_nothing_is_told_to_strangers_but_how_a_page_looks(guarded: Stage) -> None:
    for url in ("/static/style.css", "/static/pages.js", "/favicon.ico"):
        assert guarded.get(url).status == 200
    assert guarded.get("/nothing").status == 401
    assert guarded.get("/nothing", "both").status == 404
    refused = text(guarded.get("/"))
    assert "vision" not in refused
    assert guarded.place.path not in refused


def test_a_bearer_may_be_a_basic_password(guarded: Stage) -> None:
    token = b64encode(f"me:{guarded.tokens['both']}".encode()).decode()
    assert guarded.get("/", authorization=f"Basic {token}").status == 200
    assert guarded.get("/", authorization="Basic !!").status == 401
    assert guarded.get("/", authorization="Digest x").status == 401


def test_an_expired_or_revoked_token_is_out(tmp_path: Path) -> None:
    here = stage(tmp_path, guarded=True, cycles=1)
    assert here.get("/", "both").status == 200
    (tmp_path / "tokens.yaml").write_text("tokens: []\n")
    here.clock.advance(2_000)
    assert here.get("/", "both").status == 401


@pytest.mark.parametrize(
    ("headers", "mark"),
    [
        ({}, ""),
        ({}, "f" * 64),
        ({"sec_fetch_site": "cross-site"}, None),
        ({"sec_fetch_site": "same-site"}, None),
        ({"origin": "https://elsewhere.example"}, None),
    ],
)
def test_a_page_of_another_site_writes_nothing(guarded: Stage, headers: dict[str, str], mark: str | None) -> None:
    before = guarded.file.read_text()
    form = {"text": before + "\n# mine\n", "base": digest(before)}
    assert guarded.post("/policy/apply", form, "both", mark, **headers).status == 403
    assert guarded.file.read_text() == before


def test_one_callers_form_is_not_anothers(guarded: Stage) -> None:
    assert guarded.mark("both") != guarded.mark("admin")
    assert guarded.post("/policy", {}, "admin", guarded.mark("both")).status == 403


def test_without_tokens_only_loopback_names_are_answered(open_stage: Stage) -> None:
    hosts = {"localhost:9404": 200, "127.0.0.1:1": 200, "[::1]:9404": 200, "gpu.evil.example": 403, "": 403}
    for host, status in hosts.items():
        assert open_stage.get("/", host=host).status == status


def test_every_answer_is_framed(open_stage: Stage) -> None:
    for url in ("/", "/policy", "/nothing", "/static/pages.js"):
        found = open_stage.get(url)
        policy = found.headers["Content-Security-Policy"]
        assert "default-src 'none'" in policy
        assert "script-src 'self'" in policy
        assert "frame-ancestors 'none'" in policy
        static = url.startswith("/static/")
        assert found.headers["Cache-Control"] == ("private, no-cache" if static else "no-store")
        assert open_stage.get(url, if_none_match=found.headers.get("ETag", "")).status == (
            304 if static else found.status
        )
        assert b"http://" not in found.body.replace(b"http://accountant/", b"").replace(b"http://www.w3.org", b"")


def test_a_request_of_the_wrong_kind_says_which_is_right(open_stage: Stage) -> None:
    found = open_stage.post("/decisions", {})
    assert (found.status, set(found.headers["Allow"].split(", "))) == (405, {"GET", "HEAD"})


# --- what is shown ---------------------------------------------------------------------------


def test_shares_show_every_queue_in_its_tree(open_stage: Stage) -> None:
    shown = text(open_stage.get("/"))
    names = ["research", "vision", "language", "robotics", "serving", "students"]
    assert [shown.index(f">{name}</a>") for name in names] == sorted(shown.index(f">{name}</a>") for name in names)
    assert "vision: used 33.0 % of the capacity, entitled to 16.2 %" in shown
    assert "repaid by" in shown
    assert "dry-run" in shown
    assert "standby" not in shown


def test_before_the_first_cycle_it_says_so(tmp_path: Path) -> None:
    here = stage(tmp_path, cycles=0)
    assert "first cycle has not ended" in text(here.get("/"))
    assert here.get("/queue/vision").status == 503
    assert here.get("/policy").status == 200


def test_a_hold_and_staleness_are_told(tmp_path: Path) -> None:
    here = stage(tmp_path, cycles=1)
    here.accountant.coverage = 0.5
    here.controller.cycle()
    shown = text(here.get("/"))
    assert "Weights are held: " in shown
    assert shown.count(">held</span>") == 6
    here.clock.advance(3_600_000)
    assert "1 h ago" in text(here.get("/"))


def test_a_standby_says_that_it_is_one(tmp_path: Path) -> None:
    here = stage(tmp_path, cycles=1, leading=False)
    for url in ("/", "/queue/vision", "/decisions", "/policy"):
        assert "standby: reads and decides, publishes nothing" in text(here.get(url))


def test_a_queue_over_time_with_its_reasons(open_stage: Stage) -> None:
    shown = text(open_stage.get("/queue/vision"))
    for words in ("From the root down", "in the way", "weight", "held, by the ledger: "):
        assert words in shown
    assert re.search(r"due [\d.]+ GPUs now, holds 24, asks for 40", shown)
    assert open_stage.get("/queue/nobody").status == 404


def test_the_books_are_asked_once_in_a_while(tmp_path: Path) -> None:
    here = stage(tmp_path, cycles=1)
    here.get("/queue/vision")
    usage = here.books.asked
    here.get("/queue/vision")
    assert here.books.asked - usage == 1  # its decisions alone


def test_decisions_are_listed_filtered_and_told(open_stage: Stage) -> None:
    shown = text(open_stage.get("/decisions?queue=vision&kind=weight&days=1"))
    assert "the inputs of this cycle" not in shown
    assert shown.count("<tr><th") == sum(each.subject == "vision" for each in open_stage.accountant.decisions) + 1
    assert "The controller made no such decision" in text(open_stage.get("/decisions?kind=preemption"))
    assert open_stage.get("/decisions?days=9999&kind=%3Cx%3E&queue=" + "q" * 4000).status == 200
    one = next(each for each in open_stage.accountant.decisions if each.subject == "vision")
    told = text(open_stage.get(f"/decision?id={one.id}&at={one.at_ms}"))
    for words in ("Why the weight of vision changed", "63.46 %", "The law deficit", "owed_gpu_h", "step bound"):
        assert words in told
    for wrong in (f"/decision?id=x&at={one.at_ms}", "/decision?id=x&at=soon", "/decision"):
        assert open_stage.get(wrong).status == 404


def test_kais_formula_is_written_out(tmp_path: Path) -> None:
    queues = "  - {name: a, weight: 3, refs: ['kai:research']}\n  - {name: b, refs: ['kai:robotics']}\n"
    source = f"law: kai\nk: 2\nqueues:\n{queues}"
    here = stage(tmp_path, text=source, cycles=0)
    here.accountant.spend(a=0.5, b=0.1)
    here.controller.cycle()
    one = next(each for each in here.accountant.decisions if each.subject == "a")
    assert "max(0, 0.75 + 2 × (0.75 − 0.5))" in text(here.get(f"/decision?id={one.id}&at={one.at_ms}"))


def test_without_the_accountant_its_own_memory_is_shown(tmp_path: Path) -> None:
    here = stage(tmp_path)
    one = next(each for each in here.scene.decisions() if each.subject == "vision")
    here.accountant.down = True
    for url in ("/queue/vision", "/decisions?queue=vision", f"/decision?id={one.id}&at={one.at_ms}"):
        found = here.get(url)
        assert found.status == 200
        assert "63.5%" in text(found)
    assert "connection refused" in text(here.get("/decisions"))


def test_hostile_names_are_text_everywhere(tmp_path: Path) -> None:
    source = f"queues:\n  - name: {HOSTILE!r}\n    refs: ['kai:research']\n    team: {HOSTILE!r}\n"
    here = stage(tmp_path, text=source.replace("\\'", "''"), cycles=2)
    one = next(each for each in here.accountant.decisions if each.subject == HOSTILE)
    pages = ["/", "/decisions", "/policy", link("/queue/", HOSTILE), link("/decision", id=one.id, at=str(one.at_ms))]
    for url in pages:
        found = here.get(url)
        assert found.status == 200, url
        assert b"<script>alert" not in found.body
        assert b"49" not in found.body or b"{{7*7}}" in found.body
        assert HOSTILE in text(found), url
    for wrong in (link("/queue/", HOSTILE + "x"), f"/nothing/{HOSTILE}"):
        assert b"<script>alert" not in here.get(wrong).body
