"""The contract of schedulers, as tests. Derive a class from `SchedulerSuite` and describe a cluster with two queues:

    class TestLanes(SchedulerSuite):
        plugin = SCHEDULER

        @pytest.fixture
        def site(self):
            return SchedulerSite(refs=("lanes:blue", "lanes:red"), objects=(lane("blue", 10), lane("red", 10)))

`SchedulerSite` says what the description may have. The cluster is in memory; time is a fake, and no test waits."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import Any, ClassVar

import pytest

from accountant.wire.policy_models import Bounds, Policy
from fairshare.controller.control_loop import Controller
from fairshare.controller.cycle_report import CycleReport, TargetReport
from fairshare.controller.weight_writer import release_weights
from fairshare.core.gpu_demand import read_member
from fairshare.core.queues_and_weights import Condition, Observation
from fairshare.targets.guard import BrokenAdapter
from fairshare.targets.installed import adapters, kinds
from fairshare.targets.weight_plan import Adapter, look_at
from gputally.base.clock import VirtualClock
from gputally.base.errors import ClusterRefused
from gputally.base.plugins import usable
from gputally.kubernetes.memory_cluster import MemoryCluster
from gputally.kubernetes.mig_parts import NO_NODES
from gputally.kubernetes.objects import CONFIG_MAP, GPU, NODE, POD, PRIORITY_CLASS, Kind, Object, Objects, leaves
from gputally.kubernetes.pod_queue_labels import queue_ref
from gputally.kubernetes.scheduler_plugins import SEAM, SchedulerPlugin
from gputally.testing.fake_accountant import Accountant

NOW_MS = 1_790_812_800_000
MINUTE_MS = 60_000
HEAVY, LIGHT = "heavy", "light"
"""The queues of the policy. They have equal weights; the first has used nine tenths of the cluster."""
_USE = {HEAVY: 0.9, LIGHT: 0.1}
_HOSTILE: Mapping[type, Sequence[object]] = {
    str: ("", "many", "-1", "1e308", "9" * 400, "\x00\u202e"), int: (-1, 0, 2**63 - 1), float: (-1.0, 0.0, 1e308),
    bool: (True, False), list: ([],), dict: ({},),
}  # fmt: skip
"""What a field may have that its owner wrote, by type: the API server checks the types of a CRD."""
_NODE = {
    "apiVersion": NODE.api_version, "kind": NODE.kind, "metadata": {"name": "node-0"},
    "status": {"allocatable": {GPU: "16"}, "conditions": [{"type": "Ready", "status": "True"}]},
}  # fmt: skip
_LABEL = "[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?"
_SERVER_SET = ("managedFields", "resourceVersion", "generation")
_MOST_CYCLES = 8
Change = Callable[[MemoryCluster], object]


@dataclass(frozen=True)
class SchedulerSite:
    """A cluster in which the scheduler serves two queues that wait for GPUs. Their weights are the operator's, and act.

    refs: the references to the two queues, as a policy writes them.
    objects: the scheduler's objects, and pods if the adapter reads demand from pods.
    settings: what the policy says in the scheduler's section, without `mode` and `apply`.
    without_effect: changes the cluster so that weights cannot act; None if no object shows that.
    counts_history: changes the cluster so that the scheduler counts past use itself; None if it cannot."""

    refs: tuple[str, str]
    objects: Sequence[Object]
    settings: Mapping[str, Any] = field(default_factory=dict)
    without_effect: Change | None = None
    counts_history: Change | None = None


class _Refusing:
    """A client whose writes a webhook refuses."""

    def __init__(self, client: Objects) -> None:
        self._client = client

    def list(self, kind: Kind, *, fields: str = "") -> Sequence[Object]:
        return self._client.list(kind, fields=fields)

    def get(self, kind: Kind, name: str, namespace: str = "") -> Object:
        return self._client.get(kind, name, namespace)

    def apply(self, obj: Object, *, field_manager: str, dry_run: bool = False) -> Object:
        raise ClusterRefused(f"{obj['kind']} {obj['metadata']['name']}: admission webhook denied the request")

    transfer = apply


class SchedulerSuite:
    """The tests that every scheduler passes.

    writes: whether weights are written to objects. Otherwise shares take effect in another way.
    kinds: the kinds of the objects that have weights; by default those of the manifest."""

    plugin: ClassVar[SchedulerPlugin]
    writes: ClassVar[bool] = True
    kinds: ClassVar[tuple[Kind, ...]] = ()

    @pytest.fixture
    def site(self) -> SchedulerSite:
        """The cluster."""
        raise NotImplementedError("define the fixture `site` in your class")

    @pytest.fixture
    def cluster(self, site: SchedulerSite) -> MemoryCluster:
        return MemoryCluster(kinds(), [_NODE, *site.objects])

    @pytest.fixture
    def client(self, cluster: MemoryCluster) -> Objects:
        """The client of the scheduler's objects; the cluster, unless they are elsewhere."""
        return cluster

    @pytest.fixture
    def adapter(self) -> Adapter:
        (found,) = [each for each in adapters() if each.name == self.plugin.name]
        return found

    def policy(self, site: SchedulerSite, apply: str = "enforce", mode: str | None = None) -> Policy:
        section = {**site.settings, "apply": apply, **({} if mode is None else {"mode": mode})}
        if not self.writes:
            del section["apply"]
        queues = [{"name": name, "refs": [ref]} for name, ref in zip((HEAVY, LIGHT), site.refs, strict=True)]
        targets = {self.plugin.section: section}
        return Policy.model_validate({"targets": targets, "bounds": {"interval": 0}, "queues": queues})

    def controller(
        self, policy: Policy, cluster: MemoryCluster, client: Objects, accountant: Accountant | None = None
    ) -> Controller:
        """Return a controller. accountant: by default one that knows nine times as much use of the heavy queue."""
        if accountant is None:
            accountant = Accountant()
            accountant.spend(**_USE)
        pods = tuple(pod for obj in cluster.list(POD) if (pod := read_member(obj)) is not None)
        self.clock = VirtualClock(NOW_MS)
        clients = {self.plugin.name: client}
        return Controller(policy, accountant, cluster, self.clock, clusters=clients, pods=lambda: pods)

    def cycles(self, controller: Controller) -> Iterator[TargetReport]:
        """Run cycles, one each minute, and yield what they report of the scheduler."""
        while True:
            yield self.of(controller.cycle())
            self.clock.advance(MINUTE_MS)

    def of(self, report: CycleReport) -> TargetReport:
        """What a report says of the scheduler, with whose code nothing may have gone wrong."""
        (found,) = [each for each in report.targets if each.target == self.plugin.name]
        assert not {"Defect", "PluginFailed"} & found.degraded.keys(), found.degraded
        return found

    def state(self, client: Objects) -> dict[tuple[str, str, str], dict[str, Any]]:
        """Return the scheduler's objects by kind, namespace and name, without what the server sets."""
        own = self.kinds or tuple(kind for versions in self.plugin.kinds for kind in versions)
        found = {}
        for kind in own:
            for obj in client.list(kind):
                plain = copy.deepcopy(dict(obj))
                for key in _SERVER_SET:
                    plain["metadata"].pop(key, None)
                if not plain["metadata"].get("annotations"):
                    plain["metadata"].pop("annotations", None)
                found[kind.kind, plain["metadata"].get("namespace", ""), plain["metadata"]["name"]] = plain
        return found

    def look(self, adapter: Adapter, policy: Policy, cluster: MemoryCluster, client: Objects) -> Observation:
        pods = tuple(pod for obj in cluster.list(POD) if (pod := read_member(obj)) is not None)
        return look_at(adapter, policy, client, pods)

    def effective(self, adapter: Adapter, site: SchedulerSite, cluster: MemoryCluster, client: Objects) -> Condition:
        found = self.look(adapter, self.policy(site), cluster, client).conditions
        (effective,) = [each for each in found if each.type == "Effective"]
        assert effective.message, "say in words what is so"
        return effective

    def test_its_manifest_is_complete(self, adapter: Adapter) -> None:
        plugin = self.plugin
        assert plugin.reaches, "say what it reads, writes and connects to"
        assert plugin.page, "name the page about it"
        assert not isinstance(adapter, BrokenAdapter), "the adapter cannot be loaded: `gputally plugins` says why"
        assert plugin.rights or not plugin.kinds, "name the rights that it needs in the cluster"
        for rights in plugin.rights:
            assert rights.why, "say what a right is for"
        others = {prefix for each in adapters() if each.name != plugin.name for prefix in each.prefixes}
        assert not others & set(plugin.prefixes), "another scheduler has this prefix"

    def test_it_is_found_by_its_name(self) -> None:
        assert usable(SEAM, SchedulerPlugin).get(self.plugin.name) is self.plugin, "register the entry point, install"

    def test_its_pods_name_their_queue_and_no_other_schedulers_pods_do(self, site: SchedulerSite) -> None:
        labels = self.plugin.pods
        for key in labels.keys if labels is not None else ():
            names = labels.scheduler_names if labels is not None else None
            for name in names or ():
                assert queue_ref("ns", name, {key: "q"}) == f"{self.plugin.name}:q"
            assert queue_ref("ns", "another-scheduler", {key: "q"}) == ("" if names else f"{self.plugin.name}:ns/q")
            for ref in site.refs if names else ():
                value = ref.partition(":")[2]
                assert re.fullmatch(_LABEL, value), f"no pod can name {ref}: a label cannot have the value {value}"
                assert {queue_ref("ns", name, {key: value}) for name in names or ()} == {ref}, "pods name another queue"

    def test_it_asks_for_no_kind_that_its_manifest_does_not_name(self, adapter: Adapter, site: SchedulerSite) -> None:
        known = {*self.kinds, NODE, POD, CONFIG_MAP, PRIORITY_CLASS}
        known |= {kind for versions in self.plugin.kinds for kind in versions}
        asked = {kind for query in adapter.reads(self.policy(site)) for kind in query.kinds}
        assert asked <= known

    def test_its_queues_are_found_and_have_demand(
        self, adapter: Adapter, site: SchedulerSite, cluster: MemoryCluster, client: Objects
    ) -> None:
        found = self.look(adapter, self.policy(site), cluster, client)
        assert found.issues == ()
        assert found.standings.keys() == {HEAVY, LIGHT}
        for standing in found.standings.values():
            assert 0 <= standing.allocated <= standing.requested < float("inf")
            assert standing.requested > 0, "give the queues of the site some demand"
        if self.writes:
            assert found.queues.keys() == {HEAVY, LIGHT}
        for gang in found.gangs:
            assert gang.queue in (HEAVY, LIGHT)
            assert 0 < gang.minimum <= gang.requested
            assert gang.allocated <= gang.requested

    def test_it_looks_twice_at_the_same_and_changes_nothing_that_it_reads(
        self, adapter: Adapter, site: SchedulerSite, cluster: MemoryCluster, client: Objects
    ) -> None:
        before = self.state(client)
        first, second = (self.look(adapter, self.policy(site), cluster, client) for _ in range(2))
        assert first == second
        assert self.state(client) == before

    def test_the_queues_of_its_objects_have_the_references_of_policies(
        self, site: SchedulerSite, client: Objects
    ) -> None:
        objects = client.list(self.plugin.kinds[0][0]) if self.plugin.kinds else ()
        queues = [self.plugin.own_queue(obj, NO_NODES) for obj in objects]
        named = {ref for queue in queues if queue is not None for ref in queue.refs}
        assert set(site.refs) <= named or not self.plugin.kinds

    def test_the_queue_that_used_more_gets_the_smaller_weight_and_then_nothing_is_written(
        self, site: SchedulerSite, cluster: MemoryCluster, client: Objects, adapter: Adapter
    ) -> None:
        cycles = self.cycles(self.controller(self.policy(site), cluster, client))
        first = next(cycles)
        wrote = {outcome.apply.queue: outcome for outcome in first.outcomes}
        assert all(outcome.result == "applied" for outcome in wrote.values()), first.outcomes
        if not self.writes:
            assert not wrote
            return
        assert wrote, "nothing was written, though one queue used nine tenths"
        assert any(not next(cycles).outcomes for _ in range(_MOST_CYCLES)), "read the value as it was written"
        standings = self.look(adapter, self.policy(site), cluster, client).standings
        heavy, light = standings[HEAVY].weight, standings[LIGHT].weight
        assert heavy is not None
        assert light is not None
        assert isfinite(heavy)
        assert heavy < light, "the weight of a Standing is that of the law, whatever the field holds"

    def test_the_first_use_that_is_known_sets_the_weights_at_once(
        self, site: SchedulerSite, cluster: MemoryCluster, client: Objects, adapter: Adapter
    ) -> None:
        if not self.writes:
            return
        policy, accountant = self.policy(site), Accountant()
        policy = policy.model_copy(update={"bounds": Bounds()})
        cycles = self.cycles(self.controller(policy, cluster, client, accountant))
        next(cycles)
        accountant.spend(**_USE)
        assert any(not next(cycles).outcomes for _ in range(_MOST_CYCLES)), "read the value as it was written"
        standings = self.look(adapter, policy, cluster, client).standings
        heavy, light = standings[HEAVY].weight, standings[LIGHT].weight
        assert heavy is not None
        assert light is not None
        assert heavy < light, "weights of no use stay for the interval"

    def test_it_writes_its_own_field_alone_and_gives_the_operators_value_back(
        self, site: SchedulerSite, cluster: MemoryCluster, client: Objects
    ) -> None:
        before, policy = self.state(client), self.policy(site)
        for outcome in next(self.cycles(self.controller(policy, cluster, client))).outcomes:
            written = leaves({"spec": outcome.apply.patch["spec"]})
            assert len(written) == 1, (
                f"a write owns every field in it, also those that it leaves as they are: {written}"
            )
        after = self.state(client)
        assert after.keys() == before.keys(), "no object is created or deleted"
        for key, obj in after.items():
            old, new = leaves(before[key]), leaves(obj)
            changed = {path for path in old | new if old.get(path) != new.get(path)}
            fields = [path for path in changed if not path[-1].startswith("gputally.dev/")]
            assert len(fields) <= 1, f"{key}: more than one field changed: {fields}"
        release_weights(policy, cluster, clusters={self.plugin.name: client})
        assert self.state(client) == before

    def test_a_dry_run_writes_nothing(self, site: SchedulerSite, cluster: MemoryCluster, client: Objects) -> None:
        if not self.writes:
            return
        before = self.state(client)
        report = next(self.cycles(self.controller(self.policy(site, apply="dry-run"), cluster, client)))
        assert {outcome.result for outcome in report.outcomes} == {"would-apply"}
        assert self.state(client) == before

    def test_a_target_that_is_off_is_left_alone(
        self, site: SchedulerSite, cluster: MemoryCluster, client: Objects
    ) -> None:
        before = self.state(client)
        report = next(self.cycles(self.controller(self.policy(site, mode="off"), cluster, client)))
        assert (report.outcomes, report.mode) == ((), "off")
        assert self.state(client) == before

    def test_a_webhook_that_refuses_is_reported_and_tried_again(
        self, site: SchedulerSite, cluster: MemoryCluster, client: Objects
    ) -> None:
        if not self.writes:
            return
        before, policy = self.state(client), self.policy(site)
        report = next(self.cycles(self.controller(policy, cluster, _Refusing(client))))
        assert {outcome.result for outcome in report.outcomes} == {"refused"}
        assert ("Available", "False") in {(each.type, each.status) for each in report.conditions}
        assert self.state(client) == before
        report = next(self.cycles(self.controller(policy, cluster, client)))
        assert {outcome.result for outcome in report.outcomes} == {"applied"}

    def test_it_says_whether_weights_act(
        self, adapter: Adapter, site: SchedulerSite, cluster: MemoryCluster, client: Objects
    ) -> None:
        assert self.effective(adapter, site, cluster, client).status != "False", "the site's weights act"
        if site.without_effect is not None:
            site.without_effect(cluster)
            assert self.effective(adapter, site, cluster, client).status == "False"

    def test_history_never_counts_twice_in_silence(
        self, adapter: Adapter, site: SchedulerSite, cluster: MemoryCluster, client: Objects
    ) -> None:
        if site.counts_history is not None:
            site.counts_history(cluster)
            assert self.effective(adapter, site, cluster, client).status == "False"

    def test_another_managers_value_stays(self, site: SchedulerSite, cluster: MemoryCluster, client: Objects) -> None:
        if not self.writes or client is not cluster:
            return
        cycles = self.cycles(self.controller(self.policy(site), cluster, client))
        outcome = next(cycles).outcomes[0]
        patch = outcome.apply.patch
        kind = next(each for each in kinds() if (each.api_version, each.kind) == (patch["apiVersion"], patch["kind"]))
        namespace = patch["metadata"].get("namespace", "")
        before = next(obj for obj in site.objects if obj["metadata"]["name"] == outcome.apply.name)
        now = cluster.get(kind, outcome.apply.name, namespace)
        theirs = {**copy.deepcopy(dict(now)), "spec": before.get("spec")}
        theirs["metadata"] = {**theirs["metadata"], "annotations": before["metadata"].get("annotations") or {}}
        cluster.put(theirs, field_manager="another-client")
        expected = cluster.get(kind, outcome.apply.name, namespace).get("spec")
        report = next(cycles)
        assert cluster.get(kind, outcome.apply.name, namespace).get("spec") == expected
        assert outcome.apply.queue in {each.apply.queue for each in report.outcomes if each.result == "contested"}

    def test_an_object_that_a_user_broke_leaves_the_others_in_force(
        self, adapter: Adapter, site: SchedulerSite, cluster: MemoryCluster, client: Objects
    ) -> None:
        if client is not cluster:
            return
        policy = self.policy(site)
        whole = self.look(adapter, policy, cluster, client).queues
        for at, obj in enumerate(site.objects):
            if obj["kind"] == POD.kind:  # the controller's watch reads them
                continue
            mine = (obj["kind"], obj["metadata"]["name"])
            others = {name for name, queue in whole.items() if (queue.kind.kind, queue.name) != mine}
            for broken in _broken(obj):
                there = MemoryCluster(kinds(), [_NODE, *site.objects[:at], broken, *site.objects[at + 1 :]])
                assert others <= self.look(adapter, policy, there, there).queues.keys(), broken


def _broken(obj: Object) -> Iterator[Object]:
    """Yield the object with what its owner may have written in each field of its spec and status."""
    for part in ("spec", "status"):
        for path, held in leaves(obj.get(part) or {}).items():
            for value in _HOSTILE.get(type(held), ()):
                broken = copy.deepcopy(dict(obj))
                inner = broken[part]
                for key in path[:-1]:
                    inner = inner[key]
                inner[path[-1]] = value
                yield broken
