"""Nodes without an agent: their usage is unmetered, so weights are held above a limit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from fairshare.controller.control_loop import Controller
from fairshare.core.scheduler_queue_objects import instant
from fairshare.targets.kai import QUEUE, SHARD
from fairshare.usage.cluster_capacity import SETTLED_MS
from gputally.base.clock import VirtualClock
from gputally.kubernetes.memory_cluster import MemoryCluster
from gputally.kubernetes.objects import CONFIG_MAP, NODE, Object
from tests.fairshare.builders import policy_of, queue_object
from tests.fairshare.conftest import NOW_MS, Accountant
from tests.fairshare.victims import node_object

Make = Callable[..., Any]


def _node(name: str, gpus: int = 8, *, age_ms: int = 30 * SETTLED_MS, ready: str = "True") -> Object:
    return node_object(name, gpus, ready=ready, creationTimestamp=instant(NOW_MS - age_ms))


@pytest.fixture
def cycles(accountant: Accountant, clock: VirtualClock) -> Make:
    """The hold of each of so many cycles over these nodes, a minute apart."""

    def run(nodes: list[Object], count: int = 1) -> list[str | None]:
        cluster = MemoryCluster([QUEUE, SHARD, NODE, CONFIG_MAP], [*map(queue_object, "abc"), *nodes])
        accountant.spend(a=0.6, b=0.3, c=0.1)
        controller = Controller(policy_of(), accountant, cluster, clock)
        held = []
        for _ in range(count):
            hold = controller.cycle().hold
            held.append(None if hold is None else f"{hold.reason}: {hold.message}")
            clock.advance(60_000)
        return held

    return run


def test_half_of_the_nodes_without_agent_leave_the_weights_alone(cycles: Make, accountant: Accountant) -> None:
    accountant.nodes = {"n0", "n1"}
    held = cycles([_node(f"n{i}") for i in range(4)])
    assert held == ["NodesUnmetered: 16 of 32 GPUs stand on nodes that no agent has metered: n2; n3"]


def test_as_many_as_may_go_unmetered_are_no_reason(cycles: Make, accountant: Accountant) -> None:
    accountant.nodes = {f"n{i}" for i in range(49)}
    assert cycles([_node(f"n{i}") for i in range(50)]) == [None]
    assert cycles([_node(f"n{i}") for i in range(51)])[0].startswith("NodesUnmetered: 16 of 408 GPUs")


@pytest.mark.parametrize(
    "other",
    [_node("new", age_ms=SETTLED_MS - 1), _node("down", ready="False"), _node("none", gpus=0), _node("sliced", gpus=1)],
)
def test_a_node_that_is_new_down_or_without_gpus_is_not_missed(
    cycles: Make, accountant: Accountant, other: Object
) -> None:
    accountant.nodes = {"n0", "sliced"}
    assert cycles([_node("n0", 32), other]) == [None]


def test_the_accountant_is_not_queried_once_all_nodes_are_known(cycles: Make, accountant: Accountant) -> None:
    accountant.nodes = {"n0", "n1"}
    assert cycles([_node("n0"), _node("n1")], 20) == [None] * 20
    assert accountant.asked_nodes == 1


def test_an_accountant_that_does_not_tell_holds(cycles: Make, accountant: Accountant) -> None:
    """The window was told, and then nothing more."""
    plain = accountant.metered_nodes
    accountant.metered_nodes = lambda *span: [setattr(accountant, "down", True), plain(*span)][1]
    assert cycles([_node("n0")])[0].startswith("AccountantUnavailable: ")


@pytest.mark.parametrize(
    ("trouble", "nodes", "reason"),
    [
        ({"age_ms": None}, [_node("cpu", 0)], "NothingInService"),
        ({"age_ms": None}, [_node("drained", ready="False")], "NothingInService"),
        ({"capacity": 0}, [_node("cpu", 0)], "NothingInService"),
        ({}, [_node("cpu", 0), _node("drained", ready="False")], "NothingInService"),
        ({"age_ms": None}, [_node("n0")], "NoUsage"),
        ({"age_ms": None}, [], "NoUsage"),
        ({"coverage": 0.5}, [_node("cpu", 0)], "LowCoverage"),
    ],
)
def test_a_cluster_without_gpus_is_told_from_a_ledger_without_any(
    cycles: Make, accountant: Accountant, trouble: dict[str, Any], nodes: list[Object], reason: str
) -> None:
    """A cluster that was scaled to nothing for the weekend raises no alert."""
    vars(accountant).update(trouble)
    assert cycles(nodes)[0].startswith(f"{reason}: ")


def test_nodes_that_never_listed_a_gpu_say_nothing_against_the_window(cycles: Make) -> None:
    assert cycles([_node("cpu", 0)]) == [None]
