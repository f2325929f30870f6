"""A source of holders of another package stops nothing: what fails is named, and nothing counts as free."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.core.guarded_calls import RETRY_MS
from agent.core.readings import Allocation, Gpu, Unavailable
from agent.core.settings import AgentSettings, SettingsError
from agent.holders.chosen import open_holders
from agent.holders.guard import MOST_ALLOCATIONS, GuardedSource, WrongHoldings, checked
from agent.holders.installed import sharing_systems
from agent.holders.protocol import SEAM, HolderPlugin, Holdings, JobCgroups, NodeSurroundings, VirtualDevices
from agent.wire import Holder, Owner, PodFacts
from gputally.base.background_tasks import BackgroundTasks
from gputally.base.clock import VirtualClock
from gputally.base.plugins import usable
from gputally.base.pod_stop import PodStop, bounded
from gputally.testing.holders import GPUS, NODE, sure
from tests.agent.sample_values import T0
from tests.hypothesis_examples import examples

VM = Holder("container", "vm-7", "vision", "vm-7")
POD = Holder("pod", "u", "vision", "train-0", "main")


class Says:
    """A source that returns what a function says."""

    def __init__(self, says: Callable[[], Any]) -> None:
        self._says = says

    def read(self, at_ms: int, gpus: Sequence[Gpu]) -> Any:
        return self._says()

    def close(self) -> None:
        """Holds nothing."""


def guard(says: Callable[[], Any], most_s: float = 5) -> GuardedSource:
    made = GuardedSource("vms", NODE, lambda: Says(says), most_s=most_s)
    made.open()
    return made


def test_what_it_says_of_this_nodes_gpus_is_believed() -> None:
    said = Holdings((), (Allocation("GPU-a", VM), Allocation("GPU-c", VM, "MIG-c")))
    assert guard(lambda: said).read(T0, GPUS) == said


def test_one_that_hangs_is_asked_again_when_its_call_has_ended() -> None:
    began, go, calls = threading.Event(), threading.Event(), list[int]()

    def says() -> Holdings:
        calls.append(1)
        began.set()
        if len(calls) == 1:
            go.wait(60)
        return Holdings((), (Allocation("GPU-a", VM),))

    slow = guard(says, most_s=0.05)
    for _ in range(3):
        found = slow.read(T0, GPUS)
        assert found.fault
        assert sure(found) == frozenset()
    assert began.wait(60)
    assert len(calls) == 1
    go.set()
    while isinstance(slow.read(T0, GPUS).allocations, Unavailable):
        threading.Event().wait(0.01)


@pytest.mark.parametrize("raises", [False, True])
def test_one_that_names_another_failure_each_time_is_logged_once_until_it_answers(
    raises: bool, caplog: pytest.LogCaptureFixture
) -> None:
    times = iter(range(9))

    def says() -> Holdings:
        at = next(times)
        if at in (4, 8):
            return Holdings((), ())
        if raises:
            raise OSError(f"no answer at {at}")
        return Holdings((), (), f"no answer at {at}")

    asked = guard(says)
    faults = [asked.read(T0, GPUS).fault for _ in range(9)]
    assert len(set(faults)) == 8  # whoever asks has the present one
    assert [record.levelname for record in caplog.records] == ["WARNING", "WARNING"]


def test_one_that_cannot_be_opened_is_tried_again() -> None:
    tries = list[int]()

    def opens() -> Says:
        tries.append(1)
        if len(tries) < 3:
            raise OSError("not yet")
        return Says(lambda: Holdings((), ()))

    late = GuardedSource("late", NODE, opens)
    late.open()
    seen = [sure(late.read(T0 + after_ms, GPUS)) for after_ms in (0, 2_000, RETRY_MS - 1, RETRY_MS)]
    assert [bool(known) for known in seen] == [False, False, False, True]


def leave() -> None:
    raise SystemExit(3)


def divide() -> float:
    return 1 / 0


def nothing() -> None:
    """Returns no holders."""


def no_allocations() -> Holdings:
    return Holdings((), None)  # type: ignore[arg-type]


@pytest.mark.parametrize("says", [leave, divide, nothing, no_allocations])
def test_one_that_fails_is_named(says: Callable[[], Any]) -> None:
    found = guard(says).read(T0, GPUS)
    assert isinstance(found.allocations, Unavailable)
    assert found.fault == found.allocations.reason != ""


def pod(**changes: Any) -> PodFacts:
    return msgspec.structs.replace(
        PodFacts(seq=0, uid="u", namespace="vision", name="train-0", node=NODE, observed_ms=T0), **changes
    )


def held(**changes: Any) -> Holdings:
    return Holdings((), (Allocation(**{"gpu_uuid": "GPU-a", "holder": VM, **changes}),))


@pytest.mark.parametrize(
    "found",
    [
        held(holder=Holder("unattributed", "")), held(holder=Holder("pod", "u")), held(holder=Holder("container", "")),
        held(holder=Holder("container", "x" * 300)), held(holder=Holder("container", "a\nb")), held(holder=None),
        held(replicas=0), held(replicas=5, sharing="mps", sharing_replicas=4), held(fraction_ppm=5),
        held(sharing="fraction", fraction_ppm=0), held(sharing="fraction", fraction_ppm=1_000_001),
        held(sharing="friends"), held(gpu_uuid=7),
        Holdings((), (Allocation("GPU-a", VM), Allocation("GPU-a", VM))),
        Holdings((), (Allocation("GPU-a", VM),) * (MOST_ALLOCATIONS + 1)),
        Holdings((pod(node="another"),), ()), Holdings((pod(uid=""),), ()), Holdings((pod(name="\udcff"),), ()),
        Holdings((pod(namespace="a\nb"),), ()), Holdings((pod(owners=(Owner("Job", "\udcff"),)),), ()),
        Holdings((pod(created_ms=2**60),), ()), Holdings((pod(owners=(Owner("Job", "a"),) * 65),), ()),
        Holdings((pod(), pod(name="another")), ()),
        Holdings((pod(namespace="nlp"),), (Allocation("GPU-a", POD),)),
        Holdings((), (Allocation("GPU-a", POD), Allocation("GPU-b", msgspec.structs.replace(POD, namespace="nlp")))),
    ],
)  # fmt: skip
def test_what_are_no_holders_of_this_node_is_refused(found: Holdings) -> None:
    with pytest.raises(WrongHoldings):
        checked(found, GPUS, NODE)


LONG = "a" * 253


def test_a_pod_may_have_the_longest_names_of_kubernetes() -> None:
    longest = pod(
        name=LONG, workload=f"StatefulSet/{LONG}", queue_ref=f"kueue:{LONG}/{LONG}", owners=(Owner("Job", LONG, "u"),),
        labels={f"{LONG}/{LONG[:63]}": LONG[:63]}, requests={f"{LONG}/{LONG[:63]}": "1"},
    )  # fmt: skip
    assert checked(Holdings((longest,), ()), GPUS, NODE).facts == (longest,)


@pytest.mark.parametrize("name", ["labels", "requests"])
def test_what_the_author_of_a_pod_writes_into_it_leaves_no_holder_unknown(name: str) -> None:
    author = {"good": "a", "long": "x" * 5_000, "\udcff": "half", "line": "a\nb"} | {f"z{n}": "" for n in range(300)}
    found = checked(Holdings((pod(**{name: author}),), (Allocation("GPU-a", POD),)), GPUS, NODE)
    kept = getattr(found.facts[0], name)
    assert kept.items() <= author.items()
    assert (kept["good"], "long" in kept, "\udcff" in kept, "line" in kept) == ("a", False, False, False)
    assert msgspec.json.decode(msgspec.json.encode(found.facts[0]), type=PodFacts) == found.facts[0]
    assert len(found.allocations) == 1


def test_a_reason_of_a_stop_of_any_length_and_time_leaves_no_holder_unknown() -> None:
    stop = PodStop("evicted", "x" * 5_000, "a\nb", "<b>" * 5_000, at_ms=-(2**70))
    found = checked(Holdings((pod(stop=stop),), (Allocation("GPU-a", POD),)), GPUS, NODE)
    assert found.facts[0].stop == bounded(stop)
    assert len(found.allocations) == 1
    assert msgspec.json.decode(msgspec.json.encode(found.facts[0]), type=PodFacts) == found.facts[0]


@pytest.mark.parametrize("stop", [7, PodStop(7), PodStop("x", at_ms="now"), PodStop("x", at_ms=1.5)])  # type: ignore[arg-type]
def test_what_is_no_stop_of_a_pod_is_refused(stop: Any) -> None:
    with pytest.raises(WrongHoldings):
        checked(Holdings((pod(stop=stop),), ()), GPUS, NODE)


def test_one_that_opens_late_is_opened_once() -> None:
    go, tries = threading.Event(), list[int]()

    def opens() -> Says:
        tries.append(1)
        go.wait(60)
        return Says(lambda: Holdings((), ()))

    late = GuardedSource("late", NODE, opens, most_opening_s=0.05)
    late.open()
    assert sure(late.read(T0, GPUS)) == frozenset()
    go.set()
    while not sure(late.read(T0, GPUS)):
        threading.Event().wait(0.01)
    assert len(tries) == 1


@pytest.mark.parametrize(
    ("name", "unsure"),
    [
        ({"gpu_uuid": "GPU-c", "mig_uuid": "MIG-gone"}, {"GPU-c"}),
        ({"gpu_uuid": "GPU-elsewhere"}, set()),
        ({"gpu_uuid": "card 7"}, {"GPU-a", "GPU-b", "GPU-c"}),
    ],
)
def test_a_device_that_is_not_here_is_named_and_what_it_may_mean_is_unknown(
    name: dict[str, str], unsure: set[str]
) -> None:
    found = checked(held(**name), GPUS, NODE)
    assert found.allocations == ()
    assert found.unresolved == (name.get("mig_uuid", name["gpu_uuid"]),)
    assert (set(found.unknown), bool(found.fault)) == (unsure, True)


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
    lambda inner: st.tuples(inner, inner) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=5,
)


@settings(max_examples=examples(50, 1_000))
@given(st.sampled_from(["holder", "sharing", "replicas", "fraction_ppm", "mig_uuid"]), anything)
def test_whatever_is_in_a_field_the_holders_stay_known_or_unknown(field: str, value: Any) -> None:
    found = guard(lambda: held(**{field: value})).read(T0, GPUS)
    assert isinstance(found, Holdings)
    assert isinstance(found.allocations, Unavailable) or len(found.allocations) <= 1


# --- settings and manifests -----------------------------------------------------------------------


def opened(text: str, **settings_: Any) -> object:
    clock = VirtualClock(T0)
    return open_holders(text, NodeSurroundings(NODE, clock, BackgroundTasks(clock), AgentSettings(**settings_)))


SOURCES = [one for one in usable(SEAM, HolderPlugin).values() if one.open is not None]


@pytest.mark.parametrize("source", SOURCES, ids=lambda one: one.name)
def test_a_wrong_setting_says_what_is_expected(source: HolderPlugin) -> None:
    name = source.name
    wrong, tells = (name, f"expected {name}=PLACE") if source.place else (f"{name}=x", f"expected {name}$")
    with pytest.raises(SettingsError, match=tells):
        opened(wrong)
    with pytest.raises(SettingsError, match=f"'{name}s'.*{name}"):
        opened(f"{name}s")


def test_without_a_name_no_plug_in_is_found() -> None:
    with pytest.raises(SettingsError, match="no plug-in"):
        opened("")


def test_an_unknown_sharing_system_is_named_with_those_that_are_known() -> None:
    """A source of holders is none."""
    with pytest.raises(SettingsError, match=r"'no-system'; known: (?P<known>.*)") as told:
        opened(SOURCES[0].name, gpu_sharing="schedulers,no-system")
    assert [name for name in sharing_systems() if name not in str(told.value)] == []


@pytest.mark.parametrize(
    ("manifest", "values"),
    [
        (HolderPlugin, {"name": "vms", "reaches": "x", "page": "x"}),
        (HolderPlugin, {"name": "V M", "reaches": "x", "page": "x", "open": opened}),
        (VirtualDevices, {"devices": "gpu", "cores": "a/b", "memory": "a/b", "memory_percent": "a/b"}),
        (VirtualDevices, dict.fromkeys(("devices", "cores", "memory", "memory_percent"), "a/b") | {"separator": "x"}),
        (JobCgroups, {"folders": ()}), (JobCgroups, {"folders": ("a*b*c/d",)}), (JobCgroups, {"folders": ("(a+)+",)}),
        (JobCgroups, {"folders": ("jobs",), "job": "(a+)+"}), (JobCgroups, {"folders": ("jobs",), "cancel": "a; b"}),
    ],
)  # fmt: skip
def test_a_manifest_that_cannot_work_is_refused(manifest: type, values: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r" is | are | neither "):
        manifest(**values)
