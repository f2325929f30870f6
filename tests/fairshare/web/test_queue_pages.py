"""The pages of the controller: access, content, escaping, history, and their composition from settings."""

from __future__ import annotations

import csv
import io
import re
import threading
from base64 import b64encode
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from html import unescape
from pathlib import Path
from queue import Queue

import httpx2
import pytest
import structlog
from starlette.responses import Response

from accountant.wire.policy_models import Decision, Policy
from accountant.wire.usage_cost_and_job_models import Dimension, UsageLine
from fairshare.composition import serve_pages
from fairshare.controller.cycle_report import TargetReport, WriteOutcome
from fairshare.controller.policy_file import (
    PolicyConfigMapWriter,
    PolicyFileChanged,
    PolicyNotWritten,
    digest,
    policy_writer,
)
from fairshare.core.queues_and_weights import Standing
from fairshare.core.settings import ControllerSettings, load
from fairshare.usage.accountant_client import AccountantApi
from fairshare.web import queue_pages, svg_plots
from fairshare.web.page_authentication import MOST_BYTES
from fairshare.web.page_routing import TURNS, PageRoute, PagesApp, RequestContext, link
from fairshare.web.policy_pages import ROUTES
from fairshare.web.queue_history import (
    CACHED_MS,
    EVERY_MS,
    MOST_ASKING,
    MOST_CACHED,
    MOST_NAMED,
    MOST_SAMPLES,
    QueueHistory,
    ReportCache,
)
from fairshare.web.svg_plots import PlotLine
from gputally.base.clock import VirtualClock
from gputally.base.errors import AccountantUnavailable, SettingsFault
from gputally.base.units import MS_PER_HOUR, US_PER_HOUR
from gputally.kubernetes.memory_cluster import MemoryCluster
from gputally.kubernetes.objects import CONFIG_MAP
from gputally.server.https_server import serve
from gputally.server.tokens_and_grants import new_token
from tests.fairshare import samples
from tests.fairshare.builders import object_of
from tests.fairshare.conftest import NOW_MS, Make
from tests.fairshare.scheduler_kinds import KINDS
from tests.fairshare.web.controller_pages import (
    LEAVES,
    USED,
    Answer,
    Stage,
    addresses,
    ask,
    published_sample,
    stage,
    text,
    usage_line,
)


@pytest.fixture
def here(tmp_path: Path) -> Stage:
    """The pages after one cycle."""
    return stage(tmp_path, cycles=1)


def test_shares_are_sorted_by_every_column_and_the_order_stays_when_a_weight_is_tried(here: Stage) -> None:
    """Without an order a queue stands above those below it; what is unknown is last."""
    answer = here.get("/shares?queue=vision&weight=7")
    usual = answer.body.decode()
    assert answer.status == 200
    assert "controller-pages#" in usual
    links = [unescape(one) for one in re.findall(r'href="(/shares\?[^"]*sort=[^"]+)"', usual)]
    assert len(links) == sum(map(len, queue_pages.TABLES.columns.values()))
    names = re.findall(r'<th class="t name[^"]*"[^>]*><a[^>]*>([^<]*)<', usual)
    for address in links:
        assert "queue=vision" in address
        assert "weight=7" in address
        answer = here.get(address.partition("#")[0])
        assert answer.status == 200, address
        shown = answer.body.decode()
        assert shown.count("aria-sort") == 1
        assert sorted(re.findall(r'<th class="t name[^"]*"[^>]*><a[^>]*>([^<]*)<', shown)) == sorted(names)
        assert f'id="{address.partition("#")[2]}"' in shown
    used = here.get("/shares?sort=shares.used:desc").body.decode()
    of_window = [
        float(part) for part in re.findall(r"([\d.]+)\s%", " ".join(re.findall(r'data-label="Used"[^>]*>[^<]*', used)))
    ]
    assert of_window == sorted(of_window, reverse=True)
    assert len(of_window) == len(names)
    refused = here.get("/shares?sort=shares.usde")
    assert refused.status == 422
    assert "shares.usde" in unescape(refused.body.decode())


HOSTILE = "<script>alert(1)</script>\"'&{{7*7}}"


ROLES = {"": 401, "unknown": 401, "ingest": 403, "progress": 403}
"""The roles that no page accepts, with the status of the refusal."""


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
    for url in ("/shares/static/style.css", "/shares/static/pages.js", "/favicon.ico"):
        assert guarded.get(url).status == 200
    assert guarded.get("/nothing").status == 401
    assert guarded.get("/nothing", "both").status == 404
    refused = text(guarded.get("/shares"))
    assert "vision" not in refused
    assert guarded.place.path not in refused


def test_a_bearer_may_be_a_basic_password(guarded: Stage) -> None:
    token = b64encode(f"me:{guarded.tokens['both']}".encode()).decode()
    assert guarded.get("/shares", authorization=f"Basic {token}").status == 200
    assert guarded.get("/shares", authorization="Basic !!").status == 401
    assert guarded.get("/shares", authorization="Digest x").status == 401


def test_an_expired_or_revoked_token_is_out(tmp_path: Path) -> None:
    here = stage(tmp_path, guarded=True, cycles=1)
    assert here.get("/shares", "both").status == 200
    (tmp_path / "tokens.yaml").write_text("tokens: []\n")
    here.clock.advance(2_000)
    assert here.get("/shares", "both").status == 401


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
    assert guarded.post("/shares/policy/apply", form, "both", mark, **headers).status == 403
    assert guarded.file.read_text() == before


def test_one_callers_form_is_not_anothers(guarded: Stage) -> None:
    assert guarded.mark("both") != guarded.mark("admin")
    assert guarded.post("/shares/policy", {}, "admin", guarded.mark("both")).status == 403


def test_without_tokens_only_loopback_names_are_answered(open_stage: Stage) -> None:
    hosts = {"localhost:9404": 200, "127.0.0.1:1": 200, "[::1]:9404": 200, "gpu.evil.example": 403, "": 403}
    for host, status in hosts.items():
        assert open_stage.get("/shares", host=host).status == status


@pytest.mark.parametrize("url", ["/shares", "/shares/policy", "/nothing", "/shares/static/pages.js"])
def test_every_answer_is_framed(open_stage: Stage, url: str) -> None:
    found = open_stage.get(url)
    for rule in ("default-src 'none'", "script-src 'self'", "frame-ancestors 'none'"):
        assert rule in found.headers["Content-Security-Policy"]
    static = url.startswith("/shares/static/")
    assert found.headers["Cache-Control"] == ("private, no-cache" if static else "no-store")
    again = open_stage.get(url, if_none_match=found.headers.get("ETag", ""))
    assert again.status == (304 if static else found.status)
    assert b"http://" not in found.body.replace(b"http://accountant/", b"").replace(b"http://www.w3.org", b"")


def test_a_request_of_the_wrong_kind_says_which_is_right(open_stage: Stage) -> None:
    found = open_stage.post("/shares/decisions", {})
    assert (found.status, set(found.headers["Allow"].split(", "))) == (405, {"GET", "HEAD"})


def test_shares_show_every_queue_in_its_tree(open_stage: Stage) -> None:
    shown = text(open_stage.get("/shares"))
    at = [shown.index(f">{name}</a>") for name in ("research", *LEAVES)]
    assert at == sorted(at)
    for words in ("vision: used 33.0 % of the capacity, entitled to 16.2 %", "Owed", "dry-run"):
        assert words in shown
    assert "standby" not in shown


def test_shares_say_which_queue_is_above_its_guarantee(open_stage: Stage) -> None:
    told = text(open_stage.get("/shares"))
    rows = dict(re.findall(r"<tr><th[^>]*><a [^>]*>(\w+)</a>(.*?)</tr>", told))
    assert "16.0 above its guarantee" in rows["vision"], "24 held, 8 guaranteed"
    assert "above" not in rows["serving"], "12 of 12"


def test_the_file_of_shares_has_the_queues_of_the_page_in_its_order(open_stage: Stage) -> None:
    rows = list(csv.DictReader(io.StringIO(open_stage.get("/shares/shares.csv").body.decode())))
    shown = text(open_stage.get("/shares"))
    assert rows
    assert all(row["queue"] in shown and float(row["entitled_part"]) >= 0 for row in rows)
    names = [(row["target"], row["queue"]) for row in rows]
    by_name = open_stage.get("/shares/shares.csv?sort=shares.queue").body.decode()
    assert [(row["target"], row["queue"]) for row in csv.DictReader(io.StringIO(by_name))] == sorted(names)
    assert open_stage.get("/shares/shares.csv?sort=shares.nothing").status == 422


def test_another_weight_is_tried_on_the_page_of_shares(open_stage: Stage) -> None:
    tried = text(open_stage.get("/shares?queue=robotics&weight=2"))
    row = tried.partition("with weight 2 of robotics")[2].partition(">robotics</th>")[2].partition("</tr>")[0]
    assert "1 → 2" in row
    assert "▲ +" in row
    for wrong in ("queue=robotics&weight=much", "queue=robotics&weight=-1", "queue=nobody&weight=1"):
        told = text(open_stage.get(f"/shares?{wrong}"))
        assert 'id="wrong"' in told
        assert "with weight" not in told


def test_a_team_learns_no_weight_of_others_by_trying(guarded: Stage) -> None:
    assert 'name="weight"' in text(guarded.get("/shares?queue=vision&weight=2", "read"))
    told = text(guarded.get("/shares?queue=vision&weight=2", "team"))
    assert "with weight" not in told
    assert 'name="weight"' not in told


def test_before_the_first_cycle_it_says_so(tmp_path: Path) -> None:
    here = stage(tmp_path, cycles=0)
    assert "first cycle has not ended" in text(here.get("/shares"))
    assert here.get("/shares/queue/vision").status == 503
    assert here.get("/shares/policy").status == 200


def test_a_hold_and_staleness_are_told(here: Stage) -> None:
    here.accountant.coverage = 0.5
    here.controller.cycle()
    shown = text(here.get("/shares"))
    assert "Weights are held: " in shown
    assert shown.count(">held</span>") == 6
    here.clock.advance(3_600_000)
    assert "1 h ago" in text(here.get("/shares"))


def test_a_standby_says_that_it_is_one(tmp_path: Path) -> None:
    here = stage(tmp_path, cycles=1, leading=False)
    for url in ("/shares", "/shares/queue/vision", "/shares/decisions", "/shares/policy"):
        assert "standby: reads and decides, publishes nothing" in text(here.get(url))


def test_a_queue_over_time_with_its_reasons(open_stage: Stage) -> None:
    shown = text(open_stage.get("/shares/queue/vision"))
    for words in ("From the root down", "prevents its publication", "weight", "held, by the ledger: "):
        assert words in shown
    assert re.search(r"due [\d.]+ GPUs now, holds 24, asks for 40", shown)
    (steps,) = re.findall(r"<dl class=\"figures\">(.*?)</dl>", shown.partition("Step by step")[2], re.DOTALL)
    assert re.findall(r"<dt[^>]*>(.*?)</dt>", steps)[:2] == ["Fair share", "Used"]
    assert not re.search(r"<dt[^>]*>(n|U|k|P|owed_gpu_h)</dt>", steps)
    assert open_stage.get("/shares/queue/nobody").status == 404


@pytest.mark.parametrize("name", ["vision", "students"])
def test_a_queues_use_stands_beside_the_capacity_of_which_it_is_a_part(open_stage: Stage, name: str) -> None:
    (weight,) = (one for one in open_stage.scene.now().report.targets[0].weights if one.queue == name)
    x = weight.explanation
    shown = text(open_stage.get(f"/shares/queue/{name}"))
    figures = re.findall(r"([\d,.]+) GPU-h of ([\d,.]+) GPU-h, ([\d.]+) %", shown)
    assert [tuple(float(one.replace(",", "")) for one in row) for row in figures] == [
        (pytest.approx(x.usage / US_PER_HOUR, abs=0.06), pytest.approx(x.capacity / US_PER_HOUR, abs=0.06),
         pytest.approx(x.u * 100, abs=0.06))
    ]  # fmt: skip


def test_the_books_are_asked_once_in_a_while(here: Stage) -> None:
    here.get("/shares/queue/vision")
    usage = here.books.asked
    here.get("/shares/queue/vision")
    assert here.books.asked - usage == 1  # its decisions alone


def test_decisions_are_listed_filtered_and_told(open_stage: Stage) -> None:
    shown = text(open_stage.get("/shares/decisions?queue=vision&kind=weight&days=1"))
    assert "the inputs of this cycle" not in shown
    assert shown.count("<tr><th") == sum(each.subject == "vision" for each in open_stage.accountant.decisions) + 1
    assert "The controller made no such decision" in text(open_stage.get("/shares/decisions?kind=preemption"))
    assert open_stage.get("/shares/decisions?days=9999&kind=%3Cx%3E&queue=" + "q" * 4000).status == 200
    one = next(each for each in open_stage.accountant.decisions if each.subject == "vision")
    told = text(open_stage.get(f"/shares/decision?id={one.id}&at={one.at_ms}"))
    for words in ("Why the weight of vision changed", "63.46 %", "Owed", "New weight"):
        assert words in told
    assert "owed_gpu_h" not in told.partition("The record")[0]
    for wrong in (f"/shares/decision?id=x&at={one.at_ms}", "/shares/decision?id=x&at=soon", "/shares/decision"):
        assert open_stage.get(wrong).status == 404


def test_a_decision_tells_what_changed_the_weight_since_the_one_before(tmp_path: Path) -> None:
    here = stage(tmp_path, cycles=0, text=published_sample().replace("dry-run", "enforce"))
    pages = []
    for used in (0.1, 0.6):
        here.accountant.spend(**{**USED, "vision": used})
        here.clock.advance(7_200_000)
        here.controller.cycle()
        one = next(each for each in reversed(here.accountant.decisions) if each.subject == "vision")
        pages.append(text(here.get(f"/shares/decision?id={one.id}&at={one.at_ms}")))
    first, second = pages
    assert "What changed it since the previous decision" not in first
    for words in ("What changed it since the previous decision", "Its own usage", "Weight at the previous decision"):
        assert words in second


def test_the_formula_is_written_out(tmp_path: Path) -> None:
    queues = "  - {name: a, weight: 3, refs: ['fake:research']}\n  - {name: b, refs: ['fake:robotics']}\n"
    source = f"k: 2\ntargets: {{fake: {{mode: weight}}}}\nqueues:\n{queues}"
    here = stage(tmp_path, text=source, cycles=0)
    here.accountant.spend(a=0.5, b=0.1)
    here.controller.cycle()
    one = next(each for each in here.accountant.decisions if each.subject == "a")
    assert "max(0, 0.75 + 2 × (0.75 − 0.5))" in text(here.get(f"/shares/decision?id={one.id}&at={one.at_ms}"))


@pytest.mark.parametrize(
    ("a", "b", "said"),
    [(0.3, 0.02, ["2.0% for 25.0%"]), (0.3, 0.2, []), (0.9, 0.02, []), (0.7, 0.3, [])],
)
def test_a_weight_against_its_own_use_is_explained_by_its_siblings(
    tmp_path: Path, a: float, b: float, said: list[str]
) -> None:
    """a used less than its share, and yet its weight is below the configured one, because b used still less of its."""
    queues = "  - {name: a, weight: 3, refs: ['fake:research']}\n  - {name: b, refs: ['fake:robotics']}\n"
    here = stage(tmp_path, text=f"k: 0.5\ntargets: {{fake: {{mode: weight}}}}\nqueues:\n{queues}", cycles=0)
    here.accountant.spend(a=a, b=b)
    here.controller.cycle()
    (own,) = (one.explanation for one in here.scene.now().report.targets[0].weights if one.queue == "a")
    assert bool(said) == (own.u < own.n and own.value < own.configured)
    shown = text(here.get("/shares/queue/a"))
    assert re.findall(r"b \(([\d.]+% for [\d.]+%)\)", shown) == said


def test_without_the_accountant_its_own_memory_is_shown(tmp_path: Path) -> None:
    here = stage(tmp_path)
    one = next(each for each in here.scene.decisions() if each.subject == "vision")
    here.accountant.down = True
    for url in (
        "/shares/queue/vision",
        "/shares/decisions?queue=vision",
        f"/shares/decision?id={one.id}&at={one.at_ms}",
    ):
        found = here.get(url)
        assert found.status == 200
        assert "63.5%" in text(found)
    assert "connection refused" in text(here.get("/shares/decisions"))


def test_hostile_names_are_text_everywhere(tmp_path: Path) -> None:
    source = f"queues:\n  - name: {HOSTILE!r}\n    refs: ['fake:research']\n    team: {HOSTILE!r}\n"
    here = stage(tmp_path, text=source.replace("\\'", "''"), cycles=2)
    one = next(each for each in here.accountant.decisions if each.subject == HOSTILE)
    pages = [
        "/shares",
        "/shares/decisions",
        "/shares/policy",
        link("/shares/queue/", HOSTILE),
        link("/shares/decision", id=one.id, at=str(one.at_ms)),
    ]
    for url in pages:
        found = here.get(url)
        assert found.status == 200, url
        assert b"<script>alert" not in found.body
        assert b"49" not in found.body or b"{{7*7}}" in found.body
        assert HOSTILE in text(found), url
    for wrong in (link("/shares/queue/", HOSTILE + "x"), f"/nothing/{HOSTILE}"):
        assert b"<script>alert" not in here.get(wrong).body


Served = tuple[str, Queue[tuple[str, str, int]]]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    told: Queue[tuple[str, str, int]] = Queue()
    here = stage(tmp_path_factory.mktemp("served"), cycles=1)
    with serve(here.site.observed(lambda *said: told.put(said[:3])), "127.0.0.1", 0) as url:
        yield url, told


def test_requests_arrive_as_they_were_sent(served: Served) -> None:
    url, told = served
    found = httpx2.get(f"{url}/shares/queue/a%2Fb%20c?days=7&days=8")
    assert "no queue 'a/b c'" in unescape(found.text)
    assert found.headers["X-Content-Type-Options"] == "nosniff"
    assert httpx2.post(f"{url}/shares/policy", data={"k": "", "name": "ü &"}).status_code == 403
    assert [told.get(timeout=60) for _ in range(2)] == [
        ("GET", "/shares/queue/a%2Fb%20c", 404),
        ("POST", "/shares/policy", 403),
    ]


@pytest.mark.parametrize(
    ("content", "kind", "status", "why"),
    [
        (b"x" * (MOST_BYTES + 1), "application/x-www-form-urlencoded", 413, "more than 2097152 bytes"),
        (b"{}", "application/json", 415, "send forms as application/x-www-form-urlencoded"),
        (b"a=1&" * 30_000, "application/x-www-form-urlencoded", 400, "not a form of at most 25000 fields"),
        (b"a=\xff", "application/x-www-form-urlencoded", 400, "not a form"),
    ],
)
def test_bodies_are_bounded(served: Served, content: bytes, kind: str, status: int, why: str) -> None:
    url, _ = served
    with httpx2.Client() as client:
        try:
            found = client.post(f"{url}/shares/policy", content=content, headers={"Content-Type": kind})
        except httpx2.TransportError:
            assert status == 413, "it hung up before all of it was sent"
        else:
            assert found.status_code == status
            assert why in found.text


@pytest.mark.parametrize(
    ("environ", "fault"),
    [
        ({"PAGES_LISTEN": "0.0.0.0:9404"}, "can be reached from elsewhere: set pages_tokens or pages_callers"),
        ({"PAGES_CALLERS": "/x", "PAGES_SESSION_KEY": "/k"}, "together with pages_public_url and pages_session_key"),
        ({"PAGES_PUBLIC_URL": "gpus.example"}, "must have the form"),
        ({"PAGES_CERTIFICATE": "/x"}, "PAGES_CERTIFICATE: pages_certificate and pages_key go together"),
        ({"PAGES_APPLY": "yes"}, "must have the form"),
        ({"PAGES_ACCOUNTANT": "accountant"}, "must have the form"),
        ({"PAGES_LISTEN": "9404"}, "GPUTALLY_FAIRSHARE_PAGES_LISTEN: not an address"),
    ],
)
def test_settings_that_open_too_much_are_refused(environ: dict[str, str], fault: str) -> None:
    given = {f"GPUTALLY_FAIRSHARE_{key}": value for key, value in environ.items()} | {"GPUTALLY_FAIRSHARE_POLICY": "p"}
    with pytest.raises(SettingsFault, match=r"(?i)pages_") as raised:
        load(None, given, {})
    assert fault in str(raised.value)
    assert str(raised.value).startswith("GPUTALLY_FAIRSHARE_PAGES_")


def test_composed_from_settings_with_tokens_and_an_act_that_is_told(tmp_path: Path) -> None:
    structlog.reset_defaults()  # a program that ran in this process may have silenced what is no error
    here = stage(tmp_path, cycles=1)
    token, entry = new_token("ana", ("read", "policy"))
    listed = tmp_path / "tokens.yaml"
    listed.write_text(f"tokens:\n{entry}")
    settings = ControllerSettings(
        policy=here.file, pages_listen="127.0.0.1:0", pages_tokens=listed, pages_apply="file",
        url="http://127.0.0.1:1", status_namespace="gputally",
    )  # fmt: skip
    cluster = MemoryCluster(KINDS, samples.cluster_objects())
    with (
        structlog.testing.capture_logs() as logged,
        AccountantApi(settings.url) as client,
        serve_pages(settings, here.scene, client, VirtualClock(NOW_MS), cluster) as url,
        httpx2.Client(base_url=url, headers={"Authorization": f"Bearer {token}"}) as ana,
    ):
        assert httpx2.get(url + "/shares").status_code == 401
        form = ana.get("/shares/policy").text
        mark, base = (form.partition(f'name="{name}" value="')[2].partition('"')[0] for name in ("form_token", "base"))
        text = here.file.read_text().replace("k: 1.0", "k: 3.0")
        assert (
            ana.post("/shares/policy/apply", data={"form_token": mark, "base": base, "text": text}).status_code == 200
        )
    assert here.file.read_text() == text
    act = next(each for each in logged if each["event"] == "policy_applied")
    assert (act["by"], act["before"] != act["now"]) == ("ana", True)
    assert act["changes"] == ["k: 1 -> 3"]
    assert [event.reason for event in cluster.events] == ["PolicyApplied"]
    assert token not in str(logged)


def test_a_configmap_is_taken_over_and_written_and_never_over_another_manager(either_of: Make) -> None:
    """The same on a real API server, where the field belongs to its creator."""
    data = {"data": {"policy.yaml": "k: 1\n", "other": "kept"}}
    cluster = either_of([{**object_of(CONFIG_MAP, "policy", namespace="default"), **data}])
    keep = policy_writer("configmap:default/policy", Path("unused"), cluster)
    assert isinstance(keep, PolicyConfigMapWriter)
    keep.write("k: 2\n", digest("k: 1\n"))
    assert cluster.get(CONFIG_MAP, "policy", "default")["data"] == {"policy.yaml": "k: 2\n", "other": "kept"}
    keep.write("k: 3\n", digest("k: 2\n"))
    with pytest.raises(PolicyFileChanged, match="differs from the text in the form"):
        keep.write("k: 4\n", digest("k: 2\n"))
    assert cluster.get(CONFIG_MAP, "policy", "default")["data"]["policy.yaml"] == "k: 3\n"
    with pytest.raises(PolicyNotWritten):
        PolicyConfigMapWriter(cluster, "default", "none").write("", "")


def test_a_weights_state_is_what_became_of_it(tmp_path: Path) -> None:
    here = stage(tmp_path)
    snapshot = here.scene.now()
    apply = next(each for each in snapshot.report.targets[0].outcomes).apply
    made = {"applied": "published", "would-apply": "tried", "contested": "trouble", "deferred": "trouble"}
    for result, state in made.items():
        outcomes = (WriteOutcome(apply, result, "owned by helm"),)
        target = TargetReport("fake", "enforce", standings={apply.queue: Standing(8, 4, 1.0)}, outcomes=outcomes)
        changed = queue_pages.targets(snapshot.policy, replace(snapshot.report, targets=(target,)))[0]
        row = next(each for each in changed.rows if each.name == apply.queue)
        assert row.state == state
        assert ("owned by helm" in row.why) == (state == "trouble")
        assert {each.state for each in changed.rows if each.name != apply.queue} == {"none"}


def test_samples_are_thinned_bounded_and_forgotten_with_their_queue(here: Stage) -> None:
    snapshot = here.scene.now()
    assert snapshot is not None
    scene = ReportCache()
    for n in range(MOST_SAMPLES + 10):
        scene.observe(replace(snapshot.report, at_ms=n * EVERY_MS), snapshot.policy)
        scene.observe(replace(snapshot.report, at_ms=n * EVERY_MS + 1), snapshot.policy)
    found = scene.samples("fake", "vision")
    assert len(found) == MOST_SAMPLES
    assert found[-1].at_ms == (MOST_SAMPLES + 9) * EVERY_MS
    smaller = snapshot.policy.model_copy(update={"queues": snapshot.policy.queues[:1]})
    scene.observe(snapshot.report, smaller)
    assert scene.samples("fake", "vision") == ()


def test_plots_say_in_words_what_they_show_and_keep_names_in_their_place() -> None:
    svg = svg_plots.over_time("<b>", [PlotLine("held", "a&b", [(0, 1.0), (50, 3.0)], area=True, steps=True)], 0, 100)
    assert "&lt;b&gt;" in svg
    assert "a&amp;b: 1.0 to 3.0 GPUs, at the end 3.0" in svg
    assert svg_plots.over_time("x", [PlotLine("due", "nothing", [])], 0, 100).count("polyline") == 0
    assert "used – of the capacity" in svg_plots.bullet("x", None, 0.5, 1.0)
    for span in (3_600_000, 86_400_000, 7 * 86_400_000, 31 * 86_400_000):
        assert 2 <= len(svg_plots.ticks(NOW_MS, NOW_MS + span)) <= 10
    assert [svg_plots.nice(value) for value in (0, 0.3, 1, 7, 64, 401)] == [1.0, 0.4, 1.0, 10.0, 100.0, 500.0]


HISTORY_MS = 1_791_000_000_000 // MS_PER_HOUR * MS_PER_HOUR + 5 * 60_000
MANY = 3 * MOST_NAMED


class Ledger:
    """Each queue held one GPU in every hour but the second, which was not metered; so did `else`."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, ...] | None] = []

    def usage(
        self,
        start_ms: int,
        end_ms: int,
        by: Sequence[Dimension],
        where: Mapping[Dimension, Sequence[str]] | None = None,
    ) -> Iterator[UsageLine]:
        assert tuple(by) == ("hour",)
        queues = tuple((where or {}).get("queue", ())) or None
        self.asked.append(queues)
        gpus = len([name for name in queues if name != "idle"]) if queues else MANY + 2
        for number, at_ms in enumerate(range(start_ms, end_ms, MS_PER_HOUR)):
            if gpus and number != 1:
                yield usage_line(at_ms, gpus * US_PER_HOUR)

    def decisions(self, start_ms: int, end_ms: int) -> Iterator[Decision]:
        raise AssertionError("decisions are not queried here")


def org_policy() -> Policy:
    queues: list[dict[str, object]] = [{"name": "org"}, {"name": "idle"}]
    queues += [{"name": f"team-{n}", "parent": "org"} for n in range(MANY)]
    return Policy.model_validate({"schema": 1, "queues": queues})


@pytest.fixture
def books() -> Ledger:
    return Ledger()


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock(HISTORY_MS)


@pytest.fixture
def history(books: Ledger, clock: VirtualClock) -> QueueHistory:
    return QueueHistory(books, clock)


def test_a_queue_holds_what_all_below_hold_and_unknown_hours_are_left_out(history: QueueHistory) -> None:
    end_ms = HISTORY_MS // MS_PER_HOUR * MS_PER_HOUR
    hours = [float(end_ms - n * MS_PER_HOUR) for n in (4, 2, 1)]
    assert history.held(org_policy(), "org", 4) == [(at, MANY + 1.0) for at in hours]
    assert history.held(org_policy(), "team-7", 4) == [(at, 1.0) for at in hours]
    # Nothing, in hours in which others held something.
    assert history.held(org_policy(), "idle", 4) == [(at, 0.0) for at in hours]


def test_questions_name_few_queues_and_are_asked_once_in_a_while(
    books: Ledger, history: QueueHistory, clock: VirtualClock
) -> None:
    first = history.held(org_policy(), "org", 4)
    assert all(queues is None or len(queues) <= MOST_NAMED for queues in books.asked)
    named = [name for queues in books.asked for name in queues or ()]
    assert sorted(named) == sorted({"org", *(f"team-{n}" for n in range(MANY))})
    before = len(books.asked)
    assert history.held(org_policy(), "org", 4) == first
    assert len(books.asked) == before
    history.held(org_policy(), "team-7", 4)  # which hours are known is known
    assert books.asked[before:] == [("team-7",)]
    clock.advance(CACHED_MS)
    assert history.held(org_policy(), "org", 4) == first
    assert len(books.asked) == 2 * before + 1


def test_of_more_series_than_are_kept_the_least_recently_used_goes(books: Ledger, history: QueueHistory) -> None:
    for n in range(MOST_CACHED):
        history.held(org_policy(), f"team-{n}", 1)
    before = len(books.asked)
    history.held(org_policy(), f"team-{MOST_CACHED - 1}", 1)
    assert books.asked[before:] == []
    history.held(org_policy(), "team-0", 1)
    assert books.asked[before:] == [("team-0",)]


class HangingLedger(Ledger):
    """Answers nothing until it is released."""

    def __init__(self) -> None:
        super().__init__()
        self.asking = threading.Semaphore(0)
        self.released = threading.Event()

    def decisions(self, start_ms: int, end_ms: int) -> Iterator[Decision]:
        self.asking.release()
        self.released.wait()
        yield from ()


def test_while_the_accountant_hangs_a_few_pages_wait_and_others_are_told_so(clock: VirtualClock) -> None:
    books = HangingLedger()
    history = QueueHistory(books, clock)
    with ThreadPoolExecutor(MOST_ASKING + 2) as threads:
        try:
            waiting = [threads.submit(history.decisions, 0, 1, 1) for _ in range(MOST_ASKING)]
            assert all(books.asking.acquire(timeout=60) for _ in waiting)
            others = [threads.submit(history.decisions, 0, 1, 1), threads.submit(history.held, org_policy(), "org", 4)]
            for other in others:
                assert isinstance(other.exception(timeout=60), AccountantUnavailable)
        finally:
            books.released.set()
        assert [one.result(timeout=60) for one in waiting] == [[]] * MOST_ASKING
    assert history.held(org_policy(), "team-7", 1)


def test_the_pages_of_one_caller_leave_turns_to_others(tmp_path: Path) -> None:
    here = stage(tmp_path, cycles=1, guarded=True)
    running, released = threading.Semaphore(0), threading.Event()

    def slow(_: RequestContext) -> Response:
        running.release()
        released.wait()
        return Response()

    site = PagesApp(
        here.site.context, here.site._authentication, (*ROUTES, PageRoute("GET", "/slow", "read", slow, True))
    )
    with ThreadPoolExecutor(2 * TURNS.running + 1) as threads:

        def get(url: str, scope: str) -> Future[Answer]:
            headers = {"host": "localhost", "authorization": f"Bearer {here.tokens[scope]}"}
            return threads.submit(ask, site, "GET", url, None, headers)

        try:
            slow_ones = [get("/slow", "read") for _ in range(2 * TURNS.running)]
            assert running.acquire(timeout=60)
            assert get("/shares", "both").result(timeout=60).status == 200
        finally:
            released.set()
        assert {one.result(timeout=60).status for one in slow_ones} == {200}
