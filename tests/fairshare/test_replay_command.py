"""The commands `replay` and `what-if`: a day, one decision, a month under another policy."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from accountant.wire.policy_models import Decision, Policy
from accountant.wire.usage_cost_and_job_models import Accounts
from fairshare.__main__ import main
from fairshare.core.scheduler_queue_objects import WeightAnnotations
from gputally.base.clock import SystemClock, VirtualClock
from gputally.kubernetes.memory_cluster import MemoryCluster
from gputally.kubernetes.objects import POD
from gputally.testing.fake_scheduler import queue_object, setup_object
from tests.fairshare.builders import cluster_of, cluster_with, fake_pod, node_object, policy_of
from tests.fairshare.conftest import Accountant, Capsys, Make
from tests.fairshare.fixed_answers_server import Answer, serving
from tests.fairshare.observations import pods_of
from tests.fairshare.scheduler_kinds import KINDS
from tests.plugin_cases import plugin_cases

HOUR_US, HOUR_MS = 3_600_000_000, 3_600_000


Recorded = tuple[Policy, list[Decision]]


@pytest.fixture
def decided(accountant: Accountant, controller_of: Make, clock: VirtualClock) -> Recorded:
    """Three recorded cycles, as the accountant keeps them."""
    policy: Policy = policy_of(k=1.0, bounds={"interval": 90})
    controller = controller_of(policy, cluster_of([queue_object(name) for name in "abc"]))
    for used in (0.7, 0.6, 0.2):
        accountant.spend(a=used, b=0.2, c=0.1)
        controller.cycle()
        clock.advance(600_000)
    return policy, accountant.decisions


def _routes(policy: Policy, decisions: list[Decision]) -> dict[str, Answer]:
    def between(query: Mapping[str, str]) -> list[Any]:
        found = [d for d in decisions if int(query["start"]) <= d.at_ms < int(query["end"])]
        newest = sorted(found, key=lambda d: -d.at_ms)[: int(query["limit"])]
        return [json.loads(d.model_dump_json()) for d in newest]

    version = {"version": policy.version(), "effective_ms": 0, "policy": policy.model_dump(mode="json", by_alias=True)}
    return {"/v1/decisions": between, "/v1/policy/versions": lambda _: [version], "/v1/policy": lambda _: version}


def test_a_day_comes_to_the_same_and_says_how_much_was_compared(decided: Recorded, capsys: Capsys) -> None:
    policy, decisions = decided
    day = datetime.fromtimestamp(decisions[0].at_ms / 1000, UTC).date().isoformat()
    with serving(_routes(policy, decisions)) as url:
        assert main(["replay", day, "--url", url]) == 0
        out = capsys.readouterr().out
        assert out.count("the same, bit for bit") == len([d for d in decisions if d.subject == "*"]) >= 2
        assert main(["replay", day, "--url", url, "--output", "json"]) == 0
        counts = json.loads(capsys.readouterr().out)
        assert all(count["compared"] > 30 and count["differences"] == [] for count in counts)
        assert [count["at_ms"] for count in counts] == sorted(count["at_ms"] for count in counts)


def test_one_decision_is_found_by_its_id_and_a_difference_ends_with_1(decided: Recorded, capsys: Capsys) -> None:
    policy, decisions = decided
    one = next(d for d in decisions if d.subject == "a")
    bent = [d.model_copy(update={"value": 3.25}) if d.id == one.id else d for d in decisions]
    with serving(_routes(policy, bent)) as url:
        assert main(["replay", one.id, "--url", url]) == 1
    out = capsys.readouterr().out
    assert f"{one.id}: value: recorded 3.25, computed {one.value!r}" in out
    assert "the record was changed" in out.replace("\n", " ")


def test_a_cycle_is_replayed_with_everything_that_was_decided_in_it(decided: Recorded, capsys: Capsys) -> None:
    policy, decisions = decided
    cycle = next(d for d in decisions if d.subject == "*")
    with serving(_routes(policy, decisions)) as url:
        assert main(["replay", cycle.id, "--url", url, "--output", "json"]) == 0
    (count,) = json.loads(capsys.readouterr().out)
    assert (count["cycle"], count["compared"] > 30) == (cycle.id, True)


HISTORIES = {
    name: cases.COUNTING_HISTORY
    for name, cases in plugin_cases("fairshare", "object_cases").items()
    if cases.COUNTING_HISTORY is not None
}


def _scheduler_with_history(name: str) -> tuple[Policy, list[dict[str, Any]]]:
    """A queue whose scheduler counts history itself, and a weight of an earlier time on its object."""
    if name in HISTORIES:
        return HISTORIES[name]
    targets = {"fake": {"apply": "enforce", "usage": True}}
    written = {"annotations": WeightAnnotations(1.0, 3.0, 0, 1, "v", None, "").annotations()}
    queues = [queue_object("a", 3, **written), queue_object("b"), queue_object("c"), setup_object(counts_usage=True)]
    return policy_of(targets=targets), queues


@pytest.mark.parametrize("name", [*HISTORIES, "fake"])
def test_a_write_for_a_scheduler_that_counts_history_itself_comes_to_the_same(
    name: str, accountant: Accountant, controller_of: Make, capsys: Capsys
) -> None:
    policy, objects = _scheduler_with_history(name)
    accountant.spend(x=0.6, y=0.1, a=0.7, b=0.2, c=0.1)
    cluster = MemoryCluster(KINDS, [*objects, node_object(gpus=16)])
    controller_of(policy, cluster).cycle()
    day = datetime.fromtimestamp(accountant.decisions[0].at_ms / 1000, UTC).date().isoformat()
    with serving(_routes(policy, accountant.decisions)) as url:
        code = main(["replay", day, "--url", url, "--output", "json"])
    (count,) = json.loads(capsys.readouterr().out)
    assert (code, count["differences"], count["fault"]) == (0, [], "")
    assert count["compared"] >= 2


@pytest.mark.parametrize(
    ("when", "fault"),
    [
        ("yesterday", "yesterday: neither a date such as 2026-11-21 or 2026-11-21T10:00Z, nor a decision's id"),
        ("2001-01-01", "2001-01-01: the controller decided nothing in this time"),
        ("9999-12-31", "9999-12-31: the controller decided nothing in this time"),
        (f"{'0' * 16}/5/fake", f"{'0' * 16}/5/fake: the accountant has no such decision"),
    ],
)
def test_nothing_to_replay_is_one_line(when: str, fault: str, decided: Recorded, capsys: Capsys) -> None:
    with serving(_routes(*decided)) as url:
        assert main(["replay", when, "--url", url]) == 1
    assert capsys.readouterr().err == f"gputally fairshare: {fault}\n"


@pytest.fixture
def preempted(accountant: Accountant, controller_of: Make, clock: VirtualClock) -> Recorded:
    """Two recorded cycles with preemptions: a borrower gives way to b; then an idle pod is warned and evicted."""
    cluster = cluster_with(node_object(), fake_pod("a0"), fake_pod("a1"), fake_pod("b0", "b", node=""))
    since = "2026-09-30T00:00:00Z"
    for obj in cluster.list(POD)[:2]:
        ready = {"conditions": [{"type": "Ready", "status": "True", "lastTransitionTime": since}]}
        cluster.load([{**obj, "status": {**obj["status"], **ready, "startTime": since}}])
    idle = {"mode": "enforce", "sustained": "1h", "grace": "10m"}
    queues = [{"name": name, "deserved": 4, "refs": [f"fake-pods:{name}"]} for name in "ab"]
    policy: Policy = policy_of(queues, preemption={"mode": "enforce", "min_runtime": 0, "idle": idle})
    accountant.used = lambda start, end: {("ns", "a1"): Accounts(allocated_idle=4 * (end - start) * 1000)}
    controller = controller_of(policy, cluster, pods=lambda: pods_of(cluster))
    controller.cycle()
    clock.advance(600_000)
    controller.cycle()
    return policy, accountant.decisions


def test_preemptions_come_to_the_same_bit_for_bit(preempted: Recorded, capsys: Capsys) -> None:
    policy, decisions = preempted
    day = datetime.fromtimestamp(decisions[0].at_ms / 1000, UTC).date().isoformat()
    with serving(_routes(policy, decisions)) as url:
        assert main(["replay", day, "--url", url, "--output", "json"]) == 0
        counts = [count for count in json.loads(capsys.readouterr().out) if count["kind"] == "preemption"]
        assert [(count["differences"], count["fault"]) for count in counts] == [([], "")] * 2
        assert all(count["compared"] > 40 for count in counts)
        victims = [d for d in decisions if d.kind == "preemption" and "result" in d.inputs]
        assert [d.inputs["ground"] for d in victims] == ["within quota", "idle"]
        assert main(["replay", victims[1].id, "--url", url]) == 0
        assert "preemptions" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("bend", "line"),
    [
        (lambda d: {"reason": "because"}, "reason: recorded 'because', computed 'its 4 GPUs go to"),
        (
            lambda d: {"inputs": d.inputs | {"lost_gpu_hours": 95.0}},
            "lost_gpu_hours: recorded 95.0, computed 96.0",
        ),
        (lambda d: {"id": d.id[:-1] + "7"}, "decision: recorded 'its 4 GPUs go to"),
    ],
)
def test_a_preemption_that_comes_out_otherwise_is_printed(
    bend: Make, line: str, preempted: Recorded, capsys: Capsys
) -> None:
    policy, decisions = preempted
    one = next(d for d in decisions if d.inputs.get("ground") == "within quota")
    bent = [d.model_copy(update=bend(d)) if d.id == one.id else d for d in decisions]
    with serving(_routes(policy, bent)) as url:
        assert main(["replay", "2026-10-01", "--url", url]) == 1
    assert line in capsys.readouterr().out


def test_a_changed_situation_decides_otherwise(preempted: Recorded, capsys: Capsys) -> None:
    """With a larger quota for a in the inputs, no pod would have been preempted."""
    policy, decisions = preempted
    cycle = next(d for d in decisions if d.kind == "preemption" and d.subject == "*")
    situation: Any = json.loads(json.dumps(cycle.inputs["situation"]))
    situation["accounts"]["a"]["stocks"]["gpu"]["allocated"] = 4.0
    bent = cycle.model_copy(update={"inputs": cycle.inputs | {"situation": situation}})
    with serving(_routes(policy, [bent if d is cycle else d for d in decisions])) as url:
        assert main(["replay", cycle.id, "--url", url]) == 1
        assert "verdict.outcome: recorded 'preempts', computed 'denied'" in capsys.readouterr().out
        assert main(["replay", "2026-10-01", "--url", url]) == 1
    out = capsys.readouterr().out
    assert "verdict.outcome: recorded 'preempts', computed 'denied'" in out
    assert "the record was changed" in out.replace("\n", " ")


def test_a_policy_is_the_accountants_word_not_its_hash_under_this_release(preempted: Recorded, capsys: Capsys) -> None:
    """A release whose policies have a further key computes another hash of the same policy."""
    policy, decisions = preempted
    old = "0123456789abcdef"
    text = json.dumps([json.loads(d.model_dump_json()) for d in decisions])
    renamed = [Decision.model_validate(each) for each in json.loads(text.replace(policy.version(), old))]
    version = {"version": old, "effective_ms": 0, "policy": policy.model_dump(mode="json", by_alias=True)}
    with serving(_routes(policy, renamed) | {"/v1/policy/versions": lambda _: [version]}) as url:
        assert main(["replay", "2026-10-01", "--url", url]) == 0
    assert "bit for bit" in capsys.readouterr().out


def test_of_a_policy_that_the_accountant_does_not_have_nothing_is_compared(decided: Recorded, capsys: Capsys) -> None:
    policy, decisions = decided
    day = datetime.fromtimestamp(decisions[0].at_ms / 1000, UTC).date().isoformat()
    with serving(_routes(policy, decisions) | {"/v1/policy/versions": lambda _: []}) as url:
        main(["replay", day, "--url", url, "--output", "json"])
    counts = json.loads(capsys.readouterr().out)
    assert counts
    assert all(count["compared"] == 0 and count["fault"] for count in counts), counts


def _books(hours: int, now_h: int) -> dict[str, Answer]:
    """Build usage of 16 GPUs: `a` holds all of them in 4-GPU jobs of six hours; `b` has an 8-GPU job a day for four
    hours."""
    lines: list[tuple[str, str, int, int]] = []
    for hour in range(hours):
        b_runs = hour % 24 < 4
        lines += [("a", f"a-{hour // 6}-{slot}", hour, 4) for slot in range(2 if b_runs else 4)]
        if b_runs:
            lines.append(("b", f"b-{hour // 24}", hour, 8))

    def usage(query: Mapping[str, str]) -> dict[str, Any]:
        by, start = query["by"].split(","), int(query["start"]) // HOUR_MS
        found: dict[tuple[str, ...], int] = {}
        for queue, job, hour, gpus in lines:
            at = datetime.fromtimestamp((now_h - hours + hour) * 3600, UTC)
            if now_h - hours + hour < start:
                continue
            for gpu in range(gpus):
                place = {"hour": at.strftime("%Y-%m-%dT%H"), "gpu": f"GPU-{gpu}", "gpu_model": "H100"}
                key = {"queue": queue, "job": job, **place}
                found[name] = found.get(name := tuple(key[d] for d in by), 0) + HOUR_US
        return {
            "start_ms": int(query["start"]), "end_ms": int(query["end"]), "by": by, "coverage": 1.0,
            "lines": [
                {"key": dict(zip(by, name, strict=True)), "accounts_gpu_us": {"busy": amount}}
                for name, amount in sorted(found.items())
            ],
        }  # fmt: skip

    waits = [{"key": queue, "queued": {"median": 600.0}} for queue in "ab"]
    return {"/v1/usage": usage, "/v1/waits": lambda _: waits}


def _file(path: Path, weight_b: float, **more: Any) -> Path:
    queues = [{"name": "a", "weight": 1, "refs": ["fake:a"]}, {"name": "b", "weight": weight_b, "refs": ["fake:b"]}]
    path.write_text(json.dumps({"k": 0, "queues": queues, **more}))
    return path


def test_a_month_under_another_policy_says_who_gets_what(tmp_path: Path, capsys: Capsys) -> None:
    now_h = SystemClock().wall_ms() // HOUR_MS
    before, after = _file(tmp_path / "now.yaml", 0.01), _file(tmp_path / "then.yaml", 3.0)
    call = ["what-if", str(after), "--against", str(before), "--start", "4d"]
    out_csv, plots = tmp_path / "out.csv", tmp_path / "plots"
    with serving(_books(11 * 24, now_h)) as url:
        extra = ["--url", url, "--to", str(out_csv), "--plots", str(plots)]
        assert main([*call, *extra, "--output", "json"]) == 0
        text = capsys.readouterr().out
        assert main([*call, "--url", url]) == 0
        table = capsys.readouterr().out
    answer = json.loads(text[: text.rindex("}") + 1])
    assert answer["gpus"] == 16
    assert answer["days"] == 4.0
    a, b = answer["queues"]
    assert b["had"] == 4 * 4 * 8
    assert a["had"] == 4 * (20 * 16 + 4 * 8)
    assert b["then"]["mean_wait_h"] < b["now"]["mean_wait_h"]
    assert b["then"]["gpu_hours"] == pytest.approx(b["had"], abs=16)
    assert any("no jobs that never got a GPU" in text for text in answer["assumed"])
    assert (plots / "what-if.svg").read_text().startswith("<?xml")
    rows = list(csv.DictReader(out_csv.read_text().splitlines()))
    assert float(rows[1]["had_gpu_h"]) == 128.0
    assert "assumed: a job was submitted before it first held a GPU" in table
    assert "assumed: a job that holds GPUs again within a day" in table
    assert "total" in table


def test_a_trace_does_instead_of_the_books(tmp_path: Path, capsys: Capsys) -> None:
    trace = tmp_path / "jobs.csv"
    rows = [f"j{i},{i * 600},{'ab'[i % 2]},8,7200" for i in range(24)]
    trace.write_text("job_id,submit_offset_s,team,gpus,duration_s\n" + "\n".join(rows) + "\n")
    policy = _file(tmp_path / "p.yaml", 1.0)
    call = ["what-if", str(policy), "--trace", str(trace)]
    assert main([*call, "--against", str(policy), "--capacity", "16", "--output", "json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert [row["had"] for row in answer["queues"]] == [None, None]
    assert [row["then"] for row in answer["queues"]] == [row["now"] for row in answer["queues"]]
    assert sum(row["then"]["jobs"] for row in answer["queues"]) == 24
    assert main(call) == 1
    assert "--trace needs --against and --capacity" in capsys.readouterr().err


def test_no_history_is_one_line(tmp_path: Path, capsys: Capsys) -> None:
    policy = _file(tmp_path / "p.yaml", 1.0)
    with serving(_books(0, 0)) as url:
        assert main(["what-if", str(policy), "--against", str(policy), "--url", url]) == 1
    assert capsys.readouterr().err == (
        "gputally fairshare: the ledger has no GPU time in the last 720 hours: choose a longer span,"
        " or check that agents report\n"
    )
