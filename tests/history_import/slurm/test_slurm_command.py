"""`gputally import slurm` against a real accountant: its hours to the second, and one line for a user's mistake."""

from __future__ import annotations

import json
from datetime import UTC, datetime

import pytest

from accountant.__main__ import main
from accountant.histories.slurm.job_history import JobRecord, SlurmHistory
from accountant.history_import import import_run
from accountant.history_import.import_run import IMPORTING, ImportTarget, import_rows, imported_chunks
from gputally.base.accountant_connection import Unanswered
from gputally.base.units import MS_PER_DAY, MS_PER_HOUR, US_PER_HOUR
from tests.history_import.conftest import NOW_MS, Cut
from tests.moments import present
from tests.plugin_cases import needs

START_MS = 1_790_812_800_000
HEADING = "Cluster|JobIDRaw|JobID|JobName|Account|User|Partition|Submit|Start|End|State|NodeList|AllocTRES"


def line(cluster, number, account, start, end, nodes, gpus, job=""):
    begin, stop = START_MS // 1000 + start, START_MS // 1000 + end
    tres = f"billing=8,cpu=8,gres/gpu:a100={gpus},gres/gpu={gpus},mem=64G,node=1"
    return f"{cluster}|{number}|{job or number}|train|{account}|ann|gpu|{begin}|{begin}|{stop}|COMPLETED|{nodes}|{tres}"


@pytest.fixture
def sacct(tmp_path):
    """Two clusters, an array, a requeue, steps, jobs on several nodes, one without GPUs; returns the held seconds."""
    lines = [HEADING]
    held = {"hpc": {}, "lab": {}}
    for number in range(60):
        cluster, account = ("hpc", "lab")[number % 3 == 2], ("vision", "nlp")[number % 2]
        start, length = number * 1_337 % 90_000, 61 + number * 977 % 20_000
        nodes, gpus = (("n1", 1), ("n[1-2]", 3), ("n[2-4]", 12))[number % 3 if cluster == "hpc" else 0]
        lines.append(line(cluster, 100 + number, account, start, start + length, nodes, gpus, f"90_{number}"))
        lines.append(line(cluster, f"{100 + number}.batch", "", start, start + length, nodes, 0))
        held[cluster][account] = held[cluster].get(account, 0) + gpus * length
    lines.append(line("hpc", 100, "vision", 100_000, 100_017, "n3", 8, "90_0"))
    held["hpc"]["vision"] += 8 * 17
    lines.append("hpc|500|500|cpu|vision|ann|cpu|1|2|3|COMPLETED|n9|cpu=4")
    file = tmp_path / "sacct.txt"
    file.write_text("\n".join(lines) + "\n")
    return file, held


def test_slurms_hours_to_the_second_and_once(books, sacct, tmp_path, capsys):
    file, held = sacct
    (tmp_path / "sinfo.txt").write_text("n1|gpu:a100:16\nn2|gpu:a100:16\nn3|gpu:a100:16\nn4|gpu:a100:16\n")
    command = ["import", "slurm", str(file), "--nodes", str(tmp_path / "sinfo.txt"), "--model", "a100=NVIDIA A100",
               *books.by_admin.options]  # fmt: skip
    assert main(command) == 0
    told = capsys.readouterr().out
    assert "Imported into hpc from sacct.txt" in told
    assert "allocation only" in told
    ledger = books.ledger
    for cluster, accounts in held.items():
        expected = {account: seconds * 1_000_000 for account, seconds in accounts.items()}
        assert books.held(START_MS, NOW_MS, cluster) == expected
    assert set(books.held(START_MS, NOW_MS, "hpc", "gpu_model")) == {"NVIDIA A100"}
    assert present(ledger).imbalance(START_MS, NOW_MS).total_us == 0
    assert present(ledger).quarantined() == []
    before = (
        present(ledger).usage((START_MS, NOW_MS), ("cluster", "job")).lines(),
        len(present(ledger).acts("imported")),
    )
    assert main([*command, "--output", "json"]) == 0
    answer = capsys.readouterr().out  # behind what the server here says of the requests
    told = json.loads(answer[answer.index("[\n") :])
    assert [(each["cluster"], each["done"]) for each in told] == [("hpc", 0), ("lab", 0)]
    assert main(command) == 0
    assert capsys.readouterr().out.count("was imported before") == 2
    assert (
        present(ledger).usage((START_MS, NOW_MS), ("cluster", "job")).lines(),
        len(present(ledger).acts("imported")),
    ) == before


def test_what_was_left_out_is_said_lowers_the_coverage_and_fails_unless_told_otherwise(books, tmp_path, capsys):
    jobs = [
        line("default", 1, "vision", 0, 36_000, "n1", 2),
        line("default", 2, "nlp", 0, 36_000, "n[", 1),
        line("default", 3, "ops", 0, 36_000, "n1", 1),
        line("default", 4, "ops", 0, 36_000, "n1", 1).replace("COMPLETED|", "COMPLETED|x|"),
    ]
    file, nodes = tmp_path / "jobs.txt", tmp_path / "sinfo.txt"
    file.write_text("\n".join([HEADING, *jobs]) + "\n")
    nodes.write_text("n1|gpu:2\n")
    command = ["import", "slurm", str(file), "--nodes", str(nodes), "--output", "json", *books.options]
    assert main(command) == 1
    told = capsys.readouterr()
    (answer,) = json.loads(told.out[told.out.index("[\n") :])
    assert (answer["sent_us"], answer["unplaced_us"]) == (20 * US_PER_HOUR, 20 * US_PER_HOUR)
    assert (answer["coverage"], answer["left_out"]) == (0.5, 2)
    assert "job 2" in told.err
    assert "line 5" in told.err
    assert books.held(START_MS, NOW_MS, "default") == {"vision": 20 * US_PER_HOUR}
    (noted,) = imported_chunks(present(books.ledger).acts("imported"))
    (row,) = import_rows([noted], START_MS, NOW_MS)
    assert (row.coverage, row.left_out) == (0.5, 2)
    assert main(["import", "slurm", str(file), "--nodes", str(nodes), "--partial", *books.options]) == 0


def test_an_import_that_was_wrong_is_replaced_as_an_act_of_the_books(books, tmp_path, capsys):
    """Fewer GPUs, other accounts, one job less, on a node that agents metered later; before and after it other time."""
    wrong = [
        line("default", 1, "visoin", 0, 36_000, "n[1-2]", 16), line("default", 2, "nlp", 0, 36_000, "n3", 4),
        line("default", 3, "ops", 90_000, 93_600, "n1", 8), line("default", 4, "ops", 40_000, 43_600, "n4", 1),
    ]  # fmt: skip
    right = [line("default", 1, "vision", 0, 36_000, "n[1-2]", 4), wrong[2], wrong[3]]
    file = tmp_path / "jobs.txt"
    command = ["import", "slurm", str(file)]
    file.write_text("\n".join([HEADING, *wrong]) + "\n")
    assert main([*command, *books.options]) == 0
    file.write_text("\n".join([HEADING, *right]) + "\n")
    assert main([*command, *books.options]) == 0
    assert "--replace" in capsys.readouterr().out
    assert main([*command, "--replace", *books.options]) == 1
    assert "403" in capsys.readouterr().err
    day = START_MS // MS_PER_DAY * MS_PER_DAY + MS_PER_DAY
    since = ["--end", f"{datetime.fromtimestamp(day / 1000, UTC):%Y-%m-%dT%H:%MZ}", "--reason", "wrong accounts"]
    assert main([*command, "--replace", *since, *books.by_admin.options]) == 0
    expected = {"vision": 40 * US_PER_HOUR, "ops": 9 * US_PER_HOUR}
    ledger = books.ledger
    assert books.held(START_MS, NOW_MS, "default") == expected
    assert present(ledger).imbalance(START_MS, NOW_MS).total_us == 0
    assert (present(ledger).quarantined(), present(ledger).holes()) == ([], [])
    first = present(ledger).usage((START_MS, START_MS + 10 * MS_PER_HOUR), ("node",)).lines()
    assert {line.key["node"]: sum(line.accounts_gpu_us.model_dump().values()) for line in first} == {
        "n1": 20 * US_PER_HOUR, "n2": 20 * US_PER_HOUR,
    }  # fmt: skip
    (act,) = present(ledger).acts("withdrawn")
    assert (act.subject, act.who, act.reason[:14]) == ("slurm/default", "admin", "wrong accounts")
    (row,) = import_rows(imported_chunks(present(ledger).acts(*IMPORTING)), START_MS, NOW_MS)
    assert row.held_us == 49 * US_PER_HOUR
    assert main([*command, *books.options]) == 0
    assert main([*command, "--replace", *books.by_admin.options]) == 0
    assert books.held(START_MS, NOW_MS, "default") == expected
    assert present(ledger).imbalance(START_MS, NOW_MS).total_us == 0


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (HEADING.replace("|End", "") + "\n", "lacks End"),
        (HEADING.replace("|State", "") + "\n", "lacks State"),
        (HEADING + "\n" + line("hpc", 1, "a", 0, 9, "n1", 0).replace("gres/gpu", "gres/x") + "\n", "gres/gpu"),
        ('{"jobs": [{"job_id": 7}]}', "jobs[0]"),
    ],
)
def test_a_file_that_cannot_be_imported_is_refused(text, said, tmp_path, capsys):
    file = tmp_path / "jobs.txt"
    file.write_text(text)
    assert main(["import", "slurm", str(file)]) == 1
    assert said in capsys.readouterr().err


def test_cut_off_anywhere_it_goes_on_and_stores_nothing_twice(books, monkeypatch):
    monkeypatch.setattr(import_run, "RECORDS", 40)
    jobs = [
        JobRecord(str(n), "t", "vision", "ann", nodes=f"n{n % 3}", gpus=2, started_ms=START_MS + n * 600_000,
            ended_ms=START_MS + (n + 5) * 600_000)
        for n in range(20)
    ]  # fmt: skip
    history = SlurmHistory(jobs, {}, NOW_MS)
    wanted = START_MS, START_MS + 5 * MS_PER_HOUR
    heard = []
    for _ in range(40):
        try:
            to = ImportTarget(books.by_admin.remote(Cut), "hpc", "slurm", "f")
            import_run.run(to, history.read, wanted, MS_PER_HOUR, lambda *told: heard.append(told))
            break
        except Unanswered:
            continue
    assert heard[-1] == (5, 5)
    assert len(present(books.ledger).acts("imported")) == 5
    assert books.held(*wanted, "hpc") == {"vision": 20 * 2 * 5 * 600_000_000}
    assert (present(books.ledger).quarantined(), present(books.ledger).holes()) == ([], [])


def test_a_token_without_the_scope_is_refused(books, sacct, tmp_path, capsys):
    (tmp_path / "wrong").write_text("nobody")
    code = main(["import", "slurm", str(sacct[0]), "--url", books.url, "--token-file", str(tmp_path / "wrong")])
    assert code == 1
    assert "401" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["slurm", "absent.txt"], "absent.txt: No such file or directory"),
        (["slurm", "{file}", "--cluster", "x"], "jobs of hpc, lab, which keep their names"),
        (["slurm", "{file}", "--model", "a100"], "write TYPE=MODEL"),
    ],
)
def test_what_people_get_wrong_is_one_line(arguments, said, sacct, capsys):
    assert main(["import", *(part.replace("{file}", str(sacct[0])) for part in arguments)]) == 1
    err = capsys.readouterr().err.strip()
    assert said in err.replace("--since: ", "--start: ")
    assert "Traceback" not in err


@needs("exports.html")
def test_a_history_of_another_package_is_booked_withdrawn_and_reported(books, tmp_path):
    """The accountant does not have the package: it books its import, and the report names it."""
    jobs = [
        JobRecord("1", "t", "vision", "ann", nodes="n1", gpus=2, started_ms=START_MS, ended_ms=START_MS + MS_PER_HOUR)
    ]
    history, wanted = SlurmHistory(jobs, {}, NOW_MS), (START_MS, START_MS + 2 * MS_PER_HOUR)
    to = ImportTarget(books.by_admin.remote(), "hpc", "bookings", "b.csv")
    for reason in ("", "again"):
        import_run.run(to, history.read, wanted, MS_PER_HOUR, lambda *_: None, replace=reason)
        assert books.held(*wanted, "hpc") == {"vision": 2 * US_PER_HOUR}
    report = ["report", "2026-10", "--to", str(tmp_path / "r.html")]
    assert main([*report, *books.by_admin.options]) == 0
    assert "from bookings (b.csv)" in (tmp_path / "r.html").read_text()
