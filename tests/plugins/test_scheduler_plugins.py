"""A scheduler of another package is found, guarded and proved by the suite: that of the tutorial, and spoiled ones."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from accountant.inventory.pod_facts import PodObject, pod_sighting
from accountant.inventory.pod_owners import Chain
from accountant.inventory.pod_queues import Queuing
from accountant.wire.policy_models import Policy
from fairshare.controller import weight_writer as writer
from fairshare.controller.control_loop import Controller
from fairshare.controller.cycle_report import TargetReport
from fairshare.controller.policy_file import advice, policy_of_document
from fairshare.controller.weight_writer import Adoption, release_weights
from fairshare.core.gpu_demand import read_pod
from fairshare.core.queues_and_weights import TargetQueue
from fairshare.targets import guard
from fairshare.targets.installed import adapters, kinds
from fairshare.web.policy_form import PolicyText, draft, form_of, scalars
from gputally import plugin_list
from gputally.base.clock import VirtualClock
from gputally.base.errors import ClusterError, NotFound
from gputally.base.yaml_file import FileFault, parse
from gputally.doctor.rbac_checks import judge_rights, needed_rights
from gputally.doctor.scheduler_checks import own_queues
from gputally.kubernetes.memory_cluster import MemoryCluster
from gputally.kubernetes.mig_parts import NO_NODES
from gputally.kubernetes.objects import GPU, Kind
from gputally.kubernetes.pod_queue_labels import queue_ref, refs_of_levels
from gputally.kubernetes.scheduler_plugins import left_out, schedulers
from gputally.testing import schedulers as suite
from gputally.testing.fake_accountant import Accountant
from gputally.testing.fake_scheduler import ENTRY_POINTS, QUEUE, QUEUE_KEY, SCHEDULER_NAME, queue_object, setup_object
from tests.docs.code_blocks import PAGES
from tests.fairshare.builders import node_object
from tests.inventory.memory_api_server import FakeApi, pod
from tests.plugins.installed import install

FILES = {block.words[0]: block.text for block in PAGES["docs/plugins/scheduler.md"] if block.words}
ADAPTER, MANIFEST = FILES["lanes_adapter.py"], FILES["lanes_scheduler.py"]
ADAPTER += "\n\nclass Mute(Exception):\n    def __str__(self):\n        raise SystemExit(3)\n"
go = threading.Event()
"""Ends an adapter that hangs."""
Spoil = tuple[str, str]
OTHERS = "__import__('gputally.testing.fake_scheduler').testing.fake_scheduler.QUEUE"
GANGS = "__import__('gputally').kubernetes.scheduler_plugins.PodGangKeys"
READ = "observation = read_queues(found, read_lane)"
STRANGE = f"{{name: replace(one, kind={OTHERS}) for name, one in observation.queues.items()}}"
LANE = Kind("lanes.example.com/v1", "Lane", "lanes")
KINDS = (LANE, replace(LANE, kind="LaneSetup", plural="lanesetups"))
HANGS = (
    "        lanes = seen.get(LANE, ())",
    "        from tests.plugins import test_scheduler_plugins as t; t.go.wait()",
)


@pytest.fixture
def lanes(folder: Path) -> Iterator[Callable[..., None]]:
    """Returns a function that installs the tutorial's package with a text replaced, in its adapter or its manifest."""

    def make(*changes: Spoil) -> None:
        texts = {"lanes_adapter": ADAPTER, "lanes_scheduler": MANIFEST}
        for old, new in changes:
            assert any(old in text for text in texts.values())
            texts = {name: text.replace(old, new) for name, text in texts.items()}
        install(folder, "gputally-fake-scheduler", ENTRY_POINTS)
        install(folder, "gputally-lanes", {"gputally.schedulers": {"lanes": "lanes_scheduler:SCHEDULER"}}, **texts)

    go.clear()
    yield make
    go.set()


def lane(name: str, kind: str = "Lane", **spec: Any) -> dict[str, Any]:
    status = {"heldGpus": 4, "wantedGpus": 12}
    head = {"apiVersion": "lanes.example.com/v1", "kind": kind, "metadata": {"name": name}}
    return {**head, "spec": spec or {"weight": 10}, "status": status}


SETUP = lane("default", "LaneSetup", order="weighted")


def cycle(cluster: MemoryCluster) -> dict[str, TargetReport]:
    names = {"blue": "lanes:blue", "red": "lanes:red", "a": "fake:a", "b": "fake:b"}
    policy = Policy.model_validate(
        {
            "queues": [{"name": name, "refs": [ref]} for name, ref in names.items()],
            "targets": {"lanes": {"apply": "enforce"}, "fake": {"apply": "enforce"}},
            "bounds": {"interval": 0},
        }
    )
    accountant = Accountant()
    accountant.spend(blue=0.5, red=0.1, a=0.4)
    report = Controller(policy, accountant, cluster, VirtualClock(suite.NOW_MS)).cycle()
    return {target.target: target for target in report.targets}


def objects() -> list[Any]:
    others = [queue_object("a"), queue_object("b"), setup_object(), node_object(gpus=16)]
    return [lane("blue"), lane("red"), SETUP, *others]


def test_a_scheduler_of_another_package_gets_weights_and_its_pods_are_billed(lanes: Callable[..., None]) -> None:
    lanes()
    cluster = MemoryCluster(kinds(), objects())
    targets = cycle(cluster)
    assert {outcome.result for outcome in targets["lanes"].outcomes} == {"applied"}
    assert queue_ref("ns", "lanes-scheduler", {"lanes.example.com/lane": "blue"}) == "lanes:blue"
    assert schedulers()["lanes"].own_queue(lane("blue"), NO_NODES) is not None


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (("import LANE, SETUP", "import LANE, SETUP, NOTHING"), "ImportError"),
        (("from dataclasses import replace", "raise SystemExit(3)"), "SystemExit"),
        (('    name = "lanes"', '    name = "lines"'), "lanes"),
        (("        lanes = seen.get(LANE, ())", "        1 / 0"), "ZeroDivisionError"),
        (("        lanes = seen.get(LANE, ())", "        raise SystemExit(3)"), "SystemExit"),
        (("        return replace(observation, conditions=", "        return dict(conditions="), "dict"),
        (HANGS, "no end"),
        (('return {"weight": value}', "return value"), "spec"),
        (('return {"weight": value}', 'return {"weight": value, "guaranteedGpus": 1}'), "guaranteedGpus"),
        (('return {"weight": value}', "return {}"), "field"),
        (("        lanes = seen.get(LANE, ())", "        raise KeyboardInterrupt"), "KeyboardInterrupt"),
        (("        lanes = seen.get(LANE, ())", "        raise Mute"), "Mute"),
        (("from dataclasses import replace", "raise GeneratorExit"), "GeneratorExit"),
        (("kinds=((LANE,), (SETUP,))", "kinds=(LANE, SETUP)"), "kinds"),
        (("own_queue=own_queue", f"own_queue=own_queue, gangs={GANGS}('Lane', 'gang', leaders=((),))"), "leaders"),
        (("own_queue=own_queue", f"own_queue=own_queue, gangs={GANGS}('Lane', 'gang', leaders=(('l',),))"), "leaders"),
        (("PodQueueLabels((", "PodQueueLabels(None and ("), "keys"),
        (('prefixes=("lanes",)', 'prefixes=("lanes", "fake")'), "fake"),
        (("kinds=((LANE,),", f"kinds=((LANE,), ({OTHERS},),"), "Queue"),
        (("kinds=((LANE,),", 'kinds=((LANE,), (Kind("v1", "Pod", "pods"),),'), "Pod"),
        (('    prefixes = ("lanes",)', '    prefixes = ("lanes",)\n    stop = object()'), "stop"),
        (('    prefixes = ("lanes",)', '    prefixes = ("lanes",)\n    most_writes = None'), "most_writes"),
        (("    settings = LanesSection", "    settings = None"), "settings"),
        (('    prefixes = ("lanes",)', '    prefixes = ("lanes",)\n    reasons = ("NoSuchLane",)'), "reasons"),
        (('    prefixes = ("lanes",)', '    prefixes = ("lanes",)\n    managers = {"helm": "{secret}"}'), "managers"),
        ((READ, f"{READ}; observation = replace(observation, left_behind={STRANGE})"), "Queue"),
        ((READ, f"{READ}; observation = replace(observation, gangs=tuple({STRANGE}.values()))"), "Queue"),
        (("ObjectQuery((LANE,), required", f"ObjectQuery((LANE, {OTHERS}), required"), "Queue"),
        (("target_queue(lane, LANE,", "target_queue(lane, None,"), "lanes"),
    ],
)  # fmt: skip
def test_a_scheduler_that_fails_is_named_and_stops_no_other(
    lanes: Callable[..., None], change: Spoil, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lanes(change)
    if says == "no end":  # the other scheduler is of another package too, and needs its time
        monkeypatch.setattr(guard, "MOST_CALLS_S", 1.0)
    cluster = MemoryCluster(dict.fromkeys((*kinds(), *KINDS)), objects())
    targets = cycle(cluster)
    ((reason, text),) = targets["lanes"].degraded.items()
    assert reason == "PluginFailed"
    assert "lanes" in text
    assert says in text
    assert {outcome.result for outcome in targets["fake"].outcomes} == {"applied"}
    assert cluster.get(QUEUE, "a")["spec"]["weight"] != 1
    assert [obj["spec"] for obj in cluster.list(LANE)] == [{"weight": 10}] * 2
    document = parse("{targets: {lanes: {setup: x}}, queues: [{name: a}]}", "policy.yaml")
    policy_of_document(document)
    assert queue_ref("ns", SCHEDULER_NAME, {QUEUE_KEY: "a"}) == "fake:a"


def test_a_call_that_hangs_is_not_repeated_until_it_has_ended(
    lanes: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    lanes(
        (
            "        lanes = seen.get(LANE, ())",
            "        from tests.plugins import test_scheduler_plugins as t; t.go.wait()",
        )
    )
    monkeypatch.setattr(guard, "MOST_CALLS_S", 0.1)
    cluster = MemoryCluster(kinds(), objects())
    for _ in range(3):
        assert cycle(cluster)["lanes"].degraded.keys() == {"PluginFailed"}
    assert sum(thread.name == "plugin" for thread in threading.enumerate()) == 1


def test_the_calls_of_a_cycle_have_one_limit_together(lanes: Callable[..., None]) -> None:
    lanes()
    (found,) = (each for each in adapters() if each.name == "lanes")
    assert isinstance(found, guard.GuardedAdapter)
    clock, policy = VirtualClock(suite.NOW_MS), Policy.model_validate({"queues": [{"name": "a"}]})

    class Slow(type(found._adapter)):  # type: ignore[misc]
        def spec(self, queue: Any, value: Any) -> Any:
            clock.advance(6_000)
            return super().spec(queue, value)

    slow = guard.GuardedAdapter(schedulers()["lanes"], Slow(), clock)
    queue = TargetQueue("a", "u", "1", None, LANE)
    for _cycle in range(2):
        slow.reads(policy)
        assert [slow.spec(queue, 1.0) for _ in range(2)] == [{"weight": 1.0}] * 2
        with pytest.raises(guard.PluginFault, match="in a cycle"):
            slow.spec(queue, 1.0)


@pytest.mark.parametrize(
    ("of", "shown"),
    [
        ("str = Field(default_factory=lambda: 'lanes')", "lanes"),
        ("float = Field(default_factory=lambda: 1.5)", "1.5"),
        ("Duration = Field(default_factory=lambda: 3600)", "1h"),
        ("Duration = Field(default_factory=lambda: 'soon')", "soon"),
        ("float = Field(default_factory=lambda: 1 / 0)", "computed"),
        ("float = Field(default_factory=lambda data: data['apply'])", "computed"),
    ],
)
def test_the_form_shows_the_default_of_a_section_of_another_package(
    lanes: Callable[..., None], of: str, shown: str
) -> None:
    lanes(
        ('    setup: str = "default"', f'    setup: str = "default"\n    own: {of}'),
        (
            "from accountant.wire",
            "from pydantic import Field\nfrom gputally.server.config_loading import Duration\nfrom accountant.wire",
        ),
    )
    (own,) = (each for each in scalars() if each.name == "targets.lanes.own")
    assert own.default(Policy) == shown


def test_what_another_package_says_of_reasons_and_managers_is_told(lanes: Callable[..., None]) -> None:
    """The doctor tells the cures, and who adopts a field that another manager owns is told what to do."""
    reason = "__import__('fairshare').core.queues_and_weights.ConditionReason"
    said = f"({reason}('Effective', 'False', 'NoSetup', 'the lanes have no setup', 'make a LaneSetup'),)"
    own = f"    reasons = {said}\n    managers = {{'laner': 'let laner leave {{field}} of {{kind}}s alone'}}"
    lanes(('    prefixes = ("lanes",)', f'    prefixes = ("lanes",)\n{own}'))
    (reason,) = next(adapter.reasons for adapter in adapters() if adapter.name == "lanes")
    assert (reason.reason, reason.cure) == ("NoSetup", "make a LaneSetup")
    adoption = Adoption("lanes", "a", "Lane", "a", "spec.weight", ("laner",), "adopted")
    assert "let laner leave spec.weight of Lanes alone" in writer.advice(adoption)


def test_most_writes_of_another_package_is_kept_and_bounded(lanes: Callable[..., None]) -> None:
    lanes(('    prefixes = ("lanes",)', '    prefixes = ("lanes",)\n    most_writes = 1'))
    targets = cycle(MemoryCluster(kinds(), objects()))
    assert sorted(outcome.result for outcome in targets["lanes"].outcomes) == ["applied", "deferred"]


@pytest.mark.parametrize(
    "change",
    [
        ("from dataclasses import replace", "import a_library_that_is_missing"),
        ("GROUP = ", "import a_library_that_is_missing; GROUP = "),
        (
            '    setup: str = "default"',
            '    setup: str = "default"\n    _fail = field_validator("setup")(lambda _: {}[1])',
        ),
    ],
)
def test_a_policy_stays_in_force_if_the_scheduler_of_a_section_fails(lanes: Callable[..., None], change: Spoil) -> None:
    lanes(change, ("from accountant.wire", "from pydantic import field_validator\nfrom accountant.wire"))
    text = "{targets: {lanes: {setup: x}}, preemption: {targets: {lanes: off}}, queues: [{name: a, refs: ['lanes:a']}]}"
    document = parse(text, "policy.yaml")
    policy = policy_of_document(document)
    (warning,) = [each for each in advice(policy) if each.path == ("targets", "lanes")]
    assert "lanes" in warning.message
    assert not [each for each in advice(policy) if each.path[:1] == ("queues",) and each.path[2] == "refs"]


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("{targets: {lane: {apply: enforce}}, queues: [{name: a}]}", "targets.lane"),
        ("{targets: {lanes: {setpu: x}}, queues: [{name: a}]}", "targets.lanes.setpu"),
        ("{targets: {lanes: {mode: loud}}, queues: [{name: a}]}", "targets.lanes.mode"),
        ("{preemption: {targets: {lane: off}}, queues: [{name: a}]}", "preemption.targets.lane"),
        ("{preemption: {targets: {runai: off}}, queues: [{name: a}]}", "preemption.targets.runai"),
    ],
)
def test_a_section_of_a_policy_is_checked_by_the_scheduler_that_it_names(
    lanes: Callable[..., None], text: str, place: str
) -> None:
    lanes()
    with pytest.raises(FileFault, match=f": {place}: "):
        policy_of_document(parse(text, "policy.yaml"))
    assert policy_of_document(parse("{targets: {lanes: {setup: x}}, queues: [{name: a}]}", "policy.yaml"))


def test_the_doctor_names_the_rights_that_its_manifest_wants(lanes: Callable[..., None]) -> None:
    lanes()
    rights = needed_rights("fairshare", {("lanes.example.com", "lanes")})
    assert [str(right) for right in rights] == ["list lanes.lanes.example.com", "patch lanes.lanes.example.com"]
    (found,) = judge_rights({"fairshare": {rights[0]: True, rights[1]: False}}, {"fairshare": "me"}).findings
    assert "patch lanes.lanes.example.com" in found.what
    assert "helm" not in found.remedy


def test_the_doctor_names_a_scheduler_whose_queues_it_cannot_read(lanes: Callable[..., None]) -> None:
    lanes(('    name = lane["metadata"]["name"]\n    return', "    raise SystemExit(3)\n    return"))
    with pytest.raises(guard.PluginFault, match="lanes"):
        own_queues(MemoryCluster(kinds(), objects()), NO_NODES)


LAWS = suite.SchedulerSuite


@pytest.mark.parametrize(
    ("law", "change"),
    [
        ("it_asks_for_no_kind_that_its_manifest_does_not_name", ("y((SETUP,)", 'y((replace(SETUP, kind="X"),)')),
        ("its_queues_are_found_and_have_demand", ("Standing(max(held, wanted), held,", "Standing(held, wanted,")),
        ("the_queues_of_its_objects_have_the_references_of_policies", ('refs=(f"lanes:{name}",)', "refs=()")),
        (
            "the_queue_that_used_more_gets_the_smaller_weight_and_then_nothing_is_written",
            ("else float(weight)", "else 10.0"),
        ),
        (
            "it_writes_its_own_field_alone_and_gives_the_operators_value_back",
            ('return {"weight": value}', 'return {"weight": value, "guaranteedGpus": 1}'),
        ),
        ("it_says_whether_weights_act", ('!= "weighted"', '== "never"')),
        ("history_never_counts_twice_in_silence", ('("spec", "halfLife")', '("spec", "half")')),
        (
            "an_object_that_a_user_broke_leaves_the_others_in_force",
            ('value_at(setups[0], ("spec", "order")) != "weighted"', 'not setups[0]["spec"]["order"].index("w") == 0'),
        ),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)  # fmt: skip
def test_the_suite_finds_what_is_wrong(lanes: Callable[..., None], law: str, change: Spoil) -> None:
    lanes(change)
    with pytest.raises((AssertionError, guard.PluginFault)):
        judge(law)


def judge(law: str) -> None:
    """Run a test of the suite."""
    case = LAWS()
    case.plugin = schedulers()["lanes"]  # type: ignore[misc]
    site = suite.SchedulerSite(
        refs=("lanes:blue", "lanes:red"),
        objects=(lane("blue"), lane("red"), SETUP),
        without_effect=lambda cluster: cluster.load([lane("default", "LaneSetup", order="fifo")]),
        counts_history=lambda cluster: cluster.load([lane("default", "LaneSetup", order="weighted", halfLife="24h")]),
    )
    cluster = MemoryCluster(kinds(), [node_object(gpus=16), *site.objects])
    (adapter,) = (each for each in adapters() if each.name == "lanes")
    given = {"site": site, "cluster": cluster, "client": cluster, "adapter": adapter}
    test = getattr(LAWS, f"test_{law}")
    test(case, **{name: given[name] for name in test.__code__.co_varnames[1 : test.__code__.co_argcount]})


def test_the_suite_takes_a_field_in_which_less_is_more(lanes: Callable[..., None]) -> None:
    """A price, of which the controller's weight is the inverse."""
    express = "    def express(self, *given):\n        return {one.queue: 100 / one.value for one in given[1]}\n\n"
    as_price = ("    def spec(", f"{express}    def spec(")
    law = "the_queue_that_used_more_gets_the_smaller_weight_and_then_nothing_is_written"
    lanes(as_price, ("held, queue.weight,", "held, 100 / queue.weight,"))
    judge(law)


def test_the_suite_finds_a_price_that_is_read_as_a_weight(lanes: Callable[..., None]) -> None:
    lanes(("held, queue.weight,", "held, 100 / queue.weight,"))
    with pytest.raises(AssertionError):
        judge("the_queue_that_used_more_gets_the_smaller_weight_and_then_nothing_is_written")


def test_the_suite_finds_references_that_no_pod_can_name(lanes: Callable[..., None]) -> None:
    """Use would never count for such a queue."""
    lanes()
    case = LAWS()
    case.plugin = schedulers()["lanes"]  # type: ignore[misc]
    law = case.test_its_pods_name_their_queue_and_no_other_schedulers_pods_do
    law(suite.SchedulerSite(("lanes:blue", "lanes:red"), ()))
    for ref in ("lanes:ns/blue", "rails:blue"):
        with pytest.raises(AssertionError):
            law(suite.SchedulerSite((ref, "lanes:red"), ()))


def test_the_form_of_the_policy_has_the_section_of_a_scheduler_of_another_package(lanes: Callable[..., None]) -> None:
    lanes()
    here = PolicyText.of("queues:\n- {name: a, refs: ['lanes:a']}\n", "policy.yaml")
    fields = {each.name: each for each in scalars()}
    assert [word for word, _ in fields["targets.lanes.mode"].choices] == ["weight", "off"]
    assert fields["targets.lanes.setup"].kind == "text"
    assert fields["targets.lanes.apply"].default(Policy) == "dry-run"
    empty = form_of(here)
    found = draft(here, replace(empty, values={**empty.values, "targets.lanes.setup": "fast"}))
    assert found.policy is not None
    assert found.policy.targets.others["lanes"].model_dump()["setup"] == "fast"


def test_a_fault_in_the_section_of_a_scheduler_of_another_package_is_beside_its_field(
    lanes: Callable[..., None],
) -> None:
    lanes()
    here = PolicyText.of("queues:\n- {name: a, refs: ['lanes:a']}\ntargets: {lanes: {setup: 7}}\n", "policy.yaml")
    found = draft(here, form_of(here))
    assert [(each.field, each.place) for each in found.faults] == [("targets.lanes.setup", "policy.yaml:3")]
    assert not found.sound


GANGS = 'PodQueueLabels(("lanes.example.com/lane",), frozenset({"lanes-scheduler"})),'
KEYS = '__import__("gputally").kubernetes.scheduler_plugins.PodGangKeys("KIND", "lanes/gang", rank="lanes/rank")'
GANGED = f"{GANGS}\n    gangs={KEYS},"


def test_pods_of_a_scheduler_of_another_package_form_the_gangs_that_they_name(lanes: Callable[..., None]) -> None:
    lanes((GANGS, GANGED.replace("KIND", "Lane")))
    metadata = {
        "name": "p", "namespace": "ns", "uid": "u", "annotations": {"lanes/gang": "g"}, "labels": {"lanes/rank": "7"},
    }  # fmt: skip
    spec = {"schedulerName": "lanes-scheduler", "containers": [{"resources": {"limits": {GPU: "2"}}}]}
    pod = read_pod({"metadata": metadata, "spec": spec})
    assert pod is not None
    assert (pod.gang, pod.rank) == ("Lane/ns/g", (-7,))
    elsewhere = read_pod({"metadata": metadata, "spec": spec | {"schedulerName": "default-scheduler"}})
    assert elsewhere is not None
    assert elsewhere.gang == ""


@pytest.mark.parametrize(("names_queue", "queue"), [("True", "lanes:fast"), ("False", "")])
def test_the_object_of_a_gang_of_another_package_names_the_queue_of_its_pods(
    lanes: Callable[..., None], names_queue: str, queue: str
) -> None:
    lanes((GANGS, GANGED.replace("KIND", "Lane").replace("rank=", f"names_queue={names_queue}, rank=")))
    api = FakeApi()
    api.served.add("LaneGroup")
    api.put("LaneGroup", {"metadata": {"name": "g", "namespace": "vision"}, "spec": {"queue": "fast"}})
    queuing = Queuing(api, lambda _: None, lambda: 0)
    for reflector in queuing.reflectors:
        with suppress(NotFound):
            reflector.sync()
    told = pod("p", annotations={"lanes/gang": "g"}, scheduler="lanes-scheduler")
    sighting = pod_sighting(msgspec.json.decode(json.dumps(told), type=PodObject), 0)
    assert sighting is not None
    assert queuing.ref(sighting, Chain((), {}), "") == queue


def test_gangs_of_a_kind_of_another_scheduler_are_refused(lanes: Callable[..., None]) -> None:
    lanes((GANGS, GANGED.replace("KIND", "Workload")))
    assert "lanes" not in schedulers()
    assert "Workload" in left_out()["lanes"]


LEVEL = "__import__('gputally').kubernetes.scheduler_plugins.LevelObjects"
LEVELS = f"""
    levels=__import__('gputally').kubernetes.scheduler_plugins.QueueLevels(
        {LEVEL}("Lane", ("spec.road",)), {LEVEL}("LaneSetup", ("status.road",), "spec.lane"),
        {LEVEL}("LaneSetup", ("spec.net",)), {LEVEL}("KIND", ("spec.net",)), "lanes-net",
    ),"""
ANYWHERE = GANGS.replace('frozenset({"lanes-scheduler"})', "None")


@pytest.mark.parametrize(
    ("pods", "kind", "refused"),
    [(ANYWHERE, "LaneSetup", ""), (GANGS, "LaneSetup", "scheduler_names"), (ANYWHERE, "Cohort", "Cohort")],
)
def test_queues_of_another_package_may_have_levels_in_its_own_kinds(
    lanes: Callable[..., None], pods: str, kind: str, refused: str
) -> None:
    lanes((GANGS, pods + LEVELS.replace("KIND", kind)))
    assert ("lanes" in schedulers()) == (not refused)
    assert refused in left_out().get("lanes", "")
    found = refs_of_levels("lanes:ns/fast@a1^north")
    assert found == (
        ("lanes:ns/fast@a1^north",) if refused else ("lanes:ns/fast", "lanes:a1", "lanes-net:north")
    )  # fmt: skip


def test_a_stored_policy_is_read_although_the_scheduler_of_a_section_is_not_installed() -> None:
    stored = {"queues": [{"name": "a", "refs": ["gone:a"]}], "targets": {"gone": {"mode": "deserved", "config": "x"}}}
    policy = Policy.model_validate(stored)
    assert policy.model_dump(mode="json")["targets"]["gone"] == {"apply": "dry-run", **stored["targets"]["gone"]}


def test_weights_are_given_back_although_the_plug_in_of_another_scheduler_is_broken(lanes: Callable[..., None]) -> None:
    lanes(("        lanes = seen.get(LANE, ())", "        1 / 0"))
    cluster = MemoryCluster(kinds(), objects())
    assert {outcome.result for outcome in cycle(cluster)["fake"].outcomes} == {"applied"}
    policy = Policy.model_validate({"queues": [{"name": "x", "refs": ["lanes:x"]}, {"name": "a", "refs": ["fake:a"]}]})
    unread: dict[str, ClusterError] = {}
    outcomes = release_weights(policy, cluster, unread=unread.__setitem__)
    assert {(outcome.apply.name, outcome.result) for outcome in outcomes} == {("a", "applied")}
    assert unread.keys() == {"lanes"}


def test_the_list_of_plugins_says_that_an_adapter_cannot_be_used(
    lanes: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    lanes(("import LANE, SETUP", "import LANE, SETUP, NOTHING"))
    assert plugin_list.main(["--output", "json"]) == 1
    (found,) = [one for one in json.loads(capsys.readouterr().out) if one["name"] == "lanes"]
    assert "ImportError" in found["fault"]
