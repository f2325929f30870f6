"""One set of records in every implementation of a moment."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import cast

import pytest

from accountant.fleet.fleet_ledgers import Fleet, Member
from accountant.lake.duckdb_engine import DuckDbEngine
from accountant.ledger.protocols import Moment
from accountant.ledger.usage import ACCOUNTS, MEASURES, START_UP, Usage, UsageMeasure
from accountant.wire.dimensions import OF_TIME
from accountant.wire.usage_cost_and_job_models import BUILT_IN, Accounts, Dimension, is_label
from gputally.base.units import US_PER_MS
from tests.fakes.list_ledger import ListLedger, Row
from tests.lake.comparison_queries import CENTRE, HOUR, PROJECT, ROWS, SPAN, published
from tests.ledger.busy_ledger import Rows
from tests.ledger.conftest import MINUTE, START_MS
from tests.moment.laws import Question, values_of

QUARTER = 15 * MINUTE
CLUSTERS: Mapping[str, Rows] = {
    "prod": ROWS,
    "lab": [
        (quarter, gpu, (quarter * 2 + gpu) % 6, quarter * 3 % 16, gpu == 1) for quarter in range(10) for gpu in range(3)
    ],
}


def capacity(start_ms: int, end_ms: int) -> int:
    """The GPU-µs of a span: a GPU is capacity from its first record on."""
    first: dict[tuple[str, int], int] = {}
    for cluster, rows in CLUSTERS.items():
        for quarter, gpu, *_ in rows:
            begun = START_MS + quarter * QUARTER
            first[cluster, gpu] = min(begun, first.get((cluster, gpu), begun))
    return sum(max(0, end_ms - max(start_ms, begun)) for begun in first.values()) * US_PER_MS


@dataclass(frozen=True)
class Known:
    """An implementation.

    step_ms: edges of spans are whole steps.
    measures: those that it keeps.
    values: by dimension that it keeps, what may be asked for."""

    moment: Moment
    step_ms: int
    measures: Collection[UsageMeasure]
    values: Mapping[Dimension, Sequence[str]]

    def ask(self, question: Question) -> Usage:
        return self.moment.usage(*question, self.measures)


@dataclass(frozen=True)
class Several:
    """fleet, members: each cluster has a ledger of its own there; the others have one ledger of both."""

    of: Mapping[str, Known]
    fleet: Fleet
    members: list[Member]

    @property
    def truth(self) -> Moment:
        return self.of["duckdb"].moment


def in_memory(moment: Moment) -> ListLedger:
    """A ledger of rows with the usage of another one, quarter-hour after quarter-hour."""
    edges = range(SPAN[0], SPAN[1] + 1, QUARTER)
    by = tuple(name for name in BUILT_IN if name not in OF_TIME)
    usage = moment.usage(edges, by, None, "UTC", (*START_UP, "energy_uj"))
    figures = zip(usage.columns(ACCOUNTS).tolist(), usage.columns(START_UP).tolist(), usage.energy_uj(), strict=True)
    found = ListLedger()
    found.known_pods = list(moment.pods(0, SPAN[1], placed=True))
    found.reported, found.versions = moment.epochs(), moment.status().policies(*SPAN)
    found.decided = {f"{one.at_ms}/{one.key}": one for one in moment.decisions(*SPAN)}
    found._acts = moment.acts()
    for span, key, (accounts, start_up, energy_uj) in zip(usage.span.tolist(), usage.row_keys(), figures, strict=True):
        held = Accounts(**dict(zip(ACCOUNTS, accounts, strict=True)))
        named = dict(zip(by, key, strict=True))
        found.rows.append(Row(edges[span], edges[span + 1], held, named, energy_uj, *start_up))
    return found


@pytest.fixture(scope="package")
def several(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Several]:
    place = str(tmp_path_factory.mktemp("lake"))
    with ExitStack() as stack:
        both = stack.enter_context(published(place, name="both", rows=CLUSTERS))
        for name, rows in CLUSTERS.items():
            known = stack.enter_context(published(place, name=name, rows={name: rows}))
        engine = DuckDbEngine(known.connect())
        stack.callback(engine.close)
        fleet = Fleet(engine)
        truth = stack.enter_context(both.ledger.moment(*SPAN))
        every = (*MEASURES, *START_UP)
        values = values_of(truth, *SPAN, (PROJECT, CENTRE))
        own = {name: found for name, found in values.items() if not is_label(name)}
        yield Several(
            {
                "duckdb": Known(truth, 7_001, every, values),
                "lake": Known(both.asked(engine), HOUR, every, values),
                "memory": Known(cast(Moment, in_memory(truth)), QUARTER, (*START_UP, "energy_uj"), own),
            },
            fleet,
            fleet.members([*CLUSTERS]),
        )
