"""`gputally fairshare divide`: shares as a table and as JSON, and one line for every fault."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from fairshare.__main__ import main

TWO = {
    "name": "two", "total": 15, "kValue": 1,
    "queues": [{"name": "heavy", "request": 100, "usage": 0.6}, {"name": "light", "request": 100, "usage": 0.1}],
}  # fmt: skip


def test_divide_prints_the_shares_as_json(file: Callable[[str], Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["divide", "--input", str(file(json.dumps([TWO, TWO]))), "--output", "json"]) == 0
    answer = {"name": "two", "shares": {"heavy": 5.0, "light": 10.0}, "remaining": 0.0}
    assert json.loads(capsys.readouterr().out) == [answer, answer]


def test_divide_computes_in_kais_order(file: Callable[[str], Path], capsys: pytest.CaptureFixture[str]) -> None:
    """The smallest case in which exact sums give another answer than KAI's program: 0.3, 15.6, 0, 0.1, 0."""
    asked, deserved, weights = (0.3, 100.0, 0.3, 2.0, 1.0), (0.0, 0.7, 0.0, 0.1, 0.0), (1, 1, 2, 3, 1)
    queues = [
        {"name": f"q{i}", "request": request, "deserved": quota, "overQuotaWeight": weight, "priority": priority}
        for i, (request, quota, weight, priority) in enumerate(
            zip(asked, deserved, weights, (100, 100, 1, 1, 1), strict=True)
        )
    ]
    case = {"name": "boundary", "total": 16, "kValue": 0, "queues": queues}
    assert main(["divide", "--input", str(file(json.dumps([case]))), "--output", "json"]) == 0
    ((answer),) = json.loads(capsys.readouterr().out)
    assert list(answer["shares"].values()) == pytest.approx([0.3, 15.3, 0.3, 0.1, 0.0], abs=1e-9)


def test_divide_explains_in_json(file: Callable[[str], Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["divide", "--input", str(file(json.dumps(TWO))), "--output", "json", "--explain"]) == 0
    ((answer),) = json.loads(capsys.readouterr().out)
    (first,) = answer["rounds"]
    assert (first["pool"], first["S"], first["remaining"]) == (15.0, pytest.approx(1.3), 1.0)
    assert [queue["queue"] for queue in first["queues"]] == ["heavy", "light"]
    assert answer["remainders"][0]["queue"] == "heavy"


def test_divide_prints_a_table_with_totals(file: Callable[[str], Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["divide", "--input", str(file(json.dumps(TWO))), "--explain"]) == 0
    assert [line.rstrip() for line in capsys.readouterr().out.splitlines()] == [
        "two   15 GPU, k 1",
        "",
        " queue       priority   deserved   weight   usage   request       limit   share   of total",
        " ─────────────────────────────────────────────────────────────────────────────────────────",
        " heavy            100          0        1     0.6       100   unlimited       5      33.3%",
        " light            100          0        1     0.1       100   unlimited      10      66.7%",
        "",
        " given                                                                       15     100.0%",
        " left over                                                                    0",
        "",
        "",
        " round                            queue              n     U     P     offered   given   fraction",
        " ────────────────────────────────────────────────────────────────────────────────────────────────",
        " roots, priority 100, round 1     pool 15, S 1.3",
        "                                  heavy            0.5   0.6   0.4    4.615385       4   0.615385",
        "                                  light            0.5   0.1   0.9   10.384615      10   0.384615",
        " roots, priority 100, remainder   heavy                                              1   0.615385",
        "",
    ]


def test_divide_reads_stdin() -> None:
    command = [sys.executable, "-m", "fairshare", "divide", "--input", "-", "--output", "json"]
    done = subprocess.run(command, input=json.dumps(TWO), capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)[0]["shares"] == {"heavy": 5.0, "light": 10.0}


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("{", "not JSON: Expecting property name enclosed in double quotes: line 1 column 2 (char 1)"),
        ('{"name": "x", "total": 1, "queues": [{"name": "q"}]}', "case 'x': queues.0.request: Field required"),
        (
            '{"total": 1, "queues": [{"name": "q", "request": 1, "parent": "r"}]}',
            "queue 'q' has the unknown parent 'r'",
        ),
    ],
    ids=["syntax", "missing", "parent"],
)
def test_divide_answers_faults_with_one_line(
    text: str, line: str, file: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    path = file(text)
    assert main(["divide", "--input", str(path)]) == 1
    assert capsys.readouterr().err == f"gputally fairshare: {path}: {line}\n"


def test_names_are_shown_as_they_are(file: Callable[[str], Path], capsys: pytest.CaptureFixture[str]) -> None:
    """What rich takes for markup or for an emoji is a queue's name here."""
    names = ["[/b]", "[red]a", "größe :warning:"]
    queues = [{"name": name, "request": 4} for name in names]
    assert main(["divide", "--input", str(file(json.dumps({"total": 8, "queues": queues}))), "--explain"]) == 0
    out = capsys.readouterr().out
    assert [name for name in names if f" {name} " not in out] == []


@pytest.mark.parametrize("gang", ["a=²", "a=0", "b=1", "a", "a=1e3", f"a={10**30}"])
def test_a_gang_that_is_none_is_one_line(
    gang: str, file: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    path = file("queues: [{name: a, refs: [kai:a]}]\n")
    assert main(["check", str(path), "--capacity", "8", "--gang", gang]) == 1
    words = f"gputally fairshare: --gang {gang}: write QUEUE=GPUS with a queue of the policy\n"
    assert capsys.readouterr().err == words
