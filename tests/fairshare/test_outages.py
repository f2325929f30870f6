"""Outages: state is kept, and decisions, events and conditions are delivered once the server answers again."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

import pytest
import structlog
from structlog import get_logger
from structlog.testing import capture_logs

from accountant.wire.policy_models import Decision, Policy
from fairshare.controller.control_loop import Controller
from fairshare.controller.controller_metrics import Metrics
from fairshare.controller.cycle_report import CycleReport
from fairshare.controller.event_and_decision_recorder import MOST_CYCLES, CycleLog, CycleRecorder
from fairshare.core.gpu_demand import read_pod
from fairshare.core.queues_and_weights import Pod
from fairshare.targets.kai import QUEUE, SHARD
from fairshare.targets.status_config_map import StatusObject
from gputally.base.clock import VirtualClock
from gputally.base.errors import AccountantRefused, Refused
from gputally.base.yaml_file import FileFault
from gputally.kubernetes.list_watch import Reflector
from gputally.kubernetes.memory_cluster import MemoryCluster
from gputally.kubernetes.objects import CONFIG_MAP, NODE, POD
from tests.fairshare.builders import policy_of, queue_object
from tests.fairshare.conftest import Accountant
from tests.fairshare.failing_clusters import Failing

Make = Callable[..., Any]
HERE = StatusObject("gputally", "gputally-fairshare")


def _ours(cluster: MemoryCluster) -> dict[str, str]:
    found: dict[str, str] = dict(cluster.get(CONFIG_MAP, HERE.name, HERE.namespace)["data"])
    return found


@pytest.fixture
def kai(accountant: Accountant, clock: VirtualClock) -> Make:
    """A controller of three KAI queues, and its cluster."""

    def make(**options: Any) -> tuple[Failing, Controller]:
        cluster = Failing([QUEUE, SHARD, NODE, CONFIG_MAP], [queue_object(name) for name in "abc"])
        accountant.spend(a=0.6, b=0.3, c=0.1)
        return cluster, Controller(policy_of(**options), accountant, cluster, clock, status_object=HERE)

    return make


def test_what_was_remembered_is_waited_for_and_not_written_over(
    kai: Make, accountant: Accountant, clock: VirtualClock
) -> None:
    """Who gave way within the hour counts against the limits: a leader that does not know would go beyond them."""
    cluster, first = kai(law="deficit")
    for _ in range(3):
        first.cycle()
        clock.advance(60_000)
    noted = _ours(cluster)["state.kai"]
    gone = [[clock.wall_ms() - 60_000, "Pod/ns/x", "a", "a", 4.0, 1.0, "d1"]]
    cluster.apply(
        {
            "apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": HERE.name, "namespace": HERE.namespace},
            "data": {**_ours(cluster), "preempted": json.dumps(gone)},
        },
        field_manager="gputally-fairshare",
    )  # fmt: skip
    weights = [obj["spec"] for obj in cluster.list(QUEUE)]
    second = Controller(policy_of(law="deficit"), accountant, cluster, clock, status_object=HERE)
    cluster.failing = frozenset({"get ConfigMap"})
    report = second.cycle()
    assert report.hold is not None
    assert report.hold.reason == "StateUnread"
    assert [obj["spec"] for obj in cluster.list(QUEUE)] == weights
    cluster.failing = frozenset()
    assert (_ours(cluster)["state.kai"], json.loads(_ours(cluster)["preempted"])) == (noted, gone)
    report = second.cycle()
    assert report.hold is None
    assert report.targets[0].memory == json.loads(noted)["memory"]
    assert json.loads(_ours(cluster)["preempted"]) == gone


def test_an_event_that_is_refused_keeps_nothing_else_back(kai: Make) -> None:
    """A namespace that is being deleted takes no new Event."""
    cluster, controller = kai()
    for name in "ab":
        cluster.put(
            {**cluster.get(QUEUE, name), "spec": {"resources": {"gpu": {"overQuotaWeight": 7}}}}, field_manager="x"
        )
    cluster.failing, cluster.error = frozenset({"event Queue"}), Refused("POST: 403: it is being terminated")
    controller.cycle()
    assert json.loads(_ours(cluster)["kai.Available"])["reason"] == "Contested"
    assert "Contested" in {event.reason for event in cluster.events}


def test_what_cannot_be_told_is_said_in_the_next_cycle_and_while_it_lasts(
    kai: Make, accountant: Accountant, clock: VirtualClock
) -> None:
    cluster, controller = kai()
    accountant.takes_decisions = False
    cluster.admit_config_maps = False
    controller.cycle()
    for _ in range(2):
        clock.advance(60_000)
        found = {condition.type: condition for condition in controller.cycle().conditions}
        assert found["Remembered"].reason == "StatusNotWritten"
        assert "quota" in found["Remembered"].message
        assert found["Recorded"].reason == "DecisionsWait"
        assert "503 Ledger unavailable" in found["Recorded"].message
    assert {"StatusNotWritten", "DecisionsWait"} <= {event.reason for event in cluster.events}
    accountant.takes_decisions = cluster.admit_config_maps = True
    controller.cycle()
    assert [condition.type for condition in controller.cycle().conditions] == ["UsageFresh"]


def test_nodes_that_cannot_be_listed_leave_the_weights_alone(kai: Make) -> None:
    """The ledger's average would stand in for them: half of it, where half of the nodes have no agent yet."""
    cluster, controller = kai()
    cluster.failing = frozenset({"list Node"})
    report = controller.cycle()
    assert report.hold is not None
    assert (report.hold.reason, report.targets[0].outcomes) == ("NodesUnread", ())
    cluster.failing = frozenset()
    assert controller.cycle().targets[0].outcomes


def test_pods_not_listed_recently_decide_nothing(accountant: Accountant, clock: VirtualClock) -> None:
    cluster = Failing([QUEUE, SHARD, NODE, POD, CONFIG_MAP], [queue_object(name) for name in "abc"])
    accountant.spend(a=0.6, b=0.3, c=0.1)
    pods: Reflector[dict[str, Any], Pod] = Reflector(
        cluster.api(), POD.path(), dict, read_pod, now_ms=clock.monotonic_ms
    )
    held = lambda: tuple(pods.values().values())  # noqa: E731
    controller = Controller(policy_of(), accountant, cluster, clock, pods=held, unseen=pods.behind)
    cluster.failing, cluster.error = frozenset({"list Pod"}), Refused("GET: 403: pods is forbidden")
    pods.prime()
    hold = controller.cycle().hold
    assert hold is not None
    assert (hold.reason, hold.message) == ("PodsUnseen", "pods have not been read yet: GET: 403: pods is forbidden")
    cluster.failing = frozenset()
    pods.prime()
    assert controller.cycle().hold is None
    clock.advance(599_000)
    assert controller.cycle().hold is None
    clock.advance(2_000)
    hold = controller.cycle().hold
    assert hold is not None
    assert hold.message == "pods were last read 601 s ago"
    pods.follow()  # a watch that ended in peace, with nothing new
    assert controller.cycle().hold is None


def test_a_policy_that_is_refused_is_said_until_it_is_mended(
    kai: Make, accountant: Accountant, clock: VirtualClock
) -> None:
    cluster, _ = kai()
    stop, metrics, seen = threading.Event(), Metrics(clock), []
    good, new = policy_of(), policy_of(k=0.5)
    answers: list[Policy | FileFault | None] = [None, FileFault(["policy.yaml:3: no such queue: 'x'"]), None, new]

    def reload() -> Policy | None:
        answer = answers.pop(0)
        if isinstance(answer, FileFault):
            raise answer
        return answer

    def observe(report: CycleReport) -> None:
        metrics.observe(report)
        seen.append(
            (
                report.policy_version,
                {c.reason for c in report.conditions} - {"Fresh"},
                'controller_degraded{reason="PolicyRefused"} 1.0' in metrics.render().decode(),
            )
        )
        if not answers:
            stop.set()

    Controller(good, accountant, cluster, clock, status_object=HERE, reload=reload, observe=observe).run(stop)
    refused: set[str] = {"PolicyRefused"}
    assert seen == [
        (good.version(), set(), False), (good.version(), refused, True), (good.version(), refused, True),
        (new.version(), set(), False),
    ]  # fmt: skip
    (event,) = [event for event in cluster.events if event.reason == "PolicyRefused"]
    assert event.message.endswith("policy.yaml:3: no such queue: 'x'")


def test_a_decision_that_is_never_taken_keeps_no_other_back(
    kai: Make, accountant: Accountant, clock: VirtualClock
) -> None:
    _, controller = kai()
    plain = accountant.post_decisions

    def post(decisions: Sequence[Decision]) -> None:
        if any(decision.subject == "b" for decision in decisions):
            raise AccountantRefused("http://accountant:8080/v1/decisions: 413 Too large")
        plain(decisions)

    accountant.post_decisions = post
    controller.cycle()
    assert [decision.subject for decision in accountant.decisions] == ["*", "a", "c"]
    clock.advance(60_000)
    found = {condition.reason: condition.message for condition in controller.cycle().conditions}
    assert "/kai/b: http://accountant:8080/v1/decisions: 413 Too large" in found["DecisionsRefused"]


def test_what_waits_to_be_recorded_is_bounded_by_whole_cycles(accountant: Accountant) -> None:
    def decision(cycle: int, subject: str, **inputs: str) -> Decision:
        return Decision(
            id=f"{cycle}/{subject}", at_ms=cycle, kind="weight", target="kai", subject=subject, mode="enforce",
            reason="", policy_version="v", inputs=inputs,
        )  # fmt: skip

    recorder = CycleRecorder(MemoryCluster([]), accountant, None)
    accountant.takes_decisions = False
    for cycle in range(MOST_CYCLES + 20):
        inputs, *others = (decision(cycle, subject, of=str(cycle)) for subject in ("*", "a", "b"))
        recorder.deliver([inputs, *others], accountant_away=False)
    accountant.takes_decisions = True
    recorder.deliver([], accountant_away=False)
    kept = [decision.id for decision in accountant.decisions]
    assert kept[:3] == ["20/*", "20/a", "20/b"]
    assert len(kept) == 3 * MOST_CYCLES


def test_conditions_of_a_policy_full_of_strangers_fit_into_a_config_map(
    accountant: Accountant, clock: VirtualClock
) -> None:
    queues = [{"name": f"team-{n}-with-a-long-name", "refs": [f"kai:missing-{n}"]} for n in range(1_000)]
    cluster = MemoryCluster([QUEUE, SHARD, NODE, CONFIG_MAP], [queue_object("a")])
    policy = policy_of([*queues, {"name": "a", "refs": ["kai:a"]}])
    Controller(policy, accountant, cluster, clock, status_object=HERE).cycle()
    mapped = json.loads(_ours(cluster)["kai.Mapped"])
    assert mapped["message"].endswith("; and 992 more")
    assert len(json.dumps(_ours(cluster))) < 8_000


def test_the_log_says_what_turned_and_not_what_stays(kai: Make, accountant: Accountant, clock: VirtualClock) -> None:
    """A week of minutes in which a dry run plans the same and a field stays another manager's."""
    cluster, _ = kai()
    taken = {**cluster.get(QUEUE, "b"), "spec": {"resources": {"gpu": {"overQuotaWeight": 3, "quota": 0, "limit": -1}}}}
    cluster.put(taken, field_manager="argocd")
    controller = Controller(policy_of(apply="dry-run"), accountant, cluster, clock)
    structlog.reset_defaults()  # a program that ran in this process may have silenced what is no error
    with capture_logs() as lines:
        told = CycleLog(get_logger("fairshare"))
        for _ in range(5):
            told.log(controller.cycle())
            clock.advance(60_000)
        accountant.down = True
        told.log(controller.cycle())
        accountant.down = False
        told.log(controller.cycle())
    said = [(line["event"], line.get("queue") or line.get("reason")) for line in lines if line["event"] != "cycle"]
    first = [
        ("weight", "a"),
        ("weight", "b"),
        ("weight", "c"),
        ("condition", "Contested"),
        ("condition", "FieldNotOurs"),
    ]
    assert sorted(said[:5]) == sorted(first)
    assert ("condition", "AccountantUnavailable") in said[5:]
    assert ("condition", "Fresh") in said[5:]
    assert len([line for line in lines if line["event"] == "cycle"]) == 7
    assert len(said) < 16


def test_two_controllers_of_one_accountant_do_not_take_turns_for_ever(
    kai: Make, accountant: Accountant, clock: VirtualClock
) -> None:
    """Each would act by the other's usage every other minute, and no alert would ever last long enough to fire."""
    _, one = kai()
    _, other = kai(k=0.5)
    held = []
    for _ in range(72):
        held.append((one.cycle().hold, other.cycle().hold))
        clock.advance(300_000)
    assert len(accountant.policies) < 20
    stretches = [
        len(list(run)) for who in (0, 1) for is_held, run in groupby(pair[who] is not None for pair in held) if is_held
    ]
    assert max(stretches) * 5 > 30  # minutes, as the alert waits
    texts = {hold.message for pair in held for hold in pair if hold is not None}
    assert any("another controller announces its own to this accountant" in text for text in texts)
