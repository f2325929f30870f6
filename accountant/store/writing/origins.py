"""Which queue each pod asked for, as last observed: what the writer needs of a pod for every row it books.

A memory of the tables, like `accountant.store.writing.dictionary`: what a transaction learns is staged until it is
committed, whoever is not remembered is looked up, and between observations that contradict each other the
table decides. The writer owns it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from accountant.store.database import Cursor
from accountant.store.writing import columns
from agent.wire import PodFacts

PodKey = tuple[str, str]
"""(cluster, uid)."""
KEEP = 200_000


class Origins:
    """queue_ref by pod; "" for whoever no fact is known of."""

    def __init__(self, keep: int = KEEP) -> None:
        self._keep = keep
        self._known: dict[PodKey, str] = {}
        self._staged: dict[PodKey, str] = {}
        self._unsure: set[PodKey] = set()
        self._opened = False
        self._complete = False
        """Every pod of the tables is remembered, or in `_unsure`."""

    def unheard(self, cursor: Cursor, facts: Iterable[tuple[str, PodFacts]]) -> frozenset[PodKey]:
        """The pods of these facts that no table has a row of, as far as that is known without asking."""
        self._open(cursor)
        if not self._complete:
            return frozenset()
        # One by one: the difference of a set and a dictionary's keys goes through all of the dictionary.
        keys = ((cluster, fact.uid) for cluster, fact in facts)
        return frozenset(key for key in keys if not self._heard(key))

    def learn(self, cursor: Cursor, facts: Iterable[tuple[str, PodFacts]]) -> None:
        """Facts that this transaction has written already: (cluster, facts)."""
        self._open(cursor)
        for cluster, fact in facts:
            key = (cluster, fact.uid)
            known = self._staged.get(key, self._known.get(key))
            if key in self._unsure or known == fact.queue_ref:
                continue
            if known is None and self._complete:
                self._staged[key] = fact.queue_ref
            else:
                self._unsure.add(key)

    def resolve(self, cursor: Cursor, keys: Collection[PodKey]) -> Mapping[PodKey, str]:
        """The queue_ref of each pod, this transaction's facts included."""
        self._open(cursor)
        found: dict[PodKey, str] = {}
        missing: list[PodKey] = []
        for key in keys:
            ref = self._staged.get(key, self._known.get(key))
            if key in self._unsure or (ref is None and not self._complete):
                missing.append(key)
            else:
                found[key] = ref or ""
        if missing:
            found |= dict.fromkeys(missing, "")
            rows = cursor.rows("pod_origins", incoming=columns.table(columns.POD_KEY, missing))
            found |= {(cluster, uid): ref for cluster, uid, ref in rows}
            self._staged |= {key: found[key] for key in missing}
            self._unsure.difference_update(missing)
        return found

    def commit(self) -> None:
        """The transaction is durable."""
        if len(self._known) + len(self._staged) > self._keep:
            self._known.clear()
            self._complete = False
        self._known |= self._staged
        self._staged.clear()

    def forget(self) -> None:
        """The transaction failed, or nobody knows: believe the tables alone."""
        self._known.clear()
        self._staged.clear()
        self._unsure.clear()
        self._opened = False

    def _heard(self, key: PodKey) -> bool:
        return key in self._known or key in self._staged or key in self._unsure

    def _open(self, cursor: Cursor) -> None:
        if self._opened:
            return
        self._opened = True
        pods = sum(cursor.run(f"SELECT count(*) FROM {table}")[0][0] for table in ("pod", "pod_seen"))  # noqa: S608
        self._complete = pods <= self._keep
        if self._complete:
            keys = cursor.run("SELECT cluster, uid FROM pod UNION SELECT cluster, uid FROM pod_seen")
            found = cursor.rows("pod_origins", incoming=columns.table(columns.POD_KEY, keys))
            self._known = {(cluster, uid): ref for cluster, uid, ref in found}
