"""The least k that lets a gang in, against figures of the scheduler's own arithmetic."""

from __future__ import annotations

from pathlib import Path

import pytest

from accountant.wire.policy_models import Policy, QueuePolicy, TurnPolicy
from fairshare.__main__ import main
from fairshare.laws.gang_turns import gang_reach


def _equal(queues: int, **policy: object) -> Policy:
    members = tuple(QueuePolicy(name=f"q{i}") for i in range(queues))
    return Policy.model_validate({"queues": members, **policy})


@pytest.mark.parametrize(
    ("gpus", "queues", "gang", "least_k"),
    [(16, 2, 16, 0.938), (16, 3, 12, 1.125), (100, 2, 60, 0.191), (64, 4, 32, 0.985), (64, 8, 16, 0.985)],
)
def test_the_least_k_is_the_one_known_for_the_scheduler(gpus: int, queues: int, gang: int, least_k: float) -> None:
    found = gang_reach(_equal(queues, k=0.0), gpus, "q0", gang)
    assert found.needed_k == pytest.approx(least_k, abs=0.0015)
    assert not found.admitted
    assert f"k >= {found.needed_k:.3f} would do" in found.sentence()
    assert gang_reach(_equal(queues, k=least_k + 0.002), gpus, "q0", gang).admitted


def test_a_gang_within_its_share_needs_nothing() -> None:
    found = gang_reach(_equal(2), 16, "q0", 8)
    assert (found.static, found.needed_k) == (8, 0.0)
    assert found.sentence() == "a gang of 8 GPUs in 'q0' fits its share of 8"


def test_guarantees_of_others_are_out_of_reach() -> None:
    policy = Policy(queues=(QueuePolicy(name="a"), QueuePolicy(name="b", deserved=8)), k=50.0)
    found = gang_reach(policy, 16, "a", 12)
    assert (found.best, found.needed_k) == (8, None)
    assert found.sentence().startswith("a gang of 12 GPUs in 'a' can never be admitted")


def test_turns_reach_what_no_gain_does() -> None:
    assert gang_reach(_equal(3, law="deficit"), 16, "q0", 16).admitted
    short = gang_reach(_equal(3, law="deficit", turns=TurnPolicy(ratio=3)), 16, "q0", 16)
    assert not short.admitted
    assert "law `kai` would need k >=" in short.sentence()
    assert not gang_reach(_equal(3, law="fairtree"), 16, "q0", 16).admitted


def test_departments_bound_what_a_team_can_reach() -> None:
    tree = (
        QueuePolicy(name="big", weight=3), QueuePolicy(name="small"), QueuePolicy(name="x", parent="small"),
        QueuePolicy(name="y", parent="small"),
    )  # fmt: skip
    found = gang_reach(Policy(queues=tree, k=1.0), 64, "x", 16)
    assert found.static == 8
    assert found.best > 16 - 1


def test_check_warns_of_a_gang_that_never_gets_in(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "policy.yaml"
    file.write_text("k: 0.5\nqueues:\n  - {name: a, refs: ['kai:a']}\n  - {name: b, refs: ['kai:b']}\n")
    assert main(["check", str(file), "--capacity", "16", "--gang", "a=16", "--gang", "b=8"]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "warning: a gang" in line]
    assert line.startswith(f"{file}:3: warning: a gang of 16 GPUs in 'a' is never admitted by the configured law")
    assert main(["check", str(file), "--capacity", "16", "--gang", "z=16"]) == 1
    assert "--gang z=16: write QUEUE=GPUS with a queue of the policy" in capsys.readouterr().err
