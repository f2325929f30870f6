"""What the command `check` says of policies for KAI, and the samples of the product, which show it."""

from __future__ import annotations

from importlib.resources import as_file, files

import pytest

from fairshare.__main__ import main
from tests.fairshare.conftest import Capsys, Make
from tests.fairshare.kai.objects import kai_policy


def test_the_samples_have_nothing_to_complain_about_and_a_plan(capsys: Capsys) -> None:
    with as_file(files("fairshare") / "samples") as samples:
        policy, cluster = str(samples / "policy.yaml"), str(samples / "cluster.yaml")
        assert main(["check", policy, "--capacity", "64"]) == 0
        (line,) = capsys.readouterr().out.splitlines()
        assert "6 queues, version " in line
        assert main(["release", "--policy", policy, "--objects", cluster]) == 0
        assert capsys.readouterr().out == "nothing to release: no queue has a weight of the controller\n"


def test_check_warns_of_what_the_other_mode_of_kai_would_do_and_of_budgets_that_starve(
    file: Make, capsys: Capsys
) -> None:
    path = file(
        "measure: cost\nwindow: {kind: calendar}\ntargets:\n  kai:\n    mode: usage\n"
        "budgets:\n  - name: m\n    queue: a\n    limit: 10\n    exhausted: no-over-quota\n"
        "queues: [{name: a, refs: [kai:a]}]\n"
    )
    mode = "for this measure set `targets.kai.mode: weight`"
    assert main(["check", str(path)]) == 0
    assert capsys.readouterr().out.splitlines()[:-1] == [
        f"{path}:1: warning: `cost` freezes all weights while any GPU time in the window has no price",
        f"{path}:1: warning: KAI's own history counts GPU time as it was held: {mode}",
        f"{path}:5: warning: in mode `usage` a used-up budget changes no weight: set `mode: weight`",
        f"{path}:2: warning: KAI's history can be sliding only, not calendar",
        (
            f"{path}:5: warning: set `endpoint` to the address that KAI queries: "
            "without it, shards that query another go unnoticed"
        ),
        f"{path}:10: warning: 'a' deserves nothing: once the budget is used up it gets no GPU at all",
    ]
    path.write_text(
        "targets:\n  kai:\n    endpoint: http://a:1\n    mode: weight\nqueues: [{name: a, refs: [kai:a]}]\n"
    )
    assert main(["check", str(path)]) == 0
    assert f"{path}:3: warning: `endpoint` has no effect in mode `weight`" in capsys.readouterr().out


def test_kai_cannot_read_the_history_of_several_clusters() -> None:
    with pytest.raises(ValueError, match="in mode usage KAI reads the history of one cluster"):
        kai_policy(usage={"clusters": ["prod", "west"]}, targets={"kai": {"mode": "usage"}})
