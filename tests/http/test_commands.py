"""The accountant's commands: answers as tables, faults as one line, exit codes."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
import zipfile
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from zoneinfo import ZoneInfo

import pytest
import typer

from accountant.__main__ import app
from accountant.cli import grouped_lines, terminal_tables
from accountant.cli.connection_options import Grouping
from accountant.cli.job_tables import jobs_named, jobs_table, print_job
from accountant.cli.report_command import before
from accountant.composition import Service
from accountant.exports.protocol import exports
from accountant.wire.usage_cost_and_job_models import (
    Accounts,
    CostAnswer,
    CostLine,
    Job,
    JobAnswer,
    JobAttempt,
    JobsAnswer,
    NextHolder,
    UsageAnswer,
    UsageLine,
    WaitLine,
    WaitSpread,
)
from gputally.base.terminal import draw
from tests.exports.format_cases import cases_of
from tests.http.conftest import HOUR_US, TOKENS, pod_minutes, settings_in, token_list
from tests.plugin_cases import needs, registered
from tests.price_books import price_book_text
from tests.usage_records import running_accountant

ROOT = Path(__file__).parents[2]
PRICES = price_book_text(H100="2.4")


@pytest.fixture
def stopped(tmp_path, clock):
    """A ledger with half an hour of one GPU, and a price book beside it."""
    (tmp_path / "prices.yaml").write_text(PRICES)
    with Service(settings_in(tmp_path), clock) as service:
        service.ingest.submit_batch(pod_minutes(rows=30)).result()
    return tmp_path


SPAN = ("--start", "2026-11-01T11:00:00Z", "--end", "2026-11-01T11:30:00Z")


def test_a_stopped_ledger_answers_in_tables_with_units_and_totals(stopped, run_command):
    db = stopped / "data" / "ledger.duckdb"
    out = run_command.shown("usage", "--db", db, *SPAN, "--by", "namespace,gpu_model")
    assert "GPU-hours, 2026-11-01 11:00 UTC to 2026-11-01 11:30 UTC" in out
    assert re.search(r"vision\s+NVIDIA H100 80GB HBM3\s+0\.2\d?\s+0\.2\d?\s+0\.5", out)
    assert re.search(r"total\s+0\.2\d?\s+0\.2\d?\s+0\.5", out)
    assert "100.0 % of the capacity is metered" in out
    out = run_command.shown("cost", "--db", db, *SPAN, "--prices", stopped / "prices.yaml", "--by", "namespace")
    assert re.search(r"vision\s+0\.5\s+1\.20", out)
    assert (
        json.loads(run_command.shown("cost", "--db", db, *SPAN, "--output", "json"))["unpriced_gpu_us"] == 1_800_000_000
    )


@needs("exports.html")
@needs("exports.csv")
@needs("exports.focus")
def test_check_and_report_on_a_stopped_ledger(stopped, run_command):
    db = stopped / "data" / "ledger.duckdb"
    out = run_command.shown("check", "--db", db)
    assert re.search(r"books\s+balance", out)
    page = stopped / "report.html"
    code, out, err = run_command("report", *SPAN, "--db", db, "--to", page, "--prices", stopped / "prices.yaml")
    assert (code, out) == (0, "")
    assert str(page.name) in err.replace("\n", "")
    assert page.read_text().startswith("<!doctype html>")
    folder = stopped / "reports"
    folder.mkdir()
    code, _, err = run_command("report", "last", "--db", db, "--to", folder, "--format", "csv", "--team", "vision/eu")
    assert (code, list(folder.iterdir())) == (1, [])
    assert "no team 'vision/eu' is known" in err
    code, _, err = run_command(
        "report", "last", "--db", db, "--to", folder, "--format", "csv", "--team", "__unassigned__"
    )
    assert code == 0, err
    (file,) = folder.iterdir()
    assert re.fullmatch(r"gputally-\d{4}-\d\d-__unassigned__\.csv", file.name)
    asking = ("--db", db, "--prices", stopped / "prices.yaml", "--to", folder)
    assert run_command("report", "2026-11", *asking, "--format", "focus")[0] == 0
    assert zipfile.is_zipfile(folder / "gputally-2026-11.focus.zip")
    assert "give a month" in run_command.refused("report", *SPAN, *asking, "--format", "focus")


@pytest.mark.parametrize(
    ("name", "begins"),
    [(f"x.{exports()[form].suffix}", begins) for form, begins in cases_of("BEGINS").items() if form != "pdf"],
)
def test_the_name_of_a_file_is_the_format_of_the_report(stopped, run_command, name, begins):
    asked = ("report", "2026-11", "--db", stopped / "data" / "ledger.duckdb", "--prices", stopped / "prices.yaml")
    assert run_command(*asked, "--to", stopped / name)[0] == 0
    assert (stopped / name).read_bytes().startswith(begins)
    ending = name.rpartition(".")[2]
    other = next(form for form, export in exports().items() if export.suffix.rpartition(".")[2] != ending)
    assert run_command(*asked, "--to", stopped / f"2{name}", "--format", other)[:2] == (1, "")
    assert not (stopped / f"2{name}").exists()


@pytest.mark.parametrize(
    ("now", "zone", "month"),
    [
        (datetime(2026, 11, 1, tzinfo=UTC), "UTC", "2026-10"),
        (datetime(2026, 10, 31, 23, 30, tzinfo=UTC), "Europe/Berlin", "2026-10"),
        (datetime(2026, 10, 31, 23, 30, tzinfo=UTC), "UTC", "2026-09"),
        (datetime(2026, 1, 15, tzinfo=UTC), "UTC", "2025-12"),
    ],
)
def test_last_is_the_month_that_has_ended_where_the_books_are_kept(now: datetime, zone: str, month: str) -> None:
    assert str(before(int(now.timestamp() * 1000), zone)) == month


@needs("exports.json")
def test_a_running_accountant_answers_with_a_token_from_a_file(tmp_path, clock, run_command):
    secret = tmp_path / "token"
    secret.write_text(TOKENS["read"] + "\n")
    with running_accountant(settings_in(tmp_path, tokens=token_list()), clock, pod_minutes(rows=30)) as (_, url):
        asking = ("--url", url, "--token-file", secret)
        out = run_command.shown(
            "usage", *asking, *SPAN, "--output", "json", "--by", "namespace", "--where", "namespace=vision"
        )
        assert [line["key"] for line in json.loads(out)["lines"]] == [{"namespace": "vision"}]
        code, out, _ = run_command("report", "2026-11", *asking, "--format", "json")
        assert json.loads(out)["summary"]["start"] == "2026-11-01T00:00:00Z"
        code, _, err = run_command("check", *asking)
        assert code == 1
        assert err.endswith(
            "/v1/check: 403 The caller may not do that: 'read' lacks the scope 'admin', which this request needs\n"
        )
        assert err.count("\n") == 1
        unsigned = run_command.refused("usage", "--url", url)
        assert "401 The caller is not signed in" in unsigned
        assert "--token-file or GPUTALLY_TOKEN_FILE" in unsigned
        with pytest.MonkeyPatch.context() as environment:
            environment.setenv("GPUTALLY_TOKEN_FILE", str(secret))
            assert "vision" in run_command.shown("usage", "--url", url, *SPAN, "--by", "namespace")
        assert "not a month" in run_command.refused("report", "2026-13", *asking)


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (
            ["usage", "--url", "http://127.0.0.1:9"],
            "Connection refused; give the accountant's address with --url or GPUTALLY_URL",
        ),
        (["usage", "--url", "nonsense"], "not an address: 'nonsense'"),
        (["usage", "--token-file", "/no/such/file"], "token file /no/such/file: No such file or directory"),
        (["usage", "--db", "/no/such/ledger"], "/no/such/ledger: there is no ledger"),
        (["serve", "--config", "/no/such/file"], "/no/such/file: No such file or directory"),
        (["serve", "--auth", "off", "--listen", "0.0.0.0:80"], "auth: off needs a loopback address"),
        (["serve", "--auth", "off", "--prices", "/no/such/book"], "/no/such/book: No such file or directory"),
        (["serve", "--auth", "off", "--data", "/proc/none"], "data folder /proc/none: No such file or directory"),
    ],
)
def test_what_cannot_be_done_is_one_line_and_exit_code_1(run_command, arguments, line):
    code, out, err = run_command(*arguments)
    assert (code, out) == (1, "")
    assert err.startswith("gputally accountant: ")
    assert line in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    "arguments", [["fly"], ["report"], ["report", "2026-10", "--start", "2026-10-01"], ["usage", "--where", "team"],
                  ["token", "new", "--name", "x", "--scope", "everything"], ["usage", "--output", "xml"]],
)  # fmt: skip
def test_a_wrong_call_is_exit_code_2(run_command, arguments):
    code, _, err = run_command(*arguments)
    assert code == 2
    assert err


def test_print_config_prints_the_settings_in_force_and_starts_nothing(run_command, tmp_path):
    file = tmp_path / "accountant.yaml"
    file.write_text("auth: off\ntimezone: Europe/Berlin\n")
    out = run_command.shown("serve", "--config", file, "--data", tmp_path / "data", "--print-config")
    assert "timezone: Europe/Berlin\n" in out
    assert not (tmp_path / "data").exists()


def test_token_new_prints_the_token_once_and_its_hash_for_the_file(run_command):
    out = run_command.shown("token", "new", "--name", "agent", "--scope", "ingest", "--node", "n1", "--cluster", "prod")
    assert len(re.findall(r"\b[0-9a-f]{64}\b", out)) == 1
    assert "scopes: [ingest]" in out
    assert len(re.findall(r"(?m)^  [\w-]{43}$", out)) == 1


@contextlib.contextmanager
def process(*arguments):
    started = subprocess.Popen(
        [sys.executable, "-m", "accountant", "serve", *map(str, arguments)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT,
        env={name: value for name, value in os.environ.items() if not name.startswith("GPUTALLY_")},
    )  # fmt: skip
    try:
        yield started
    finally:
        started.kill()
        started.communicate()


def test_the_process_serves_refuses_a_second_one_and_ends_cleanly(tmp_path, run_command):
    settings = settings_in(tmp_path, tokens=token_list())
    data, tokens = settings.data, settings.tokens
    with process("--data", data, "--tokens", tokens, "--listen", "127.0.0.1:0") as first:
        serving = json.loads(first.stderr.readline())
        assert serving["event"] == "serving"
        with urllib.request.urlopen(serving["url"] + "/readyz", timeout=20) as answer:
            assert answer.status == 200
        port = serving["url"].rpartition(":")[2]
        code, _, err = run_command("serve", "--data", data, "--tokens", tokens, "--listen", "127.0.0.1:0")
        fault = "another process has this ledger open, and only one may: stop that process first"
        assert (code, err) == (1, f"gputally accountant: {data / 'ledger.duckdb'}: {fault}\n")
        code, _, err = run_command(
            "serve", "--data", tmp_path / "other", "--tokens", tokens, "--listen", f"127.0.0.1:{port}"
        )
        assert (code, err) == (1, f"gputally accountant: cannot listen on 127.0.0.1:{port}: Address already in use\n")
        first.send_signal(signal.SIGTERM)
        out, err = first.communicate(timeout=30)
    assert (first.returncode, out) == (0, "")
    events = [json.loads(line) for line in err.splitlines()]
    assert events[-1]["event"] == "stopping"
    assert not any(token in err for token in TOKENS.values())
    assert not (data / "ledger.duckdb.wal").exists()


def test_jobs_as_table_json_and_csv(stopped, run_command):
    common = ("--db", stopped / "data" / "ledger.duckdb", "--prices", stopped / "prices.yaml", *SPAN)
    out = run_command.shown("jobs", *common)
    assert "Jobs, 2026-11-01 11:00 UTC to 2026-11-01 11:30 UTC" in out
    figures = r"0\s+[–—-]?\s*0\.5\s+0\.2\d?\s+1\.0\s+2\.40\s+1\.20"
    assert re.search(r"vision/Pod/train-0\s+\(unassigned\)\s+running\s+" + figures, out), out
    assert re.search(r"1 jobs\s+0\.5\s+2\.40\s+1\.20", out)
    assert "1 jobs" in run_command.shown("jobs", *common, "--search", "TRAIN", "--limit", "1")
    assert "0 jobs" in run_command.shown("jobs", *common, "--search", "none")
    code, out, err = run_command("jobs", *common, "--output", "csv")
    head, line = out.splitlines()
    row = dict(zip(head.split(","), line.split(","), strict=True))
    assert (row["id"], row["cost"], row["allocated_gpu_hours"]) == (
        "prod~vision~Pod~train-0",
        "1.2000000000",
        "0.500000000",
    )
    assert json.loads(run_command("jobs", *common, "--output", "json")[1])["total_cost"] == "1.2000000000"
    code, out, err = run_command("jobs", "prod~vision~Pod~train-0", *common)
    assert re.search(r"H100 80GB HBM3\s+\S*\s*0\.5\s+2\.4\s+1\.20", out), out
    assert run_command("jobs", "prod~vision~Pod~train-0", *common, "--output", "csv")[1].count("\n") == 1
    assert "no job 'prod~vision~Pod~other'" in run_command.refused("jobs", "prod~vision~Pod~other", *common)
    for name in ("train-0", "vision/train-0", "Pod/train-0", "vision/Pod/train-0", "prod/vision/Pod/train-0"):
        code, out, err = run_command("jobs", name, *common, "--output", "json")
        assert (code, json.loads(out)["job"]["id"], err) == (0, "prod~vision~Pod~train-0", "")
    for name in ("rain-0", "other/train-0", "vision/Job/train-0"):
        assert f"no job {name!r} held or requested a GPU in that time" in run_command.refused("jobs", name, *common)


def _job(number: int) -> Job:
    return Job(
        id=f"prod~research-vision~PyTorchJob~resnet-{number}", cluster="prod", namespace="research-vision",
        job=f"PyTorchJob/resnet-{number}", teams=("vision",), queues=("vision",), users=("ann",), state="running",
        pods=8, pods_running=8, created_ms=0, held_from_ms=0, held_until_ms=None, ended_ms=None, waited_ms=61_000,
        gpu_models=("H100",), accounts_gpu_us=Accounts(busy=HOUR_US * 1234), gpus=Decimal(8), cost=Decimal("2961.60"),
        unpriced_gpu_us=0, burn_per_hour=Decimal("19.20"), epochs=0,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("width", "shown", "dropped"),
    [
        (80, {"team", "cost USD", "GPU-hours"}, {"pods", "longest wait", "busy"}),
        (120, {"busy", "longest wait"}, {"pods"}),
    ],
)
def test_a_narrow_terminal_loses_columns_before_names_break(width, shown, dropped, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", str(width))
    answer = JobsAnswer(
        start_ms=0, end_ms=HOUR_US, currency="USD", price_book_version="1", jobs=tuple(map(_job, range(3))),
        count=6_290, total_gpu_us=HOUR_US * 3702, total_cost=Decimal("8884.80"),
    )  # fmt: skip
    draw(jobs_table(answer, ZoneInfo("UTC")))
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= width
    head = next(line for line in lines if line.startswith(" job "))
    assert all(name in head for name in shown)
    assert not any(name in head for name in dropped)
    for number in range(3):
        (line,) = [line for line in lines if f"research-vision/PyTorchJob/resnet-{number} " in line]
        assert "2,961.60" in line
    assert "6,287 more" in " ".join(lines)
    assert bool(dropped) == ("not shown at this width" in " ".join(lines))


def test_what_a_stop_lost_and_why_it_came_are_told_on_a_narrow_terminal(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    reason = "its queue holds more than its share, and the queue of the other workload less; " * 3
    taker = NextHolder(
        job="prod~speech~Job~asr", team="speech", queue="speech", gpus=8, held_gpus=Decimal(8), after_ms=0
    )
    attempt = JobAttempt(
        number=1, start_ms=0, end_ms=3_600_000, pods=1, nodes=("n1",), gpus=8, held_gpus=Decimal(8), gpu_us=8 * HOUR_US,
        waited_ms=0,
        end="preempted", by="a-scheduler", reason=reason, decision=None, decision_ms=None, lost_gpu_us=2 * HOUR_US,
        next_holders=(taker,),
    )  # fmt: skip
    answer = JobAnswer(
        start_ms=0, end_ms=7_200_000, currency="USD", price_book_version="1", job=_job(1), parts=(), epochs=(),
        attempts=(attempt,), lost_gpu_us=2 * HOUR_US, known_lost_gpu_us=2 * HOUR_US,
    )  # fmt: skip
    draw(print_job(answer, ZoneInfo("UTC")))
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    (head,) = [line for line in out.splitlines() if "stopped by" in line]
    (row,) = [line for line in out.splitlines() if line.rstrip().endswith("a-scheduler")]
    assert row.index("2.0") + len("2.0") == head.index("lost") + len("lost")
    assert " ".join(reason.split()) in " ".join(out.split())
    assert "prod~speech~Job~asr (8)" in " ".join(out.split())


def test_a_client_does_not_load_the_server(tmp_path, clock):
    with running_accountant(settings_in(tmp_path), clock, pod_minutes(rows=3)) as (_, url):
        for command in ("usage", "cost", "jobs", "months"):
            call = f"from accountant.__main__ import main; main(['{command}', '--url', '{url}'])"
            code = f"import sys; {call}; print(*sys.modules, file=sys.stderr)"
            done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
            assert done.stdout.strip(), done.stderr
            loaded = set(done.stderr.split())
            assert not loaded & {
                "fastapi",
                "starlette",
                "uvicorn",
                "duckdb",
                "numpy",
                "pandas",
                "jinja2",
                "structlog",
                "mcp",
            }
            assert not {
                one for one in loaded if one.startswith(("accountant.storage", "accountant.runtime", "accountant.web"))
            }


def test_a_job_is_meant_by_the_end_of_its_name():
    named = [("a", "ml", "Job/train"), ("b", "ml", "Job/train"), ("b", "ml", "RayJob/train"), ("a", "", "SlurmJob/17")]
    known = [Job.model_construct(cluster=cluster, namespace=space, job=job) for cluster, space, job in named]

    def found(name):
        return [named[known.index(job)] for job in jobs_named(known, name)]

    assert found("train") == found("ml/train") == named[:3]
    assert found("ml/Job/train") == named[:2]
    assert found("b/ml/train") == named[1:3]
    assert found("a/ml/Job/train") == named[:1]
    assert found("17") == found("SlurmJob/17") == named[3:]
    assert found("rain") == found("Job") == found("") == []


def test_every_asking_command_has_the_same_options_for_where_it_asks():
    found = {}
    program = typer.main.get_command(app)
    assert isinstance(program, typer.core.TyperGroup)
    of_slurm = program.commands["slurm"].commands if registered("histories.slurm") else {}
    for name, command in [*program.commands.items(), *of_slurm.items()]:
        options = {option: each.help for each in command.params for option in each.opts if each.help}
        if "--url" in options:
            found[name] = {key: options[key] for key in ("--url", "--token-file", "--ca-file")}
            assert "--db" in options or not options.keys() & {"--timezone", "--prices"}
    asking = {"usage", "report", "jobs", "backup", "backups", "deliveries", "close", "check"}
    assert asking | of_slurm.keys() & {"import"} <= found.keys()
    assert len({tuple(options.values()) for options in found.values()}) == 1


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["usage", "--output", "xml"], ("--output", "'xml'")),
        (["jobs", "--limit", "0"], ("--limit", "at least 1")),
        (["jobs", "--limit", "many"], ("--limit", "whole number")),
        (["cost", "--limit", "-3"], ("--limit", "at least 1")),
    ],
)
def test_a_wrong_value_is_told_in_the_words_of_who_wrote_it(run_command, arguments, told):
    code, _, err = run_command(*arguments)
    assert code == 2
    assert all(word in err for word in told)
    assert not re.search("Input should|Value error|pydantic", err)


def test_since_is_another_word_for_start_wherever_a_span_begins():
    program = typer.main.get_command(app)
    assert isinstance(program, typer.core.TyperGroup)
    spans = {
        name: each.opts
        for name, command in program.commands.items()
        for each in command.params
        if each.name == "start" and "span" in (each.help or "")
    }
    assert spans.keys() >= {"usage", "cost", "jobs", "nodes"}
    assert {tuple(opts) for opts in spans.values()} == {("--start", "--since")}


def test_usage_and_cost_are_searched_sorted_and_shortened():
    lines = tuple(
        UsageLine(key={"team": team, "day": day}, accounts_gpu_us=Accounts(busy=busy, allocated_idle=idle))
        for team, day, busy, idle in (("b", "2026-11-02", 5, 1), ("a", "2026-11-02", 3, 9), ("b", "2026-11-01", 1, 2))
    )
    usage = UsageAnswer(start_ms=0, end_ms=1, by=("team", "day"), lines=lines, coverage=1.0)

    def found(sort: str = "", search: str = "") -> list[tuple[str, str]]:
        wanted = Grouping(by="team,day", sort=sort, search=search)
        answer = grouped_lines.usage_lines(usage, wanted, grouped_lines.usage_order(wanted))
        return [(line.key["team"], line.key["day"][-2:]) for line in answer.lines]

    assert found() == [("b", "01"), ("a", "02"), ("b", "02")], "in the order of time, then the largest first"
    assert found("team") == [("a", "02"), ("b", "01"), ("b", "02")]
    assert found("day:desc") == [("a", "02"), ("b", "02"), ("b", "01")]
    assert found("busy") == [("b", "02"), ("a", "02"), ("b", "01")]
    assert found("idle:asc", search="B") == [("b", "02"), ("b", "01")]
    with pytest.raises(typer.BadParameter):
        grouped_lines.usage_order(Grouping(by="day", sort="team"))


def test_the_total_of_a_search_is_that_of_what_it_finds_and_an_unknown_cost_comes_last(capsys):
    lines = tuple(
        CostLine(key={"team": team}, gpu_us=HOUR_US, cost=cost, unpriced_gpu_us=0 if cost else HOUR_US)
        for team, cost in (("nlp", Decimal(2)), ("vision", None), ("vision-2", Decimal(7)))
    )
    cost = CostAnswer(
        start_ms=0, end_ms=1, by=("team",), currency="USD", price_book_version="1", lines=lines, total=None,
        unpriced_gpu_us=HOUR_US,
    )  # fmt: skip

    def found(**asked: str) -> CostAnswer:
        wanted = Grouping(**asked)
        return grouped_lines.cost_lines(cost, wanted, grouped_lines.cost_order(wanted))

    for order, teams in (("cost", ["vision-2", "nlp", "vision"]), ("cost:asc", ["nlp", "vision-2", "vision"])):
        assert [line.key["team"] for line in found(sort=order).lines] == teams
    assert (found(search="nlp").total, found(search="nlp").unpriced_gpu_us) == (Decimal(2), 0)
    assert found(search="vision").total is None
    draw(terminal_tables.cost_table(found(), ZoneInfo("UTC"), 1))
    out = capsys.readouterr().out
    assert "2 more" in out
    assert "nlp" not in out


def test_waits_are_listed_with_their_mean_and_the_longest_first(capsys):
    def line(key: str, mean: float | None) -> WaitLine:
        spread = WaitSpread(pods=3, mean=mean, median=mean, p95=mean, longest=mean)
        return WaitLine(key=key, pods=3, waiting=None, queued=spread, starting=spread, note="no API server")

    draw(terminal_tables.waits([line("a", 1_800.0), line("b", None), line("c", 9_000.0)], "queue", "7d", None))
    out = capsys.readouterr().out
    assert "7d to now" in out, "the table names its span"
    rows = [text.split() for text in out.splitlines()]
    assert [row[:4] for row in rows if row and row[0] in "abc"] == [
        ["c", "3", "–", "2.50"],
        ["a", "3", "–", "0.50"],
        ["b", "3", "–", "–"],
    ]


def test_an_unknown_time_zone_is_named_with_its_option(run_command):
    program = typer.main.get_command(app)
    assert isinstance(program, typer.core.TyperGroup)
    groups = [((), program), *(((n,), g) for n, g in program.commands.items() if isinstance(g, typer.core.TyperGroup))]
    zoned = [
        (*path, name)
        for path, group in groups
        for name, command in group.commands.items()
        if any("--timezone" in each.opts for each in command.params)
    ]
    assert {("usage",), ("jobs",), ("report",), ("fleet", "usage"), ("serve",)} <= {*zoned}
    for command in zoned:
        code, _, err = run_command(*command, "--timezone", "Mars/Base")
        assert code == 2, command
        assert "--timezone" in err, command
        assert "Mars/Base" in err, command
