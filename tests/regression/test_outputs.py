"""The output of the demo's pages, API and files, pinned by digests: a refactoring may not change any of them.

`GPUTALLY_GOLDEN=update` rewrites the digests. A differing output is saved in the test's folder, for comparison with
that of another checkout."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import urlencode, urlsplit

import pytest

from tests.plugin_cases import registered

SHOWN = (
    "schedulers.kai",
    *(f"exports.{name}" for name in ("csv", "focus", "focus-1.2", "html", "json", "parquet", "pdf", "xlsx")),
)
"""The plug-ins that the outputs show: the scheduler that the demo plays, and the formats that pages offer."""
MISSING = [plugin for plugin in SHOWN if not registered(plugin)]
pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(bool(MISSING), reason=f"the digests are of outputs that show {', '.join(MISSING)}"),
]

CHECKOUT = Path(__file__).parents[2]
DIGESTS = Path(__file__).with_name("digests.json")
DAYS, START, END = "2", "2026-10-16T00:00:00Z", "2026-10-18T00:00:00Z"
"""The options of the demo."""
MONTH = "2026-10"
SPAN = urlencode({"start": START, "end": END})
QUESTIONS = (
    *(f"/v1/{what}?{SPAN}&by={by}" for what in ("usage", "cost") for by in (
        "team", "queue", "namespace", "job", "pod", "user", "gpu_model", "node", "gpu", "cluster,team", "mig_profile",
        "team&timezone=Europe/Berlin",
    )),
    *(f"/v1/{what}?{SPAN}" for what in ("jobs", "statement", "waits", "check", "report", "decisions")),
    *(f"/v1/report?month={MONTH}&format={form}" for form in ("csv", "html", "json")),
    "/v1/windows", "/v1/windows?kind=tumbling&size=1d", "/v1/windows?kind=sliding",
    "/v1/budgets", "/v1/clock", "/v1/corrections", "/v1/adjustments",
    "/v1/deliveries", "/v1/gpus/owners", "/v1/periods",
    "/v1/policy", "/v1/policy/versions", "/v1/prices", "/v1/prices/versions", "/v1/proposals", "/v1/quarantine",
    "/v1/audit", "/v1/nothing", "/v1/usage", "/v1/usage?start=x&end=y", f"/v1/usage?{SPAN}&by=nothing",
)  # fmt: skip
PAGES = 60
"""Maximum number of pages that the test follows from the first one."""


class Links(HTMLParser):
    """The links of a page to the same server."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        target = dict(attrs).get("href") if tag == "a" else None
        if target and target.startswith("/") and not target.startswith("//"):
            self.found.append(target.partition("#")[0])


def fetch(url: str) -> tuple[int, bytes]:
    try:
        with urllib.request.urlopen(
            urllib.request.Request(url, headers={"Accept": "text/html, */*"}), timeout=300
        ) as got:
            return got.status, got.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


def masked(text: str, url: str) -> str:
    """Return the text without what differs from run to run: the port, the checkout, the run time, and the note that a
    slow answer came from the cache."""
    text = re.sub(r'<span class="chip"><i></i>(the month as of|as of [^<]*; refreshed every) [^<]*</span>', "", text)
    text = re.sub(r'("\w*seconds": )[0-9.]+', r"\1SECONDS", text)
    text = re.sub(r'("digest":")[0-9a-f]{64}', r"\1DIGEST", text)  # of acts, which name the checkout
    text = re.sub(r'(name="form_token" value=")[0-9a-f]*', r"\1SECRET", text)
    return text.replace(str(CHECKOUT), "CHECKOUT").replace(url, "URL").replace(urlsplit(url).netloc, "URL")


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Name → text, of one run of the demo."""
    folder = tmp_path_factory.mktemp("demo")
    command = [sys.executable, "-m", "gputally", "demo", "--days", DAYS, "--port", "0", "--to", str(folder)]
    environment = os.environ | {"NO_COLOR": "1", "COLUMNS": "200"}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    ) as demo:
        try:
            assert demo.stdout is not None
            printed = []
            for line in demo.stdout:
                printed.append(line)
                if found := re.search(r"pages stay at (http://\S+)", line):
                    break
            else:
                pytest.fail("the demo ended early:\n" + "".join(printed))
            yield gather(found[1].rstrip("/"), folder)
        finally:
            demo.terminate()


def gather(url: str, folder: Path) -> dict[str, str]:
    texts: dict[str, str] = {}
    for path in QUESTIONS:
        status, content = fetch(url + path)
        texts[path] = f"{status}\n" + masked(content.decode("utf-8", "replace"), url)
    waiting, seen = ["/"], {"/"}
    while waiting and len(seen) <= PAGES:
        path = waiting.pop(0)
        status, content = fetch(url + path)
        text = content.decode("utf-8", "replace")
        texts["page " + path] = f"{status}\n" + masked(text, url)
        links = Links()
        links.feed(text)
        for target in links.found:
            if target not in seen and len(seen) < PAGES:
                seen.add(target)
                waiting.append(target)
    for file in sorted(folder.rglob("*")):
        if file.suffix in {".html", ".csv", ".json", ".txt"}:
            texts[f"file {file.relative_to(folder)}"] = masked(file.read_text("utf-8"), url)
    return texts


def test_the_questions_are_about_the_time_that_the_demo_simulates(outputs: dict[str, str]) -> None:
    for path in (f"/v1/{what}?{SPAN}&by={by}" for what in ("usage", "cost") for by in ("team", "job", "gpu", "user")):
        assert json.loads(outputs[path].partition("\n")[2])["lines"], path


def test_outputs_are_those_of_before(outputs: dict[str, str], tmp_path: Path) -> None:
    digests = {name: hashlib.sha256(text.encode()).hexdigest()[:16] for name, text in sorted(outputs.items())}
    if os.environ.get("GPUTALLY_GOLDEN") == "update":
        DIGESTS.write_text(json.dumps(digests, indent=1) + "\n")
    known = json.loads(DIGESTS.read_text())
    differ = [name for name in sorted(digests.keys() | known.keys()) if digests.get(name) != known.get(name)]
    for number, name in enumerate(differ):
        (tmp_path / f"{number}.txt").write_text(name + "\n" + outputs.get(name, ""))
    assert not differ, f"the texts are in {tmp_path}"
