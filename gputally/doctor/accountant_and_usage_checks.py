"""Checks the clocks, the accountant, and GPU time in its ledger that is idle, oversized, unpriced or without an owner.

The rules and thresholds for idle and oversized jobs are those of the report (accountant.reports.savings_hints)."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from accountant.core.periods import utc
from accountant.core.record_age import is_old
from accountant.ledger.protocols import GpuOwnership
from accountant.reports.figure_formatting import duration
from accountant.reports.savings_hints import HARDLY_USED, known_well
from accountant.wire.policy_models import IDLE
from accountant.wire.usage_cost_and_job_models import Accounts, UsageLine
from gputally.base.near_names import joined_names
from gputally.base.number_format import hours, percent
from gputally.base.units import MS_PER_MINUTE, MS_PER_SECOND, US_PER_HOUR
from gputally.doctor.findings import CheckResult, Finding, first_findings

TOLERATED_MS = 2 * MS_PER_SECOND
"""Largest difference of two clocks that is not reported."""
REFUSED_MS = 5 * MS_PER_MINUTE
"""Difference above which an accountant quarantines rows that end ahead of its clock
(accountant.core.record_faults.SKEW_MS)."""


@dataclass(frozen=True, slots=True)
class ClockReading:
    """The time that another machine reported.

    machine: its name.
    their_ms: its time, in whole seconds.
    own_ms: this machine's time when the answer arrived.
    took_ms: the duration of the request."""

    machine: str
    their_ms: int
    own_ms: int
    took_ms: int

    @property
    def least_skew_ms(self) -> int:
        """The smallest difference of the clocks that explains the reading. It is positive if the other clock is
        ahead."""
        # The other clock was read within [their, their + 1 s), and this one within [own - took, own].
        difference_ms = self.their_ms - self.own_ms
        return difference_ms if difference_ms > 0 else min(0, difference_ms + MS_PER_SECOND + self.took_ms)


def clocks(readings: tuple[ClockReading, ...]) -> CheckResult:
    """Check whether this machine's clock agrees with the clocks of other machines."""
    findings = []
    for each in readings:
        skew = each.least_skew_ms
        if abs(skew) <= TOLERATED_MS:
            continue
        direction = "ahead of" if skew < 0 else "behind"
        effect = ": agents' records would be quarantined as future-dated" if skew < -REFUSED_MS else ""
        findings.append(
            Finding(
                "error" if abs(skew) > REFUSED_MS else "warning",
                f"this machine's clock is {direction} the {each.machine}'s{effect}",
                f"by at least {abs(skew) / MS_PER_SECOND:.1f} s",
                "timedatectl set-ntp true   # on the machine whose clock is wrong",
            )
        )
    seen = (
        f"{each.machine} within {max(MS_PER_SECOND, abs(each.their_ms - each.own_ms)) / MS_PER_SECOND:.0f} s"
        for each in readings
    )
    return CheckResult(", ".join(seen), tuple(findings), len(readings))


@dataclass(frozen=True, slots=True)
class AccountantProbe:
    """The accountant's answers.

    ready: HTTP status of /readyz; 0 without an answer.
    periods: HTTP status of /v1/periods, which needs a token; 0 without an answer.
    reason: why a request failed; "" if none did."""

    url: str
    ready: int
    periods: int
    reason: str = ""


def accountant(probe: AccountantProbe) -> CheckResult:
    """Check whether the accountant runs, can read its ledger, and accepts the token."""
    seen = f"{probe.url}: /readyz {probe.ready or 'no answer'}, /v1/periods {probe.periods or 'no answer'}"
    if not probe.ready:
        remedy = "kubectl -n gputally get pods -l app.kubernetes.io/component=accountant   # or give its address: --url"
        return CheckResult(
            seen, (Finding("error", "the accountant does not answer", f"{probe.url}: {probe.reason}", remedy),)
        )
    findings = []
    if probe.ready != 200:
        remedy = "kubectl -n gputally logs statefulset/gputally-accountant"
        findings.append(Finding("error", "the accountant cannot read its ledger", probe.reason or seen, remedy))
    if probe.periods == 401:
        remedy = (
            "give --token-file or GPUTALLY_TOKEN_FILE; "
            "`gputally accountant token new --name me --scope read` makes a token"
        )
        findings.append(Finding("error", "the accountant does not know this caller", probe.reason, remedy))
    elif probe.periods == 403:
        remedy = "use a token of scope read, or bind the group in callers.yaml (docs/security.md)"
        findings.append(Finding("error", "this caller may not read the ledger", probe.reason, remedy))
    elif probe.periods != 200 and probe.ready == 200:
        remedy = "kubectl -n gputally logs statefulset/gputally-accountant"
        what = "the accountant answers a request with an error"
        findings.append(Finding("error", what, probe.reason or seen, remedy))
    return CheckResult(seen, tuple(findings), 1)


def freshness(gpus: Sequence[GpuOwnership], nodes: Collection[tuple[str, str]], now_ms: int) -> CheckResult:
    """Find the nodes whose newest record is old, because every other check of the ledger is about recorded time.

    gpus: the GPUs of the ledger with the end of their newest record.
    nodes: (cluster, node) of the nodes that are capacity at present.
    now_ms: the accountant's time."""
    newest: dict[tuple[str, str], int] = {}
    for gpu in gpus:
        key = gpu.cluster, gpu.owners[-1].node
        newest[key] = max(newest.get(key, 0), gpu.last_ms)
    if not newest:
        return CheckResult("the ledger has no records")
    last = max(newest.values())
    seen = f"{len(newest)} nodes, the newest record is {duration(max(0, now_ms - last))} old ({utc(last)})"
    if is_old(last, now_ms):
        what = f"no node reports any more: the newest record is {duration(now_ms - last)} old"
        return CheckResult(seen, (Finding("error", what, utc(last), _NO_RECORDS_REMEDY),), len(newest))
    silent = sorted((at, *key) for key, at in newest.items() if key in nodes and is_old(at, now_ms))
    found = first_findings(
        (
            Finding(
                "warning",
                f"node {node} of cluster {cluster} does not report: its newest record is {duration(now_ms - at)} old",
                utc(at),
                _NO_RECORDS_REMEDY,
            )
            for at, cluster, node in silent
        ),
        "nodes that do not report",
    )
    return CheckResult(f"{seen}, {len(silent)} nodes do not report", found, len(newest))


_NO_RECORDS_REMEDY = "gputally doctor --only agents; kubectl -n gputally logs daemonset/gputally-agent"


def metered(accounts: Accounts) -> bool:
    """Whether any of the time is known."""
    return accounts.total > accounts.unmetered


FOREIGN_PART = 0.01
"""Fraction of a node's capacity above which unattributed busy time is reported."""
Row = Mapping[str, Any]


def idle_holders(lines: Iterable[UsageLine], window_hours: int) -> CheckResult:
    """Find pods that held GPUs in every hour of a window and hardly used them.

    lines: usage by team, namespace, pod and hour over the window."""
    pods: dict[tuple[str, str, str], list[UsageLine]] = {}
    examined = 0
    for line in lines:
        key = line.key
        examined += metered(line.accounts_gpu_us)
        if key["team"] != IDLE and key["pod"] and line.accounts_gpu_us.allocated:
            pods.setdefault((key["team"], key["namespace"], key["pod"]), []).append(line)
    whole = {key: summed(of_pod) for key, of_pod in pods.items() if len(of_pod) >= window_hours}
    idle = sorted((key for key, sums in whole.items() if _idle(sums)), key=lambda key: (-whole[key].allocated, key))
    found = first_findings((_idle_finding(*key, whole[key], window_hours) for key in idle), "pods that hold GPUs idle")
    seen = f"{len(whole)} pods held GPUs all of the last {window_hours} h, {len(idle)} of them idle"
    return CheckResult(seen if examined else f"no record of the last {window_hours} h", found, examined)


def summed(lines: Iterable[UsageLine]) -> Accounts:
    """Add up the accounts of several lines."""
    found = [line.accounts_gpu_us for line in lines]
    return Accounts(**{name: sum(getattr(each, name) for each in found) for name in Accounts.model_fields})


def _idle(accounts: Accounts) -> bool:
    return known_well(accounts) and accounts.busy < HARDLY_USED * (accounts.busy + accounts.allocated_idle)


def _idle_finding(team: str, namespace: str, pod: str, accounts: Accounts, window_hours: int) -> Finding:
    gpus = accounts.allocated / US_PER_HOUR / window_hours
    used = accounts.busy / (accounts.busy + accounts.allocated_idle)
    return Finding(
        "warning",
        f"pod {namespace}/{pod} of {team} holds {gpus:.1f} GPUs and hardly uses them",
        f"{hours(accounts.allocated)} GPU-hours in {window_hours} h, {percent(used)} busy",
        f"kubectl -n {namespace} delete pod {pod}   # ask {team} first; or set preemption.idle in the policy",
    )


def oversized(rows: Sequence[Row], days: int, currency: str | None, jobs: int) -> CheckResult:
    """Find jobs that requested far more GPUs than they used. rows: the report's table `hints`. jobs: how many held
    GPUs."""
    found = tuple(_oversized(row, currency) for row in rows if row["kind"] in ("fewer", "slice"))
    if not jobs:
        return CheckResult(f"no record of a job in the last {days} days")
    return CheckResult(f"{len(found)} jobs of the last {days} days requested far more than they used", found, jobs)


def _oversized(row: Row, currency: str | None) -> Finding:
    needed = Decimal(str(row["needed_gpus"]))
    saving = row.get("saving_at_most")
    money = f"; at most {Decimal(str(saving)):.2f} {currency}" if saving is not None and currency else ""
    whole = row["kind"] == "fewer"
    remedy = (
        f"set nvidia.com/gpu: {needed} in the pod template of {row['job']} ({row['namespace']})"
        if whole
        else f"gputally advise sharing   # {needed}/{row['needed_of']} of a GPU would be enough"
    )
    return Finding(
        "warning",
        f"{row['job']} in {row['namespace'] or '(no namespace)'} of {row['team']} requested far more than it used",
        f"held {float(row['held_gpus']):.1f} GPUs, its busiest hour used {float(row['peak_busy_gpus']):.2f}{money}",
        remedy,
    )


def prices(
    rows: Sequence[Row], days: int, version: str | None, month: str, models: int, examples: Sequence[str] = ()
) -> CheckResult:
    """Check whether there is a price book with a price for every GPU model in use, and no example prices.

    rows: the report's table `unpriced`.
    version: the version of the price book; None without one.
    models: how many GPU models have records in that time.
    month: the month to price again, for the remedy.
    examples: ids of the price book's rows that are examples."""
    if not version:
        remedy = "gputally accountant serve --prices FILE (docs/prices.md)"
        return CheckResult(
            "no price book", (Finding("error", "there is no price book: nothing has a cost", "", remedy),)
        )
    by_model: dict[str, list[Row]] = {}
    for row in rows:
        by_model.setdefault(row["gpu_model"], []).append(row)
    found = first_findings(
        (_unpriced(model, several, month) for model, several in sorted(by_model.items())), "models without a price"
    )
    if examples:
        remedy = (
            "write your own (docs/price-book-cookbook.md) and give it: --set-file accountant.prices.text=prices.yaml"
        )
        what = f"{len(examples)} rows of the price book are examples: the costs are not those of your GPUs"
        found = (*found, Finding("warning", what, joined_names(examples), remedy))
    seen = f"{len(by_model)} models without a price" if models else "no record of any GPU"
    return CheckResult(f"price book {version}, last {days} days: {seen}", found, models)


def _unpriced(model: str, rows: Sequence[Row], month: str) -> Finding:
    whole = sum((Decimal(str(row["gpu_hours"])) for row in rows), Decimal(0))
    places = sorted({" ".join(filter(None, (row["pool"], row["region"], row["capacity_type"]))) for row in rows} - {""})
    where = f" ({joined_names(places)})" if places else ""
    near = rows[0]["near_row"], rows[0]["near_model"]
    return Finding(
        "warning",
        f"{model} has no price{where}: its time is unpriced, and budgets in money cannot be kept",
        f"{whole:,.1f} GPU-hours held" + (f"; row {near[0]} of the price book is for {near[1]}" if near[0] else ""),
        f"add a row for it and run: gputally accountant reprice {month} --prices FILE --apply --reason TEXT",
    )


def unattributed_time(lines: Iterable[UsageLine], span_hours: float) -> CheckResult:
    """Find nodes with busy time that belongs to no holder, for example of programs outside Kubernetes.

    lines: usage by node over the last `span_hours`."""
    nodes = [line for line in lines if metered(line.accounts_gpu_us)]
    bad = [line for line in nodes if line.unattributed_busy_us > FOREIGN_PART * line.accounts_gpu_us.total]
    found = first_findings(
        (_unowned(line, span_hours) for line in sorted(bad, key=lambda line: -line.unattributed_busy_us)),
        "nodes with busy time without an owner",
    )
    seen = f"{len(nodes)} nodes over {span_hours:g} h, {len(bad)} with busy time without an owner"
    return CheckResult(seen if nodes else f"no record of the last {span_hours:g} h", found, len(nodes))


def _unowned(line: UsageLine, span_hours: float) -> Finding:
    node, whole = line.key["node"], line.accounts_gpu_us.total
    return Finding(
        "warning",
        f"GPUs of node {node} were busy without an owner",
        f"{hours(line.unattributed_busy_us)} of {hours(whole)} GPU-hours in {span_hours:g} h",
        f"on {node}: gputally doctor --only processes",
    )
