"""Which GPUs the real accountant calls lost over HTTP: those alone that were so for a whole quarter, on a node in
service."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from msgspec.structs import replace

from accountant.composition import Service
from accountant.core.settings import Limits, Settings
from accountant.ledger.protocols import Down, Facts, NodeFacts
from accountant.wire.policy_models import WindowSpec
from agent.wire import Batch, UsageInterval
from fairshare.usage.accountant_client import AccountantApi
from gputally.base.clock import VirtualClock
from gputally.server.https_server import serve

START_MS = 1_790_812_800_000  # 2026-10-01T00:00Z
QUARTER_MS = 900_000
QUARTERS = 4
LOST = {"all": {0: 0, 1: 0}, "one": {1: 0}, "late": {0: 3}, "same": {0: 0}}
"""From which quarter on which GPU of each node is lost."""


def _batch(cluster: str, node: str, gpus: int = 2) -> Batch:
    rows: list[UsageInterval] = []
    for quarter in range(QUARTERS):
        for gpu in range(gpus):
            lost = quarter >= LOST.get(node, {}).get(gpu, QUARTERS)
            begin = START_MS + quarter * QUARTER_MS
            rows.append(
                UsageInterval(
                    seq=len(rows) + 1, start_ms=begin, end_ms=begin + QUARTER_MS,
                    gpu_uuid=f"GPU-{cluster}-{node}-{gpu}", gpu_model="H100",
                    health="lost" if lost else "ok", capacity_us=900_000_000, allocated_us=0,
                    busy_us=None if lost else 0, method="device",
                )
            )  # fmt: skip
    return Batch(
        cluster=cluster, node=node, boot_id="b", epoch=cluster + node, first_seq=1, oldest_seq=1,
        intervals=tuple(rows), facts=(),
    )  # fmt: skip


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AccountantApi]:
    """`drained` was out of service in the third quarter; `silent` has said nothing since its first."""
    clock = VirtualClock(START_MS)
    with Service(Settings(data=tmp_path_factory.mktemp("data"), auth="off", limits=Limits(page_lines=3)), clock) as it:
        clock.advance(QUARTERS * QUARTER_MS)
        silent = _batch("c1", "silent")
        first = tuple(row for row in silent.intervals if row.start_ms == START_MS)
        batches = [_batch("c1", node) for node in ("all", "one", "late", "same", "drained")] + [_batch("c2", "same")]
        batches.append(replace(silent, intervals=first))
        for receipt in it.ledger.append(batches, clock.wall_ms()):
            assert not isinstance(receipt, Exception)
        down = Down(START_MS + 2 * QUARTER_MS, START_MS + 3 * QUARTER_MS, "cordoned")
        it.ledger.observe(Facts(nodes=(NodeFacts("c1", "drained", down=(down,)),)), clock.wall_ms())
        with serve(it.app, "127.0.0.1", 0) as url, AccountantApi(url) as ours:
            yield ours


@pytest.mark.parametrize(("quarter", "late"), [(2, {}), (3, {"late": 1})])
def test_lost_is_who_was_so_for_the_whole_quarter(client: AccountantApi, quarter: int, late: dict[str, int]) -> None:
    begin = START_MS + quarter * QUARTER_MS
    assert client.lost_gpus(begin, begin + QUARTER_MS) == {"all": 2, "one": 1, **late}


def test_a_part_of_the_span_is_not_enough(client: AccountantApi) -> None:
    begin = START_MS + 2 * QUARTER_MS
    assert client.lost_gpus(begin, begin + 2 * QUARTER_MS) == {"all": 2, "one": 1}


@pytest.mark.parametrize(("quarters", "newest"), [(0, None), (1, 1), (4, 4)])
def test_a_window_tells_when_a_gpu_was_lost_last(client: AccountantApi, quarters: int, newest: int | None) -> None:
    window = client.window(WindowSpec(kind="sliding", size=3_600), "allocated", START_MS + quarters * QUARTER_MS, 0.9)
    assert window.lost_ms == (0 if newest is None else START_MS + newest * QUARTER_MS)


@pytest.mark.parametrize(("quarters", "begun"), [(0, 0), (1, 0), (4, 0), (6, 2)])
def test_a_window_tells_where_the_books_begin_in_it(client: AccountantApi, quarters: int, begun: int) -> None:
    for spec in (WindowSpec(kind="sliding", size=3_600), WindowSpec(kind="sliding", size=3_600, half_life=600)):
        window = client.window(spec, "allocated", START_MS + quarters * QUARTER_MS, 0.9)
        assert window.since_ms == START_MS + begun * QUARTER_MS


def test_the_books_tell_a_nodes_down_time_from_a_gpus(client: AccountantApi) -> None:
    begin = START_MS + 2 * QUARTER_MS
    lines = {line.key["node"]: line for line in client.usage(begin, begin + QUARTER_MS, ("node",))}
    down = {node: (line.accounts_gpu_us.down, line.node_down_us) for node, line in lines.items()}
    gpu_us = 900_000_000
    assert (down["drained"], down["one"], down["all"]) == ((2 * gpu_us, 2 * gpu_us), (gpu_us, 0), (2 * gpu_us, 0))
    assert (down["silent"], down["late"]) == ((0, 0), (0, 0))


def test_nodes_that_were_ever_metered_are_told_while_they_are_silent_too(client: AccountantApi) -> None:
    begin = START_MS + 3 * QUARTER_MS
    assert client.metered_nodes(begin, begin + QUARTER_MS) == {"all", "one", "late", "same", "drained", "silent"}
