"""Lists every check with the facts it needs."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from agent.core.errors import AgentError
from gputally.base.errors import AccountantError, FairshareError
from gputally.base.units import MS_PER_DAY, MS_PER_HOUR
from gputally.base.yaml_file import FileFault
from gputally.doctor.check_inputs import Sources
from gputally.doctor.findings import CannotCheck, CheckResult, Finding, Result

if TYPE_CHECKING:
    from accountant.wire.policy_models import Policy

IDLE_HOURS = 4
REPORT_DAYS = 7
_OURS = frozenset({"agent", "accountant", "fairshare", "dashboards", "gputally"})


@dataclass(frozen=True, slots=True)
class Check:
    """A check. about: its subject, for people."""

    name: str
    about: str
    look: Callable[[Sources], CheckResult]


def make(check: Check, sources: Sources) -> Result:
    """Run a check. It raises nothing for missing facts: `unknown` gives the reason."""
    try:
        seen = check.look(sources)
    except (CannotCheck, AgentError, AccountantError, FairshareError, FileFault) as reason:
        return Result(check.name, unknown=" ".join(str(reason).split()))
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] in _OURS:
            raise
        return Result(check.name, unknown=f"{error.name} is not installed here: pip install gputally")
    return Result(check.name, seen.seen, seen.findings)


def make_all(sources: Sources, only: Iterable[str] = ()) -> tuple[Result, ...]:
    """Run all checks, or those named, in their order."""
    wanted = set(only)
    return tuple(make(check, sources) for check in CHECKS.values() if not wanted or check.name in wanted)


def _driver(sources: Sources) -> CheckResult:
    from gputally.doctor.node_checks import driver

    return driver(sources.machine())


def _kubelet(sources: Sources) -> CheckResult:
    given = sources.kubelet()
    if given.failure:
        remedy = "run as root, or mount /var/lib/kubelet/pod-resources as the chart's agent does"
        return CheckResult("", (Finding("error", "the kubelet does not say who holds GPUs", given.failure, remedy),))
    return CheckResult(f"{len(given.pods)} pods, answered in {given.took_ms} ms")


def _processes(sources: Sources) -> CheckResult:
    from gputally.doctor.node_checks import driver, foreign_processes

    sources.kubelet()  # raises without a kubelet: then processes outside pods are normal
    machine = sources.machine()
    driver(machine)
    return foreign_processes(machine.snapshot)


def _permissions(sources: Sources) -> CheckResult:
    from gputally.doctor.rbac_checks import ask, judge_rights, scheduler_configs

    policy, _ = _policy(sources)
    preempts = policy is not None and policy.preemption.mode == "enforce"
    configs = scheduler_configs(policy) if policy is not None else ()
    return judge_rights(*ask(sources.ground(), sources.options.namespace, preempts=preempts, configs=configs))


def _policy(sources: Sources) -> tuple[Policy | None, str]:
    """Return the policy, and a note if it cannot be read; for checks that can run partly without it."""
    try:
        return sources.policy(), ""
    except (CannotCheck, AccountantError, FairshareError, FileFault) as reason:
        return None, f"; without the policy: {' '.join(str(reason).split())}"


def _agents(sources: Sources) -> CheckResult:
    from gputally.doctor.node_checks import DAEMON_SET, agents, ours
    from gputally.kubernetes.objects import EVENT, POD, Object

    ground, pods = sources.ground(), list[Object]()
    sets = [one for one in ground.list(DAEMON_SET) if ours(one)]
    ground.scan(POD, lambda obj: pods.append(obj) if ours(obj) else None)
    return agents(sets, pods, sources.nodes(), ground.list(EVENT, fields="reason=FailedCreate"))


def _clock(sources: Sources) -> CheckResult:
    from gputally.doctor.accountant_and_usage_checks import ClockReading, clocks

    told: list[ClockReading] = []
    silent: list[str] = []

    def ask(who: str, question: Callable[[], int | None]) -> None:
        began = sources.clock.monotonic_ms()
        try:
            theirs = question()
        except (CannotCheck, AccountantError, FairshareError, FileFault) as reason:
            silent.append(str(reason))
            return
        if theirs is not None:
            took = sources.clock.monotonic_ms() - began
            told.append(ClockReading(who, theirs, sources.clock.wall_ms(), took))

    ask("API server", lambda: sources.ground().server_ms())
    ask("accountant", lambda: sources.remote().probe("/livez").date_ms)
    if not told:
        raise CannotCheck("; ".join(silent) or "no source reports the time")
    return clocks(tuple(told))


def _accountant(sources: Sources) -> CheckResult:
    from gputally.base.accountant_connection import Unanswered
    from gputally.doctor.accountant_and_usage_checks import AccountantProbe, accountant

    url = sources.options.url
    try:
        remote = sources.remote()
        ready, asked = remote.probe("/readyz"), remote.probe("/v1/periods")
    except Unanswered as reason:
        return accountant(AccountantProbe(url, 0, 0, str(reason).removeprefix(f"{url}: ")))
    return accountant(AccountantProbe(url, ready.status, asked.status, asked.reason or ready.reason))


def _weights(sources: Sources) -> CheckResult:
    from gputally.doctor.scheduler_checks import noted_conditions, targets, weights

    policy, ground = sources.policy(), sources.ground()
    return weights(policy, targets(ground, policy), noted_conditions(ground, sources.options.namespace))


def _conflicts(sources: Sources) -> CheckResult:
    from fairshare.core.pods import read_pod
    from gputally.base.pod_queue_labels import placed_by
    from gputally.doctor.scheduler_checks import conflicts, own_queues

    pods = [
        (pod, placed_by(name := (obj.get("spec") or {}).get("schedulerName") or "") or name or "default-scheduler")
        for obj in sources.pods()
        if (pod := read_pod(obj)) is not None
    ]
    policy, unknown = _policy(sources)
    seen = conflicts(policy, own_queues(sources.ground()), pods)
    return replace(seen, seen=seen.seen + unknown)


def _guarantees(sources: Sources) -> CheckResult:
    from gputally.doctor.scheduler_checks import gangs, guarantees, installed, own_queues
    from gputally.kubernetes.objects import gpus_of_nodes

    ground, nodes = sources.ground(), sources.nodes()
    policy, unknown = _policy(sources)
    asked = gangs(ground, policy, sources.pods()) if policy is not None else ()
    seen = guarantees(policy, gpus_of_nodes(nodes), installed(nodes), own_queues(ground), asked)
    return replace(seen, seen=seen.seen + unknown)


def _placement(sources: Sources) -> CheckResult:
    from gputally.doctor.pending_pod_checks import placement
    from gputally.kubernetes.objects import EVENT

    events = sources.ground().list(EVENT, fields="reason=FailedScheduling")
    return placement(sources.nodes(), sources.pods(), events, sources.now_ms)


def _idle(sources: Sources) -> CheckResult:
    from accountant.wire.usage_models import UsageAnswer
    from gputally.doctor.accountant_and_usage_checks import idle_holders

    end = sources.now_ms // MS_PER_HOUR * MS_PER_HOUR
    query = {"by": "team,namespace,pod,hour", "start": str(end - IDLE_HOURS * MS_PER_HOUR), "end": str(end)}
    pages = sources.remote().pages(UsageAnswer, "/v1/usage", query)
    return idle_holders((line for page in pages for line in page.lines), IDLE_HOURS)


def _unowned(sources: Sources) -> CheckResult:
    from accountant.wire.usage_models import UsageAnswer
    from gputally.doctor.accountant_and_usage_checks import unattributed_time

    query = {"by": "node", "start": str(sources.now_ms - MS_PER_DAY), "end": str(sources.now_ms)}
    pages = sources.remote().pages(UsageAnswer, "/v1/usage", query)
    return unattributed_time([line for page in pages for line in page.lines], MS_PER_DAY / MS_PER_HOUR)


def _oversized(sources: Sources) -> CheckResult:
    from gputally.doctor.accountant_and_usage_checks import oversized

    found = _report(sources)
    return oversized(found["tables"]["hints"], REPORT_DAYS, found["summary"]["currency"])


def _prices(sources: Sources) -> CheckResult:
    from accountant.prices.price_book import EXAMPLE
    from gputally.doctor.accountant_and_usage_checks import prices

    found = _report(sources)
    month = f"{datetime.fromtimestamp(sources.now_ms / 1000, UTC):%Y-%m}"
    version, examples = found["summary"]["price_book_version"], []
    if version:
        rows = json.loads(sources.remote().get("/v1/prices", {}))["rows"]
        examples = [row["id"] for row in rows if row["source"] == EXAMPLE]
    return prices(found["tables"]["unpriced"], REPORT_DAYS, version, month, examples)


def _report(sources: Sources) -> dict[str, Any]:
    """Return the report of the last days, as JSON."""
    start = sources.now_ms - REPORT_DAYS * MS_PER_DAY
    query = {"start": str(start), "end": str(sources.now_ms), "format": "json"}
    found: dict[str, Any] = json.loads(sources.remote().get("/v1/report", query))
    return found


_ALL: Sequence[Check] = (
    Check("driver", "NVML of this machine: GPUs that are lost, readings that are refused", _driver),
    Check("kubelet", "the kubelet's PodResources socket of this machine", _kubelet),
    Check("processes", "holders of this machine's GPUs outside Kubernetes", _processes),
    Check("agents", "nodes with GPUs that have no agent, and agents that do not start", _agents),
    Check("permissions", "what agent, accountant and fairshare need at the API server", _permissions),
    Check("clock", "this clock against the API server's and the accountant's", _clock),
    Check("accountant", "whether it answers, reads its ledger and lets us in", _accountant),
    Check("weights", "schedulers' kinds and versions, and whether published weights can act", _weights),
    Check("conflicts", "queues and nodes that two schedulers give out", _conflicts),
    Check("guarantees", "quotas and gangs that can never be met", _guarantees),
    Check("placement", "pods that wait although GPUs are free, and by which taint", _placement),
    Check("idle", f"pods that hold GPUs and hardly use them, over {IDLE_HOURS} h", _idle),
    Check("oversized", f"jobs that requested far more GPUs than they used, over {REPORT_DAYS} days", _oversized),
    Check("unowned", "nodes with busy time without an owner, over 24 h", _unowned),
    Check("prices", f"GPU models without a price, over {REPORT_DAYS} days", _prices),
)
CHECKS = {check.name: check for check in _ALL}
