"""Calls the accountant: announces the policy, reads usage windows, posts decisions.

Any failure to get a valid answer raises AccountantUnavailable with a one-line message.

An accountant assigns usage to the queues of one policy at a time. If this is not the controller's policy, the
controller announces its policy again. Each time it waits twice as long, so that two controllers with one accountant do
not replace each other's policy in every cycle."""

from __future__ import annotations

import contextlib
import gzip
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, TypeVar

import httpx2
from pydantic import Field, TypeAdapter, ValidationError

from accountant.wire.policy_models import ClusterName, Decision, Measure, Policy, PolicyVersion, UsageWindow, WindowSpec
from accountant.wire.typed_accountant_client import AccountantClient
from accountant.wire.usage_cost_and_job_models import (
    Accounts,
    BudgetState,
    Dimension,
    GuaranteesAnswer,
    UsageAnswer,
    UsageLine,
)
from fairshare.core.gpu_models import parts_of, window_of_part
from fairshare.core.queues_and_weights import with_unit
from fairshare.core.scheduler_queue_objects import instant
from fairshare.laws import weight_calculation
from fairshare.usage.multi_cluster_windows import NO_OTHER_CLUSTERS, OtherClusters
from fairshare.usage.stale_usage_hold import UsageHold, usage_hold
from gputally.base.accountant_connection import Query, Unanswered
from gputally.base.called_off import CalledOff
from gputally.base.clock import Clock, SystemClock
from gputally.base.errors import AccountantRefused, AccountantUnavailable
from gputally.base.units import MS_PER_HOUR, MS_PER_MINUTE, MS_PER_SECOND
from gputally.server.config_loading import Model, load_yaml


class AccountantPort(Protocol):
    """The calls of the controller to the accountant. Every method raises AccountantUnavailable."""

    def window(self, spec: WindowSpec, measure: Measure, at_ms: int, min_coverage: float) -> UsageWindow:
        """Return the usage per queue over the window that ends (or is current) at `at_ms`."""
        ...

    def policy_in_force(self) -> Policy | None:
        """Return the policy in force; None if there is none, or none that this release can read."""
        ...

    def put_policy(self, policy: Policy) -> PolicyVersion:
        """Announce the policy. The same content again changes nothing."""
        ...

    def budgets(self) -> Sequence[BudgetState]:
        """Return the budgets of the policy in force, with this month's spend."""
        ...

    def pod_usage(
        self, start_ms: int, end_ms: int, pods: Sequence[tuple[str, str]] = ()
    ) -> Mapping[tuple[str, str], Accounts]:
        """Return GPU time by (namespace, name) over the span. A name that exists in several clusters is left out.

        pods: the pods to query; empty for all."""
        ...

    def lost_gpus(self, start_ms: int, end_ms: int) -> Mapping[str, int]:
        """Return the number of GPUs by node that were lost for the whole span on a node in service. A node name that
        exists in several clusters is left out."""
        ...

    def metered_nodes(self, start_ms: int, end_ms: int) -> Collection[str]:
        """Return the names of the nodes with GPU records in the span."""
        ...

    def post_decisions(self, decisions: Sequence[Decision]) -> None:
        """Store decisions. A decision with a stored id changes nothing."""
        ...


MOST_DECISIONS_PER_POST = 1_000
MOST_BYTES_PER_POST = 8 * 1024 * 1024
"""Size before compression; a larger decision is sent alone."""
_FINAL = frozenset({400, 413, 422})
"""HTTP status codes of requests that the accountant will never accept."""
_BUSY = frozenset({429, 503})
"""HTTP status codes whose Retry-After is obeyed."""
_NOT_NOW = frozenset({408, 425, 429})
"""HTTP status codes from 400 to 499 that refuse nothing."""
REFUSES = "AccountantRefuses"
"""The reason of a hold while the accountant answers with a refusal, such as that of a token without the right."""
_OF_BODY = _FINAL | {409}
"""HTTP status codes of an announcement by which the accountant refuses the policy itself."""
DECISIONS_PER_GET = 1_000
MOST_NAMES = 100
"""Largest number of pods or nodes in one query by name. With more pods their namespaces are queried, with more nodes
all nodes."""
T = TypeVar("T")
_DECISIONS = TypeAdapter(list[Decision])
_SESSIONS = TypeAdapter(dict[str, int])
_POLICIES = TypeAdapter(list[PolicyVersion])
_GUARANTEES = TypeAdapter(GuaranteesAnswer)
_BUDGETS = TypeAdapter(list[BudgetState])
_POLICY = TypeAdapter(PolicyVersion)
_USAGE = TypeAdapter(UsageAnswer)
_WINDOW = TypeAdapter(UsageWindow)
_WAITS = TypeAdapter(list[dict[str, Any]])


class AccountantApi:
    """The client of one accountant. As a context manager it reuses connections.

    Where the accountant asks for a pause (Retry-After of 429 or 503), the same kind of request is not sent until it is
    over, and fails at once. Other requests are sent, because a quota concerns one kind."""

    def __init__(
        self,
        url: str,
        *,
        token_file: Path | None = None,
        ca_file: Path | None = None,
        cluster: str = "",
        timeout_s: float = 30.0,
        transport: httpx2.BaseTransport | None = None,
        clock: Clock | None = None,
    ) -> None:
        """Raises AccountantUnavailable for an invalid address, or a file without a certificate.

        ca_file: PEM file of the CAs to trust instead of the system's.
        cluster: the cluster to query and to record decisions for; "" for everything in the ledger.
        transport: used instead of the network.
        clock: measures pauses; None: the system's."""
        self._clock = clock or SystemClock()
        self._paused: dict[tuple[str, str], tuple[int, str]] = {}
        """By method and path, until when (ms, monotonic) the accountant asked to wait, and its refusal."""
        with _translated():
            self._remote = AccountantClient(
                url, ca_file=ca_file, token_file=token_file, timeout_s=timeout_s, proxies=True, transport=transport
            )
        self._cluster = cluster

    def __enter__(self) -> AccountantApi:
        self._remote.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._remote.close()

    def window(self, spec: WindowSpec, measure: Measure, at_ms: int, min_coverage: float) -> UsageWindow:
        query: dict[str, str | Sequence[str]] = {
            "kind": spec.kind,
            "size": f"{spec.size}s",
            "measure": measure,
            "by": "queue",
            "at": str(at_ms),
            "min_coverage": repr(min_coverage),
        }
        if spec.half_life is not None:
            query["half_life"] = f"{spec.half_life}s"
        if spec.start is not None:
            query["start"] = spec.start.isoformat()
        if spec.cron is not None:
            query["cron"] = spec.cron
        if spec.decay != "exact":
            query |= {"decay": spec.decay, "calc_period": f"{spec.calc_period}s"}
        if spec.gpu_weights:
            query["gpu_weight"] = [f"{model}:{weight}" for model, weight in sorted(spec.gpu_weights.items())]
        return self._read("/v1/windows", _WINDOW, {**query, **self._cluster_query()})

    def _cluster_query(self) -> dict[str, str]:
        return {"cluster": self._cluster} if self._cluster else {}

    def put_policy(self, policy: Policy) -> PolicyVersion:
        """Raises AccountantUnavailable, with the reason PolicyNotTaken if the accountant refuses this policy."""
        content = policy.model_dump_json(by_alias=True).encode()
        answer = self._send("PUT", "/v1/policy", content, refuses="PolicyNotTaken")
        try:
            return PolicyVersion.model_validate_json(answer)
        except ValidationError as error:
            raise self._invalid("/v1/policy") from error

    def post_decisions(self, decisions: Sequence[Decision]) -> None:
        batch: list[bytes] = []
        size = 0
        for decision in decisions:
            text = decision.model_copy(update={"cluster": self._cluster}).model_dump_json().encode()
            if batch and (len(batch) == MOST_DECISIONS_PER_POST or size + len(text) > MOST_BYTES_PER_POST):
                self._post_batch(batch)
                batch, size = [], 0
            batch.append(text)
            size += len(text)
        if batch:
            self._post_batch(batch)

    def _post_batch(self, batch: Sequence[bytes]) -> None:
        """Send decisions, compressed because the record of a preemption contains every pod of the cluster."""
        content = gzip.compress(b"[" + b",".join(batch) + b"]", compresslevel=1, mtime=0)
        self._send("POST", "/v1/decisions", content, "gzip")

    def decisions(
        self, start_ms: int, end_ms: int, *, subject: str = "", kind: str = "", per_get: int = DECISIONS_PER_GET
    ) -> Iterator[Decision]:
        """Yield the decisions in [start_ms, end_ms), newest first. Pages are fetched while iterating.

        subject, kind: only decisions about this queue or workload, and of this kind; "" for all.
        per_get: the size of a page."""
        only = {name: value for name, value in (("subject", subject), ("kind", kind)) if value}
        before: dict[str, str] = {}
        while end_ms > start_ms:
            query = {"start": str(start_ms), "end": str(end_ms), "limit": str(per_get), **before}
            page = self._read("/v1/decisions", _DECISIONS, {**query, **only, **self._cluster_query()})
            yield from page
            if len(page) < per_get:
                return
            # A page may end between two decisions of one millisecond, so the next query includes that millisecond.
            end_ms, before = page[-1].at_ms + 1, {"before": page[-1].key}

    def policies(self) -> list[PolicyVersion]:
        """Return every policy that was ever in force, oldest first."""
        return self._read("/v1/policy/versions", _POLICIES)

    def ended_sessions(self) -> dict[str, int]:
        """Return the sessions that people ended at the accountant's pages: by digest, when no cookie of them is valid
        any more (ms since 1970 UTC)."""
        return self._read("/v1/sessions/ended", _SESSIONS)

    def policy(self) -> Policy:
        """Return the policy in force."""
        return self._read("/v1/policy", _POLICY).policy

    def policy_in_force(self) -> Policy | None:
        try:
            return self.policy()
        except AccountantUnavailable as error:
            cause = error.__cause__
            if isinstance(cause, ValidationError) or (isinstance(cause, Unanswered) and cause.status == 404):
                return None
            raise

    def guarantees(self) -> GuaranteesAnswer:
        """Return what each queue is guaranteed and holds, and the GPUs in service."""
        return self._read("/v1/guarantees", _GUARANTEES)

    def budgets(self) -> list[BudgetState]:
        return self._read("/v1/budgets", _BUDGETS)

    def pod_usage(
        self, start_ms: int, end_ms: int, pods: Sequence[tuple[str, str]] = ()
    ) -> dict[tuple[str, str], Accounts]:
        where: dict[Dimension, Sequence[str]] = {}
        if pods:
            where["namespace"] = sorted({namespace for namespace, _ in pods})
            if len(pods) <= MOST_NAMES:
                where["pod"] = sorted({name for _, name in pods})
        by_cluster: dict[tuple[str, str], list[Accounts]] = {}
        for line in self.usage(start_ms, end_ms, ("cluster", "namespace", "pod"), where):
            by_cluster.setdefault((line.key["namespace"], line.key["pod"]), []).append(line.accounts_gpu_us)
        return {
            pod: accounts[0] for pod, accounts in by_cluster.items() if len(accounts) == 1 and (not pods or pod in pods)
        }

    def lost_gpus(self, start_ms: int, end_ms: int) -> dict[str, int]:
        # Query nodes first: a large cluster has far fewer nodes than GPUs, and usually none has lost a GPU.
        suspects = sorted(
            {line.key["node"] for line in self.usage(start_ms, end_ms, ("cluster", "node")) if _lost(line)}
        )
        if not suspects:
            return {}
        where: dict[Dimension, Sequence[str]] = {"node": suspects} if len(suspects) <= MOST_NAMES else {}
        lost: dict[str, int] = {}
        clusters: dict[str, set[str]] = {}
        for line in self.usage(start_ms, end_ms, ("cluster", "node", "gpu"), where):
            node = line.key["node"]
            clusters.setdefault(node, set()).add(line.key["cluster"])
            if 0 < line.accounts_gpu_us.total <= _lost(line):
                lost[node] = lost.get(node, 0) + 1
        return {node: count for node, count in lost.items() if len(clusters[node]) == 1}

    def metered_nodes(self, start_ms: int, end_ms: int) -> frozenset[str]:
        return frozenset(line.key["node"] for line in self.usage(start_ms, end_ms, ("node",)))

    def usage(
        self,
        start_ms: int,
        end_ms: int,
        by: Sequence[Dimension],
        where: Mapping[Dimension, Sequence[str]] | None = None,
    ) -> Iterator[UsageLine]:
        """Yield GPU time by account and group, page by page. An hour is named by its beginning in UTC.

        where: by dimension, the values to which the query is limited."""
        query: dict[str, str | Sequence[str]] = {
            "start": str(start_ms), "end": str(end_ms), "by": ",".join(by), "timezone": "UTC", "limit": "10000",
        }  # fmt: skip
        query |= {f"where.{dimension}": values for dimension, values in (where or {}).items()}
        if self._cluster:
            query["where.cluster"] = self._cluster
        while True:
            answer = self._read("/v1/usage", _USAGE, query)
            yield from answer.lines
            if answer.next_page is None:
                return
            query["page"] = answer.next_page

    def median_waits_s(self, start_ms: int, end_ms: int) -> dict[str, float]:
        """Return the median time from creation to a node, by queue, of the pods that existed in the span."""
        query = {"start": str(start_ms), "end": str(end_ms), "by": "queue"}
        lines = self._read("/v1/waits", _WAITS, {**query, **self._cluster_query()})
        try:
            return {
                str(line["key"]): float(median) for line in lines if (median := line["queued"]["median"]) is not None
            }
        except (KeyError, TypeError, ValueError) as error:
            raise self._invalid("/v1/waits") from error

    def _read(self, path: str, shape: TypeAdapter[T], params: Query | None = None) -> T:
        with _translated(), self._unless_paused("GET", path):
            answer = self._remote.get(path, params)
        try:
            return shape.validate_json(answer)
        except ValidationError as error:
            raise self._invalid(path) from error

    def _send(self, method: str, path: str, content: bytes, encoding: str = "", refuses: str = REFUSES) -> bytes:
        with _translated(sent=True, refuses=refuses), self._unless_paused(method, path):
            return self._remote.send_body(method, path, content, "application/json", encoding=encoding)

    @contextlib.contextmanager
    def _unless_paused(self, method: str, path: str) -> Iterator[None]:
        """Run a request, unless the accountant asked to wait with requests of this kind. Raises Unanswered."""
        now_ms = self._clock.monotonic_ms()
        until_ms, refusal = self._paused.get((method, path), (now_ms, ""))
        if now_ms < until_ms:
            left_s = -(-(until_ms - now_ms) // MS_PER_SECOND)
            raise Unanswered(f"{refusal}; not sent again for {left_s} s, as it asks", 429)
        try:
            yield
        except Unanswered as error:
            if error.status in _BUSY and error.retry_after_s:
                until_ms = self._clock.monotonic_ms() + error.retry_after_s * MS_PER_SECOND
                self._paused[method, path] = until_ms, str(error)
            raise

    def _invalid(self, path: str) -> AccountantUnavailable:
        return AccountantUnavailable(
            f"{self._remote.url}{path}: not the answer of an accountant of this release: "
            "check the address and the accountant's release"
        )


@contextlib.contextmanager
def _translated(*, sent: bool = False, refuses: str = REFUSES) -> Iterator[None]:
    """Convert HTTP failures to AccountantUnavailable or AccountantRefused.

    sent: whether the request has a body. Only a body can be refused for good.
    refuses: the reason of a refusal of the body."""
    try:
        yield
    except Unanswered as error:
        status = error.status or 0
        reason = refuses if status in _OF_BODY else REFUSES
        final = sent and status in _FINAL
        unavailable = not 400 <= status < 500 or status in _NOT_NOW
        kind = AccountantRefused if final else AccountantUnavailable
        raise (kind(str(error)) if unavailable else kind(str(error), reason)) from error
    except CalledOff as error:
        raise AccountantUnavailable("this program ends, or nobody waits for the answer any more") from error


def _lost(line: UsageLine) -> int:
    """Return the GPU-microseconds of lost GPUs in service; 0 from an accountant that does not separate them."""
    return 0 if line.node_down_us is None else line.accounts_gpu_us.down - line.node_down_us


class OtherAccountant(Model):
    """The address of another cluster's accountant. token_file and ca_file are like the settings of these names."""

    url: str = Field(pattern=r"^https?://[^\s?#]+$")
    token_file: Path | None = None
    ca_file: Path | None = None


class AccountantsFile(Model):
    """Accountants by the cluster name that agents report. Clusters with the same accountant have the same url."""

    clusters: dict[ClusterName, OtherAccountant]


def other_clusters(path: Path | None, own: str) -> OtherClusters:
    """Return the clusters of an accountants file. own: the name of the controller's own cluster.

    Raises FileFault, and AccountantUnavailable for a `ca_file` without a certificate."""
    addresses = load_yaml(path, AccountantsFile).clusters if path is not None else {}
    return OtherClusters(
        own,
        {
            name: AccountantApi(address.url, token_file=address.token_file, ca_file=address.ca_file, cluster=name)
            for name, address in sorted(addresses.items())
            if name != own
        },
    )


LONGEST_MS = 6 * MS_PER_HOUR
"""Longest time between two announcements of a policy that another controller replaces each time."""


@dataclass(frozen=True, slots=True)
class PolicyChange:
    """Another policy that the accountant has in force."""

    before: Policy
    after: Policy


@dataclass(frozen=True, slots=True)
class UsageReading:
    """The usage of one cycle.

    window: None if the accountant did not answer.
    hold: why the window must not change weights; None if it may.
    exhausted: queues whose budget is used up.
    change: the change of policy that this reading announced; None if it announced none.
    by_model: the usage of the GPUs of each part, if the policy has quotas by GPU model (`fairshare.core.gpu_models`).
    exhausted_by_model: queues whose budget of these GPUs is used up."""

    window: UsageWindow | None
    hold: UsageHold | None
    exhausted: frozenset[str] = frozenset()
    change: PolicyChange | None = None
    by_model: Mapping[str, UsageWindow] = field(default_factory=dict)
    exhausted_by_model: Mapping[str, frozenset[str]] = field(default_factory=dict)


def window_by_model(policy: Policy, read: Callable[[WindowSpec], UsageWindow]) -> dict[str, UsageWindow]:
    """Return the usage of the GPUs of each part into which the policy divides them; empty without quotas by model.

    read: returns the usage over a window.

    A part of a window without weights of models is in GPU time, because each of its GPUs counts once."""
    windows = {}
    for model in parts_of(policy):
        window = read(window_of_part(policy.window, policy.gpu_models, model))
        windows[model] = window if policy.window.gpu_weights else with_unit(window, "gpu_us")
    return windows


class UsageReader:
    """Announces one controller's policy and reads the usage that the policy needs. Not thread-safe."""

    def __init__(self, accountant: AccountantPort, clock: Clock, others: OtherClusters = NO_OTHER_CLUSTERS) -> None:
        """others: the accountants of other clusters that a policy may count."""
        self._accountant = accountant
        self._clock = clock
        self._others = others
        self._announced: str | None = None
        self._announced_ms = 0
        self._effective_ms = 0
        self._contests = 0

    def read(self, policy: Policy, version: str, *, announce: bool) -> UsageReading:
        """Return the usage that the policy needs. If the accountant does not answer, the reading has a hold.

        version: the policy's version.
        announce: whether to announce a new policy first."""
        change: PolicyChange | None = None
        try:
            if self._announced != version and announce:
                before = self._accountant.policy_in_force()
                self._effective_ms = self._accountant.put_policy(policy).effective_ms
                if before is not None and before.version() != version:
                    change = PolicyChange(before, policy)
                self._announced, self._announced_ms = version, self._clock.wall_ms()
            now_ms = self._clock.wall_ms()
            # Rows end at whole minutes. A window that ends there cuts no row: its query takes a twentieth of the time.
            at_ms = now_ms - now_ms % MS_PER_MINUTE
            if at_ms <= self._announced_ms:  # a policy that was just announced is in force only after this instant
                at_ms = now_ms
            if at_ms < self._effective_ms <= now_ms + MS_PER_MINUTE:  # by the accountant's clock, which may be ahead
                at_ms = self._effective_ms
            window = self._accountant.window(policy.window, policy.measure, at_ms, policy.min_coverage)
            exhausted = frozenset[str]()
            exhausted_by_model: dict[str, frozenset[str]] = {}
            if weight_calculation.budgets_limit_weights(policy):
                states = self._accountant.budgets()
                exhausted = weight_calculation.exhausted_queues(policy, states)
                for model in policy.gpu_models:
                    exhausted_by_model[model] = weight_calculation.exhausted_queues(policy, states, model)
        except AccountantUnavailable as error:
            return UsageReading(None, UsageHold(error.reason, str(error)), change=change)
        same_counting = window.policy_version == version or window.policy_counting == policy.counting()
        if not same_counting and announce:
            return UsageReading(window, self._policy_not_in_force(window, version, now_ms), change=change)
        if now_ms - self._announced_ms > 2 * LONGEST_MS:
            self._contests = 0
        hold = usage_hold(policy, window, now_ms)
        if hold is None:
            window, hold = self._others.add(policy, window, at_ms, now_ms, same_counting=announce)
        by_model: dict[str, UsageWindow] = {}
        if hold is None:
            try:
                by_model = window_by_model(policy, partial(self._of_part, policy, at_ms, now_ms, announce))
            except AccountantUnavailable as error:
                hold = UsageHold(error.reason, str(error))
        return UsageReading(window, hold, exhausted, change, by_model, exhausted_by_model)

    def _of_part(self, policy: Policy, at_ms: int, now_ms: int, announce: bool, spec: WindowSpec) -> UsageWindow:
        """Return the usage of one part of the GPUs in all clusters that the policy counts. Raises
        AccountantUnavailable."""
        own = self._accountant.window(spec, policy.measure, at_ms, policy.min_coverage)
        of_part = policy.model_copy(update={"window": spec})
        window, hold = self._others.add(of_part, own, at_ms, now_ms, same_counting=announce)
        if hold is not None:
            raise AccountantUnavailable(f"{hold.reason}: {hold.message}")
        return window

    def _policy_not_in_force(self, window: UsageWindow, version: str, now_ms: int) -> UsageHold:
        """Return the hold for a window with the queues of another policy, from another controller or a restored ledger.

        The next reading announces the policy again if enough time has passed since the last announcement."""
        if now_ms < self._effective_ms:  # the controller announced it itself; announcing it again would change nothing
            return UsageHold("PolicyNotInForce", _clock_behind(self._effective_ms, now_ms))
        text = f"usage was counted by policy {window.policy_version or 'none'}, ours is {version}"
        if self._contests > 1:
            text = f"{text}, announced {self._contests} times: another controller announces its own to this accountant"
        if now_ms >= self._announced_ms + min(MS_PER_MINUTE << self._contests, LONGEST_MS):
            self._announced, self._contests = None, self._contests + 1
        return UsageHold("PolicyNotInForce", text)


def _clock_behind(effective_ms: int, now_ms: int) -> str:
    return (
        f"the accountant has ours in force from {instant(effective_ms)} on, and our clock shows {instant(now_ms)}:"
        f" it is {(effective_ms - now_ms) / MS_PER_SECOND:.0f} s or more behind the accountant's"
    )
