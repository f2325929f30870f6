"""The inventory over an API server: trimmed, paged, resumable, tolerant of what servers do."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest

from accountant.inventory.kubernetes_inventory import ClusterInventory
from accountant.inventory.pod_owners import MANY
from accountant.ledger.protocols import Down, JobKey, NamespaceFacts, NodeFacts
from agent.wire import Owner, PodFacts
from gputally.base.clock import VirtualClock
from gputally.base.errors import Unavailable, VersionGone
from gputally.kubernetes.list_watch import PAGE
from tests.inventory.api import UNREACHABLE, FakeApi, node, owner, pod

CREATED = 1_790_812_800_000  # 2026-10-01T00:00:00Z


@pytest.fixture
def api() -> FakeApi:
    return FakeApi()


@pytest.fixture
def inventory(api: FakeApi, clock: VirtualClock) -> ClusterInventory:
    return ClusterInventory(api, clock, "prod", team_keys=["team"])


def pods(inventory: ClusterInventory, clock: VirtualClock, *, taken: bool = True) -> dict[str, PodFacts]:
    facts = inventory.read(clock.wall_ms())
    if taken:
        inventory.taken()
    return {fact.name: fact for _, fact in facts.pods}


def test_a_gpu_pod_with_its_whole_chain(api: FakeApi, inventory: ClusterInventory, clock: VirtualClock) -> None:
    api.put("CronJob", owner("CronJob", "train"))
    api.put(
        "Job",
        owner("Job", "train-1", above=("batch/v1", "CronJob", "train"), labels={"kueue.x-k8s.io/queue-name": "lq"}),
    )
    state = {
        "phase": "Running",
        "conditions": [{"type": "PodScheduled", "status": "True", "lastTransitionTime": "2026-10-01T00:05:00Z"}],
        "containerStatuses": [{"name": "main", "state": {"running": {"startedAt": "2026-10-01T00:06:00Z"}}}],
    }
    api.put(
        "Pod", pod("train-1-x", owners=[("batch/v1", "Job", "train-1")], gpus=4, labels={"secret": "s"}, status=state)
    )
    api.put("Pod", pod("web", gpus=0))
    inventory.sync()
    found = pods(inventory, clock)
    assert found == {
        "train-1-x": PodFacts(
            seq=0, uid="uid-vision-train-1-x", namespace="vision", name="train-1-x", node="n1",
            owners=(Owner("Job", "train-1", "Job-vision-train-1"), Owner("CronJob", "train", "CronJob-vision-train")),
            workload="CronJob/train", queue_ref="kueue:vision/lq", requests={"nvidia.com/gpu": "4"}, created_ms=CREATED,
            scheduled_ms=CREATED + 300_000, started_ms=CREATED + 360_000, observed_ms=clock.wall_ms(),
        )
    }  # fmt: skip
    assert pods(inventory, clock) == {}


@pytest.mark.parametrize(
    "asked",
    [
        {"spec": {"containers": [{"name": "a", "resources": {"limits": {"nvidia.com/mig-1g.10gb": "1"}}}]}},
        {"spec": {"containers": [{"name": "a", "resources": {"requests": {"amd.com/gpu": "1"}}}]}},
        {"spec": {"containers": [{"name": "a"}], "resourceClaims": [{"name": "gpu", "resourceClaimName": "c"}]}},
        {"gpus": 0, "annotations": {"gpu-fraction": "0.5"}},
        {
            "spec": {
                "containers": [],
                "initContainers": [{"name": "i", "resources": {"limits": {"nvidia.com/gpu": "2"}}}],
            }
        },
    ],
)
def test_every_way_of_asking_for_a_gpu(
    api: FakeApi, inventory: ClusterInventory, clock: VirtualClock, asked: dict[str, Any]
) -> None:
    api.put("Pod", pod("p", **asked))
    inventory.sync()
    assert set(pods(inventory, clock)) == {"p"}


def test_changes_come_by_the_watch_and_a_deleted_pod_has_ended(
    api: FakeApi, inventory: ClusterInventory, clock: VirtualClock
) -> None:
    inventory.sync()
    api.put("Pod", pod("a"))
    api.put("Pod", pod("b"))
    inventory.follow()
    assert set(pods(inventory, clock)) == {"a", "b"}
    clock.advance(5_000)
    api.drop("Pod", "a")
    inventory.follow()
    ended = pods(inventory, clock)
    assert {name: fact.ended_ms for name, fact in ended.items()} == {"a": clock.wall_ms()}
    assert sum(request.startswith("GET /api/v1/pods") for request in api.requests) == 1


def test_what_was_not_taken_is_told_again(api: FakeApi, inventory: ClusterInventory, clock: VirtualClock) -> None:
    api.put("Pod", pod("a"))
    inventory.sync()
    assert set(pods(inventory, clock, taken=False)) == {"a"}
    api.put("Pod", pod("b"))
    inventory.follow()
    assert set(pods(inventory, clock)) == {"a", "b"}
    assert pods(inventory, clock) == {}


def test_a_list_that_breaks_off_goes_on_at_its_page(
    api: FakeApi, inventory: ClusterInventory, clock: VirtualClock
) -> None:
    for number in range(3 * PAGE):
        api.put("Pod", pod(f"p-{number:04}"))
    api.trouble = [None, None, None, None, UNREACHABLE]  # namespaces, nodes, two pages of pods
    with pytest.raises(Unavailable):
        inventory.sync()
    assert not inventory.synced
    assert pods(inventory, clock) == {}
    before = len(api.requests)
    inventory.sync()
    assert sum(request.startswith("GET /api/v1/") for request in api.requests[before:]) == 1
    assert len(pods(inventory, clock)) == 3 * PAGE


def test_a_list_whose_token_is_gone_begins_again(
    api: FakeApi, inventory: ClusterInventory, clock: VirtualClock
) -> None:
    for number in range(2 * PAGE):
        api.put("Pod", pod(f"p-{number:04}"))
    api.trouble = [None, None, None, UNREACHABLE]
    with pytest.raises(Unavailable):
        inventory.sync()
    api.drop("Pod", "p-0003")
    api.forget()
    inventory.sync()
    assert len(pods(inventory, clock)) == 2 * PAGE - 1


def test_after_410_what_is_missing_has_ended_and_nothing_else_is_told_again(
    api: FakeApi, inventory: ClusterInventory, clock: VirtualClock
) -> None:
    api.put("Pod", pod("a"))
    api.put("Pod", pod("b"))
    inventory.sync()
    pods(inventory, clock)
    api.drop("Pod", "a")
    api.put("Pod", pod("c"))
    api.forget()
    clock.advance(60_000)
    with pytest.raises(VersionGone):
        inventory.follow()
    inventory.sync()
    for reflector in (inventory._nodes, inventory._pods):
        with pytest.raises(VersionGone):
            reflector.follow()
    inventory.sync()
    told = pods(inventory, clock)
    assert {name: fact.ended_ms is not None for name, fact in told.items()} == {"a": True, "c": False}


def test_owners_that_cannot_be_asked_now_are_asked_again(
    api: FakeApi, inventory: ClusterInventory, clock: VirtualClock
) -> None:
    api.put("Job", owner("Job", "j", above=("acme.io/v1", "Fleet", "f")))
    api.put("Fleet", owner("Fleet", "f"))
    api.put("Pod", pod("p", owners=[("batch/v1", "Job", "j")]))
    inventory.sync()
    api.trouble = [UNREACHABLE]
    assert pods(inventory, clock)["p"].workload == "Job/j"
    assert pods(inventory, clock)["p"].workload == "Fleet/f"  # of a kind that only discovery knows
    assert pods(inventory, clock) == {}


@pytest.mark.parametrize("kind", [("secret.io/v1", "Vault"), ("batch/v1", "Job")])
def test_an_owner_nobody_may_read_ends_the_chain(
    api: FakeApi, inventory: ClusterInventory, clock: VirtualClock, kind: tuple[str, str]
) -> None:
    api.put("Pod", pod("p", owners=[(*kind, "x")]))
    inventory.sync()
    assert pods(inventory, clock)["p"].workload == f"{kind[1]}/x"


@pytest.mark.parametrize("listed", [True, False])
def test_owners_that_a_whole_list_does_not_name_are_gone_and_not_asked_for_one_by_one(
    api: FakeApi, inventory: ClusterInventory, clock: VirtualClock, listed: bool
) -> None:
    """Where the list is refused, each may still be asked for."""
    api.put("CronJob", owner("CronJob", "nightly"))
    for number in range(3):
        api.put("Job", owner("Job", f"j-{number}", above=("batch/v1", "CronJob", "nightly")))
    for number in range(MANY + 5):
        api.put("Pod", pod(f"p-{number}", owners=[("batch/v1", "Job", f"j-{number}")]))
    if not listed:
        api.served.remove("Job")
    inventory.sync()
    before = len(api.requests)
    found = pods(inventory, clock)
    asked = [request for request in api.requests[before:] if "/apis/batch/v1/" in request and "/jobs" in request]
    assert len(asked) == (1 if listed else 1 + MANY + 5)
    named = {f"p-{number}": "CronJob/nightly" if number < 3 else f"Job/j-{number}" for number in range(MANY + 5)}
    assert {name: fact.workload for name, fact in found.items()} == named


def test_owners_in_a_circle_end(api: FakeApi, inventory: ClusterInventory, clock: VirtualClock) -> None:
    api.put("Job", owner("Job", "a", above=("batch/v1", "Job", "b")))
    api.put("Job", owner("Job", "b", above=("batch/v1", "Job", "a")))
    api.put("Pod", pod("p", owners=[("batch/v1", "Job", "a")]))
    inventory.sync()
    assert pods(inventory, clock)["p"].workload in ("Job/a", "Job/b")


def test_namespaces_say_who_pays_and_which_label_is_kept(
    api: FakeApi, inventory: ClusterInventory, clock: VirtualClock
) -> None:
    api.put("Namespace", {"metadata": {"name": "vision", "labels": {"team": "vision"}}})
    rule = {"gputally.dev/team-label": "who", "gputally.dev/teams": "nlp"}
    api.put("Namespace", {"metadata": {"name": "shared", "annotations": rule}})
    api.put("Pod", pod("p", labels={"who": "nlp", "private": "x"}))
    inventory.sync()
    facts = inventory.read(clock.wall_ms())
    assert facts.namespaces == (
        NamespaceFacts("prod", "shared", "", "who", ("nlp",)),
        NamespaceFacts("prod", "vision", "vision"),
    )
    assert facts.pods[0][1].labels == {"who": "nlp"}


def test_nodes_and_when_they_were_down(api: FakeApi, clock: VirtualClock) -> None:
    known = NodeFacts("prod", "n3", pool="old", down=(Down(5, 9, "firmware"), Down(CREATED, None, "NotReady")))
    elsewhere = NodeFacts("edge", "n9")
    inventory = ClusterInventory(api, clock, "prod", [known, elsewhere])
    assert inventory.read(clock.wall_ms()).nodes == (NodeFacts("prod", "n3", pool="old", down=known.down[1:]),)
    api.put("Node", node("n1", ready=False))
    api.put(
        "Node",
        node(
            "n2",
            spec={
                "unschedulable": True,
                "taints": [{"key": "node.kubernetes.io/unschedulable", "timeAdded": "2026-10-01T00:20:00Z"}],
            },
        ),
    )
    api.put("Node", node("cpu-only", labels={}, capacity={"cpu": "8"}))
    inventory.sync()
    n1, n2, n3 = inventory.read(clock.wall_ms()).nodes
    assert (n1.name, n1.pool, n1.capacity_type, n1.down) == (
        "n1",
        "a3",
        "on-demand",
        (Down(CREATED + 600_000, None, "NotReady"),),
    )
    assert (n2.name, n2.down) == ("n2", (Down(CREATED + 1_200_000, None, "cordoned"),))
    # Gone while nobody looked.
    assert (n3.deleted_ms, n3.down) == (clock.wall_ms(), (Down(CREATED, clock.wall_ms(), "NotReady"),))


@pytest.mark.parametrize("answer", [b"", b"<html>", b'{"items": 3}', b"[]"])
def test_an_answer_that_is_none_is_a_failure_not_a_defect(
    api: FakeApi, inventory: ClusterInventory, monkeypatch: pytest.MonkeyPatch, answer: bytes
) -> None:
    monkeypatch.setattr(api, "get", lambda *args, **kwargs: answer)
    with pytest.raises(Unavailable, match="unexpected answer of the API server"):
        inventory.sync()


@dataclass
class Crowd(FakeApi):
    """50,000 pods, of which a tenth use GPUs, under 500 jobs; written down only when they are asked for."""

    total: int = 50_000

    def _page(self, kind: str, query: Mapping[str, str], metadata_only: bool) -> bytes:
        if kind != "Pod":
            return super()._page(kind, query, metadata_only)
        begin = int(query.get("continue", "0"))
        items = [self._text(number) for number in range(begin, begin + PAGE)]
        more = f', "continue": "{begin + PAGE}"' if begin + PAGE < self.total else ""
        return f'{{"metadata": {{"resourceVersion": "7"{more}}}, "items": [{",".join(items)}]}}'.encode()

    def _text(self, number: int) -> str:
        text = _WITH_GPU if number % 10 == 0 else _WITHOUT
        return text.replace("NUMBER", str(number)).replace("JOB", str(number // 100))


def _written(gpus: int) -> str:
    one = pod("p-NUMBER", gpus=gpus, owners=[("batch/v1", "Job", "j-JOB")])
    one["metadata"]["managedFields"] = [{"manager": "m", "fieldsV1": {f"f:{n}": {} for n in range(30)}}]
    return json.dumps(one)


_WITH_GPU, _WITHOUT = _written(1), _written(0)


@pytest.mark.real  # of that size too dear for `make test`
def test_fifty_thousand_pods_cost_few_requests_and_little_memory(clock: VirtualClock) -> None:
    api = Crowd()
    for number in range(500):
        api.put("Job", owner("Job", f"j-{number}"))
    inventory = ClusterInventory(api, clock, "prod")
    tracemalloc.start()
    inventory.sync()
    facts = inventory.read(clock.wall_ms())
    held, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(facts.pods) == 5_000
    assert {fact.workload for _, fact in facts.pods} == {f"Job/j-{number}" for number in range(500)}
    # Pages, two other kinds, the jobs as one list; the schedulers' six kinds are not there, Kueue's four in two
    # versions.
    assert len(api.requests) == 50_000 / PAGE + 2 + 1 + 2 + 4 * 2
    assert held < 30 * 2**20
    assert peak < 40 * 2**20


def test_an_epoch_annotated_during_an_outage_is_dated_by_who_wrote_it(
    api: FakeApi, inventory: ClusterInventory, clock: VirtualClock
) -> None:
    """Not by the restart, an hour later; what others wrote later says nothing of it."""
    train = pod("train-0", gpus=4, annotations={"gputally.dev/epoch": "7"})
    train["metadata"]["managedFields"] = [
        {"manager": "kubelet", "operation": "Update", "time": "2026-10-01T00:50:00Z", "fieldsV1": {"f:status": {}}},
        {
            "manager": "train.py", "operation": "Update", "time": "2026-10-01T00:20:00Z", "fieldsType": "FieldsV1",
            "fieldsV1": {"f:metadata": {"f:annotations": {"f:gputally.dev/epoch": {}}}},
        },
    ]  # fmt: skip
    ahead = pod("ahead-0", gpus=4, annotations={"gputally.dev/epoch": "8"})
    ahead["metadata"]["managedFields"] = [{**train["metadata"]["managedFields"][1], "time": "2999-01-01T00:00:00Z"}]
    api.put("Pod", train)
    api.put("Pod", ahead)
    clock.advance(max(0, CREATED + 3_600_000 - clock.wall_ms()))
    inventory.sync()
    told = {one.epoch: one.at_ms for one in inventory.read(clock.wall_ms()).epochs}
    assert told == {7: CREATED + 1_200_000, 8: clock.wall_ms()}


def test_epochs_that_pods_annotate_are_told_once_under_the_name_of_their_job(
    api: FakeApi, inventory: ClusterInventory, clock: VirtualClock
) -> None:
    def annotated(epoch: str) -> None:
        owners = [("batch/v1", "Job", "train-1")]
        api.put("Pod", pod("train-1-x", owners=owners, gpus=4, annotations={"gputally.dev/epoch": epoch}))

    api.put("CronJob", owner("CronJob", "train"))
    api.put("Job", owner("Job", "train-1", above=("batch/v1", "CronJob", "train")))
    job = JobKey("prod", "vision", "CronJob/train")
    annotated("3")
    inventory.sync()
    first = clock.wall_ms()
    clock.advance(60_000)
    annotated("4@2026-10-01T00:30:00Z")
    api.trouble = [None, None, None]
    inventory.follow()
    told = inventory.read(clock.wall_ms()).epochs
    assert inventory.read(clock.wall_ms()).epochs == told, "told again until it is taken"
    inventory.taken()
    assert {(one.key, one.epoch, one.at_ms, one.who) for one in told} == {
        (job, 3, first, "pod vision/train-1-x"),
        (job, 4, CREATED + 1_800_000, "pod vision/train-1-x"),
    }
    assert inventory.read(clock.wall_ms()).epochs == ()
    for nonsense in ("-1", "3.5", "five", "9" * 40, "7@soon", "7@2999-01-01T00:00:00Z", ""):
        annotated(nonsense)
        inventory.follow()
        assert inventory.read(clock.wall_ms()).epochs == (), nonsense
        inventory.taken()
