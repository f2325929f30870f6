"""What a preview and another weight conclude from their figures."""

from __future__ import annotations

from accountant.wire.policy_models import Policy
from fairshare.explain import conclusions
from fairshare.explain.try_weight import try_weight
from fairshare.explain.what_if_simulation import ComparedQueue, Comparison, ReplayedQueue


def _row(queue: str, hours: tuple[float, float], waits: tuple[float, float]) -> ComparedQueue:
    now, then = (ReplayedQueue(queue, hours[at], 5, waits[at], waits[at], 0) for at in (0, 1))
    return ComparedQueue(queue, None, now, then)


def _replay(*rows: ComparedQueue) -> Comparison:
    return Comparison(64, 10, 0, 1, rows, {}, ())


def test_a_replay_names_who_gains_who_loses_and_whose_waits_change() -> None:
    held, waits = conclusions.of_replay(
        _replay(_row("a", (100, 150), (2, 1)), _row("b", (200, 149.5), (1, 1.5)), _row("c", (7, 7), (0.5, 0.5)))
    )
    assert held == "Gains: a 50.0 GPU-hours (+50 %); losses: b 50.5 GPU-hours (−25 %)."
    assert waits == "Mean waits: a 1.0 h shorter; b 0.5 h longer."


def test_a_replay_without_a_change_says_so_and_many_queues_are_counted() -> None:
    held, waits = conclusions.of_replay(_replay(_row("a", (1, 1.01), (2, 2.01))))
    assert held.startswith("No queue gains or loses")
    assert waits.startswith("No queue's mean wait")
    many = [_row(f"q{number}", (10, 10 + number), (1, 1)) for number in range(1, 7)]
    assert "and 2 others" in conclusions.of_replay(_replay(*many))[0]


def test_another_weight_names_the_lowest_queues_with_what_they_gain_and_lose() -> None:
    policy = Policy.model_validate(
        {"queues": [{"name": "x"}, {"name": "a", "parent": "x"}, {"name": "b", "parent": "x"}]}
    )
    assert (
        conclusions.of_weight(try_weight(policy, 12, "a", 2))
        == "Gains: a 2.00 GPUs (+33 %); losses: b 2.00 GPUs (−33 %)."
    )
    assert conclusions.of_weight(try_weight(policy, 12, "x", 2)) == "No queue gains or loses GPUs."
