"""What users write on KAI's groups."""

from __future__ import annotations

from dataclasses import replace

from fairshare.core.gpu_demand import CHECKPOINT
from fairshare.schedulers.kai.adapter import KaiAdapter
from fairshare.schedulers.kai.kinds import POD_GROUP
from fairshare.schedulers.kai.kinds import QUEUE as KAI_QUEUE
from tests.fairshare.conftest import NOW_MS
from tests.fairshare.kai.objects import kai_policy, pod_group, queue_object
from tests.fairshare.read_pods import pod_of


def test_a_checkpoint_speaks_of_its_own_gang_and_the_newest_counts() -> None:
    later = replace(pod_of(), gang="PodGroup/ns/g", ref="kai:a", checkpoint_ms=NOW_MS, scheduler="kai")
    noted = {CHECKPOINT: "2026-01-01T00:00:00Z"}
    groups = [pod_group("g", requested=4, annotations=noted), pod_group("other", requested=4)]
    seen = {KAI_QUEUE: [queue_object("a")], POD_GROUP: groups}
    found = {gang.name: gang for gang in KaiAdapter().observe(kai_policy(), seen, [later]).gangs}
    assert (found["g"].checkpoint_ms, found["other"].checkpoint_ms) == (NOW_MS, None)


def test_a_group_that_claims_to_have_just_started_is_as_old_as_its_pods() -> None:
    later = "2099-01-01T00:00:00Z"
    noted = {"kai.scheduler/last-start-timestamp": later, "kai.scheduler/last-eviction-timestamp": later}
    held = replace(pod_of("kai-scheduler"), gang="PodGroup/ns/g", ref="kai:a", node="n0", held=True, started_ms=NOW_MS)
    groups = [pod_group("g", requested=4, allocated=4, annotations=noted), pod_group("other", requested=4, allocated=4)]
    seen = {KAI_QUEUE: [queue_object("a")], POD_GROUP: groups}
    found = {gang.name: gang for gang in KaiAdapter().observe(kai_policy(), seen, [held]).gangs}
    assert (found["g"].started_ms, found["other"].started_ms) == (NOW_MS, None)
    assert found["other"].may_claim_ms is None
