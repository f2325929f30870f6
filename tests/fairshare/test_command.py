"""The command line: output, exit codes, and one line for every fault."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
import yaml

from fairshare.__main__ import main
from fairshare.controller.policy_file import load
from tests.fairshare import samples
from tests.fairshare.conftest import Capsys, Make
from tests.fairshare.fixed_answers_server import serving, window_of


@dataclass(frozen=True)
class Sample:
    """The sample of a policy and of a cluster, as files."""

    policy: Path
    cluster: Path

    @property
    def version(self) -> str:
        return load(self.policy)[0].version()


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Sample:
    return Sample(*samples.written(tmp_path_factory.mktemp("sample")))


@contextmanager
def _accountant(
    sample: Sample, usage: dict[str, float], coverage: float = 1.0
) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """Run an accountant that counts by the sample policy; yield its address and the list of requests."""
    asked: list[tuple[str, str]] = []
    window = window_of(usage, 64 * 3_600_000_000, sample.version)
    known = {"version": sample.version, "effective_ms": 0, "policy": {"queues": [{"name": "x"}]}}
    taking = {"/v1/policy": lambda _: known, "/v1/decisions": lambda _: {"recorded": 0, "known": 0}}
    with serving({"/v1/windows": lambda query: window(query) | {"coverage": coverage}}, taking, asked) as url:
        yield url, asked


def test_a_missing_file_and_a_wrong_call(capsys: Capsys) -> None:
    assert main(["divide", "--input", "no-such-file"]) == 1
    assert capsys.readouterr().err == "gputally fairshare: no-such-file: No such file or directory\n"
    assert main(["divine"]) == 2
    assert "No such command 'divine'" in capsys.readouterr().err


def test_a_sound_policy_has_nothing_to_complain_about(sample: Sample, capsys: Capsys) -> None:
    assert main(["check", str(sample.policy), "--capacity", "64"]) == 0
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
        f"queues:\n  - {{name: a, refs: [fake:a]{of_queue}}}\nbudgets:\n  - {{name: b, team: {team}, limit: 9}}\n"
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
    path = file(f"queues:\n  - {queue}\n    name: a\n    refs: [fake:a]\n  - {{name: b, refs: [fake:b]}}\n")
    assert main(["check", str(path), "--strict"]) == (0 if line is None else 1)
    *warnings, _ = capsys.readouterr().out.splitlines()
    assert [warning.partition(": ")[0] for warning in warnings] == ([] if line is None else [f"{path}:{line}"])


def test_check_warns_of_what_is_seldom_meant(file: Make, capsys: Capsys) -> None:
    path = file(
        "measure: busy\nk: 0\nbounds: {interval: 1h}\nqueues:\n"
        "  - name: a\n    deserved: 8\n    limit: 4\n    refs: [fake:a]\n"
        "  - name: b\n    parent: a\n    deserved: 9\n    refs: [kube:b]\n"
        "  - name: c\n"
    )
    assert main(["check", str(path), "--capacity", "4"]) == 0
    *warnings, _ = capsys.readouterr().out.splitlines()
    assert [re.sub(r"\(write for example .*", "(write for example ", line) for line in warnings] == [
        f"{path}:1: warning: `busy` makes hoarding free: a held but idle GPU counts as no usage",
        f"{path}:2: warning: `k: 0` switches history off: weights stay as configured",
        f"{path}:4: warning: deserved quotas add up to 8 GPUs, and the cluster has 4",
        f"{path}:6: warning: the children of 'a' deserve 9 GPUs together, and it deserves 8",
        f"{path}:6: warning: 'a' deserves 8 GPUs, which is above its limit of 4",
        f"{path}:12: warning: 'kube:b' names no known scheduler (write for example ",
        f"{path}:13: warning: no scheduler's queue belongs to 'c': it has no refs",
    ]
    path.write_text("measure: cost\nqueues: [{name: a, refs: [fake:a]}]\n")
    assert main(["check", str(path)]) == 0
    assert ":1: warning: `cost` freezes all weights" in capsys.readouterr().out
    assert main(["check", str(path), "--strict"]) == 1
    assert main(["check", str(path), "--gang", "a=8"]) == 1
    assert (
        capsys.readouterr().err
        == "gputally fairshare: --gang: give --capacity too, the number of GPUs of the cluster\n"
    )
    path.write_text("queues: [{name: a, refs: [fake:a]}]\n")
    assert main(["check", str(path), "--strict"]) == 0


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


def test_plan_prints_every_weight_with_its_reason_and_sends_nothing(sample: Sample, capsys: Capsys) -> None:
    assert _plan(sample) == 0
    out = capsys.readouterr().out
    assert out.startswith("allocated over 1 h (sliding), 100.0% metered; policy ")
    assert "fake, dry-run, 64 GPUs" in out
    rows = [line.split() for line in out.splitlines()[3:] if line.strip(" ─")]
    assert rows[:8] == [
        [
            "queue",
            "configured",
            "fair",
            "share",
            "used",
            "with",
            "history",
            "now",
            "new",
            "asks",
            "holds",
            "due",
            "result",
        ],
        ["research", "3", "75.0%", "70.0%", "80.0%", "3", "2.56", "88", "40", "37", "would-apply"],
        ["language", "3", "60.0%", "14.3%", "105.7%", "3", "4.8", "48", "16", "29", "would-apply"],
        ["vision", "2", "40.0%", "85.7%", "0.0%", "2", "0.2", "40", "24", "8", "would-apply"],
        ["robotics", "1", "25.0%", "5.0%", "45.0%", "1", "1.44", "32", "8", "15", "would-apply"],
        ["serving", "1", "100.0%", "15.0%", "185.0%", "1", "1", "12", "12", "12", "as", "it", "is"],
        ["students", "0.5", "100.0%", "10.0%", "190.0%", "0.5", "0.5", "20", "4", "0", "as", "it", "is"],
        ["total", "152", "64", "64"],
    ]
    assert "at the lower bound, 0.1 x configured" in " ".join(out.split())


def _plan(sample: Sample, cluster: Path | None = None, **accountant: Any) -> int:
    with _accountant(sample, USED, **accountant) as (url, asked):
        code = main(["plan", "--policy", str(sample.policy), "--objects", str(cluster or sample.cluster), "--url", url])
    assert asked == [("GET", "/v1/windows")], "nothing is sent"
    return code


def test_plan_says_why_it_holds(sample: Sample, capsys: Capsys) -> None:
    assert _plan(sample, coverage=0.5) == 1
    assert (
        "HOLD LowCoverage: 50.00% of the window is metered, and the policy requires 98.00%" in capsys.readouterr().out
    )


def _changed(sample: Sample, path: Path, name: str, change: Callable[[Any], None]) -> Path:
    """Return the sample's objects with one of them changed."""
    objects = yaml.safe_load(sample.cluster.read_text())
    change(next(obj for obj in objects if obj["metadata"]["name"] == name))
    path.write_text(yaml.safe_dump({"kind": "List", "items": objects}))
    return path


def test_plan_shows_a_conflict_before_it_happens(sample: Sample, tmp_path: Path, capsys: Capsys) -> None:
    fields = {"f:spec": {"f:weight": {}}}
    theirs = {"managedFields": [{"manager": "argocd", "operation": "Apply", "fieldsV1": fields}]}
    assert (
        _plan(sample, _changed(sample, tmp_path / "cluster.yaml", "vision", lambda obj: obj["metadata"].update(theirs)))
        == 1
    )
    out = " ".join(capsys.readouterr().out.split())
    assert 'conflict with "argocd": .spec.weight' in out


def test_objects_that_cannot_be_loaded(sample: Sample, file: Make, capsys: Capsys) -> None:
    path = file("- 3\n- {apiVersion: v1, kind: Secret, metadata: {name: x}}\n- {apiVersion: v1, kind: Node}\n")
    assert main(["release", "--policy", str(sample.policy), "--objects", str(path)]) == 1
    first, second, third = capsys.readouterr().err.splitlines()
    assert first == f"gputally fairshare: {path}:1: expected an object"
    assert second.startswith(f"gputally fairshare: {path}:2: Secret of v1 is none of: ")
    assert third == f"gputally fairshare: {path}:3: metadata.name is missing"
    path.write_text("kind: Queue\n")
    assert main(["release", "--policy", str(sample.policy), "--objects", str(path)]) == 1
    assert capsys.readouterr().err == f"gputally fairshare: {path}:1: expected a list of objects\n"


def test_release_shows_what_it_gives_back(sample: Sample, tmp_path: Path, capsys: Capsys) -> None:
    assert main(["release", "--policy", str(sample.policy), "--objects", str(sample.cluster)]) == 0
    assert capsys.readouterr().out == "nothing to release: no queue has a weight of the controller\n"

    def publish(obj: Any) -> None:
        noted = {"gputally.dev/base-over-quota-weight": "2", "gputally.dev/published-over-quota-weight": "1"}
        obj["metadata"]["annotations"] = noted
        obj["spec"]["weight"] = 1

    path = _changed(sample, tmp_path / "cluster.yaml", "vision", publish)
    assert main(["release", "--policy", str(sample.policy), "--objects", str(path), "--dry-run"]) == 0
    row = capsys.readouterr().out.splitlines()[3].split()
    assert row[:6] == ["fake", "vision", "vision", "1", "2", "would-apply"]


def test_run_needs_a_policy_and_refuses_what_it_does_not_know(sample: Sample, file: Make, capsys: Capsys) -> None:
    assert main(["run"]) == 1
    assert "policy is missing: give --policy or set it" in capsys.readouterr().err
    settings = file(f"policy: {sample.policy}\nintervall: 3\nlisten: here\n")
    assert main(["run", "--config", str(settings), "--interval", "soon"]) == 1
    assert capsys.readouterr().err.splitlines() == [
        "gputally fairshare: --interval: not a duration: 'soon' (write for example 7d, 12h, 1h30m)",
        f"gputally fairshare: {settings}:2: intervall: no such setting",
        f"gputally fairshare: {settings}:3: listen: not an address: 'here' (write host:port, for example 0.0.0.0:9402)",
    ]
    assert main(["run", "--policy", str(sample.policy), "--interval", "5m", "--print-config"]) == 0
    assert yaml.safe_load(capsys.readouterr().out)["interval"] == 300


def test_run_serves_publishes_and_ends_on_sigterm(sample: Sample) -> None:
    """As a process: the log names its address, the first cycle makes it ready, SIGTERM ends it."""
    with _accountant(sample, USED) as (url, asked):
        command = [
            sys.executable, "-m", "fairshare", "run", "--policy", str(sample.policy), "--url", url,
            "--objects", str(sample.cluster), "--listen", "127.0.0.1:0",
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
    assert 'gputally_queue_weight{queue="vision",target="fake"} 2.0' in text
    assert 'gputally_queue_weight_base{queue="students"} 0.5' in text
    assert ("PUT", "/v1/policy") in asked
    assert ("POST", "/v1/decisions") in asked


def test_a_port_in_use_is_one_line(sample: Sample, capsys: Capsys) -> None:
    with _accountant(sample, {}) as (url, _):
        port = url.rpartition(":")[2]
        call = ["run", "--policy", str(sample.policy), "--objects", str(sample.cluster), "--log-level", "error"]
        code = main([*call, "--listen", f"127.0.0.1:{port}"])
    assert code == 1
    assert capsys.readouterr().err == (
        f"gputally fairshare: cannot listen on 127.0.0.1:{port}: Address already in use\n"
    )
