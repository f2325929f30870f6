"""The command line: output, exit codes, and one line for every fault."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
import yaml

import fairshare
from fairshare.__main__ import main
from fairshare.controller.policy_file import load
from tests.fairshare.conftest import Capsys, Make
from tests.fairshare.fixed_answers_server import serving, window_of

SAMPLES = Path(fairshare.__file__).parent / "samples"
POLICY, CLUSTER = SAMPLES / "policy.yaml", SAMPLES / "cluster.yaml"


VERSION = load(POLICY)[0].version()


@contextmanager
def _accountant(usage: dict[str, float], coverage: float = 1.0) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """Run an accountant that counts by the sample policy; yield its address and the list of requests."""
    asked: list[tuple[str, str]] = []
    window = window_of(usage, 64 * 3_600_000_000, VERSION)
    known = {"version": VERSION, "effective_ms": 0, "policy": {"queues": [{"name": "x"}]}}
    taking = {"/v1/policy": lambda _: known, "/v1/decisions": lambda _: {"recorded": 0, "known": 0}}
    with serving({"/v1/windows": lambda query: window(query) | {"coverage": coverage}}, taking, asked) as url:
        yield url, asked


def test_a_missing_file_and_a_wrong_call(capsys: Capsys) -> None:
    assert main(["divide", "--input", "no-such-file"]) == 1
    assert capsys.readouterr().err == "gputally fairshare: no-such-file: No such file or directory\n"
    assert main(["divine"]) == 2
    assert "No such command 'divine'" in capsys.readouterr().err


def test_the_sample_policy_has_nothing_to_complain_about(capsys: Capsys) -> None:
    assert main(["check", str(POLICY), "--capacity", "64"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert "6 queues, version " in line


@pytest.mark.parametrize(
    ("team", "queues_team", "warned"),
    [("vision", "vision", False), ("visoin", "vision", True), ("visoin", None, False)],
)
def test_check_warns_of_a_budget_for_a_team_that_no_queue_has(
    file: Make, capsys: Capsys, team: str, queues_team: str | None, warned: bool
) -> None:
    """If no queue has a team, the teams come from namespaces."""
    of_queue = f", team: {queues_team}" if queues_team else ""
    path = file(
        f"queues:\n  - {{name: a, refs: [kai:a]{of_queue}}}\nbudgets:\n  - {{name: b, team: {team}, limit: 9}}\n"
    )
    assert main(["check", str(path)]) == 0
    *warnings, _ = capsys.readouterr().out.splitlines()
    assert [warning.partition(": ")[0] for warning in warnings] == ([f"{path}:4"] if warned else [])
    assert ["did you mean 'vision'?" in warning for warning in warnings] == [True] * warned


@pytest.mark.parametrize(
    ("queue", "line"),
    [
        ("weight: 0\n    deserved: 0\n    limit: 0", 4),
        ("limit: 0", 2),
        ("weight: 0", 2),
        ("deserved: 0\n    weight: 0\n    limit: 8", 3),
        ("weight: 0\n    deserved: 1", None),
        ("limit: 1", None),
    ],
)
def test_check_warns_of_a_queue_that_starves(file: Make, capsys: Capsys, queue: str, line: int | None) -> None:
    path = file(f"queues:\n  - {queue}\n    name: a\n    refs: [kai:a]\n  - {{name: b, refs: [kai:b]}}\n")
    assert main(["check", str(path), "--strict"]) == (0 if line is None else 1)
    *warnings, _ = capsys.readouterr().out.splitlines()
    assert [warning.partition(": ")[0] for warning in warnings] == ([] if line is None else [f"{path}:{line}"])


def test_check_warns_of_what_is_seldom_meant(file: Make, capsys: Capsys) -> None:
    path = file(
        "measure: busy\nk: 0\nbounds: {interval: 1h}\nqueues:\n"
        "  - name: a\n    deserved: 8\n    limit: 4\n    refs: [kai:a]\n"
        "  - name: b\n    parent: a\n    deserved: 9\n    refs: [kube:b]\n"
        "  - name: c\n"
    )
    assert main(["check", str(path), "--capacity", "4"]) == 0
    *warnings, _ = capsys.readouterr().out.splitlines()
    assert warnings == [
        f"{path}:1: warning: `busy` makes hoarding free: a held but idle GPU counts as no usage",
        f"{path}:2: warning: `k: 0` switches history off: weights stay as configured",
        f"{path}:4: warning: deserved quotas add up to 8 GPUs, and the cluster has 4",
        f"{path}:6: warning: the children of 'a' deserve 9 GPUs together, and it deserves 8",
        f"{path}:6: warning: 'a' deserves 8 GPUs, which is above its limit of 4",
        f"{path}:12: warning: 'kube:b' names no known scheduler (write for example kai:b)",
        f"{path}:13: warning: no scheduler's queue belongs to 'c': it has no refs",
    ]
    path.write_text("measure: cost\nqueues: [{name: a, refs: [kai:a]}]\n")
    assert main(["check", str(path)]) == 0
    assert ":1: warning: `cost` freezes all weights" in capsys.readouterr().out
    assert main(["check", str(path), "--strict"]) == 1
    assert main(["check", str(path), "--gang", "a=8"]) == 1
    assert (
        capsys.readouterr().err
        == "gputally fairshare: --gang: give --capacity too, the number of GPUs of the cluster\n"
    )
    path.write_text("queues: [{name: a, refs: [kai:a]}]\n")
    assert main(["check", str(path), "--strict"]) == 0


def test_check_warns_of_what_the_other_mode_of_kai_would_do_and_of_budgets_that_starve(
    file: Make, capsys: Capsys
) -> None:
    path = file(
        "measure: cost\nwindow: {kind: calendar}\ntargets:\n  kai:\n    mode: usage\n"
        "budgets:\n  - name: m\n    queue: a\n    limit: 10\n    exhausted: no-over-quota\n"
        "queues: [{name: a, refs: [kai:a]}]\n"
    )
    mode = "for this measure set `targets.kai.mode: weight`"
    assert main(["check", str(path)]) == 0
    assert capsys.readouterr().out.splitlines()[:-1] == [
        f"{path}:1: warning: `cost` freezes all weights while any GPU time in the window has no price",
        f"{path}:1: warning: KAI's own history counts GPU time as it was held: {mode}",
        f"{path}:5: warning: in mode `usage` a used-up budget changes no weight: set `mode: weight`",
        f"{path}:2: warning: KAI's history can be sliding only, not calendar",
        (
            f"{path}:5: warning: set `endpoint` to the address that KAI queries: "
            "without it, shards that query another go unnoticed"
        ),
        f"{path}:10: warning: 'a' deserves nothing: once the budget is used up it gets no GPU at all",
    ]
    path.write_text(
        "targets:\n  kai:\n    endpoint: http://a:1\n    mode: weight\nqueues: [{name: a, refs: [kai:a]}]\n"
    )
    assert main(["check", str(path)]) == 0
    assert f"{path}:3: warning: `endpoint` has no effect in mode `weight`" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("queues:\n  - name: a\n    parent: b\n  - name: b\n    parent: a\n",
         ":3: queues.0.parent: the queue tree has a cycle: a -> b -> a"),
        ("queues:\n  - name: a\n    weight: -1\n", ":3: queues.0.weight: must be at least 0"),
        ("queues:\n  - name: a\n    wieght: 1\n", ":3: queues.0.wieght: unknown key"),
        ("queues:\n  - name: a\n  - name: a\n", ":3: queues.1.name: queue 'a' is defined twice"),
        ("queues:\n  - name: a\n    parent: z\n", ":3: queues.0.parent: queue 'a' has the unknown parent 'z'"),
        ("queues:\n  - name: a\n    weight: .inf\n", ":3: queues.0.weight: must be a finite number"),
        (
            "queues:\n  - name: a\n    limit: -0.5\n",
            ":3: queues.0.limit: -0.5 is neither -1 (unlimited) nor 0 or more",
        ),
        (
            'queues:\n  - name: "a\\e[31m"\n',
            ":2: queues.0.name: 'a\\x1b[31m' has invisible characters",
        ),
        ("queues:\n  - name: 'a '\n", ":2: queues.0.name: 'a ' has invisible characters"),
        ("queues: []\n", ":1: queues.0.name: a policy needs at least one queue"),
        ("", ":1: the file is empty"),
    ],
    ids=["cycle", "negative", "unknown-key", "twice", "orphan", "infinite", "half", "escape", "blank", "none", "empty"],
)  # fmt: skip
def test_check_refuses_with_file_and_line(text: str, fault: str, file: Make, capsys: Capsys) -> None:
    path = file(text)
    assert main(["check", str(path)]) == 1
    assert capsys.readouterr().err == f"gputally fairshare: {path}{fault}\n"


USED = {"research": 0.7, "vision": 0.6, "language": 0.1, "robotics": 0.05, "serving": 0.15, "students": 0.1}


def test_plan_prints_every_weight_with_its_reason_and_sends_nothing(capsys: Capsys) -> None:
    assert _plan() == 0
    out = capsys.readouterr().out
    assert out.startswith("allocated over 1 h (sliding), 100.0% metered; policy ")
    assert "kai, dry-run, 64 GPUs" in out
    numbers = [line[:95].rstrip() for line in out.splitlines()[3:] if line[:12].strip(" ─")]
    assert numbers == [
        " queue        configured      n       U       P   now    new   asks   has   due   result",
        " research              3   0.75     0.7     0.8     3   2.56     88    40    37   would-apply",
        "   language            3    0.6   0.143   1.057     3    4.8     48    16    29   would-apply",
        "   vision              2    0.4   0.857       0     2    0.2     40    24     8   would-apply",
        " robotics              1   0.25    0.05    0.45     1   1.44     32     8    15   would-apply",
        " serving               1      1    0.15    1.85     1      1     12    12    12   as it is",
        " students            0.5      1     0.1     1.9   0.5    0.5     20     4     0   as it is",
        " total                                                          152    64    64",
    ]
    assert "at the lower bound, 0.1 x configured" in " ".join(out.split())


def _plan(cluster: Path = CLUSTER, **accountant: Any) -> int:
    with _accountant(USED, **accountant) as (url, asked):
        code = main(["plan", "--policy", str(POLICY), "--objects", str(cluster), "--url", url])
    assert asked == [("GET", "/v1/windows")], "nothing is sent"
    return code


def test_plan_says_why_it_holds(capsys: Capsys) -> None:
    assert _plan(coverage=0.5) == 1
    assert (
        "HOLD LowCoverage: 50.00% of the window is metered, and the policy requires 98.00%" in capsys.readouterr().out
    )


def _changed(path: Path, name: str, change: Callable[[Any], None]) -> Path:
    """Return the sample's objects with one of them changed."""
    objects = yaml.safe_load(CLUSTER.read_text())
    change(next(obj for obj in objects if obj["metadata"]["name"] == name))
    path.write_text(yaml.safe_dump({"kind": "List", "items": objects}))
    return path


def test_plan_shows_a_conflict_before_it_happens(tmp_path: Path, capsys: Capsys) -> None:
    fields = {"f:spec": {"f:resources": {"f:gpu": {"f:overQuotaWeight": {}}}}}
    theirs = {"managedFields": [{"manager": "argocd", "operation": "Apply", "fieldsV1": fields}]}
    assert _plan(_changed(tmp_path / "cluster.yaml", "vision", lambda obj: obj["metadata"].update(theirs))) == 1
    out = " ".join(capsys.readouterr().out.split())
    assert 'conflict with "argocd": .spec.resources.gpu.overQuotaWeight' in out


def test_objects_that_cannot_be_loaded(file: Make, capsys: Capsys) -> None:
    path = file("- 3\n- {apiVersion: v1, kind: Secret, metadata: {name: x}}\n- {apiVersion: v1, kind: Node}\n")
    assert main(["release", "--policy", str(POLICY), "--objects", str(path)]) == 1
    first, second, third = capsys.readouterr().err.splitlines()
    assert first == f"gputally fairshare: {path}:1: expected an object"
    assert second.startswith(f"gputally fairshare: {path}:2: Secret of v1 is none of: ")
    assert third == f"gputally fairshare: {path}:3: metadata.name is missing"
    path.write_text("kind: Queue\n")
    assert main(["release", "--policy", str(POLICY), "--objects", str(path)]) == 1
    assert capsys.readouterr().err == f"gputally fairshare: {path}:1: expected a list of objects\n"


def test_release_shows_what_it_gives_back(tmp_path: Path, capsys: Capsys) -> None:
    assert main(["release", "--policy", str(POLICY), "--objects", str(CLUSTER)]) == 0
    assert capsys.readouterr().out == "nothing to release: no queue has a weight of the controller\n"

    def publish(obj: Any) -> None:
        noted = {"gputally.dev/base-over-quota-weight": "2", "gputally.dev/published-over-quota-weight": "1"}
        obj["metadata"]["annotations"] = noted
        obj["spec"]["resources"]["gpu"]["overQuotaWeight"] = 1

    path = _changed(tmp_path / "cluster.yaml", "vision", publish)
    assert main(["release", "--policy", str(POLICY), "--objects", str(path), "--dry-run"]) == 0
    row = capsys.readouterr().out.splitlines()[3].split()
    assert row[:6] == ["kai", "vision", "vision", "1", "2", "would-apply"]


def test_run_needs_a_policy_and_refuses_what_it_does_not_know(file: Make, capsys: Capsys) -> None:
    assert main(["run"]) == 1
    assert "policy is missing: give --policy or set it" in capsys.readouterr().err
    settings = file(f"policy: {POLICY}\nintervall: 3\nlisten: here\n")
    assert main(["run", "--config", str(settings), "--interval", "soon"]) == 1
    assert capsys.readouterr().err.splitlines() == [
        "gputally fairshare: --interval: not a duration: 'soon' (write for example 7d, 12h, 1h30m)",
        f"gputally fairshare: {settings}:2: intervall: no such setting",
        f"gputally fairshare: {settings}:3: listen: not an address: 'here' (write host:port, for example 0.0.0.0:9402)",
    ]
    assert main(["run", "--policy", str(POLICY), "--interval", "5m", "--print-config"]) == 0
    assert yaml.safe_load(capsys.readouterr().out)["interval"] == 300


def test_run_serves_publishes_and_ends_on_sigterm() -> None:
    """As a process: the log names its address, the first cycle makes it ready, SIGTERM ends it."""
    with _accountant(USED) as (url, asked):
        command = [
            sys.executable, "-m", "fairshare", "run", "--policy", str(POLICY), "--url", url,
            "--objects", str(CLUSTER), "--listen", "127.0.0.1:0",
        ]  # fmt: skip
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
            try:
                assert process.stderr is not None
                base = ""
                for line in process.stderr:
                    event = json.loads(line)
                    base = event.get("url", base)
                    if event["event"] == "cycle":
                        break
                with urlopen(f"{base}/readyz") as answer:
                    assert answer.status == 200
                with urlopen(f"{base}/metrics") as answer:
                    text = answer.read().decode()
                process.send_signal(signal.SIGTERM)
                rest = [json.loads(line) for line in process.stderr]
                assert process.wait(20) == 0
            finally:
                process.kill()
    assert rest[-1]["event"] == "stopping"
    assert 'gputally_queue_weight{queue="vision",target="kai"} 2.0' in text
    assert 'gputally_queue_weight_base{queue="students"} 0.5' in text
    assert ("PUT", "/v1/policy") in asked
    assert ("POST", "/v1/decisions") in asked


def test_a_port_in_use_is_one_line(capsys: Capsys) -> None:
    with _accountant({}) as (url, _):
        port = url.rpartition(":")[2]
        call = ["run", "--policy", str(POLICY), "--objects", str(CLUSTER), "--log-level", "error"]
        code = main([*call, "--listen", f"127.0.0.1:{port}"])
    assert code == 1
    assert capsys.readouterr().err == (
        f"gputally fairshare: cannot listen on 127.0.0.1:{port}: Address already in use\n"
    )
