"""Which GPUs the real accountant calls lost over HTTP: those alone that were so for a whole quarter, on a node in
service."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from accountant.core.settings import Limits, Settings
from accountant.ledger.protocols import Down, Facts, NodeFacts
from accountant.wire.policy_models import WindowSpec
from agent.wire import Batch
from fairshare.usage.accountant_client import AccountantApi
from gputally.base.clock import VirtualClock
from tests.usage_records import QUARTER_MS, batch, interval, running_accountant

START_MS = 1_790_812_800_000  # 2026-10-01T00:00Z
QUARTERS = 4
LOST = {"all": {0: 0, 1: 0}, "one": {1: 0}, "late": {0: 3}, "same": {0: 0}}
"""From which quarter on which GPU of each node is lost."""


def _batch(cluster: str, node: str, quarters: int = QUARTERS) -> Batch:
    rows = []
    for quarter in range(quarters):
        for gpu in range(2):
            lost = quarter >= LOST.get(node, {}).get(gpu, QUARTERS)
            state: dict[str, Any] = {"health": "lost", "busy_us": None} if lost else {"health": "ok"}
            rows.append(interval(START_MS + quarter * QUARTER_MS, f"GPU-{cluster}-{node}-{gpu}", **state))
    return batch(rows, cluster=cluster, node=node, epoch=cluster + node)


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AccountantApi]:
    """`drained` was out of service in the third quarter; `silent` has said nothing since its first."""
    clock = VirtualClock(START_MS + QUARTERS * QUARTER_MS)
    settings = Settings(data=tmp_path_factory.mktemp("data"), auth="off", limits=Limits(page_lines=3))
    batches = [_batch("c1", node) for node in ("all", "one", "late", "same", "drained")] + [_batch("c2", "same")]
    with running_accountant(settings, clock, *batches, _batch("c1", "silent", quarters=1)) as (service, url):
        down = Down(START_MS + 2 * QUARTER_MS, START_MS + 3 * QUARTER_MS, "cordoned")
        service.ledger.observe(Facts(nodes=(NodeFacts("c1", "drained", down=(down,)),)), clock.wall_ms())
        with AccountantApi(url) as ours:
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
