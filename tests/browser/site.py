"""A simulated cluster with its pages up, and a real Chromium to look at them."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import httpx2
from playwright.sync_api import Browser, sync_playwright
from rich.console import Console

from fairshare.web.scene import Scene
from gputally.demo import summary
from gputally.demo.__main__ import simulate
from gputally.demo.pipeline import Pipeline
from gputally.demo.scenario import Options, build
from tests.browser.controller import ControllerPages, controller_pages


@dataclass(frozen=True)
class Site:
    """`url`: where the accountant's pages are. `out`: the files the demo leaves. month: the simulated one.
    job, node: the dearest one, and the first one. controller: the controller's pages."""

    url: str
    out: Path
    job: str
    node: str
    controller: ControllerPages
    month: str = "2026-10"

    @property
    def pages(self) -> dict[str, str]:
        """Every page of the product by name."""
        return {
            "overview": f"{self.url}/",
            "month": f"{self.url}/month/{self.month}",
            "team": f"{self.url}/team/research?month={self.month}",
            "jobs": f"{self.url}/jobs?month={self.month}",
            "job": f"{self.url}/job/{self.job}",
            "nodes": f"{self.url}/nodes",
            "node": f"{self.url}/node/{self.node}",
            "decisions": f"{self.url}/decisions",
            "prices": f"{self.url}/prices",
            "coverage": f"{self.url}/coverage",
            "report": (self.out / "report.html").as_uri(),
            **self.controller.pages,
        }


@contextlib.contextmanager
def demo_site(folder: Path, days: int) -> Iterator[Site]:
    """Run the demo for `days` and keep its pages up until the block ends."""
    scenario = build(Options(days=days))
    out = folder / "out"
    out.mkdir()
    scene = Scene()
    with (
        ExitStack() as after,
        Pipeline(scenario, folder, 0, observe=lambda report: scene.observe(report, scenario.policy)) as pipeline,
    ):
        results = simulate(scenario, pipeline, Console(quiet=True))
        summary.write_files(pipeline, results, out)
        start, end = scenario.start_ms, scenario.end_ms
        jobs = httpx2.get(f"{pipeline.url}/v1/jobs", params={"start": start, "end": end}, timeout=120).json()["jobs"]
        dearest = max(jobs, key=lambda job: float(job["cost"] or 0))
        lines = httpx2.get(
            f"{pipeline.url}/v1/usage", params={"start": start, "end": end, "by": "cluster,node"}
        ).json()["lines"]
        first = min((line["key"]["cluster"], line["key"]["node"]) for line in lines)
        controller = after.enter_context(
            controller_pages(folder, scene, scenario.policy, pipeline.url, end, min(days, 7))
        )
        yield Site(pipeline.url, out, dearest["id"], "/".join(first), controller)


@contextlib.contextmanager
def chromium() -> Iterator[Browser]:
    """The distribution's own Chromium; it may reach nothing but this machine."""
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
