"""Pages of money in a real Chromium with names and amounts as long as they get: no figure is beyond an edge."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

# As in the other tests of pages: brought by the group `real`.
pytest.importorskip("playwright", reason="make test-real installs the browser driver", exc_type=ImportError)

from playwright.sync_api import Browser, Page

from accountant.composition import Service
from gputally.base.clock import VirtualClock
from gputally.server.https_server import serve
from tests.browser.demo_pages import chromium
from tests.http.conftest import NOW_MS, client_of, encoded, settings_in
from tests.usage_records import QUARTER_MS, batch, interval, pod_facts, pod_holder

pytestmark = pytest.mark.real

TEAMS = ("language-models-research", "platform-evaluation-team", "vision")
PRICES = "schema: 1\ncurrency: EUR\nrows:\n" + "".join(
    f"  - {{id: {name}, model: {model}, price: {price}, per: gpu-hour, valid_from: 2026-01-01, as_of: 2026-01-01,"
    " basis: whole-instance, source: 'framework contract 2026-0173 with ACME Cloud Europe GmbH, annex 4'}\n"
    for name, model, price in (
        ("h100-sxm-80gb-reserved-2026", "H100", "123456.789012"),
        ("a100-40gb-sxm-on-demand-2026", "A100-40GB", "23451.12345678"),
    )
)
NODE = "gpu-node-eu-west-1a-0017.example.internal"
JOB = "PyTorchJob/finetune-an-instruct-model-with-adapters-r64"
PAGES = {
    "overview": "/", "jobs": "/jobs", "job": f"/job/prod~vision~{JOB.replace('/', '~')}-2", "month": "/month/2026-11",
    "lines": "/month/2026-11/lines", "lines by node": "/month/2026-11/lines?account=allocated&by=node",
    "team": f"/team/{TEAMS[0]}?month=2026-11", "nodes": "/nodes", "node": f"/node/prod/{NODE}", "prices": "/prices",
    "explore": "/explore?by=cluster,namespace,job&compare=true",
    "group": f"/group?by=team&value={TEAMS[0]}",
    "explore, side by side": "/explore?by=team,day&across=day",
    "coverage": "/coverage", "decisions": "/decisions", "proposals": "/proposals",
}  # fmt: skip
BEYOND = """() => {
  const found = [];
  for (const text of document.querySelectorAll('.card .value, .card .note')) {
    const inside = document.createRange();
    inside.selectNodeContents(text);
    const beyond = inside.getBoundingClientRect().right - text.closest('.card').getBoundingClientRect().right;
    if (beyond > 0) found.push(['tile', text.textContent.trim(), beyond]);
  }
  for (const box of document.querySelectorAll('.scroll:has(table)')) {
    const beyond = box.scrollWidth - box.clientWidth;
    if (beyond > 1) found.push(['table', box.querySelector('caption').textContent, beyond]);
  }
  return found;
}"""


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    settings = settings_in(
        tmp_path_factory.mktemp("long"), prices=PRICES,
        inventory="schema: 1\ncluster: prod\nnamespaces:\n" + "".join(f"  - {{name: {t}, team: {t}}}\n" for t in TEAMS),
    )  # fmt: skip
    begin = NOW_MS - 40 * QUARTER_MS
    rows, facts = [], []
    for number in range(6):
        team, pod = TEAMS[number % 3], f"{JOB.partition('/')[2]}-{number}-worker-0"
        times = {"created_ms": begin, "scheduled_ms": begin, "started_ms": begin}
        facts.append(pod_facts(pod, begin, namespace=team, node=NODE, workload=f"{JOB}-{number}", **times))
        model = "NVIDIA H100 80GB HBM3" if number % 2 else "NVIDIA A100-SXM4-40GB"
        rows += [
            interval(
                at, f"GPU-8a7b6c5d-{number:04d}-4e3f-9a1b", pod_holder(pod, team), gpu_model=model, busy_us=617_000_123
            )
            for at in range(begin, NOW_MS, QUARTER_MS)
        ]
    with Service(settings, VirtualClock(NOW_MS)) as service:
        found = batch(rows, facts, cluster="prod", node=NODE)
        client_of(service).post("/v1/usage", content=encoded(found)).raise_for_status()
        with serve(service.app, "127.0.0.1", 0) as address:
            yield address


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as running:
        yield running


@pytest.fixture(scope="module", params=PAGES)
def opened(request: pytest.FixtureRequest, browser: Browser, url: str) -> Iterator[Page]:
    """Every page, opened once. No script of a page looks at its width."""
    page = browser.new_page()
    try:
        answer = page.goto(url + PAGES[request.param], wait_until="networkidle")
        assert answer is not None
        assert answer.status == 200
        yield page
    finally:
        page.close()


@pytest.mark.parametrize("width", [390, 1280, 1440])
def test_no_figure_is_beyond_an_edge(opened: Page, width: int) -> None:
    opened.set_viewport_size({"width": width, "height": 900})
    assert opened.evaluate(BEYOND) == []


@pytest.fixture(scope="module")
def late(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """An accountant with late records of every team for a closed month."""
    clock = VirtualClock(NOW_MS)
    settings = settings_in(
        tmp_path_factory.mktemp("late"), prices=PRICES,
        inventory="schema: 1\ncluster: prod\nnamespaces:\n" + "".join(f"  - {{name: {t}, team: {t}}}\n" for t in TEAMS),
    )  # fmt: skip
    with Service(settings, clock) as service:
        for node in ("early", NODE):
            rows = [
                interval(at, f"GPU-{node}-{number}", pod_holder(f"{node}-{number}", TEAMS[number % 3]))
                for number in range(6)
                for at in range(NOW_MS - 40 * QUARTER_MS, NOW_MS, QUARTER_MS)
            ]
            found = batch(rows, cluster="prod", node=node)
            client_of(service).post("/v1/usage", content=encoded(found)).raise_for_status()
            if node == "early":
                clock.advance(40 * 86_400_000)
                closed = client_of(service).post(
                    "/v1/periods/2026-11/close", json={"reason": "one node", "acknowledge": ["coverage"]}
                )
                assert closed.status_code == 200, closed.text
        clock.advance(3_600_000)
        service.maintain()
        with serve(service.app, "127.0.0.1", 0) as address:
            yield address


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_late_changes_of_long_names_fit_on_a_phone(browser: Browser, late: str, scheme: str) -> None:
    context = browser.new_context(viewport={"width": 390, "height": 900}, color_scheme=scheme)
    try:
        page = context.new_page()
        page.goto(f"{late}/proposals", wait_until="networkidle")
        assert page.locator("tbody tr").count() > len(TEAMS)  # and the idle time
        assert page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth") <= 0
        assert page.evaluate(BEYOND) == []
    finally:
        context.close()
