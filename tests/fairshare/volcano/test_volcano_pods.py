"""What Volcano's annotations say about a pod: that it may not be preempted, and nothing once it runs."""

from __future__ import annotations

from typing import Any

import pytest

from fairshare.core.gpu_demand import CHECKPOINT, SPOT_LABEL, PodReducer, read_pod
from gputally.base.clock import VirtualClock
from gputally.kubernetes.objects import Object
from tests.fairshare.builders import pod_object
from tests.fairshare.volcano.cases import PROTECTED

NOW_MS = 1_790_820_000_000
"""2026-10-01T02:00:00Z."""
SAVED = {CHECKPOINT: "2026-10-01T01:00:00Z"}


def _pod(scheduler: str = "volcano", **metadata: Any) -> Object:
    obj = pod_object("p", **metadata)
    obj["spec"] |= {"schedulerName": scheduler, "nodeName": "n1"}
    return obj


@pytest.mark.parametrize(("scheduler", "protected"), [("volcano", True), ("kai-scheduler", False), ("", False)])
def test_what_volcano_may_not_preempt_is_said_of_pods_that_volcano_places(scheduler: str, protected: bool) -> None:
    marked = read_pod(_pod(scheduler, annotations=PROTECTED))
    assert marked is not None
    assert marked.disruptable is not protected


@pytest.mark.parametrize("later", [PROTECTED, {"scheduling.k8s.io/group-name": "large"}])
def test_hints_that_are_written_into_a_running_pod_buy_no_protection(later: dict[str, str]) -> None:
    read = PodReducer(VirtualClock(NOW_MS))
    before = read(_pod(annotations=SAVED))
    assert read(_pod(annotations=SAVED | later)) == before


def test_a_running_pod_may_give_protection_up() -> None:
    read = PodReducer(VirtualClock(NOW_MS))
    before = read(_pod(annotations=PROTECTED | SAVED))
    assert not before.disruptable
    later = read(_pod(annotations=SAVED, labels={SPOT_LABEL: "true"}))
    assert (later.spot, later.disruptable) == (True, True)
