"""Findings about rights, clocks, the accountant, and its figures."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from accountant.core.record_faults import SKEW_MS
from accountant.ledger.protocols import GpuOwner, GpuOwnership
from accountant.wire.usage_cost_and_job_models import Accounts, UsageLine
from gputally.doctor.accountant_and_usage_checks import (
    REFUSED_MS,
    AccountantProbe,
    ClockReading,
    accountant,
    clocks,
    freshness,
    idle_holders,
    oversized,
    prices,
    unattributed_time,
)
from gputally.doctor.findings import CheckResult, Finding, exit_code, first_findings
from gputally.doctor.rbac_checks import (
    EXTENDING,
    PROGRAMS,
    AccessRight,
    extends,
    judge_rights,
    needed_rights,
    needs,
    preempting,
)
from gputally.doctor.scheduler_checks import conflicts, guarantees, placement, weights
from gputally.testing.fake_scheduler import GROUP
from tests.fairshare.builders import policy_of

CHART = Path(__file__).parents[1] / "chart" / "golden" / "on-prem.yaml"
HOUR_US = 3_600_000_000


def test_the_rights_are_those_of_the_chart() -> None:
    """Kinds, verbs and names, role by role; the chart's example also grants preemption."""
    roles: dict[str, set[AccessRight]] = {}
    for manifest in yaml.safe_load_all(CHART.read_text("utf-8")):
        if manifest["kind"] not in {"Role", "ClusterRole"}:
            continue
        program = manifest["metadata"]["labels"]["app.kubernetes.io/component"]
        local = manifest["kind"] == "Role"
        for rule in manifest["rules"]:
            for group in rule["apiGroups"]:
                for resource in rule["resources"]:
                    for verb in rule["verbs"]:
                        for name in rule.get("resourceNames", [""]):
                            roles.setdefault(program, set()).add(AccessRight(group, resource, verb, name, local))
    for program, rights in roles.items():
        ours = set(needs(program))
        assert ours <= rights, sorted(map(str, ours - rights))
        assert rights - ours <= {*preempting(), *EXTENDING}, sorted(map(str, rights - ours))
    assert set(EXTENDING) <= roles["fairshare"]
    assert set(roles) == {program for program in PROGRAMS if needs(program)}, "no role without a right"


@pytest.mark.usefixtures("fake_scheduler")
def test_rights_of_kinds_that_nobody_serves_are_not_asked_for() -> None:
    served = {("", "pods"), (GROUP, "podgroups")}
    assert {right.resource for right in needed_rights("fairshare", served)} == {"pods", "podgroups"}
    assert AccessRight("", "pods/eviction", "create") in needed_rights("fairshare", served, preempts=True)
    claims = {("resource.k8s.io", "resourceclaims")}
    assert set(needed_rights("fairshare", claims, extender=True)) == set(EXTENDING[:2])
    assert not extends(policy_of())


def test_refused_rights() -> None:
    pods, jobs = AccessRight("", "pods", "list"), AccessRight("batch", "jobs", "get")
    seen = judge_rights(
        {"agent": {pods: True}, "accountant": {pods: False, jobs: False}}, {"agent": "me", "accountant": "me"}
    )
    hard, soft = seen.findings
    assert seen.seen == "3 rights of agent, accountant, reviewed for me"
    assert (hard.severity, hard.what) == ("error", "accountant lacks rights that it needs: list pods")
    assert hard.evidence == "me lacks 1 of 2 rights"
    assert (soft.severity, "get jobs.batch" in soft.evidence) == ("warning", True)


def test_clocks() -> None:
    assert REFUSED_MS == SKEW_MS
    assert (
        clocks((ClockReading("API server", 9_000, 9_999, 100), ClockReading("accountant", 11_000, 10_000, 0))).findings
        == ()
    )
    seen = clocks((ClockReading("API server", 10_000, 20_000, 500), ClockReading("accountant", 700_000, 10_000, 0)))
    ahead, behind = seen.findings
    assert (ahead.severity, ahead.what) == ("warning", "this machine's clock is ahead of the API server's")
    assert ahead.evidence == "by at least 8.5 s"
    assert (behind.severity, behind.what) == ("error", "this machine's clock is behind the accountant's")
    (far,) = clocks((ClockReading("accountant", 0, 400_000, 0),)).findings
    assert "quarantined as future-dated" in far.what


@pytest.mark.parametrize(
    ("probe", "what"),
    [
        (AccountantProbe("http://a", 0, 0, "Connection refused"), "the accountant does not answer"),
        (AccountantProbe("http://a", 503, 503, "disk full"), "the accountant cannot read its ledger"),
        (AccountantProbe("http://a", 200, 401, "Unauthenticated"), "the accountant does not know this caller"),
        (AccountantProbe("http://a", 200, 403, "Forbidden"), "this caller may not read the ledger"),
        (AccountantProbe("http://a", 200, 500, "Internal"), "the accountant answers a request with an error"),
    ],
)
def test_what_the_accountant_answers(probe: AccountantProbe, what: str) -> None:
    (found,) = accountant(probe).findings
    assert (found.severity, found.what) == ("error", what)
    assert probe.reason in found.evidence
    assert accountant(AccountantProbe("http://a", 200, 200)).findings == ()


def hour(pod: str, hour: int, busy: float, gpus: float = 2, unknown: float = 0.0) -> UsageLine:
    held = round(gpus * HOUR_US)
    used, dark = round(held * busy), round(held * unknown)
    accounts = Accounts(busy=used, allocated_idle=held - used - dark, allocated_unknown=dark)
    key = {"team": "vision", "namespace": "work", "pod": pod, "hour": f"2026-11-01T{hour:02}"}
    return UsageLine(key=key, accounts_gpu_us=accounts)


def test_idle_holders_held_their_gpus_all_the_time() -> None:
    lines = [hour("notebook", h, 0.01) for h in range(4)] + [hour("train", h, 0.9) for h in range(4)]
    lines += [hour("new", 3, 0.0), *(hour("dark", h, 0.0, unknown=0.5) for h in range(4))]
    seen = idle_holders(lines, 4)
    (found,) = seen.findings
    assert seen.seen == "3 pods held GPUs all of the last 4 h, 1 of them idle"
    assert found.what == "pod work/notebook of vision holds 2.0 GPUs and hardly uses them"
    assert found.evidence == "8.0 GPU-hours in 4 h, 1.0 % busy"
    assert found.remedy.startswith("kubectl -n work delete pod notebook")


def test_oversized_jobs() -> None:
    common = {"team": "vision", "namespace": "work", "saving_at_most": "120.5", "advice": ""}
    rows = [
        {
            **common,
            "job": "Job/eight",
            "kind": "fewer",
            "held_gpus": 8.0,
            "peak_busy_gpus": 1.7,
            "needed_gpus": "2",
            "needed_of": 1,
        },
        {
            **common,
            "job": "Job/one",
            "kind": "slice",
            "held_gpus": 1.0,
            "peak_busy_gpus": 0.2,
            "needed_gpus": "2",
            "needed_of": 7,
        },
        {
            **common,
            "job": "Job/idle",
            "kind": "idle",
            "held_gpus": 1.0,
            "peak_busy_gpus": 0.0,
            "needed_gpus": "0",
            "needed_of": 1,
        },
    ]
    fewer, part = oversized(rows, 7, "USD", 9).findings
    assert fewer.evidence == "held 8.0 GPUs, its busiest hour used 1.70; at most 120.50 USD"
    assert fewer.remedy == "set nvidia.com/gpu: 2 in the pod template of Job/eight (work)"
    assert "2/7 of a GPU" in part.remedy


def test_models_without_a_price() -> None:
    row = {"gpu_model": "NVIDIA L4", "pool": "", "region": "eu", "capacity_type": "", "gpu_hours": "12.5"}
    rows = [{**row, "near_row": "", "near_model": ""}] * 2
    (found,) = prices(rows, 7, "abc", "2026-11", 1).findings
    assert found.what.startswith("NVIDIA L4 has no price (eu)")
    assert (found.evidence, "reprice 2026-11" in found.remedy) == ("25.0 GPU-hours held", True)
    (near,) = prices([{**row, "near_row": "l40", "near_model": "L40"}], 7, "abc", "2026-11", 1).findings
    assert "row l40" in near.evidence
    (none,) = prices([], 7, None, "2026-11", 0).findings
    assert none.severity == "error"


def test_prices_that_are_examples_are_told() -> None:
    (found,) = prices([], 7, "abc", "2026-11", 1, ["example-h100", "example-l4"]).findings
    assert (found.severity, found.evidence) == ("warning", "example-h100, example-l4")
    assert found.what.startswith("2 rows of the price book are examples")
    assert "accountant.prices.text" in found.remedy


def test_busy_time_that_nobody_owns() -> None:
    accounts = Accounts(unallocated=100 * HOUR_US)
    lines = [
        UsageLine(key={"node": "a"}, accounts_gpu_us=accounts, unattributed_busy_us=50 * HOUR_US),
        UsageLine(key={"node": "b"}, accounts_gpu_us=accounts, unattributed_busy_us=HOUR_US // 2),
    ]
    (found,) = unattributed_time(lines, 24).findings
    assert (found.what, found.evidence) == (
        "GPUs of node a were busy without an owner",
        "50.0 of 100.0 GPU-hours in 24 h",
    )


def test_the_exit_code_is_that_of_the_worst() -> None:
    warning, error = Finding("warning", "w", "", ""), Finding("error", "e", "", "")
    assert exit_code([]) == exit_code([CheckResult(examined=1), CheckResult(unknown="no cluster")]) == 0
    assert exit_code([CheckResult(findings=(warning,))]) == 1
    assert exit_code([CheckResult(findings=(warning, error)), CheckResult()]) == 2


def test_a_check_that_examined_nothing_is_not_run() -> None:
    """By construction: a result is ok only if it says how much it examined."""
    assert CheckResult("0 pods").status == "unknown"
    assert CheckResult("0 pods").not_run
    assert CheckResult("1 pod", examined=1).status == "ok"
    over_nothing = (
        idle_holders([], 4), unattributed_time([], 24), oversized([], 7, "EUR", 0), prices([], 7, "v", "2026-11", 0),
        freshness([], (), 0), clocks(()), judge_rights({}, {}), conflicts(None, (), ()), weights(None, ()),
        guarantees(None, 0, 0, (), ()), placement((), (), (), 0),
    )  # fmt: skip
    assert {result.status for result in over_nothing} == {"unknown"}


def gpu(node: str, last_ms: int, cluster: str = "prod") -> GpuOwnership:
    owner = GpuOwner(node=node, from_ms=0, until_ms=None, recorded_ms=0, confirmed_by="")
    return GpuOwnership(
        cluster=cluster, gpu_uuid=f"GPU-{node}", gpu_model="L4", last_ms=last_ms, owners=(owner,), claims=()
    )


def test_nodes_whose_newest_record_is_old_are_found() -> None:
    hour = 3_600_000
    gpus = [gpu("fresh", 100 * hour), gpu("silent", 90 * hour), gpu("sold", 10 * hour)]
    nodes = {("prod", "fresh"), ("prod", "silent")}
    (found,) = freshness(gpus, nodes, 100 * hour).findings
    assert (found.severity, "silent" in found.what, "10.0 h" in found.what) == ("warning", True, True)
    (found,) = freshness(gpus, nodes, 748 * hour).findings
    assert (found.severity, "27.0 d old" in found.what) == ("error", True)
    assert freshness(gpus[:1], nodes, 100 * hour).status == "ok"


def test_many_findings_of_a_kind_are_counted() -> None:
    found = first_findings((Finding("warning", f"f{i}", "", "r") for i in range(15)), "pods")
    assert (len(found), found[-1].what) == (10, "6 more pods")
