"""Any ledger keeps the laws of the relation of usage: with GPUs that move, nodes that are down, overlapping outboxes,
GPUs that are shared and lost, borrowed time, and changes of policies and labels."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from accountant.lake.duckdb_engine import DuckDbEngine
from accountant.ledger.protocols import Down, Facts, NodeFacts
from accountant.ledger.usage import ACCOUNTS, LENT, MEASURES, START_UP, Usage
from accountant.storage.duckdb_ledger import DuckLedger, open_ledger
from gputally.base.clock import VirtualClock
from tests.empty_ledger import fresh
from tests.hypothesis_examples import examples
from tests.lake.comparison_queries import CENTRE, HOUR, PROJECT, SPAN, published
from tests.ledger.busy_ledger import ROWS
from tests.ledger.conftest import MINUTE, START_MS, Hand
from tests.moment.laws import QUARTERS, ZONES, Question, keeps_its_laws, questions, rows, values_of
from tests.properties import interval_streams
from tests.properties.interval_streams import SPAN_MS, Stream, streams

CLUSTERS = {"n1": "prod", "n2": "prod", "n3": "lab"}
NODES, GPUS, MODELS = tuple(CLUSTERS), ("a", "b", "c", "d"), ("H100", "A100")
STAYS = st.lists(
    st.tuples(st.sampled_from(GPUS), st.sampled_from(NODES), st.sampled_from(MODELS), st.integers(0, 3), st.booleans()),
    min_size=1,
    max_size=8,
)
DOWNS = st.lists(st.tuples(st.sampled_from(NODES), st.integers(0, 50), st.integers(1, 20)), max_size=3)
FEW = settings(
    max_examples=examples(4, 16),
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
    suppress_health_check=list(HealthCheck),
)
"""Without shrinking, which does not help with hundreds of rows."""


@contextmanager
def opened(clock_ms: int) -> Iterator[DuckLedger]:
    with (
        TemporaryDirectory() as folder,
        closing(open_ledger(fresh(Path(folder) / "ledger.duckdb"), VirtualClock(clock_ms))) as ledger,
    ):
        yield ledger


def check(ledger: DuckLedger, start_ms: int, end_ms: int, data: st.DataObject) -> None:
    """Check a question about any span, from a moment that remembers nothing of earlier ones."""
    with ledger.moment(start_ms, end_ms) as moment:
        values = values_of(moment, start_ms, end_ms)
        assert moment.imbalance(start_ms, end_ms).lines == ()
    question = data.draw(questions(start_ms, end_ms, 7_001, values, (*ZONES, QUARTERS)))

    def ask(asked: Question) -> Usage:
        with ledger.moment(start_ms, end_ms) as moment:
            return moment.usage(*asked, (*MEASURES, *START_UP, *LENT))

    def capacity(low_ms: int, high_ms: int) -> int:
        return int(ask(Question((low_ms, high_ms), ("cluster", "gpu"), {})).columns(ACCOUNTS).sum())

    keeps_its_laws(ask, question, capacity, MEASURES)


@pytest.mark.thorough
@FEW
@given(told=STAYS, down=DOWNS, moved=st.booleans(), data=st.data())
def test_gpus_that_move(told: Any, down: Any, moved: bool, data: st.DataObject) -> None:
    """GPUs are on nodes for ten minutes at a time, some of them held. The nodes have pools, and one changes its
    pool."""
    hand = Hand()
    with opened(hand.now_ms) as ledger:
        for number, (gpu, node, model, when, held) in enumerate(told):
            row = {"gpu_model": model} if held else {"gpu_model": model, "holder": None}
            sent = [hand.row(i + 1, when * 10 + i, when * 10 + i + 1, gpu, **row) for i in range(8)]
            ledger.append([hand.batch(*sent, node=node, cluster=CLUSTERS[node], epoch=f"0192-{number}")], hand.now_ms)
        spans: dict[str, list[Down]] = defaultdict(list)
        for node, start, length in down:
            begin = hand.start_ms + start * MINUTE
            spans[node].append(Down(begin, begin + length * MINUTE, "cordoned"))
        pools = {"n1": "x", "n2": "x", "n3": "y"}
        for pool in ("old", None) if moved else (None,):
            nodes = [
                NodeFacts(CLUSTERS[node], node, pool or pools[node], "eu", capacity_type="spot",
                          down=tuple(spans[node]), since_ms=hand.start_ms + (0 if pool else 25) * MINUTE)
                for node in NODES
            ]  # fmt: skip
            ledger.observe(Facts(nodes=tuple(nodes)), hand.now_ms)
        check(ledger, hand.start_ms, hand.now_ms, data)


@pytest.mark.thorough
@FEW
@given(found=streams(), data=st.data())
def test_outboxes_that_overlap(found: list[Stream], data: st.DataObject) -> None:
    down = Down(START_MS + 400_123, START_MS + 1_500_777, "cordoned")
    with opened(START_MS + 2 * SPAN_MS) as ledger:
        ledger.put_policy(interval_streams.POLICY, START_MS)
        for stream in found:
            interval_streams.book(ledger, interval_streams.batches(stream, 3))
        ledger.observe(Facts(nodes=(NodeFacts("c", "n1", down=(down,)),)), START_MS)
        check(ledger, START_MS - MINUTE, START_MS + SPAN_MS + MINUTE, data)


@pytest.mark.thorough
@given(rows_of=ROWS, seed=st.integers(0, 1_000), timezone=st.sampled_from((*ZONES, QUARTERS)), data=st.data())
@settings(max_examples=examples(3, 10))
def test_its_lake_answers_alike(rows_of: Any, seed: int, timezone: str, data: st.DataObject) -> None:
    """Hours of Kathmandu begin at a quarter past an hour of UTC: the lake is divided there, and so is the question."""
    start_ms = START_MS - 45 * MINUTE * (timezone == QUARTERS)
    with published(rows=rows_of, seed=seed, timezone=timezone) as known:
        engine = DuckDbEngine(known.connect())
        with known.ledger.moment(start_ms, SPAN[1]) as moment, closing(engine):
            values = values_of(moment, start_ms, SPAN[1], (PROJECT, CENTRE))
            question = data.draw(questions(start_ms, SPAN[1], HOUR, values, (timezone,)))
            assert rows(known.asked(engine).usage(*question)) == rows(moment.usage(*question))
            check(known.ledger, start_ms, SPAN[1], data)
