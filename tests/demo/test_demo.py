"""The whole chain for one day: the ledger equals the simulated truth, and a second run gives the same output."""

from __future__ import annotations

import io
import json
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import httpx2
import pytest
from rich.console import Console

from gputally.demo.__main__ import main
from gputally.demo.finished import serve_finished
from gputally.demo.played_scheduler import pod_marks
from gputally.demo.results import FILES
from gputally.demo.worker_processes import REPORT_FILES
from tests.deadlines import patience_s


def run(folder: Path, *arguments: str) -> dict[str, Any]:
    assert main(["--once", "--quiet", "--to", str(folder), *arguments]) == 0
    summary: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return summary


@pytest.fixture(scope="module")
def day(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("day")
    return folder, run(folder, "--days", "1", "--seed", "5")


@pytest.fixture(scope="module")
def summary(day: tuple[Path, dict[str, Any]]) -> dict[str, Any]:
    return day[1]


def test_every_check_holds(summary: dict[str, Any]) -> None:
    assert summary["checks"]
    assert all(summary["checks"].values()), summary["checks"]


def test_the_accounts_add_up_to_the_capacity_and_none_is_missing(summary: dict[str, Any]) -> None:
    accounts = summary["accounts_gpu_us"]
    assert summary["capacity_gpu_us"] == 64 * 86_400 * 1_000_000 == sum(accounts.values())
    assert all(amount > 0 for amount in accounts.values()), "the run shows every account"
    held = sum(accounts[name] for name in ("busy", "allocated_idle", "allocated_unknown"))
    assert sum(team["gpu_us"] for team in summary["teams"].values()) + summary["unassigned_gpu_us"] == held


def test_teams_have_cost_and_shares(summary: dict[str, Any]) -> None:
    teams = summary["teams"].values()
    assert all(re.fullmatch(r"\d+\.\d\d", team["cost"]) and team["currency"] == "USD" for team in teams)
    for share in ("share_before", "share_after", "share_due"):
        assert sum(team[share] for team in teams) == pytest.approx(1.0, abs=1e-5)


def test_what_was_lost_on_the_wire_came_again_and_counted_once(summary: dict[str, Any]) -> None:
    intervals = summary["intervals"]
    assert intervals["duplicates_dropped"] > 0
    assert intervals["sent"] == intervals["stored"] + intervals["duplicates_dropped"]
    assert intervals["quarantined"] == 0
    assert summary["controller"]["holds"] >= 1, "the hour without the accountant holds the weights"
    assert summary["controller"]["weights_published"] > 0


def test_the_files_are_there_and_the_log_has_no_errors(day: tuple[Path, dict[str, Any]]) -> None:
    folder, _ = day
    for name in FILES:
        assert (folder / name).stat().st_size > 0
    assert all("research" in (folder / file).read_text() for file in REPORT_FILES.values())
    assert "used" in (folder / "plan.txt").read_text()
    assert "Traceback" not in (folder / "demo.log").read_text()


def test_a_finished_demo_is_served_again_and_stays_as_it_is(day: tuple[Path, dict[str, Any]]) -> None:
    folder, _ = day
    ledger = (folder / "ledger.duckdb").read_bytes()
    said = io.StringIO()

    def look() -> None:
        url = re.findall(r"http://127\.0\.0\.1:\d+", said.getvalue())[0]
        with httpx2.Client(base_url=url, headers={"Accept": "text/html"}, timeout=60, follow_redirects=True) as browser:
            for path in ("/", "/month", "/jobs", "/nodes", "/decisions"):
                page = browser.get(path)
                assert (page.status_code, "Old records" in page.text) == (200, False), path
            assert usage_in(browser)
            assert 'href="/shares"' in page.text
            left = json.loads((folder / "summary.json").read_text())["queues"]
            for path in ("/shares", "/shares/queue/llm", "/shares/policy"):
                shares = browser.get(path)
                assert (shares.status_code, "llm" in shares.text) == (200, True), path
            decided = browser.get("/v1/decisions", params={"start": "2026-10-16", "end": "2026-10-18", "limit": 20})
            newest = {one["subject"]: one["value"] for one in reversed(decided.json()) if one["kind"] == "weight"}
            assert newest["llm"] == pytest.approx(left["llm"]["weight"], rel=0.1), "about as the demo left it"

    serve_finished(folder, 0, Console(file=said, width=200), look)
    assert said.getvalue()
    assert (folder / "ledger.duckdb").read_bytes() == ledger


def test_the_demo_says_which_jobs_wait_for_what_and_by_whom_one_was_stopped_and_why(
    day: tuple[Path, dict[str, Any]],
) -> None:
    said = io.StringIO()

    def look() -> None:
        url = re.findall(r"http://127\.0\.0\.1:\d+", said.getvalue())[0]
        with httpx2.Client(base_url=url, headers={"Accept": "text/html"}, timeout=60) as browser:
            waiting = browser.get("/v1/jobs", params={"state": "waiting"}).json()["jobs"]
            assert waiting
            assert all(job["asks_gpus"] > 0 and job["waited_ms"] > 0 and job["created_ms"] for job in waiting)
            waits = browser.get("/v1/waits", params={"by": "queue"}).json()
            assert sum(one["waiting"] for one in waits) >= len(waiting)
            page = browser.get("/jobs", params={"state": "waiting"}).text
            assert waiting[0]["job"] in page
            assert "is not known" not in page
            page = browser.get(f"/job/{waiting[0]['id']}").text
            assert f"It asks for {waiting[0]['asks_gpus']} GPU" in page
            most = browser.get("/v1/jobs", params={"sort": "pods", "limit": 60}).json()["jobs"]
            attempts = (
                (job["id"], one) for job in most for one in browser.get(f"/v1/jobs/{job['id']}").json()["attempts"]
            )
            job, stopped = next((job, one) for job, one in attempts if one["end"] == "preempted")
            assert stopped["by"] == pod_marks()[1]
            taken = re.search(r"was preempted by workload ([a-z]+)/([a-z0-9-]+)\.", stopped["reason"])
            assert taken is not None
            assert any(taken[2] in one["job"] for one in stopped["next_holders"])
            assert f"was preempted by workload {taken[1]}/{taken[2]}" in browser.get(f"/job/{job}").text

    serve_finished(day[0], 0, Console(file=said, width=200), look)
    assert said.getvalue()


def test_a_finished_demo_without_its_summary_is_served_without_the_controller(
    day: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    (tmp_path / "ledger.duckdb").write_bytes((day[0] / "ledger.duckdb").read_bytes())
    (tmp_path / "summary.json").write_text('{"queues": {"llm": {"allocated": "many"}}}')
    said = io.StringIO()

    def look() -> None:
        url = re.findall(r"http://127\.0\.0\.1:\d+", said.getvalue())[0]
        page = httpx2.get(f"{url}/nodes", headers={"Accept": "text/html"}, timeout=60)
        assert (page.status_code, 'href="/shares"' in page.text) == (200, False)

    serve_finished(tmp_path, 0, Console(file=said, width=200), look)
    assert "summary.json" in said.getvalue()


@pytest.mark.real  # another whole day, too dear for `make test`
def test_the_same_seed_gives_the_same_summary_also_as_it_is_printed_for_programs(
    day: tuple[Path, dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, first = day
    assert main(["--once", "--to", str(tmp_path), "--days", "1", "--seed", "5", "--output", "json"]) == 0
    again = json.loads(capsys.readouterr().out)
    assert {**again, "wall_seconds": 0} == {**first, "wall_seconds": 0}


@pytest.mark.real  # another whole day, too dear for `make test`
def test_a_trace_is_replayed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.csv"
    rows = [f"{team}-{i},{i * 600},{team},{1 + i % 4},5400,80" for team in ("red", "blue") for i in range(90)]
    trace.write_text("job_id,submit_offset_s,team,gpus,duration_s,mean_gpu_util_pct\n" + "\n".join(rows) + "\n")
    arguments = ["--once", "--to", str(tmp_path / "out"), "--trace", str(trace), "--days", "1"]
    assert main(arguments) == 0
    assert "capacity ✓" in capsys.readouterr().out
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert sorted(summary["teams"]) == ["blue", "red"]
    assert summary["span"]["days"] == 1


@pytest.mark.parametrize(
    ("arguments", "code", "reason"),
    [
        (["--trace", "none.csv"], 1, "gputally demo: none.csv: No such file or directory"),
        (["--days", "1", "--to", "earlier"], 1, "--serve earlier, name another folder"),
        (["--serve", "nowhere"], 1, "nowhere has no ledger of a finished demo"),
        (["--days", "1", "--to", "file"], 1, "gputally demo: file: File exists\n"),
        (["--days", "0"], 2, "'0' is not a whole number of days from 1 to 366"),
        (["--interval", "7m"], 2, "'7m' does not divide 15 minutes"),
        (["--interval", "soon"], 2, "not a duration: 'soon'"),
        (["--port", "99999"], 2, "'99999' is not a port"),
    ],
)
def test_wrong_calls_are_answered_in_words(
    arguments: list[str],
    code: int,
    reason: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    (tmp_path / "earlier").mkdir()
    earlier = tmp_path / "earlier" / "ledger.duckdb"
    earlier.write_text("kept")
    assert main(["--once", *arguments]) == code
    assert reason in capsys.readouterr().err
    assert earlier.read_text() == "kept"


def test_the_address_is_printed_at_once_and_the_pages_fill_while_it_runs(tmp_path: Path) -> None:
    command = [sys.executable, "-u", "-m", "gputally", "demo", "--days", "31", "--port", "0", "--to", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as demo:
        assert demo.stdout is not None
        try:
            url = address_in(demo.stdout)
            with httpx2.Client(base_url=url, headers={"Accept": "text/html"}, timeout=60) as browser:
                while not usage_in(browser):
                    assert demo.poll() is None
                assert browser.get("/").status_code in (200, 503)
                while (shares := browser.get("/shares")).status_code == 503:
                    assert demo.poll() is None  # until the simulated outage or the first cycle is over
                assert (shares.status_code, 'href="/month"' in shares.text) == (200, True)
        finally:
            demo.terminate()
    assert demo.returncode == 1, "it was stopped in the middle of the month"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_demo_that_is_stopped_ends_whatever_it_does(tmp_path: Path, number: signal.Signals) -> None:
    """An exception in the middle of a message would leave a worker waiting for the rest of it, and one in the middle
    of an `exec` would change the code with which Python ends."""
    command = [sys.executable, "-u", "-m", "gputally", "demo", "--days", "2", "--port", "0", "--to", str(tmp_path)]
    for hours in (0, 1, 2):
        replace = ["--replace"] if hours else []
        with subprocess.Popen([*command, *replace], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as demo:
            assert demo.stdout is not None
            url = address_in(demo.stdout)
            for _ in range(hours):
                httpx2.get(f"{url}/v1/usage", params={"start": "2026-10-16", "end": "2026-11-01"}, timeout=patience_s())
            demo.send_signal(number)
            _, said = demo.communicate(timeout=patience_s())
        assert (demo.returncode, said) == (1, "gputally demo: stopped\n")


def address_in(lines: Iterable[str]) -> str:
    """Return the first address that a demo prints."""
    return next(found[0] for line in lines if (found := re.search(r"http://127\.0\.0\.1:\d+", line)))


def usage_in(browser: httpx2.Client) -> bool:
    """Return True if the accountant counts usage. It may be in the simulated outage."""
    answer = browser.get("/v1/usage", params={"start": "2026-10-16", "end": "2026-11-01"})
    return answer.status_code == 200 and bool(answer.json()["lines"])


def test_a_port_in_use_is_one_clear_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = int(taken.getsockname()[1])
        assert main(["--days", "1", "--quiet", "--to", str(tmp_path), "--port", str(port)]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line == f"gputally demo: cannot listen on 127.0.0.1:{port}: Address already in use"
