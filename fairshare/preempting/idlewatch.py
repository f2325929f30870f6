"""Owners of idle GPUs are warned, and what is known of their pods is brought together for the decision.

The accountant is asked what every pod did lately (`preempting.idle` says who is idle by it), each owner new to it
gets an annotation and an Event, and the instant is kept: in memory, and over restarts in the status ConfigMap. Who
is no longer idle is forgiven, and told. Where the accountant does not answer nobody is idle, and nobody forgiven.

A warning that could not be written was none: its grace does not begin. A warning of a dry run says so and does not
count once the rule is enforced. What this must not do: stop anybody.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from accountant.preempting import IdleReclaimPolicy, Mode
from accountant.wire import Accounts
from agent.units import MS_PER_DAY, MS_PER_MINUTE, MS_PER_SECOND
from fairshare.errors import AccountantUnavailable, ClusterError, NotFound
from fairshare.kube.kinds import POD
from fairshare.kube.marks import instant
from fairshare.kube.ports import Cluster, Event
from fairshare.model import Gang, Pod
from fairshare.plan import FIELD_MANAGER
from fairshare.preempting.effectors import OPT_OUT
from fairshare.preempting.idle import exemption, idle_parts, ripe, shown, work_since, worked
from fairshare.preempting.rulings import Idleness, Use
from fairshare.preempting.victims import Bundle

WARNING = "gputally.dev/idle-warning"
"""Annotation on a pod: why, and from when on, it may be reclaimed."""
MOST_WARNED = 500
"""Pods of a target that are warned at a time."""
LOOKS = 6
"""Looks during one grace: every one asks the accountant for what each pod did."""
MOST_RIPE = 20
"""Workloads whose work is looked up in one cycle; the others wait for the next."""
AGAIN_MS = 10 * MS_PER_MINUTE
"""An exempt pod is looked at again after this time."""
LONGEST_MS = 90 * MS_PER_DAY
"""How far back work is looked up; what is older counts as work."""
PodUsage = Callable[[int, int, Sequence[tuple[str, str]]], Mapping[tuple[str, str], Accounts]]
"""GPU time over [start_ms, end_ms) by (namespace, name), of these pods (none: of all). Raises AccountantUnavailable."""


@dataclass(frozen=True, slots=True)
class Look:
    """idleness: of who may be idle. events: for the owners. faults: warnings that could not be written."""

    idleness: Idleness | None = None
    events: tuple[Event, ...] = ()
    faults: tuple[str, ...] = ()


class IdleWatch:
    """Belongs to one controller; not made for threads."""

    def __init__(self, usage: PodUsage) -> None:
        self._usage = usage
        self._warned: dict[str, dict[str, tuple[int, Mode]]] = {}
        self._exempt: dict[str, int] = {}
        self._looked_ms: dict[str, int] = {}

    def restore(self, text: str) -> None:
        """Go on with what `state` wrote; anything else is forgotten, which makes every grace begin anew."""
        self._warned = {}
        try:
            for target, uid, at_ms, mode in json.loads(text or "[]"):
                if mode in ("dry-run", "enforce"):
                    self._warned.setdefault(str(target), {})[str(uid)] = (int(at_ms), mode)
        except (ValueError, TypeError):
            self._warned = {}

    def state(self) -> str:
        """Empty where nobody is warned."""
        rows: list[Any] = [
            (target, uid, *noted)
            for target, here in sorted(self._warned.items())
            for uid, noted in sorted(here.items())
        ]
        return json.dumps(rows, separators=(",", ":")) if rows else ""

    def look(
        self,
        rule: IdleReclaimPolicy | None,
        mode: Mode,
        cluster: Cluster,
        target: str,
        gangs: Sequence[Gang],
        end_ms: int,
        now_ms: int,
    ) -> Look:
        """mode: of the rule at this target. end_ms: up to when usage is metered. Between two looks nobody is warned,
        forgiven or reclaimed."""
        if rule is None or mode == "off":
            self._warned.pop(target, None)
            return Look()
        if now_ms - self._looked_ms.get(target, -rule.grace * MS_PER_SECOND) < rule.grace * MS_PER_SECOND // LOOKS:
            return Look()
        before = {uid: at for uid, (at, noted) in self._warned.get(target, {}).items() if noted == mode}
        self._exempt = {uid: at for uid, at in self._exempt.items() if now_ms - at < AGAIN_MS}
        try:
            measured = self._measured(rule, gangs, end_ms)
        except AccountantUnavailable:
            return Look()
        self._looked_ms[target] = now_ms
        parts = tuple(idle_parts(rule, gangs, measured, now_ms))
        still = {pod.uid for part in parts for pod in part.pods}
        round_ = _Round(rule, mode, cluster, measured, now_ms)
        pods = {pod.uid: pod for gang in gangs for pod in gang.pods if pod.held}
        for uid in sorted(before.keys() - still):
            if uid in pods:
                round_.forgive(pods[uid])
        warned = {uid: at for uid, at in before.items() if uid in still}
        for part in sorted(parts, key=lambda part: (min(warned.get(p.uid, now_ms) for p in part.pods), part.key)):
            for pod in part.pods:
                new = pod.uid not in warned and pod.uid not in self._exempt and len(warned) < MOST_WARNED
                if new and round_.warn(part, pod):
                    warned[pod.uid] = now_ms
        due = [part for part in parts if ripe(rule, part, warned, now_ms)][:MOST_RIPE]
        for part in due:
            round_.look_again(part)
        self._exempt |= dict.fromkeys(round_.exempt, now_ms)
        self._warned[target] = {uid: (at, mode) for uid, at in warned.items() if uid not in round_.exempt}
        known = {uid for part in due for uid in (pod.uid for pod in part.pods)}
        idleness = Idleness(
            end_ms,
            {uid: use for uid, use in measured.lasting.items() if uid in known},
            {uid: use for uid, use in measured.recent.items() if uid in known},
            {uid: at for uid, at in warned.items() if uid in known},
            {uid: why for uid, why in round_.exempt.items() if uid in known},
            self._work(due, end_ms),
        )
        return Look(idleness, tuple(round_.events), tuple(round_.faults))

    def warned(self, target: str) -> int:
        """Pods whose grace runs."""
        return len(self._warned.get(target, {}))

    def _measured(self, rule: IdleReclaimPolicy, gangs: Sequence[Gang], end_ms: int) -> Idleness:
        """Of pods that could be idle by how long they have been ready. Nobody such: nobody asks."""
        longest_ms = max(rule.sustained, rule.grace) * MS_PER_SECOND
        pods = {
            (pod.namespace, pod.name): pod.uid
            for gang in gangs
            for pod in gang.pods
            if pod.held and pod.ready_ms is not None and pod.ready_ms <= end_ms - longest_ms
        }
        if not pods:
            return Idleness(end_ms, {}, {})
        spans = [self._usage(end_ms - span * MS_PER_SECOND, end_ms, ()) for span in (rule.sustained, rule.grace)]
        lasting, recent = ({pods[key]: _use(found) for key, found in span.items() if key in pods} for span in spans)
        return Idleness(end_ms, lasting, recent)

    def _work(self, due: Sequence[Bundle], end_ms: int) -> dict[str, float]:
        """What is known of the work each would lose; nothing where the accountant does not answer."""
        found: dict[str, float] = {}
        for part in due:
            since = work_since(part)
            if since is None or since >= end_ms:
                continue
            names = [(pod.namespace, pod.name) for pod in part.pods]
            try:
                usage = self._usage(max(since, end_ms - LONGEST_MS), end_ms, names)
            except AccountantUnavailable:
                continue
            for pod in part.pods:
                held = usage.get((pod.namespace, pod.name))
                found[pod.uid] = worked(pod, _use(held) if held is not None else None, since, end_ms)
        return found


class _Round:
    """One target in one cycle: what is written and said."""

    def __init__(self, rule: IdleReclaimPolicy, mode: Mode, cluster: Cluster, measured: Idleness, now_ms: int) -> None:
        self._rule = rule
        self._enforce = mode == "enforce"
        self._cluster = cluster
        self._measured = measured
        self._now_ms = now_ms
        self.events: list[Event] = []
        self.faults: list[str] = []
        self.exempt: dict[str, str] = {}

    def warn(self, part: Bundle, pod: Pod) -> bool:
        """Whether its owner knows now. False: the pod is exempt, gone, or could not be written to."""
        if not self._may_be_warned(pod):
            return False
        until = instant(self._now_ms + self._rule.grace * MS_PER_SECOND)
        does = "its GPUs are reclaimed" if self._enforce else "its GPUs would be reclaimed (dry run)"
        text = f"it was {shown(self._rule, part, self._measured)}: {does} after {until} unless they are used"
        if self._enforce and not self._note(pod, text):
            return False
        self._tell(pod, "Warning", "Idle" if self._enforce else "WouldBeIdle", text)
        return True

    def forgive(self, pod: Pod) -> None:
        if self._enforce:
            self._note(pod, None)
        self._tell(pod, "Normal", "IdleNoMore", "its GPUs are used again, or it is not known: nothing is reclaimed")

    def look_again(self, part: Bundle) -> None:
        """An owner may have exempted a pod while its grace ran."""
        for pod in part.pods:
            self._may_be_warned(pod)

    def _may_be_warned(self, pod: Pod) -> bool:
        try:
            obj = self._cluster.get(POD, pod.name, pod.namespace)
        except NotFound:
            return False
        except ClusterError as error:
            self.faults.append(f"{pod.namespace}/{pod.name}: {error}")
            return False
        if obj["metadata"].get("uid", "") != pod.uid:
            return False
        reason = exemption(self._rule.exempt, obj)
        if (obj["metadata"].get("annotations") or {}).get(OPT_OUT) == "never":
            reason = "its owner has opted out of preemption"
        if reason is not None:
            self.exempt[pod.uid] = reason
        return reason is None

    def _note(self, pod: Pod, text: str | None) -> bool:
        change = {"metadata": {"uid": pod.uid, "annotations": {WARNING: text}}}
        try:
            self._cluster.patch(POD, pod.name, pod.namespace, change, field_manager=FIELD_MANAGER)
        except NotFound:
            return False
        except ClusterError as error:
            self.faults.append(f"{pod.namespace}/{pod.name}: {error}")
            return False
        return True

    def _tell(self, pod: Pod, kind: Literal["Normal", "Warning"], reason: str, text: str) -> None:
        self.events.append(Event(POD, pod.name, pod.namespace, pod.uid, kind, reason, text, self._now_ms))


def _use(found: Accounts) -> Use:
    return Use(found.busy, found.allocated_idle, found.allocated_unknown)
