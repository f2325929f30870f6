"""Holders that a question tells apart, and those it does not ask for at all.

Usage is summed by the engine per class of holders, so that an answer by team and hour costs what it is
long, not what the cluster's pods are many.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from accountant.ledger import OF_HOLDERS
from accountant.store.database import Cursor
from accountant.store.names import HolderName, holders
from accountant.wire import IDLE, Dimension

ASSIGNED: frozenset[Dimension] = frozenset({"team", "queue"})
NOBODY = 0
"""The id of no holder, and the class of it."""


@dataclass(frozen=True, slots=True)
class Classes:
    """of: holder id -> class; who is not in it is not asked for. names: by class, what the question asks of it."""

    of: Mapping[int, int]
    names: Mapping[int, HolderName]


def asks_for_nobody(where: Mapping[Dimension, Collection[str]]) -> bool:
    """Whether time that nobody pays passes the filter, as far as that concerns holders."""
    return all(
        (IDLE if dimension in ASSIGNED else "") in allowed
        for dimension, allowed in where.items()
        if dimension in OF_HOLDERS
    )


def classes(
    cursor: Cursor,
    start_ms: int,
    end_ms: int,
    asked: Collection[Dimension],
    where: Mapping[Dimension, Collection[str]],
    labels: Collection[str] = (),
) -> Classes:
    """Of the holders in [start_ms, end_ms), by what `asked` tells apart. labels: those that may name a team."""
    found = cursor.rows("payers", {"low": start_ms, "high": end_ms})
    numbers: dict[HolderName, int] = {}
    of = {}
    for holder, name in holders(cursor, {row[0] for row in found} - {NOBODY}, labels, users="user" in asked).items():
        if not all(
            getattr(name, attribute) in where.get(dimension, (getattr(name, attribute),))
            for dimension, attribute in _NAMED.items()
        ):
            continue
        of[holder] = numbers.setdefault(_as_asked(name, asked), len(numbers) + 1)
    if asks_for_nobody(where):
        of[NOBODY] = NOBODY
    return Classes(of, {number: name for name, number in numbers.items()})


_NAMED: Mapping[Dimension, str] = {
    "namespace": "namespace", "job": "job", "pod": "name", "container": "container", "user": "user",
}  # fmt: skip
"""Dimensions that the holder decides alone, and the attribute of its name they are."""


def _as_asked(name: HolderName, asked: Collection[Dimension]) -> HolderName:
    """The name with only what the dimensions need: a team may come from the namespace of a cluster."""
    team = "team" in asked
    return HolderName(
        cluster=name.cluster if team else "",
        namespace=name.namespace if team or "namespace" in asked else "",
        name=name.name if "pod" in asked else "",
        queue_ref=name.queue_ref if team or "queue" in asked else "",
        job=name.job if "job" in asked else "",
        labels=name.labels if team else frozenset(),
        container=name.container if "container" in asked else "",
        user=name.user,
    )
