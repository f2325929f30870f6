"""The laws of a moment's relation of usage, for any implementation and any question."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import pairwise
from typing import Final, NamedTuple, TypeAlias

from hypothesis import strategies as st

from accountant.ledger.protocols import Moment
from accountant.ledger.usage import ACCOUNTS, HELD, LENT, MEASURES, START_UP, Usage, UsageMeasure, Where
from accountant.wire.usage_cost_and_job_models import BUILT_IN, Dimension
from tests.usage_relation import figures_by_span

ZONES: Final = ("UTC", "Asia/Tokyo", "America/New_York")
QUARTERS: Final = "Asia/Kathmandu"
"""A zone whose days begin at a quarter past an hour of UTC."""
ROUNDED_US: Final = 200
"""A measure is rounded by itself in each row of the ledger that an edge cuts."""
_PARTS: Final[Mapping[str, Sequence[str]]] = {
    "node_down": ("down",),
    "memory_unknown": HELD,
    "sm_active": HELD,
    "sm_unknown": HELD,
    "tensor_active": HELD,
    "tensor_unknown": HELD,
    "energy_unknown": (*HELD, "unallocated", "down"),
}
"""By measure, the accounts of which it is a part."""

Figures: TypeAlias = Mapping[tuple[int, tuple[str, ...]], tuple[int, ...]]
"""By span and key; rows without any figure are left out."""


class Question(NamedTuple):
    """The arguments of `Moment.usage`."""

    edges: Sequence[int]
    by: tuple[Dimension, ...]
    where: Where
    timezone: str = "UTC"


Ask: TypeAlias = Callable[[Question], Usage]
Capacity: TypeAlias = Callable[[int, int], int]
"""The GPU-µs of a span, by the records and not by an answer."""


def questions(
    start_ms: int, end_ms: int, step_ms: int, values: Mapping[Dimension, Sequence[str]], zones: Sequence[str] = ZONES
) -> st.SearchStrategy[Question]:
    """Questions whose edges are whole steps. values: what may be asked for, by dimension."""
    edges = st.sets(st.integers(0, (end_ms - start_ms) // step_ms), min_size=2, max_size=4)
    names = st.sampled_from(sorted(values))
    wanted = st.sampled_from(sorted(values)).flatmap(
        lambda name: st.tuples(
            st.just(name), st.sets(st.sampled_from((*values[name], "nobody'")), min_size=1, max_size=3)
        )
    )
    return st.builds(
        Question,
        edges.map(lambda found: [start_ms + step * step_ms for step in sorted(found)]),
        st.lists(names, min_size=1, max_size=4, unique=True).map(tuple),
        st.lists(wanted, max_size=2).map(dict),
        st.sampled_from(zones),
    )


def rows(usage: Usage, names: Collection[str] | None = None) -> Figures:
    """The rows of a relation, of which each has a key of its own and all ascend. Energy is one exact figure."""
    found = figures_by_span(usage, [name for name in names or usage.names if name not in ("energy_uj", "energy_j")])
    if "energy_uj" not in (names or usage.names):
        return found
    energy_uj = zip(zip(usage.span.tolist(), usage.row_keys(), strict=True), usage.energy_uj(), strict=True)
    width = len(next(iter(found.values()), ()))
    return {at: (*found.get(at, (0,) * width), energy) for at, energy in energy_uj if energy or at in found}


def added(figures: Figures, by: Sequence[Dimension], coarser: Sequence[Dimension], *, spans: bool = True) -> Figures:
    """The sums by fewer dimensions. spans: each span by itself."""
    at = [by.index(name) for name in coarser]
    sums: dict[tuple[int, tuple[str, ...]], tuple[int, ...]] = {}
    for (span, key), row in figures.items():
        place = span if spans else 0, tuple(key[column] for column in at)
        sums[place] = tuple(map(sum, zip(row, sums[place], strict=True))) if place in sums else row
    return dict(sorted(sums.items()))


def keeps_its_laws(
    ask: Ask, question: Question, capacity: Capacity, measures: Collection[UsageMeasure] = MEASURES
) -> None:
    """Check the laws (accountant.ledger.usage) on one question and those that follow from it.

    measures: those that the relation has."""
    edges, by, where, timezone = question
    exact = (*ACCOUNTS, *(name for name in measures if name not in START_UP))
    finer = tuple(dict.fromkeys((*by, *where)))
    usage = ask(Question(edges, finer, {}, timezone))
    _has_possible_figures(usage, measures)
    every = rows(usage, exact)
    for span, (start_ms, end_ms) in enumerate(pairwise(edges)):
        of_span = [sum(row[: len(ACCOUNTS)]) for (number, _), row in every.items() if number == span]
        assert sum(of_span) == capacity(start_ms, end_ms), "accounts add up to the capacity"
    chosen = {
        (span, key): row
        for (span, key), row in every.items()
        if all(key[finer.index(name)] in allowed for name, allowed in where.items())
    }
    assert rows(ask(Question(edges, finer, where, timezone)), exact) == chosen, "a filter selects rows and changes none"
    assert rows(ask(question), exact) == added(chosen, finer, by), "a coarser grouping is the sum of a finer one"
    assert rows(usage.grouped(by), exact) == added(every, finer, by)
    whole = ask(Question((edges[0], edges[-1]), by, where, timezone))
    assert rows(whole, exact) == added(chosen, finer, by, spans=False), "adjacent spans add up"


def _has_possible_figures(usage: Usage, measures: Collection[UsageMeasure]) -> None:
    assert (usage.columns([name for name in usage.names if name not in LENT]) >= 0).all()
    for name, accounts in _PARTS.items():
        if name in measures:
            most = usage.columns(accounts).sum(axis=1) + ROUNDED_US
            assert (usage.column(name) <= most).all(), f"{name} is a part of {accounts}"
    if set(START_UP) <= set(measures):
        parts, idle = usage.columns(START_UP).sum(axis=1), usage.column("allocated_idle")
        assert (parts <= idle + ROUNDED_US).all(), "start-up time is a part of idle time"
    if set(LENT) <= set(measures):
        assert usage.columns(LENT).sum() == 0, "what is lent is taken from somebody"


def values_of(
    moment: Moment, start_ms: int, end_ms: int, labels: Collection[Dimension] = ()
) -> dict[Dimension, Sequence[str]]:
    """By dimension, the values that a ledger knows in a span."""
    dimensions: tuple[Dimension, ...] = (*BUILT_IN, *labels)
    usage = moment.usage((start_ms, end_ms), dimensions, measures=())
    return dict(zip(dimensions, usage.values, strict=True))
