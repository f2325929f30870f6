"""What the controller's cycles do about preemption, target by target, and what they keep in mind between them.

Kept: who gave way in the last day (for the limits), whose owners were warned that they are idle, what was said
already (so that it is said once), whom the cluster keeps, and since when a latency is too high. The first two survive
a restart in the status ConfigMap; losing them would make the limits generous, and a grace begin anew.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, replace
from typing import Any

from accountant.wire import Decision, Policy
from agent.units import MS_PER_MINUTE
from fairshare.errors import ClusterError, Conflict, NotFound
from fairshare.kube.kinds import CONFIG_MAP, Object
from fairshare.kube.ports import Cluster
from fairshare.model import Entitlement, Gang, Pod, Quota
from fairshare.preempting import preempter
from fairshare.preempting.effectors import Veto
from fairshare.preempting.idlewatch import IdleWatch, Look, PodUsage
from fairshare.preempting.limits import Past, kept
from fairshare.preempting.preempter import PreemptionReport, Said, Unsettled
from fairshare.preempting.rulings import Call
from fairshare.preempting.situations import NO_QUOTAS, situation
from fairshare.status import StatusObject

KEY = "preempted"
IDLE_KEY = "warned-idle"
"""The ConfigMap's entries."""
HAND_KEY, BY_HAND = "preempted-by-hand", "gputally-by-hand"
"""The entry of whoever preempts by hand, and his field manager: the controller leaves both alone."""
MOST_KEPT = 1_000
FORGOTTEN_MS = 10 * MS_PER_MINUTE
"""Whom the cluster keeps is asked again after this time, where so many are kept that one cycle cannot ask all."""
Calls = Callable[[Policy, int], Sequence[Call]]


def nobody(_policy: Policy, _now_ms: int) -> Sequence[Call]:
    """No latency is watched."""
    return ()


class Preemptions:
    """Belongs to one controller; not made for threads."""

    def __init__(self, usage: PodUsage, calls: Calls = nobody, where: StatusObject | None = None) -> None:
        """usage: what pods did lately, for the idle rule. where: what was done by hand stands there too."""
        self._calls = calls
        self._where = where
        self._idle = IdleWatch(usage)
        self._past: tuple[Past, ...] = ()
        self._said: dict[str, Said] = {}
        self._vetoed: dict[str, dict[str, tuple[Veto, int]]] = {}

    def restore(self, standing: Object) -> None:
        """Go on with what stands in the ConfigMap."""
        data = standing.get("data") or {}
        self._past = _read(data.get(KEY, ""))
        self._idle.restore(data.get(IDLE_KEY, ""))

    def state(self) -> dict[str, str]:
        """For the ConfigMap."""
        texts = {KEY: _text(self._past) if self._past else "", IDLE_KEY: self._idle.state()}
        return {key: text for key, text in texts.items() if text}

    def cycle(
        self,
        policy: Policy,
        cluster: Cluster,
        target: str,
        gangs: Sequence[Gang],
        entitlements: Sequence[Entitlement],
        nodes: Sequence[Object],
        pods: Sequence[Pod],
        now_ms: int,
        metered_ms: int | None,
        leading: Callable[[], bool],
        quotas: Mapping[str, Quota] = NO_QUOTAS,
    ) -> tuple[PreemptionReport | None, tuple[Decision, ...]]:
        """metered_ms: up to when usage is metered; None: that is not known. quotas: by which the target admits work.

        None where the target's preemption is off. Raises ClusterError where nothing could be decided."""
        mode = preempter.mode_of(policy, target)
        if mode == "off" or not leading():
            return None, ()
        look = Look()
        if metered_ms is not None:
            at_target = preempter.idle_mode(policy, mode)
            look = self._idle.look(
                policy.preemption.idle, at_target, cluster, target, gangs, min(metered_ms, now_ms), now_ms
            )
        by_hand = _noted(cluster, self._where, HAND_KEY) if self._where is not None else ()
        here = situation(
            policy, target, gangs, entitlements, nodes, pods, now_ms,
            past=(*self._past, *by_hand), calls=self._calls(policy, now_ms), quotas=quotas,
        )  # fmt: skip
        known = self._known(target, now_ms)
        try:
            report = preempter.preempt(policy, cluster, replace(here, idle=look.idleness), mode, leading, known)
        except Unsettled as unsettled:
            new = {key: (veto, now_ms) for key, veto in unsettled.vetoes.items() if key not in known}
            self._vetoed[target] = self._vetoed[target] | new
            raise
        report = replace(report, warned=self._idle.warned(target), faults=look.faults)
        news = preempter.decisions(policy, report, self._said.get(target, {}))
        self._said[target] = preempter.said(report)
        self._past = kept((*self._past, *report.past), now_ms, policy.preemption.cool_down)
        return replace(report, events=(*look.events, *(report.events if news else ()))), news

    def _known(self, target: str, now_ms: int) -> dict[str, Veto]:
        """Vetoes of earlier cycles that did not come to an end."""
        held = {key: veto for key, veto in self._vetoed.get(target, {}).items() if now_ms - veto[1] < FORGOTTEN_MS}
        self._vetoed[target] = held
        return {key: veto for key, (veto, _) in held.items()}


def recent(cluster: Cluster, where: StatusObject) -> tuple[Past, ...]:
    """Who gave way of late, to the controller and by hand, as they have noted it; none where that cannot be read."""
    return _noted(cluster, where, KEY, HAND_KEY)


def note_by_hand(cluster: Cluster, where: StatusObject, past: Sequence[Past], now_ms: int, cool_down_s: int) -> None:
    """Let the limits of the controller, and of who comes next, know who gave way by hand. Raises ClusterError."""
    for left in range(2, -1, -1):
        metadata = {"name": where.name, "namespace": where.namespace}
        before: tuple[Past, ...] = ()
        try:
            standing = cluster.get(CONFIG_MAP, where.name, where.namespace)
        except NotFound:
            pass
        else:
            before = _read((standing.get("data") or {}).get(HAND_KEY, ""))
            metadata["resourceVersion"] = standing["metadata"].get("resourceVersion", "")
        text = _text(kept((*before, *past), now_ms, cool_down_s))
        noted = {
            "apiVersion": CONFIG_MAP.api_version,
            "kind": CONFIG_MAP.kind,
            "metadata": metadata,
            "data": {HAND_KEY: text},
        }
        try:
            cluster.apply(noted, field_manager=BY_HAND)
        except Conflict:  # the controller, or somebody else, has written meanwhile
            if not left:
                raise
        else:
            return


def _noted(cluster: Cluster, where: StatusObject, *keys: str) -> tuple[Past, ...]:
    try:
        data = cluster.get(CONFIG_MAP, where.name, where.namespace).get("data") or {}
    except ClusterError:
        return ()
    return tuple(past for key in keys for past in _read(data.get(key, "")))


def _text(past: Sequence[Past]) -> str:
    return json.dumps([astuple(each) for each in past[-MOST_KEPT:]], separators=(",", ":"))


def _read(text: str) -> tuple[Past, ...]:
    """What `state` wrote; anything else is forgotten."""
    try:
        rows: Any = json.loads(text or "[]")
        return tuple(
            Past(int(r[0]), str(r[1]), str(r[2]), str(r[3]), float(r[4]), float(r[5]), str(r[6])) for r in rows
        )
    except (ValueError, TypeError, IndexError, KeyError):
        return ()
