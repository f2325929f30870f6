"""Runs `gputally doctor`: lists every check with the facts that it needs, runs the checks and prints the findings.

The command also runs where only the agent is installed: there it runs the checks of the machine, and each other check
reports which library is missing. A check therefore imports the modules of the other programs itself, and the arguments
are parsed by the standard library.

Exit codes: 0 nothing wrong, 1 warnings, 2 errors, 64 wrong call."""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Column
from rich.text import Text

from gputally.base import terminal
from gputally.base.clock import SystemClock
from gputally.base.command_output import OUTPUTS, Output, show
from gputally.base.errors import AccountantError, AgentError, FairshareError
from gputally.base.units import MS_PER_DAY, MS_PER_HOUR
from gputally.base.yaml_file import FileFault
from gputally.doctor.check_inputs import DoctorOptions, Sources, real_sources
from gputally.doctor.findings import CannotCheck, CheckResult, Finding, Status, exit_code

if TYPE_CHECKING:
    from accountant.ledger.protocols import GpuOwnership
    from accountant.wire.policy_models import Policy

IDLE_HOURS = 4
REPORT_DAYS = 7
_PACKAGES = frozenset({"agent", "accountant", "fairshare", "dashboards", "gputally"})
_UNREADABLE = (CannotCheck, AgentError, AccountantError, FairshareError, FileFault)
"""Exceptions of a source that cannot be read."""


@dataclass(frozen=True, slots=True)
class Check:
    """A check. about: what it examines, for the command's help."""

    name: str
    about: str
    run: Callable[[Sources], CheckResult]


def run_check(check: Check, sources: Sources) -> CheckResult:
    """Run a check. If its facts cannot be read, the result's `unknown` is the reason."""
    try:
        return replace(check.run(sources), check=check.name)
    except _UNREADABLE as reason:
        return CheckResult(check=check.name, unknown=" ".join(str(reason).split()))
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] in _PACKAGES:
            raise
        return CheckResult(check=check.name, unknown=f"{error.name} is not installed here: pip install gputally")


def run_checks(sources: Sources, only: Iterable[str] = ()) -> tuple[CheckResult, ...]:
    """Run the checks with the names in `only`, or all checks if it is empty, in the order of `CHECKS`."""
    wanted = set(only)
    return tuple(run_check(check, sources) for check in CHECKS.values() if not wanted or check.name in wanted)


def _driver(sources: Sources) -> CheckResult:
    from gputally.doctor.node_checks import driver

    return driver(sources.machine())


def _kubelet(sources: Sources) -> CheckResult:
    answer = sources.kubelet()
    if answer.failure:
        what = "the kubelet does not report which pods hold GPUs"
        remedy = "run the doctor as root, or mount /var/lib/kubelet/pod-resources, as the chart does for the agent"
        return CheckResult("", (Finding("error", what, answer.failure, remedy),))
    return CheckResult(f"{answer.pods} pods, answered in {answer.took_ms} ms", examined=1)


def _processes(sources: Sources) -> CheckResult:
    from gputally.doctor.node_checks import driver, foreign_processes

    sources.kubelet()  # raises CannotCheck without a kubelet, because processes outside pods are then normal
    machine = sources.machine()
    driver(machine)  # raises CannotCheck without a driver
    return foreign_processes(machine.snapshot)


def _permissions(sources: Sources) -> CheckResult:
    from gputally.doctor.rbac_checks import extends, judge_rights, named_rights, review_rights

    policy, _ = _policy(sources)
    preempts = policy is not None and policy.preemption.mode == "enforce"
    extender = policy is not None and extends(policy)
    named = named_rights(policy) if policy is not None else ()
    return judge_rights(
        *review_rights(sources.cluster(), sources.options.namespace, preempts=preempts, extender=extender, named=named)
    )


def _policy(sources: Sources) -> tuple[Policy | None, str]:
    """Return the policy (None if there is none) and "". If the policy cannot be read, return None and the reason, as
    text for `CheckResult.seen`."""
    try:
        return sources.policy(), ""
    except _UNREADABLE as reason:
        return None, f"; without the policy: {' '.join(str(reason).split())}"


def _agents(sources: Sources) -> CheckResult:
    from gputally.doctor.node_checks import DAEMON_SET, agents, is_of_agents
    from gputally.kubernetes.objects import EVENT, POD, Object

    cluster, pods = sources.cluster(), list[Object]()
    sets = [obj for obj in cluster.list(DAEMON_SET) if is_of_agents(obj)]
    cluster.scan(POD, lambda obj: pods.append(obj) if is_of_agents(obj) else None)
    return agents(sets, pods, sources.nodes(), cluster.list(EVENT, fields="reason=FailedCreate"))


def _clock(sources: Sources) -> CheckResult:
    from gputally.doctor.accountant_and_usage_checks import ClockReading, clocks

    readings: list[ClockReading] = []
    reasons: list[str] = []

    def read(machine: str, read_time: Callable[[], int | None]) -> None:
        began = sources.clock.monotonic_ms()
        try:
            their_ms = read_time()
        except _UNREADABLE as reason:
            reasons.append(str(reason))
            return
        if their_ms is not None:
            took_ms = sources.clock.monotonic_ms() - began
            readings.append(ClockReading(machine, their_ms, sources.clock.wall_ms(), took_ms))

    read("API server", lambda: sources.cluster().server_ms())
    read("accountant", lambda: sources.accountant().probe("/livez").date_ms)
    if not readings:
        raise CannotCheck("; ".join(reasons) or "no source reports the time")
    return clocks(tuple(readings))


def _accountant(sources: Sources) -> CheckResult:
    from gputally.base.accountant_connection import Unanswered
    from gputally.doctor.accountant_and_usage_checks import AccountantProbe, accountant

    url = sources.options.url
    try:
        client = sources.accountant()
        ready, periods = client.probe("/readyz"), client.probe("/v1/periods")
    except Unanswered as reason:
        return accountant(AccountantProbe(url, 0, 0, str(reason).removeprefix(f"{url}: ")))
    return accountant(AccountantProbe(url, ready.status, periods.status, periods.reason or ready.reason))


def _weights(sources: Sources) -> CheckResult:
    from gputally.doctor.scheduler_checks import recorded_conditions, targets, weights

    policy, cluster = sources.policy(), sources.cluster()
    return weights(policy, targets(cluster, policy), recorded_conditions(cluster, sources.options.namespace))


def _conflicts(sources: Sources) -> CheckResult:
    from fairshare.core.gpu_demand import read_pod, sized
    from gputally.doctor.scheduler_checks import conflicts, own_queues
    from gputally.kubernetes.mig_parts import MigParts
    from gputally.kubernetes.pod_queue_labels import placed_by

    pods, parts = [], MigParts.of(sources.nodes())
    for obj in sources.pods():
        pod = read_pod(obj)
        if pod is not None:
            name = (obj.get("spec") or {}).get("schedulerName") or ""
            pods.append((sized(pod, parts), placed_by(name) or name or "default-scheduler"))
    policy, unknown = _policy(sources)
    result = conflicts(policy, own_queues(sources.cluster(), parts), pods)
    return replace(result, seen=result.seen + unknown)


def _guarantees(sources: Sources) -> CheckResult:
    from gputally.doctor.scheduler_checks import gangs, guarantees, installed, of_models, own_queues
    from gputally.kubernetes.mig_parts import MigParts
    from gputally.kubernetes.objects import gpus_of_nodes

    cluster, nodes = sources.cluster(), sources.nodes()
    policy, unknown = _policy(sources)
    requested = gangs(cluster, policy, sources.pods(), nodes) if policy is not None else ()
    result = guarantees(
        policy, gpus_of_nodes(nodes), installed(nodes), own_queues(cluster, MigParts.of(nodes)), requested,
        of_models(policy, nodes),
    )  # fmt: skip
    return replace(result, seen=result.seen + unknown)


def _placement(sources: Sources) -> CheckResult:
    from gputally.doctor.scheduler_checks import placement
    from gputally.kubernetes.objects import EVENT

    events = sources.cluster().list(EVENT, fields="reason=FailedScheduling")
    return placement(sources.nodes(), sources.pods(), events, sources.now_ms)


def _freshness(sources: Sources) -> CheckResult:
    from accountant.api.bookkeeping_models import GpuOwners
    from accountant.wire.usage_cost_and_job_models import UsageAnswer
    from gputally.doctor.accountant_and_usage_checks import freshness

    accountant, end = sources.accountant(), sources.ledger_ms()
    gpus: list[GpuOwnership] = []
    after: str | None = ""
    while after is not None:
        page = accountant.ask(GpuOwners, "/v1/gpus/owners", {"after": after, "limit": "10000"})
        gpus, after = [*gpus, *page.gpus], page.next_after
    query = {"by": "cluster,node", "start": str(end - MS_PER_HOUR), "end": str(end)}
    lines = (line for page in accountant.pages(UsageAnswer, "/v1/usage", query) for line in page.lines)
    nodes = {(line.key["cluster"], line.key["node"]) for line in lines if line.accounts_gpu_us.total}
    return freshness(gpus, nodes, end)


def _idle(sources: Sources) -> CheckResult:
    from accountant.wire.usage_cost_and_job_models import UsageAnswer
    from gputally.doctor.accountant_and_usage_checks import idle_holders

    end = sources.ledger_ms() // MS_PER_HOUR * MS_PER_HOUR
    query = {"by": "team,namespace,pod,hour", "start": str(end - IDLE_HOURS * MS_PER_HOUR), "end": str(end)}
    pages = sources.accountant().pages(UsageAnswer, "/v1/usage", query)
    return idle_holders((line for page in pages for line in page.lines), IDLE_HOURS)


def _unowned(sources: Sources) -> CheckResult:
    from accountant.wire.usage_cost_and_job_models import UsageAnswer
    from gputally.doctor.accountant_and_usage_checks import unattributed_time

    end = sources.ledger_ms()
    query = {"by": "node", "start": str(end - MS_PER_DAY), "end": str(end)}
    pages = sources.accountant().pages(UsageAnswer, "/v1/usage", query)
    return unattributed_time([line for page in pages for line in page.lines], MS_PER_DAY / MS_PER_HOUR)


def _oversized(sources: Sources) -> CheckResult:
    from gputally.doctor.accountant_and_usage_checks import oversized

    report = _report(sources)
    summary = report["summary"]
    return oversized(report["tables"]["hints"], REPORT_DAYS, summary["currency"], summary["jobs"] or 0)


def _prices(sources: Sources) -> CheckResult:
    from accountant.prices.price_book import EXAMPLE
    from gputally.doctor.accountant_and_usage_checks import prices

    report = _report(sources)
    month = f"{datetime.fromtimestamp(sources.ledger_ms() / 1000, UTC):%Y-%m}"
    models = len({row["gpu_model"] for row in report["tables"]["kinds"]}) if report["summary"]["coverage"] else 0
    version, examples = report["summary"]["price_book_version"], []
    if version:
        rows = json.loads(sources.accountant().get("/v1/prices", {}))["rows"]
        examples = [row["id"] for row in rows if row["source"] == EXAMPLE]
    return prices(report["tables"]["unpriced"], REPORT_DAYS, version, month, models, examples)


def _report(sources: Sources) -> dict[str, Any]:
    """Return the accountant's report of the last `REPORT_DAYS` days."""
    end = sources.ledger_ms()
    query = {"start": str(end - REPORT_DAYS * MS_PER_DAY), "end": str(end), "format": "json"}
    report: dict[str, Any] = json.loads(sources.accountant().get("/v1/report", query))
    return report


def _plugins(_: Sources) -> CheckResult:
    from gputally.plugin_list import installed

    found = installed()
    remedy = "update or remove the package; the programs go on without this plug-in"
    broken = tuple(
        Finding("warning", f"{seam}: {one.name} of {one.package} {one.version} is left out", one.fault, remedy)
        for seam, one in found
        if one.fault
    )
    return CheckResult(f"{len(found)} plug-ins", broken, examined=len(found))


_ALL: Sequence[Check] = (
    Check("driver", "this machine's driver: GPUs that are lost, and readings that are missing", _driver),
    Check("kubelet", "the kubelet's PodResources socket of this machine", _kubelet),
    Check("processes", "holders of this machine's GPUs outside Kubernetes", _processes),
    Check("agents", "nodes with GPUs that have no agent, and agents that do not start", _agents),
    Check("permissions", "rights that agent, accountant and fairshare need at the API server", _permissions),
    Check("clock", "this machine's clock, compared with the API server's and the accountant's", _clock),
    Check("accountant", "whether it answers, reads its ledger and accepts the token", _accountant),
    Check("freshness", "nodes whose newest record is old, which all later checks of the ledger lack", _freshness),
    Check("weights", "schedulers' kinds and versions, and whether published weights can take effect", _weights),
    Check("conflicts", "queues and nodes that two schedulers manage", _conflicts),
    Check("guarantees", "quotas and gangs that the cluster can never satisfy", _guarantees),
    Check("placement", "pods that wait although GPUs are free, and the taints that block them", _placement),
    Check("idle", f"pods that hold GPUs and hardly use them, over {IDLE_HOURS} h", _idle),
    Check("oversized", f"jobs that requested far more GPUs than they used, over {REPORT_DAYS} days", _oversized),
    Check("unowned", "nodes with busy time without an owner, over 24 h", _unowned),
    Check("prices", f"GPU models without a price, over {REPORT_DAYS} days", _prices),
    Check("plugins", "plug-ins of this installation that cannot be used", _plugins),
)
CHECKS = {check.name: check for check in _ALL}

_STYLE: dict[Status, str] = {"ok": "green", "warning": "yellow", "error": "bold red", "unknown": "dim"}
_MARK: dict[Status, str] = {"ok": "ok", "warning": "warning", "error": "ERROR", "unknown": "not run"}
"""The text for each status, so that the status can be understood without colours."""


def table(results: Sequence[CheckResult]) -> RenderableType:
    """Render one line per check, then every finding with its figures and remedy, errors first."""
    overview = terminal.table(
        "Checks", [Column("check", no_wrap=True), Column("result", no_wrap=True), Column("examined", overflow="fold")]
    )
    for result in results:
        status = Text(_MARK[result.status], _STYLE[result.status])
        overview.add_row(result.check, status, Text(result.not_run or result.seen, "dim" if result.not_run else ""))
    parts: list[RenderableType] = [overview]
    findings = [(result.check, each) for result in results for each in result.findings]
    for check, each in sorted(findings, key=lambda pair: pair[1].severity != "error"):
        mark = (f"{_MARK[each.severity]}  ", _STYLE[each.severity])
        parts.append(Text.assemble(mark, (f"{check}: ", "dim"), (each.what, "bold")))
        if each.evidence:
            parts.append(Padding(Text(each.evidence), (0, 0, 0, 4), expand=False))
        parts.append(Padding(Text(f"→ {each.remedy}", "cyan"), (0, 0, 0, 4), expand=False))
    return Group(*parts, Text(summary(results)))


GIVEN: Final = "--url for the accountant, --kubeconfig for the cluster, a GPU node for its driver and kubelet"


def summary(results: Sequence[CheckResult]) -> str:
    """Return the number of findings and checks in one line: `2 errors, 1 warning; 12 checks run, 2 not run`."""
    counts = {
        severity: sum(1 for result in results for each in result.findings if each.severity == severity)
        for severity in ("error", "warning")
    }
    faults = ", ".join(f"{count} {name}{'s' * (count != 1)}" for name, count in counts.items() if count)
    not_run = sum(1 for result in results if result.not_run)
    checks = f"{len(results) - not_run} checks run" + (f", {not_run} not run" if not_run else "")
    if results and not_run == len(results):
        return f"nothing was checked: {checks}; each says above what it needs ({GIVEN})"
    return f"{faults or 'nothing wrong found'}; {checks}"


def document(results: Sequence[CheckResult]) -> dict[str, Any]:
    """Return all results and the command's exit code, for JSON."""
    return {
        "schema": 1,
        "exit_code": exit_code(results),
        "checks": [
            {
                "check": result.check,
                "status": result.status,
                "seen": result.seen,
                "unknown": result.not_run or None,
                "findings": [asdict(each) for each in result.findings],
            }
            for result in results
        ],
    }


def records(results: Sequence[CheckResult]) -> Iterator[dict[str, object]]:
    """Yield one record for every finding, and one for every check without findings, for CSV."""
    for result in results:
        for each in result.findings:
            yield {"check": result.check, **asdict(each)}
        if not result.findings:
            text = result.not_run or result.seen
            yield {"check": result.check, "severity": result.status, "what": "", "evidence": text, "remedy": ""}


CALLED_WRONGLY = 64
"""Exit code of a wrong call (EX_USAGE of sysexits.h), because 2 already means that there are errors."""
_NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        self.exit(CALLED_WRONGLY, f"{self.prog}: {message}\n")


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command's arguments."""
    checks = "\n".join(f"  {check.name:<12} {check.about}" for check in CHECKS.values())
    arguments = _Parser(
        prog="gputally doctor",
        description="Look for common faults, and report each with its figures and its remedy.",
        epilog=f"checks:\n{checks}\n\nexit codes: 0 nothing wrong, 1 warnings, 2 errors, 64 wrong call",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    arguments.add_argument(
        "--only", action="append", default=[], metavar="CHECK[,CHECK]", help="Run only these checks (repeatable)."
    )
    arguments.add_argument("--output", choices=OUTPUTS, default="table", help="Format of the findings.")
    arguments.add_argument(
        "--url",
        default=os.environ.get("GPUTALLY_URL", DoctorOptions.url),
        help="Address of the accountant (GPUTALLY_URL).",
    )
    arguments.add_argument(
        "--token-file",
        type=Path,
        metavar="FILE",
        default=os.environ.get("GPUTALLY_TOKEN_FILE") or None,
        help="File with the bearer token for --url (GPUTALLY_TOKEN_FILE).",
    )
    arguments.add_argument(
        "--ca-file",
        type=Path,
        metavar="FILE",
        default=os.environ.get("GPUTALLY_CA_FILE") or None,
        help="PEM file of the CAs trusted for https (GPUTALLY_CA_FILE; default: the system's).",
    )
    arguments.add_argument("--kubeconfig", type=Path, metavar="FILE", help="Kubeconfig instead of the default one.")
    arguments.add_argument("--policy", type=Path, metavar="FILE", help="Policy file instead of the one in force.")
    arguments.add_argument(
        "--namespace",
        default=_own_namespace(),
        help="Namespace of the release (default: this pod's, else %(default)s).",
    )
    arguments.add_argument(
        "--kubelet-socket",
        type=Path,
        metavar="PATH",
        default=DoctorOptions.kubelet_socket,
        help="The kubelet's PodResources socket (default: %(default)s).",
    )
    arguments.add_argument(
        "--proc",
        type=Path,
        metavar="PATH",
        default=DoctorOptions.proc,
        help="Where the host's process table is mounted (default: /proc).",
    )
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    """Run `gputally doctor` and return its exit code."""
    arguments = parser()
    try:
        given = vars(arguments.parse_args(argv))
        output: Output = given.pop("output")
        only = [name for names in given.pop("only") for name in names.split(",") if name]
        unknown = [name for name in only if name not in CHECKS]
        if unknown:
            arguments.error(f"--only: there is no check {unknown[0]!r}; the checks are {', '.join(CHECKS)}")
    except SystemExit as done:
        return done.code if isinstance(done.code, int) else CALLED_WRONGLY
    logging.basicConfig(level=logging.ERROR)
    return run_and_print(real_sources(DoctorOptions(**given), SystemClock()), only, output)


def run_and_print(sources: Sources, only: Sequence[str], output: Output) -> int:
    """Run the checks, print their findings, and return the exit code."""
    results = run_checks(sources, only)
    show(output, lambda: table(results), document(results), records(results))
    return exit_code(results)


def _own_namespace() -> str:
    try:
        return _NAMESPACE_FILE.read_text(encoding="utf-8").strip() or DoctorOptions.namespace
    except (OSError, UnicodeDecodeError):
        return DoctorOptions.namespace


if __name__ == "__main__":
    sys.exit(main())
