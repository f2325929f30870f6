"""A queue removed from the policy: its object keeps the published weight until a release, and a condition says so."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from fairshare.__main__ import main
from fairshare.controller.control_loop import Controller
from fairshare.controller.weight_writer import release_weights
from fairshare.core import scheduler_queue_objects
from fairshare.targets import KINDS
from fairshare.targets.kai import QUEUE
from fairshare.targets.kueue import CLUSTER_QUEUES
from fairshare.targets.status_config_map import StatusObject
from fairshare.targets.volcano import QUEUE as VOLCANO_QUEUE
from gputally.base.clock import VirtualClock
from gputally.kubernetes.memory_cluster import MemoryCluster
from gputally.kubernetes.objects import Cluster, Object
from tests.fairshare.builders import object_of, policy_of, queue_object
from tests.fairshare.conftest import Accountant

Make = Callable[..., Any]
SAYS = (
    "a has the controller's weight 0.5 (its base: 1), and no queue of the policy refers to it: restore the base with"
    " `gputally fairshare release --left-behind` (name the other policies of this cluster with `--other FILE`)"
)


def carries_annotations(obj: Object) -> bool:
    return scheduler_queue_objects.PUBLISHED in (obj["metadata"].get("annotations") or {})


def test_what_a_policy_lets_go_of_is_said_and_given_back_alone(
    either_of: Make, accountant: Accountant, clock: VirtualClock
) -> None:
    cluster: Cluster = either_of([queue_object(name) for name in "abc"])
    accountant.spend(a=0.8, b=0.1, c=0.1)
    policies = [policy_of()]
    controller = Controller(
        policies[0], accountant, cluster, clock, reload=lambda: policies[-1], status_object=StatusObject()
    )
    controller.cycle()
    policies.append(policy_of([{"name": name, "refs": (f"kai:{name}",)} for name in "bc"]))
    controller._reload_policy()
    clock.advance(60_000)
    report = controller.cycle()
    said = {c.type: (c.status, c.reason, c.message) for c in report.targets[0].conditions}
    assert said["Mapped"] == ("False", "WeightsLeftBehind", SAYS)
    assert [event.message for event in report.events if event.reason == "WeightsLeftBehind"] == [f"kai: {SAYS}"]

    def weights() -> dict[str, float]:
        return {o["metadata"]["name"]: o["spec"]["resources"]["gpu"]["overQuotaWeight"] for o in cluster.list(QUEUE)}

    before = weights()
    assert [o.result for o in release_weights(policies[-1], cluster, left_behind=True)] == ["applied"]
    assert weights() == {**before, "a": 1}
    assert not carries_annotations(cluster.get(QUEUE, "a"))
    assert release_weights(policies[-1], cluster, left_behind=True) == ()
    clock.advance(60_000)
    assert {c.status for c in controller.cycle().targets[0].conditions if c.type == "Mapped"} == {"True"}


@pytest.mark.parametrize(
    ("kind", "ref", "spec"),
    [
        (CLUSTER_QUEUES[0], "kueue", {"cohortName": "c", "fairSharing": {"weight": "0.5"}}),
        (VOLCANO_QUEUE, "volcano", {"weight": 5000}),
    ],
)
def test_every_target_knows_what_it_left_behind(
    kind: Any, ref: str, spec: dict[str, Any], accountant: Accountant, clock: VirtualClock
) -> None:
    published = 0.5 if ref == "kueue" else 5000.0
    noted = scheduler_queue_objects.WeightAnnotations(1.0, published, None, 0, "f" * 16).annotations()
    objects = [
        object_of(kind, name, spec, **more)
        for name, more in (("a", {"annotations": noted}), ("b", {}), ("stranger", {}))
    ]
    cluster = MemoryCluster(KINDS, objects)
    policy = policy_of([{"name": "b", "refs": (f"{ref}:b",)}])
    (target,) = Controller(policy, accountant, cluster, clock).cycle().targets
    assert [c.reason for c in target.conditions if c.type == "Mapped"] == ["WeightsLeftBehind"]
    (outcome,) = release_weights(policy, cluster, left_behind=True)
    assert (outcome.apply.name, outcome.apply.value, outcome.result) == ("a", 1.0, "applied")


def test_another_policys_weights_stay_where_it_is_named(
    either_of: Make, accountant: Accountant, clock: VirtualClock
) -> None:
    """Two policies publish to one cluster; the first lets go of a queue."""
    cluster: Cluster = either_of([queue_object(name) for name in "abxy"])
    accountant.spend(a=0.8, x=0.2)
    first, second = (policy_of([{"name": n, "refs": (f"kai:{n}",)} for n in names]) for names in ("ab", "xy"))
    for policy in (first, second):
        Controller(policy, accountant, cluster, clock).cycle()
    smaller = policy_of([{"name": "b", "refs": ("kai:b",)}])

    def carrying() -> list[str]:
        return sorted(o["metadata"]["name"] for o in cluster.list(QUEUE) if carries_annotations(o))

    assert carrying() == ["a", "b", "x", "y"]
    release_weights(smaller, cluster, left_behind=True, others=[second])
    assert carrying() == ["b", "x", "y"]
    release_weights(smaller, cluster, others=[second])
    assert carrying() == ["x", "y"]


def test_the_command_gives_back_what_was_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    noted = scheduler_queue_objects.WeightAnnotations(1.0, 0.5, None, 0, "f" * 16).annotations()
    objects = [queue_object("a", 0.5, annotations=noted), queue_object("b", 0.5, annotations=noted)]
    (tmp_path / "cluster.yaml").write_text(yaml.safe_dump(objects))
    (tmp_path / "policy.yaml").write_text("queues: [{name: b, refs: [kai:b]}]")
    call = ["release", "--policy", str(tmp_path / "policy.yaml"), "--cluster", str(tmp_path / "cluster.yaml")]
    assert main([*call, "--left-behind", "--dry-run", "--output", "csv"]) == 0
    assert [line.split(",")[:3] for line in capsys.readouterr().out.splitlines()[1:]] == [["kai", "a", "a"]]
