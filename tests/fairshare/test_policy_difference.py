"""Another policy leaves a decision with the difference, and is in force whether or not the difference can be shown."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from accountant.wire import decision_text
from accountant.wire.policy_models import Decision, Policy
from fairshare.composition import reload
from fairshare.controller import event_and_decision_recorder, policy_difference
from fairshare.controller.policy_difference import MOST_RECORDED, policy_decision
from fairshare.controller.policy_file import reloaded
from fairshare.core.settings import ControllerSettings
from fairshare.usage.multi_cluster_windows import NO_OTHER_CLUSTERS
from gputally.base.clock import VirtualClock
from gputally.base.yaml_file import FileFault
from gputally.kubernetes.objects import Cluster
from gputally.testing.fake_scheduler import queue_object, setup_object
from tests.fairshare import samples
from tests.fairshare.builders import cluster_with, policy_of
from tests.fairshare.conftest import Accountant, Make


def recorded(accountant: Accountant) -> list[Decision]:
    return [decision for decision in accountant.decisions if decision.kind == "policy"]


@pytest.fixture
def queues() -> Cluster:
    return cluster_with(*map(queue_object, "abc"), setup_object())


def test_a_policy_in_force_leaves_a_decision_with_the_difference(
    queues: Cluster, accountant: Accountant, controller_of: Make
) -> None:
    """Also if it changed while no controller ran, as at an upgrade of the chart."""
    controller_of(policy_of(k=1.0), queues).cycle()
    controller_of(policy_of(k=1.0), queues).cycle()
    assert recorded(accountant) == [], "the first policy and a restart change nothing"
    controller = controller_of(policy_of(k=2.0), queues)
    controller.cycle()
    controller.later()
    (second,) = recorded(accountant)
    before, now = policy_of(k=1.0).version(), policy_of(k=2.0).version()
    assert second.policy_version == now
    assert second.inputs["difference"] == [f"--- policy {before}", f"+++ policy {now}", "-k: 1", "+k: 2"]


def test_it_is_recorded_when_the_accountant_answers_again(
    queues: Cluster, accountant: Accountant, controller_of: Make
) -> None:
    accountant.put_policy(policy_of(k=2.0))
    accountant.takes_decisions = False
    controller = controller_of(policy_of(), queues)
    controller.cycle()
    assert recorded(accountant) == []
    accountant.takes_decisions = True
    controller.later()
    assert len(recorded(accountant)) == 1


def test_a_standby_records_what_a_person_saved_at_its_pages(
    queues: Cluster, accountant: Accountant, controller_of: Make, clock: VirtualClock
) -> None:
    saved = [policy_decision(policy_of(k=1.0), policy_of(k=2.0), clock.wall_ms(), "ann@example.com")]

    def posts() -> list[Decision]:
        return [saved.pop() for _ in range(len(saved))]

    standby = controller_of(policy_of(k=1.0), queues, term=lambda: None, posts=posts)
    accountant.takes_decisions = False
    standby.cycle()
    accountant.takes_decisions = True
    standby.later()
    standby.later()
    (one,) = accountant.decisions
    assert (one.kind, one.inputs["by"], one.inputs["difference"][2:]) == (
        "policy", "ann@example.com", ["-k: 1", "+k: 2"],
    )  # fmt: skip


def test_a_changed_file_is_in_force_and_the_log_has_the_difference(tmp_path: Path, logs: list[Any]) -> None:
    path, text = tmp_path / "policy.yaml", samples.policy_text()
    path.write_text(text)
    file, settings = reloaded(path, NO_OTHER_CLUSTERS), ControllerSettings(policy=path)
    assert reload(file, settings) is None
    path.write_text(text.replace("k: 1.0", "k: 3.0"))
    policy = reload(file, settings)
    assert policy is not None
    assert policy.k == 3.0
    (line,) = logs
    assert (line["event"], line["now"], line["changes"]) == ("policy_in_force", policy.version(), ["k: 1 -> 3"])
    path.write_text(text.replace("k: 1.0", "k: 3.0  # as agreed"))
    assert reload(file, settings) == policy
    assert len(logs) == 1, "the same policy in other words is no change"
    path.write_text("k: none")
    with pytest.raises(FileFault):
        reload(file, settings)
    assert file.current == policy


def test_a_policy_whose_difference_cannot_be_shown_is_in_force_and_the_fault_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, logs: list[Any]
) -> None:
    def defect(before: Policy, after: Policy) -> Any:
        raise ZeroDivisionError("no difference")

    monkeypatch.setattr(policy_difference, "changes", defect)
    path, text = tmp_path / "policy.yaml", samples.policy_text()
    path.write_text(text)
    file = reloaded(path, NO_OTHER_CLUSTERS)
    before = file.current
    path.write_text(text.replace("k: 1.0", "k: 3.0"))
    policy = reload(file, ControllerSettings(policy=path))
    assert policy is not None
    assert policy.k == 3.0
    assert [each["event"] for each in logs] == ["policy_not_compared", "policy_in_force"]
    assert "ZeroDivisionError" in str(logs[1]["changes"])
    decision = policy_decision(before, policy, 0)
    assert "ZeroDivisionError" in decision.reason
    assert decision.inputs["difference"] == []


def test_the_difference_of_many_values_and_of_long_ones_is_limited() -> None:
    many = [{"name": f"queue-{number}", "weight": 1, "refs": [f"fake:queue-{number}"]} for number in range(2_000)]
    before = policy_of(queues=many)
    after = policy_of(
        queues=[
            {**queue, "weight": 2, "refs": [f"fake:{number}{queue['name']}" + "x" * 200 for number in range(5)]}
            for queue in many
        ]
    )
    inputs = policy_decision(before, after, 0).inputs
    lines: Any = inputs["difference"]
    assert (len(lines), inputs["more"]) == (2 + 2 * MOST_RECORDED, 4_000 - MOST_RECORDED)
    assert max(map(len, lines)) < 310


def test_changes_of_the_policy_stay_among_many_decisions_that_wait() -> None:
    change = policy_decision(None, policy_of(), 0)
    others = [change.model_copy(update={"id": f"w{number}", "kind": "weight"}) for number in range(20_000)]
    kept = event_and_decision_recorder._newest([change, *others])
    assert kept[0] == change
    assert kept[-1] == others[-1]
    assert len(kept) <= event_and_decision_recorder.MOST_PENDING + 1


def test_the_page_of_the_decision_has_the_difference_and_who() -> None:
    told = decision_text.decision_text(policy_decision(policy_of(k=1.0), policy_of(k=2.0), 0, "ann"), ())
    assert ("Saved by", "ann") in told.facts
    assert told.grids[0].rows[2:] == (("-k: 1",), ("+k: 2",))


def test_the_reason_that_a_person_gave_is_that_of_the_decision() -> None:
    decision = policy_decision(policy_of(k=1.0), policy_of(k=2.0), 0, "ann", "a new quarter")
    assert "ann" in decision.reason
    assert decision.reason.endswith("; a new quarter")
