"""Keeps the exported labels of pods over time. They are dimensions of usage: `label:project` is the label `project`.

Only the labels that the settings name are kept (`exported_labels`). A pod's first observed labels count from its start;
a change counts from the first quarter-hour after it was observed, so it moves no earlier time. The API server's facts
contain every label, so one that they lack is unset. A node's agent sends the labels that its own settings name, so one
that it does not send stays as it was.

Whoever makes a pod chooses its labels, so what a namespace can leave is bounded: `most` values of each label within 31
days, and MOST_CHANGES changes of one pod. A further value, or a text that is no label's value, is kept as OTHER_VALUE
and counted. A node may send pods of any namespace, so the values that it sends count as its own: they take no room from
those that the API server shows or another node sends. Once the API server has shown `most` values of a namespace, a
node adds none."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Sequence
from typing import Final, Literal, TypeAlias

import msgspec
import structlog

from accountant.storage.duckdb_engine import Cursor
from accountant.storage.write import record_columns
from accountant.storage.write.record_columns import add
from accountant.wire.usage_cost_and_job_models import LABEL_VALUE, OTHER_VALUE
from agent.wire import PodFacts
from gputally.base.units import BUCKET_MS, MS_PER_DAY

PodKey: TypeAlias = tuple[str, str]
"""(cluster, uid)."""
Whose: TypeAlias = tuple[str, str, str, str | None]
"""Cluster, namespace and label, and the node that sent the values; None for the API server."""
Cut: TypeAlias = Literal["values", "invalid", "changes"]
"""Why a value was not kept."""
MOST_CHANGES: Final = 16
"""Changes of one pod's labels that are kept; later ones are ignored."""
_PERIOD_MS: Final = 31 * MS_PER_DAY
_PODS: Final = 20_000
"""Pods whose labels are in memory."""
_PERIODS: Final = 16
"""Periods whose values are in memory."""


class Content(msgspec.Struct, frozen=True, omit_defaults=True):
    """The content of a row of `exported_label`.

    labels: "" for a label that is not set; one that is missing is unknown.
    nodes: by label, the node that sent it; the API server showed the others."""

    namespace: str
    labels: dict[str, str]
    nodes: dict[str, str] = {}


class PodLabels:
    """The exported labels, and the values of each that are in use. Only the writer uses it.

    names: the exported labels.
    most: values of one label that the pods of a namespace may have within 31 days.
    cut: the number of observed values that were not kept, by reason, since the start of the process."""

    def __init__(self, names: Sequence[str] = (), most: int = 1) -> None:
        self.names = tuple(names)
        self.cut: Counter[Cut] = Counter()
        self._most = most
        self._values: dict[int, defaultdict[Whose, set[str]]] = {}
        """By period."""
        self._steps: dict[PodKey, list[tuple[int, Content]]] = {}
        """What the table has of some pods, because several facts of a pod come in one after the other."""
        self._log = structlog.get_logger("gputally.ledger")

    def forget(self) -> None:
        """Read the table again after a transaction failed."""
        self._values.clear()
        self._steps.clear()

    def write(
        self, cursor: Cursor, facts: Iterable[tuple[str, str | None, PodFacts]], new_pods: Collection[PodKey] = ()
    ) -> None:
        """Add what these facts, given as (cluster, sending node, facts), say about labels.

        The node is None for the API server's facts, which contain every label that is set.
        new_pods: pods that certainly have no row."""
        told: dict[PodKey, list[tuple[str | None, PodFacts]]] = {}
        for cluster, node, fact in facts if self.names else ():
            if node is None or not fact.labels.keys().isdisjoint(self.names):
                told.setdefault((cluster, fact.uid), []).append((node, fact))
        if not told:
            return
        known = self._known(cursor, [key for key in told if key not in new_pods])
        changed: dict[PodKey, list[tuple[int, Content]]] = {}
        for key, several in told.items():
            before = known.get(key, [])
            after = before
            for node, fact in sorted(several, key=lambda sent: sent[1].observed_ms):
                after = self._with(cursor, key[0], after, fact, node)
            if after != before:
                changed[key] = after
        if not changed:
            return
        for cluster, uids in _by_cluster(key for key in changed if key in known):
            cursor.plainly(
                "DELETE FROM exported_label WHERE cluster = ? AND uid IN (SELECT unnest(?))", [cluster, uids]
            )
        rows = [
            (*key, since, place > 0, msgspec.json.encode(content, order="deterministic").decode())
            for key, steps in changed.items()
            for place, (since, content) in enumerate(steps)
        ]
        add(cursor, "exported_label", record_columns.EXPORTED_LABEL, rows)
        self._steps |= changed

    def _known(self, cursor: Cursor, keys: Sequence[PodKey]) -> dict[PodKey, list[tuple[int, Content]]]:
        """Return what the table has of these pods, without those of which it has nothing."""
        if len(self._steps) > _PODS:
            self._steps.clear()
        unread = [key for key in keys if key not in self._steps]
        self._steps |= {key: [] for key in unread}
        for cluster, uids in _by_cluster(unread):
            rows = cursor.plainly(
                "SELECT uid, since_ms, content FROM exported_label "
                "WHERE cluster = ? AND uid IN (SELECT unnest(?)) ORDER BY ALL",
                [cluster, uids],
            )
            for uid, since, content in rows:
                self._steps[cluster, uid].append((since, _decoder.decode(content)))
        return {key: self._steps[key] for key in keys if self._steps[key]}

    def _with(
        self, cursor: Cursor, cluster: str, steps: list[tuple[int, Content]], fact: PodFacts, node: str | None
    ) -> list[tuple[int, Content]]:
        """The steps with one observation. Those of a pod are sorted by the instant from which they count."""
        bucket = fact.observed_ms - fact.observed_ms % BUCKET_MS
        since = bucket if bucket == fact.observed_ms or not steps or bucket < steps[0][0] else bucket + BUCKET_MS
        place = bisect_right([step for step, _ in steps], since)
        in_force = max(0, place - 1)
        before = steps[in_force][1] if steps else Content(fact.namespace, {})
        labels, nodes = dict(before.labels), dict(before.nodes)
        for name in self.names:
            if node is None or name in fact.labels:
                value = self._kept(cursor, (cluster, fact.namespace, name, node), fact.labels.get(name, ""), since)
                if node is None:
                    nodes.pop(name, None)
                elif labels.get(name) != value:
                    nodes[name] = node
                labels[name] = value
        if steps and labels == before.labels:
            if nodes == before.nodes:
                return steps
            confirmed = (steps[in_force][0], Content(before.namespace, labels, nodes))
            return [*steps[:in_force], confirmed, *steps[in_force + 1 :]]
        if len(steps) > MOST_CHANGES:
            self._count("changes", fact.namespace, "")
            return steps
        step = (since, Content(fact.namespace, labels, nodes))
        same = place > 0 and steps[place - 1][0] == since
        return [*steps[: place - same], step, *steps[place:]]

    def _kept(self, cursor: Cursor, whose: Whose, value: str, at_ms: int) -> str:
        """The value under which a label's value is kept."""
        if value == "":
            return ""
        if LABEL_VALUE.fullmatch(value) is None:
            self._count("invalid", whose[1], whose[2])
            return OTHER_VALUE
        of_period = self._of_period(cursor, at_ms // _PERIOD_MS)
        values, shown = of_period[whose], of_period[*whose[:3], None]
        if value not in values and value not in shown:
            if max(len(values), len(shown)) >= self._most:
                self._count("values", whose[1], whose[2])
                return OTHER_VALUE
            values.add(value)
        return value

    def _of_period(self, cursor: Cursor, period: int) -> defaultdict[Whose, set[str]]:
        if period not in self._values:
            if len(self._values) >= _PERIODS:
                self._values.clear()
            found: defaultdict[Whose, set[str]] = defaultdict(set)
            rows = cursor.run(
                "SELECT DISTINCT cluster, content FROM exported_label WHERE since_ms >= ? AND since_ms < ?",
                [period * _PERIOD_MS, (period + 1) * _PERIOD_MS],
            )
            for cluster, text in rows:
                content = _decoder.decode(text)
                for name, value in content.labels.items():
                    if value not in ("", OTHER_VALUE):
                        found[cluster, content.namespace, name, content.nodes.get(name)].add(value)
            self._values[period] = found
        return self._values[period]

    def _count(self, why: Cut, namespace: str, label: str) -> None:
        if not self.cut[why]:
            self._log.warning("label_value_not_kept", why=why, namespace=namespace, label=label)
        self.cut[why] += 1


def _by_cluster(keys: Iterable[PodKey]) -> Iterable[tuple[str, list[str]]]:
    """The uids of each cluster. Looking these up in a list takes half the time of a join of small tables."""
    found: dict[str, list[str]] = {}
    for cluster, uid in keys:
        found.setdefault(cluster, []).append(uid)
    return found.items()


_decoder = msgspec.json.Decoder(Content)
