"""A Volcano Job is told to restart, told again if the Command is lost, and given up after a few times."""

from __future__ import annotations

import pytest

from fairshare.preemption import unfinished_preemptions as unfinished
from fairshare.preemption.eviction import stop_victim
from fairshare.schedulers.volcano.kinds import COMMAND, JOB
from fairshare.schedulers.volcano.stop import MOST_ATTEMPTS, REISSUE_MS
from fairshare.targets.status_config_map import StatusObject
from fairshare.targets.whole_stop import PREEMPTION, PreemptionIntent
from gputally.kubernetes.memory_cluster import MemoryCluster
from tests.fairshare.builders import object_of, policy_of
from tests.fairshare.case_types import victim_of
from tests.fairshare.conftest import NOW_MS, Make
from tests.fairshare.scheduler_kinds import KINDS


def test_a_lost_command_is_issued_again_a_few_times(either_of: Make, others_of: Make) -> None:
    state = {"phase": "Running", "lastTransitionTime": "2026-09-30T00:00:00Z"}
    job = object_of(JOB, "x", {}, {"state": state}, uid="uid-x")
    cluster = either_of([job])
    victim = victim_of(kind=JOB, uid=cluster.get(JOB, "x", "ns")["metadata"]["uid"])
    assert stop_victim(cluster, victim, "d1", NOW_MS).result == "stopped"
    (order,) = cluster.list(COMMAND)
    assert (order["action"], order["target"]["uid"]) == ("RestartJob", cluster.get(JOB, "x", "ns")["metadata"]["uid"])

    def go_on(after_ms: int) -> list[str]:
        found = unfinished.resume(cluster, JOB, cluster.list(JOB), cluster.list(COMMAND), NOW_MS + after_ms)
        return [each.action for each in found]

    assert go_on(10 * REISSUE_MS) == []  # the Command is still there
    seen = []
    for n in range(1, MOST_ATTEMPTS + 2):
        for each in cluster.list(COMMAND):
            others_of(cluster).delete(COMMAND, each["metadata"]["name"], "ns")
        assert go_on(REISSUE_MS // 2) == []
        seen += go_on(n * REISSUE_MS)
    assert seen == ["asked again"] * (MOST_ATTEMPTS - 1) + ["given up"]


def test_a_job_that_restarted_is_done(either_of: Make) -> None:
    intent = PreemptionIntent("d1", NOW_MS).text()
    job = object_of(JOB, "x", {}, {"state": {"phase": "Restarting"}}, uid="uid-x", annotations={PREEMPTION: intent})
    cluster = either_of([job])
    assert [each.action for each in unfinished.resume(cluster, JOB, cluster.list(JOB), (), NOW_MS)] == ["restarted"]


def test_a_job_that_does_not_restart_is_given_up_and_told(controller_of: Make) -> None:
    state = {"phase": "Running", "lastTransitionTime": "2026-09-30T00:00:00Z"}
    intent = PreemptionIntent("d1", NOW_MS - 3_600_000, 3).text()
    job = object_of(JOB, "x", {}, {"state": state}, annotations={PREEMPTION: intent})
    cluster = MemoryCluster(KINDS, [job])
    policy = policy_of([{"name": "a", "refs": ["volcano:a"]}], preemption={"mode": "off"})
    controller_of(policy, cluster, status_object=StatusObject("gputally", "gputally-fairshare")).cycle()
    (told,) = [event for event in cluster.events if event.kind == JOB]
    assert (told.type, told.reason, told.name) == ("Warning", "NotRestarted", "x")
    assert PREEMPTION not in cluster.get(JOB, "x", "ns")["metadata"]["annotations"]


@pytest.mark.parametrize(
    ("attempts", "left", "line"),
    [
        (1, ("ns/x",), "ns/x is still being stopped: run `release` again in a minute"),
        (MOST_ATTEMPTS, (), "ns/x: its preemption failed: Volcano was told 3 times to restart it, and it still runs"),
    ],
    ids=["told again", "given up"],
)
def test_release_does_not_say_that_a_running_job_may_run_again(attempts: int, left: tuple[str, ...], line: str) -> None:
    state = {"phase": "Running", "lastTransitionTime": "2026-09-30T00:00:00Z"}
    intent = PreemptionIntent("d1", NOW_MS - 3_600_000, attempts).text()
    cluster = MemoryCluster(KINDS, [object_of(JOB, "x", {}, {"state": state}, annotations={PREEMPTION: intent})])
    ended = unfinished.finish_all(cluster, NOW_MS)
    assert (ended.resumed, ended.left, ended.lines()) == ((), left, (line,))
