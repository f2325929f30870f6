"""The command as a whole, over a cluster in memory and a real accountant: each check alone, output forms and exit
codes."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from accountant.composition import Service
from accountant.wire.policy_models import Policy
from accountant.wire.typed_accountant_client import AccountantClient
from agent.holders.protocol import SourceCheck
from agent.wire import Batch, Holder
from gputally.base.accountant_connection import Unanswered
from gputally.base.clock import VirtualClock
from gputally.doctor.__main__ import CALLED_WRONGLY, CHECKS, main, run_and_print, run_checks
from gputally.doctor.check_inputs import Sources
from gputally.doctor.findings import CheckResult
from gputally.doctor.rbac_checks import SERVICE_ACCOUNT, AccessRight, review_rights
from gputally.kubernetes.scheduler_plugins import schedulers
from gputally.testing.fake_scheduler import queue_object, setup_object
from tests.doctor.conftest import NOW_MS, MemoryInspector, failed, node, pod
from tests.fakes.nvml.library import FakeNvml
from tests.plugin_cases import registered
from tests.usage_records import QUARTER_MS, batch, deliver, interval, pod_facts, pod_holder

pytestmark = pytest.mark.usefixtures("fake_scheduler")

HOUR_MS = 3_600_000
TAINT = {"key": "dedicated", "value": "infra", "effect": "NoSchedule"}
PRICES = """\
schema: 1
currency: EUR
rows:
  - {id: h100, model: H100, price: "4.00", per: gpu-hour, valid_from: 2026-01-01, source: contract, as_of: 2026-01-01,
     basis: whole-instance}
"""
POLICY = Policy.model_validate(
    {
        "targets": {"fake": {"mode": "weight", "apply": "enforce"}},
        "queues": [{"name": "vision", "team": "vision", "deserved": 24, "refs": ["fake:vision"]}],
    }
)


def books() -> Batch:
    """Six hours of three GPUs until 12:00: an idle notebook, a job, and a busy L4 without a price or a holder."""
    names = ("notebook", "train")
    begin_ms = NOW_MS - 6 * HOUR_MS
    facts = [pod_facts(name, begin_ms, namespace="work", queue_ref="fake:vision") for name in names]
    stranger = Holder(kind="unattributed", uid="unattributed")
    l4: dict[str, Any] = {"gpu_model": "NVIDIA L4", "allocated_us": 0}
    rows = []
    for begin in range(begin_ms, NOW_MS, QUARTER_MS):
        for i, name in enumerate(names):
            rows.append(interval(begin, f"GPU-{i}", pod_holder(name, "work"), busy_us=i * 800_000_000))
        rows.append(interval(begin, "GPU-l4", **l4))
        rows.append(interval(begin, "GPU-l4", stranger, capacity_us=0, busy_us=450_000_000, **l4))
    return batch(rows, facts)


@pytest.fixture(scope="module")
def running(accountant_of: Callable[..., tuple[Service, str]], tmp_path_factory: pytest.TempPathFactory) -> str:
    """The address of an accountant with this usage, policy and prices."""
    book = tmp_path_factory.mktemp("prices") / "prices.yaml"
    book.write_text(PRICES)
    clock = VirtualClock(NOW_MS)
    service, url = accountant_of(clock, prices=book)
    service.ledger.put_policy(POLICY, NOW_MS - 7 * HOUR_MS)
    deliver(service.ledger, clock.wall_ms(), books())
    return url


@pytest.fixture
def cluster() -> MemoryInspector:
    """16 GPUs: eight behind a taint, two pods that wait, a scheduler that counts usage itself."""
    setup = setup_object(counts_usage=True)
    return MemoryInspector(
        [
            node("a", taints=[TAINT]), node("b"), pod("full", 8, on="b"), pod("train", 4),
            queue_object("vision", quota=24, requested=None, allocated=None), setup,
            failed("train", "0/2 nodes are available"),
        ]
    )  # fmt: skip


def by_name(results: tuple[CheckResult, ...]) -> dict[str, CheckResult]:
    return {result.check: result for result in results}


def test_what_is_wrong_in_the_cluster_and_the_books_is_found(
    sources_of: Callable[..., Sources], cluster: MemoryInspector, running: str
) -> None:
    found = by_name(run_checks(sources_of(cluster, AccountantClient(running), kubelet=SourceCheck())))
    status = {name: result.status for name, result in found.items()}
    report = registered("exports.json")  # which these two checks read
    assert status == {
        "driver": "unknown", "kubelet": "ok", "processes": "unknown", "agents": "unknown",
        "permissions": "ok", "clock": "error",
        "accountant": "ok", "freshness": "ok",
        "weights": "error", "conflicts": "ok", "guarantees": "error", "placement": "error",
        "idle": "warning", "oversized": "ok" if report else "unknown", "unowned": "warning",
        "prices": "warning" if report else "unknown", "plugins": "ok",
    }  # fmt: skip
    what = {name: [each.what for each in result.findings] for name, result in found.items()}
    assert what["weights"] == ["weights published to fake have no effect (HistoryCountedTwice)"]
    assert (
        what["guarantees"][0]
        == "deserved quotas add up to more GPUs than the cluster has: it can never satisfy all of them"
    )
    assert what["placement"] == ["taint dedicated=infra:NoSchedule keeps 1 pods from free GPUs: work/train"]
    assert what["idle"] == ["pod work/notebook of vision holds 1.0 GPUs and hardly uses them"]
    assert what["unowned"] == ["GPUs of node n were busy without an owner"]
    if report:
        assert [text.split(" has no price")[0] for text in what["prices"]] == ["NVIDIA L4"]
    else:
        assert all("format: give " in found[name].unknown for name in ("oversized", "prices"))
    assert found["clock"].findings[0].what.endswith("accountant's")  # a virtual clock beside HTTP's own Date
    assert all(each.remedy for result in found.values() for each in result.findings)


def test_a_check_that_cannot_be_made_says_why_and_leaves_the_others_alone(
    sources_of: Callable[..., Sources], cluster: MemoryInspector
) -> None:
    found = by_name(run_checks(sources_of(cluster)))
    assert found["driver"].unknown == "no driver"
    assert found["idle"].unknown == "no accountant"
    assert found["placement"].status == "error"
    assert found["conflicts"].seen == "1 queues of 1 schedulers, 0 in the policy; without the policy: no accountant"
    assert found["guarantees"].findings[0].what.startswith("fake's own queues are guaranteed more")
    found = by_name(run_checks(sources_of()))
    assert {result.status for name, result in found.items() if name != "plugins"} == {"unknown"}
    assert found["placement"].unknown == "no cluster: nothing listens"


def test_a_ledger_that_stopped_is_told_first_and_its_checks_are_not_run(
    sources_of: Callable[..., Sources], accountant_of: Callable[..., tuple[Service, str]]
) -> None:
    clock = VirtualClock(NOW_MS)
    service, url = accountant_of(clock)
    deliver(service.ledger, clock.wall_ms(), books())
    clock.advance(27 * 24 * HOUR_MS)
    names = ("freshness", "idle", "oversized", "unowned")
    found = run_checks(sources_of(None, AccountantClient(url)), names)
    assert [(result.check, result.status) for result in found] == [
        ("freshness", "error"), ("idle", "unknown"), ("oversized", "unknown"), ("unowned", "unknown"),
    ]  # fmt: skip
    assert all(result.not_run for result in found[1:])


def test_windows_go_by_the_ledgers_clock(sources_of: Callable[..., Sources], running: str, clock: VirtualClock) -> None:
    """A demo's ledger is of another time than the machine on which the doctor runs."""
    clock.advance(90 * 24 * HOUR_MS)
    found = by_name(run_checks(sources_of(None, AccountantClient(running)), ("freshness", "idle", "unowned")))
    assert {name: result.status for name, result in found.items()} == {
        "freshness": "ok", "idle": "warning", "unowned": "warning",
    }  # fmt: skip


def test_a_source_is_asked_once(sources_of: Callable[..., Sources], cluster: MemoryInspector) -> None:
    sources = sources_of(cluster)
    assert sources.cluster() is sources.cluster()
    assert sources.pods() is sources.pods()
    broken = sources_of()
    faults = []
    for _ in range(2):
        with pytest.raises(Exception, match="nothing listens") as caught:
            broken.cluster()
        faults.append(caught.value)
    assert faults[0] is faults[1]


def test_accounts_of_the_release_are_asked_about_where_there_are_any(cluster: MemoryInspector) -> None:
    answers, users = review_rights(cluster, "here")
    assert set(users.values()) == {"somebody"}
    assert {user for user, _ in cluster.asked} == {""}
    labels = {"app.kubernetes.io/name": "gputally", "app.kubernetes.io/component": "fairshare"}
    cluster.load(
        [
            {
                "apiVersion": "v1",
                "kind": SERVICE_ACCOUNT.kind,
                "metadata": {"name": "tally-fairshare", "namespace": "metering", "labels": labels},
            }
        ]
    )
    cluster.refused.add(("fake.gputally.dev", "queues", "patch"))
    answers, users = review_rights(cluster, "here")
    assert users == {"fairshare": "system:serviceaccount:metering:tally-fairshare"}
    assert [str(right) for right, allowed in answers["fairshare"].items() if not allowed] == [
        "patch queues.fake.gputally.dev"
    ]
    named = [asked for user, asked in cluster.asked if user and asked.get("namespace")]
    assert {asked["namespace"] for asked in named} == {"metering"}
    names = {asked.get("name") for asked in named}
    assert "tally-fairshare" in names
    assert ("tally-fairshare-runai" in names) == ("runai" in schedulers())
    assert AccessRight("", "pods", "list") in answers["fairshare"]


def test_the_door_is_told_from_the_ledger(sources_of: Callable[..., Sources]) -> None:
    sources = sources_of(accountant=AccountantClient("http://127.0.0.1:1"))
    (door,) = run_checks(sources, ["accountant"])
    assert door.findings[0].what == "the accountant does not answer"
    with pytest.raises(Unanswered, match="refused"):
        AccountantClient("http://127.0.0.1:1").probe("/livez")


def test_a_probe_returns_every_status(running: str) -> None:
    assert AccountantClient(running).probe("/readyz").status == 200
    refused = AccountantClient(running).probe("/v1/nothing")
    assert (refused.status, refused.reason != "") == (404, True)
    assert refused.date_ms is not None


def test_forms_and_codes(
    sources_of: Callable[..., Sources], cluster: MemoryInspector, capsys: pytest.CaptureFixture[str]
) -> None:
    only = ["placement", "conflicts"]
    assert run_and_print(sources_of(cluster), only, "table") == 2
    table = capsys.readouterr().out
    assert "ERROR  placement: taint dedicated=infra:NoSchedule" in table
    assert "    → kubectl taint nodes a" in table
    assert table.rstrip().endswith("1 error; 2 checks run")
    assert run_and_print(sources_of(cluster), only, "json") == 2
    document = json.loads(capsys.readouterr().out)
    assert (document["exit_code"], [check["status"] for check in document["checks"]]) == (2, ["ok", "error"])
    assert document["checks"][1]["findings"][0]["severity"] == "error"
    assert run_and_print(sources_of(cluster), ["driver", *only], "csv") == 2
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [(row["check"], row["severity"]) for row in rows] == [
        ("driver", "unknown"), ("conflicts", "ok"), ("placement", "error")
    ]  # fmt: skip


def test_a_machine_without_anything_is_no_fault(
    fake_nvml: FakeNvml, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_nvml.tell("initerr 12")  # a library that an earlier test loaded would be found in place of none
    socket = tmp_path / "kubelet.sock"
    call = ["--only", "driver,kubelet,processes", "--kubelet-socket", str(socket)]
    assert main([*call, "--output", "csv"]) == 0
    assert f"this machine has no kubelet ({socket})" in capsys.readouterr().out
    assert main(call) == 0
    said = capsys.readouterr().out
    assert "0 checks run, 3 not run" in said
    assert "nothing wrong" not in said, "nothing was checked"
    assert "--url" in said


def test_wrong_calls_have_a_code_of_their_own(capsys: pytest.CaptureFixture[str]) -> None:
    for call in (["--only", "nothing"], ["--output", "xml"], ["--what"]):
        assert main(call) == CALLED_WRONGLY
    assert "there is no check 'nothing'; the checks are driver, kubelet" in capsys.readouterr().err
    assert main(["--help"]) == 0
    listed = capsys.readouterr().out
    assert all(f"  {name} " in listed for name in CHECKS)
