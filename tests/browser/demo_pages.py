"""Serves the pages of accountant and controller over a simulated cluster, and starts a real Chromium."""

from __future__ import annotations

import contextlib
import shutil
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx2
from playwright.sync_api import Browser, sync_playwright
from rich.console import Console

from accountant.wire.policy_models import Policy
from fairshare.controller.policy_file import PolicyFileWriter, PolicyLocation
from fairshare.usage.accountant_client import AccountantApi
from fairshare.web.page_authentication import PageAuthentication
from fairshare.web.page_routing import PageContext, PagesApp, link
from fairshare.web.policy_form import policy_text
from fairshare.web.policy_pages import ROUTES
from fairshare.web.queue_history import QueueHistory, ReportCache
from fairshare.web.what_if_worker import PreviewOrder, Previews, PreviewWorker
from gputally.base.clock import VirtualClock
from gputally.demo import results as summary
from gputally.demo.options import DemoOptions
from gputally.demo.pipeline import Pipeline
from gputally.demo.scenario import build
from gputally.demo.session import simulate
from gputally.server.https_server import serve
from tests.fairshare.web.controller_pages import settled

HEADING = "# Who is due how much of the cluster, and how the past counts.\n"


@dataclass(frozen=True)
class ControllerPages:
    """The running pages. policy: the file that they edit. pages: addresses by name."""

    url: str
    policy: Path
    pages: dict[str, str]


@contextlib.contextmanager
def controller_pages(
    folder: Path, scene: ReportCache, policy: Policy, accountant: str, now_ms: int, days: int
) -> Iterator[ControllerPages]:
    """Serve the controller's pages until the block ends. They have a finished preview of `days` days."""
    file = folder / "policy.yaml"
    file.write_text(policy_text(policy.model_dump(mode="json", by_alias=True, exclude_defaults=True), HEADING))
    clock = VirtualClock(now_ms)
    with AccountantApi(accountant) as client, contextlib.ExitStack() as after:
        previews = Previews(PreviewWorker(partial(AccountantApi, accountant)))
        after.callback(previews.close)
        place = PolicyLocation(file, PolicyFileWriter(file))
        context = PageContext(scene, QueueHistory(client, clock), previews, place, clock, 3600.0, accountant=accountant)
        url = after.enter_context(serve(PagesApp(context, PageAuthentication(None), ROUTES).observed(), "127.0.0.1", 0))
        other = policy.model_copy(update={"k": policy.k / 2, "queues": tuple(_heavier(policy))})
        text = policy_text(other.model_dump(mode="json", by_alias=True, exclude_defaults=True), HEADING)
        key = previews.start(PreviewOrder(policy, other, days, now_ms), text, edited=True)
        found = settled(previews, key, calm_s=120)
        assert found.state == "done", found.fault
        first = policy.queues[0].name
        weight = next(
            each
            for each in client.decisions(now_ms - days * 86_400_000, now_ms + 1)
            if each.kind == "weight" and each.subject != "*"
        )
        pages = {
            "shares": "/shares",
            "queue": link("/shares/queue/", first),
            "fairshare-decisions": "/shares/decisions",
            "fairshare-decision": link("/shares/decision", id=weight.id, at=str(weight.at_ms)),
            "policy": "/shares/policy",
            "preview": link("/shares/preview/", key),
        }
        yield ControllerPages(url, file, {name: url + path for name, path in pages.items()})


def _heavier(policy: Policy) -> Iterator[object]:
    """Return the queues, the first one with twice its weight."""
    for number, queue in enumerate(policy.queues):
        yield queue.model_copy(update={"weight": queue.weight * 2}) if number == 0 else queue


@dataclass(frozen=True)
class Site:
    """The running pages. out: the folder of the demo's files. job: the job with the most to show; node: the first node.
    decision: the path of a weight change. act: the journal number of a stored invoice."""

    url: str
    out: Path
    job: str
    node: str
    decision: str
    act: int
    controller: ControllerPages
    month: str = "2026-10"

    @property
    def pages(self) -> dict[str, str]:
        """Every page of the product by name."""
        lines = f"{self.url}/month/{self.month}/lines"
        return {
            "overview": f"{self.url}/",
            "explore": f"{self.url}/explore?compare=true",
            "group": f"{self.url}/group?by=queue&value=research",
            "explore-pivot": f"{self.url}/explore?by=team,day&across=day&measure=cost&where.team=research",
            "month": f"{self.url}/month/{self.month}",
            "team": f"{self.url}/team/research?month={self.month}",
            "lines": f"{lines}?account=allocated",
            "lines-of-team": f"{lines}?team=research&by=job",
            "jobs": f"{self.url}/jobs?start={self.month}-01",
            "savings": f"{self.url}/savings?month={self.month}",
            "waits": f"{self.url}/waits?start={self.month}-01",
            "job": f"{self.url}/job/{self.job}",
            "nodes": f"{self.url}/nodes",
            "node": f"{self.url}/node/{self.node}",
            "decisions": f"{self.url}/decisions",
            "why": f"{self.url}/{self.decision}",
            "prices": f"{self.url}/prices",
            "invoice": f"{self.url}/invoice/{self.month}",
            "invoices": f"{self.url}/invoices",
            "invoice-steps": f"{self.url}/invoices/{self.month}?since=31d",
            "audit": f"{self.url}/audit",
            "act": f"{self.url}/act/{self.act}",
            "proposals": f"{self.url}/proposals",
            "coverage": f"{self.url}/coverage",
            "report": (self.out / "report.html").resolve().as_uri(),
            **self.controller.pages,
        }


@contextlib.contextmanager
def demo_site(folder: Path, days: int) -> Iterator[Site]:
    """Run the demo for `days` and keep its pages up until the block ends."""
    scenario = build(DemoOptions(days=days))
    out = folder / "out"
    out.mkdir()
    scene = ReportCache()
    with (
        ExitStack() as after,
        Pipeline(scenario, folder, 0, observe=lambda report: scene.observe(report, scenario.policy)) as pipeline,
    ):
        results = simulate(scenario, pipeline, Console(quiet=True), out, threading.Event())
        summary.write_files(pipeline, results, out)
        start, end = scenario.start_ms, scenario.end_ms
        with httpx2.Client(base_url=pipeline.url, timeout=120) as asking:
            span = {"start": start, "end": end}
            jobs = asking.get("/v1/jobs", params=span).json()["jobs"]
            shown = max(jobs, key=_telling)
            lines = asking.get("/v1/usage", params={**span, "by": "cluster,node"}).json()["lines"]
            first = min((line["key"]["cluster"], line["key"]["node"]) for line in lines)
            decided = asking.get("/v1/decisions", params={**span, "end": end + 1, "limit": 100}).json()
            weight = next(one for one in decided if one["kind"] == "weight" and one["subject"] != "*")
            act = _invoiced(asking)
        controller = after.enter_context(
            controller_pages(folder, scene, scenario.policy, pipeline.url, end, min(days, 7))
        )
        decision = f"decisions/{weight['at_ms']}/{weight['id']}"
        yield Site(pipeline.url, out, shown["id"], "/".join(first), decision, act, controller)


def _telling(job: dict[str, Any]) -> tuple[bool, bool, float]:
    """Rank a job by what its page shows: both busy and idle time, then epochs, then cost."""
    used = job["accounts_gpu_us"]
    busy = used["busy"] / (sum(used.values()) or 1)
    return 0.2 < busy < 0.95, job["epochs"] > 0, float(job["cost"] or 0)


def _invoiced(asking: httpx2.Client) -> int:
    """Store an invoice of the month that agrees with the ledger for one GPU model only, and return its number."""
    lines = asking.get("/v1/statement", params={"month": Site.month}).json()["lines"]
    costs: dict[str, float] = {}
    for line in lines:
        costs[line["gpu_model"]] = costs.get(line["gpu_model"], 0.0) + float(line["cost"] or 0)
    currency = asking.get("/v1/prices").json()["currency"]
    invoiced = [
        {
            "item": f"gpu-node-{n}.8x",
            "gpu_model": model,
            "amount": f"{cost * (1 + n * 0.013):.2f}",
            "currency": currency,
        }
        for n, (model, cost) in enumerate(sorted(costs.items()))
    ]
    invoiced.append({"item": "network egress", "amount": "218.40", "currency": currency})
    body = {"source": "provider-2026-10.csv", "lines": invoiced}
    asking.post(f"/v1/reconciliation/{Site.month}", params={"keep": "true"}, json=body).raise_for_status()
    acts = asking.get("/v1/audit").json()["acts"]
    return int(next(act["number"] for act in acts if act["kind"] == "invoiced"))


@contextlib.contextmanager
def chromium() -> Iterator[Browser]:
    """Start the distribution's Chromium; it can only reach this machine."""
    path = shutil.which("chromium")
    if path is None:
        raise RuntimeError("no chromium on this machine: scripts/setup-real.sh installs it")
    quiet = ["--disable-background-networking", "--disable-component-update", "--disable-sync", "--no-first-run"]
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-quic", *quiet])
        try:
            yield browser
        finally:
            browser.close()
