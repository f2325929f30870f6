"""What a pod declared counts as it was when the pod was bound, whatever its owner writes later."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from agent.holders.kubernetes_api_objects import PodView
from agent.holders.lean_list_watch import BOUND_PODS_FILE, BoundPods, PodStore
from gputally.base.clock import VirtualClock
from tests.agent_cluster.conftest import T0
from tests.agent_cluster.objects import UID, pod_object

BOUND = {
    "gpus": 0,
    "labels": {"runai-gpu-group": "g1", "kai.scheduler/queue": "vision"},
    "annotations": {"gpu-fraction": "0.5"},
}


def text(**changed: object) -> bytes:
    return json.dumps(pod_object(**{**BOUND, **changed})).encode()  # type: ignore[arg-type]


def store(folder: Path) -> PodStore:
    return PodStore("node-1", (), VirtualClock(T0), bound=BoundPods(folder / BOUND_PODS_FILE))


def only(pods: PodStore) -> PodView:
    (view,) = pods.views().values()
    return view


LATER = [
    {"annotations": {"gpu-fraction": "0.01"}},
    {"annotations": {}},
    {"annotations": {"gpu-memory": "1"}},
    {"labels": {"runai-gpu-group": "g2", "kai.scheduler/queue": "vision"}},
    {"labels": {"kai.scheduler/queue": "vision"}},
    {"labels": {"runai-gpu-group": "g1", "kai.scheduler/queue": "speech"}},
    {"labels": {"runai-gpu-group": "g1"}},
]


@pytest.mark.parametrize("later", LATER)
@pytest.mark.parametrize("restart", [False, True])
def test_what_is_changed_after_binding_changes_nothing(tmp_path: Path, later: dict[str, object], restart: bool) -> None:
    pods = store(tmp_path)
    pods.apply("ADDED", text())
    before = only(pods)
    if restart:
        pods = store(tmp_path)
        pods.replace([text(**later)])
    else:
        pods.apply("MODIFIED", text(**later))
    after = only(pods)
    assert (after.fraction, after.memory_mib, after.groups) == ("0.5", "", ("g1",))
    assert (after.facts.requests, after.facts.queue_ref) == ({"gpu-fraction": "0.5"}, "kai:vision")
    assert (before.fraction, before.groups) == (after.fraction, after.groups)


def test_the_group_that_the_scheduler_names_as_it_binds_the_pod_counts_once(tmp_path: Path) -> None:
    pods = store(tmp_path)
    pods.apply("ADDED", text(labels={}))
    pods.apply("MODIFIED", text(labels={"runai-gpu-group": "g1"}))
    pods.apply("MODIFIED", text(labels={"runai-gpu-group": "g2"}))
    assert only(pods).groups == ("g1",)


def test_a_pod_that_declared_no_part_joins_no_group_later(tmp_path: Path) -> None:
    pods = store(tmp_path)
    pods.apply("ADDED", text(labels={}, annotations={}))
    pods.apply("MODIFIED", text())
    assert (only(pods).groups, only(pods).fraction) == ((), "")


def test_what_waits_for_its_node_may_still_be_changed(tmp_path: Path) -> None:
    pods = store(tmp_path)
    pods.apply("ADDED", text(spec={"nodeName": ""}))
    pods.apply("MODIFIED", text(annotations={"gpu-fraction": "0.25"}))
    assert only(pods).fraction == "0.25"


def test_pods_that_are_gone_are_forgotten(tmp_path: Path) -> None:
    pods = store(tmp_path)
    pods.apply("ADDED", text())
    pods.apply("DELETED", text())
    assert UID not in (tmp_path / BOUND_PODS_FILE).read_text()
    pods.apply("ADDED", text())
    pods.replace([])
    assert UID not in (tmp_path / BOUND_PODS_FILE).read_text()


def test_a_file_that_cannot_be_read_is_said_and_written_anew(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / BOUND_PODS_FILE).write_text("{")
    pods = store(tmp_path)
    assert "their present parts count" in caplog.text
    pods.apply("ADDED", text())
    assert UID in (tmp_path / BOUND_PODS_FILE).read_text()
