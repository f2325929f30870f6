"""Checks clocks, the accountant's reachability, and idle, unpriced or unowned GPU time in the ledger.

Idle and right-sizing are the report's own rules and thresholds (accountant.reports.savings_hints)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from accountant.reports.savings_hints import HARDLY_USED, known_well
from accountant.wire.policy_models import IDLE
from accountant.wire.usage_models import Accounts, UsageLine
from gputally.base.number_format import hours, percent
from gputally.base.units import US_PER_HOUR
from gputally.doctor.findings import CheckResult, Finding, first_findings, joined_names

MS = 1_000
TOLERATED_MS = 2_000
"""Skew below which nothing is reported."""
REFUSED_MS = 5 * 60_000
"""Skew above which an accountant quarantines rows that end ahead of its clock
(accountant.storage.write.batch_admission.SKEW_MS)."""


@dataclass(frozen=True, slots=True)
class ClockReading:
    """The time that another machine reported.

    own_ms: this machine's time when the answer came.
    took_ms: the duration of the request. The `Date` header has whole seconds, so the skew is known to a second plus the
        duration."""

    who: str
    their_ms: int
    own_ms: int
    took_ms: int

    @property
    def least_skew_ms(self) -> int:
        """Return the smallest skew that the reading allows, positive if the other clock is ahead."""
        late = (
            self.their_ms - self.own_ms
        )  # the other clock read within [their, their + 1 s), this one within [own - took, own]
        return late if late > 0 else min(0, late + MS + self.took_ms)


def clocks(told: tuple[ClockReading, ...]) -> CheckResult:
    """Compare this machine's clock with the others."""
    findings = []
    for each in told:
        skew = each.least_skew_ms
        if abs(skew) <= TOLERATED_MS:
            continue
        how = "ahead of" if skew < 0 else "behind"
        effect = ": agents' records would be quarantined as future-dated" if skew < -REFUSED_MS else ""
        findings.append(
            Finding(
                "error" if abs(skew) > REFUSED_MS else "warning",
                f"this clock is {how} the {each.who}'s{effect}",
                f"by at least {abs(skew) / MS:.1f} s",
                "timedatectl set-ntp true   # on the machine whose clock is wrong",
            )
        )
    words = ", ".join(f"{each.who} within {max(MS, abs(each.their_ms - each.own_ms)) / MS:.0f} s" for each in told)
    return CheckResult(words, tuple(findings))


@dataclass(frozen=True, slots=True)
class AccountantProbe:
    """The accountant's answers.

    ready, asked: HTTP status of /readyz and of a request that needs a token, 0 without an answer.
    why: the reason from the answer or the network."""

    url: str
    ready: int
    asked: int
    why: str = ""


def accountant(knock: AccountantProbe) -> CheckResult:
    """Check whether the accountant runs, can read its ledger, and accepts the token."""
    seen = f"{knock.url}: /readyz {knock.ready or 'no answer'}, a question {knock.asked or 'no answer'}"
    if not knock.ready:
        remedy = "kubectl -n gputally get pods -l app.kubernetes.io/component=accountant; give --url"
        return CheckResult(
            seen, (Finding("error", "the accountant does not answer", f"{knock.url}: {knock.why}", remedy),)
        )
    findings = []
    if knock.ready != 200:
        remedy = "kubectl -n gputally logs statefulset/gputally-accountant"
        findings.append(Finding("error", "the accountant cannot read its ledger", knock.why or seen, remedy))
    if knock.asked == 401:
        remedy = "give --token-file; `gputally accountant token new --name me --scope read` makes one"
        findings.append(Finding("error", "the accountant does not know this caller", knock.why, remedy))
    elif knock.asked == 403:
        remedy = "use a token of scope read, or bind the group in callers.yaml (docs/security.md)"
        findings.append(Finding("error", "this caller may not read the books", knock.why, remedy))
    elif knock.asked != 200 and knock.ready == 200:
        remedy = "kubectl -n gputally logs statefulset/gputally-accountant"
        findings.append(Finding("error", "the accountant does not answer a question", knock.why or seen, remedy))
    return CheckResult(seen, tuple(findings))


FOREIGN_PART = 0.01
"""Part of a node's capacity above which unattributed busy time is reported."""
Row = Mapping[str, Any]


def idle_holders(lines: Iterable[UsageLine], hours_asked: int) -> CheckResult:
    """Find pods that held GPUs idle. lines: usage by team, namespace, pod and hour, over that many whole hours. A pod
    counts if it held GPUs in every one of them."""
    pods: dict[tuple[str, str, str], list[UsageLine]] = {}
    for line in lines:
        key = line.key
        if key["team"] != IDLE and key["pod"] and line.accounts_gpu_us.allocated:
            pods.setdefault((key["team"], key["namespace"], key["pod"]), []).append(line)
    whole = {key: summed(found) for key, found in pods.items() if len(found) >= hours_asked}
    idle = sorted((key for key, sums in whole.items() if _idle(sums)), key=lambda key: (-whole[key].allocated, key))
    found = first_findings((_idle_finding(*key, whole[key], hours_asked) for key in idle), "pods that hold GPUs idle")
    return CheckResult(f"{len(whole)} pods held GPUs all of the last {hours_asked} h, {len(idle)} of them idle", found)


def summed(lines: Iterable[UsageLine]) -> Accounts:
    """Return the sum of the accounts of several lines."""
    found = [line.accounts_gpu_us for line in lines]
    return Accounts(**{name: sum(getattr(each, name) for each in found) for name in Accounts.model_fields})


def _idle(accounts: Accounts) -> bool:
    return known_well(accounts) and accounts.busy < HARDLY_USED * (accounts.busy + accounts.allocated_idle)


def _idle_finding(team: str, namespace: str, pod: str, accounts: Accounts, hours_asked: int) -> Finding:
    gpus = accounts.allocated / US_PER_HOUR / hours_asked
    used = accounts.busy / (accounts.busy + accounts.allocated_idle)
    return Finding(
        "warning",
        f"pod {namespace}/{pod} of {team} holds {gpus:.1f} GPUs and hardly uses them",
        f"{hours(accounts.allocated)} GPU-hours in {hours_asked} h, {percent(used)} busy",
        f"kubectl -n {namespace} delete pod {pod}   # ask {team} first; or let preemption.idle reclaim",
    )


def oversized(rows: Sequence[Row], days: int, currency: str | None) -> CheckResult:
    """Find jobs that requested far more GPUs than they used. rows: the rows of the report's table `hints`."""
    asked = [row for row in rows if row["kind"] in ("fewer", "slice")]
    found = tuple(_oversized(row, currency) for row in asked)
    return CheckResult(f"{len(asked)} jobs of the last {days} days asked far more than they used", found)


def _oversized(row: Row, currency: str | None) -> Finding:
    needed = Decimal(str(row["needed_gpus"]))
    saving = row.get("saving_at_most")
    money = f"; at most {Decimal(str(saving)):.2f} {currency}" if saving is not None and currency else ""
    whole = row["kind"] == "fewer"
    remedy = (
        f"set nvidia.com/gpu: {needed} in the pod template of {row['job']} ({row['namespace']})"
        if whole
        else f"gputally advise sharing   # {needed}/7 of a GPU would have done"
    )
    return Finding(
        "warning",
        f"{row['job']} in {row['namespace'] or '(no namespace)'} of {row['team']} requested far more than it used",
        f"held {float(row['held_gpus']):.1f} GPUs, its busiest hour used {float(row['peak_busy_gpus']):.2f}{money}",
        remedy,
    )


def prices(
    rows: Sequence[Row], days: int, version: str | None, month: str, examples: Sequence[str] = ()
) -> CheckResult:
    """Check prices.

    rows: the report's table `unpriced`.
    version: the version of the price book, None without one.
    month: the month to price again.
    examples: ids of the rows that are examples."""
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
        what = f"{len(examples)} rows of the price book are examples: costs are not yours"
        found = (*found, Finding("warning", what, joined_names(examples), remedy))
    return CheckResult(f"price book {version}, last {days} days: {len(by_model)} models without a price", found)


def _unpriced(model: str, rows: Sequence[Row], month: str) -> Finding:
    whole = sum((Decimal(str(row["gpu_hours"])) for row in rows), Decimal(0))
    places = sorted({" ".join(filter(None, (row["pool"], row["region"], row["capacity_type"]))) for row in rows} - {""})
    where = f" ({joined_names(places)})" if places else ""
    return Finding(
        "warning",
        f"{model} has no price{where}: its time is unpriced, and budgets in money cannot be kept",
        f"{whole:,.1f} GPU-hours held",
        f"add a row for it and run: gputally accountant reprice {month} --book FILE --apply --reason TEXT",
    )


def unattributed_time(lines: Iterable[UsageLine], span_hours: float) -> CheckResult:
    """Report busy time without a holder, by node: programs outside Kubernetes, as the agents saw them."""
    nodes = [line for line in lines if line.accounts_gpu_us.total]
    bad = [line for line in nodes if line.unattributed_busy_us > FOREIGN_PART * line.accounts_gpu_us.total]
    found = first_findings(
        (_unowned(line, span_hours) for line in sorted(bad, key=lambda line: -line.unattributed_busy_us)),
        "nodes with busy time without an owner",
    )
    return CheckResult(f"{len(nodes)} nodes over {span_hours:g} h, {len(bad)} with busy time without an owner", found)


def _unowned(line: UsageLine, span_hours: float) -> Finding:
    node, whole = line.key["node"], line.accounts_gpu_us.total
    return Finding(
        "warning",
        f"GPUs of node {node} were busy without an owner",
        f"{hours(line.unattributed_busy_us)} of {hours(whole)} GPU-hours in {span_hours:g} h",
        f"on {node}: gputally doctor --only processes",
    )
