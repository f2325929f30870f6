"""The contract of sources of holders and of ways to share GPUs, as tests.

For a source, derive a class from `HolderSuite` and say how it is faked:

    class TestVms(HolderSuite):
        plugin = HOLDERS

        @pytest.fixture
        def site(self, tmp_path):
            return File(tmp_path / "vms.json")

`Site` says what the fake offers. For manifests that are data, derive one from `PartsSuite` or `JobsSuite`, with
examples. Time is the fake's: no test waits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar, Protocol

import pytest

from agent.core.readings import Gpu, MigInstance, Unavailable
from agent.core.settings import AgentSettings, SettingsError
from agent.holders.chosen import opening
from agent.holders.guard import checked
from agent.holders.process_cgroups import holder_in
from agent.holders.protocol import SEAM, HolderPlugin, HolderSource, Holdings, NodeSurroundings
from agent.holders.virtual_parts import limited_ppm, virtual_device
from agent.wire import JOB
from gputally.base.background_tasks import BackgroundTasks
from gputally.base.clock import VirtualClock
from gputally.base.errors import AgentError
from gputally.base.plugins import usable
from gputally.base.yaml_file import FileFault

START_MS = 1_790_812_800_000
SECOND_MS = 1_000
PATIENCE_MS = 600_000
"""How long a source may take to notice that what it reads answers again."""
NODE = "node-1"
MEMORY_MIB = 81_920
GPUS = (
    Gpu("GPU-a", 0, "NVIDIA H100 80GB HBM3", MEMORY_MIB, minor=0),
    Gpu("GPU-b", 1, "NVIDIA H100 80GB HBM3", MEMORY_MIB, minor=1),
    Gpu(
        "GPU-c", 2, "NVIDIA H100 80GB HBM3", MEMORY_MIB, mig_enabled=True, minor=2,
        mig=(MigInstance("MIG-c", "3g.40gb", gi=1, ci=0, compute=3, memory_mib=MEMORY_MIB // 2),),
    ),
)  # fmt: skip
"""The GPUs of the suite's node; the last one has a MIG instance."""

Held = tuple[str, str, str, str]
"""(GPU uuid, MIG uuid or "", uid of the holder, its namespace)."""


class Site(Protocol):
    """The fake of what a source reads.

    place: what follows `name=` in the setting, so that the source finds the fake; "" if it takes no place.
    clock: the time of the fake; the agent's too."""

    place: str
    clock: VirtualClock

    def give(self, gpu_uuid: str, mig_uuid: str) -> Held:
        """From now on, somebody holds a GPU of `GPUS`, or its MIG instance, which was free. Returns who."""
        ...

    def take(self, held: Held) -> None:
        """From now on, this device is free again."""
        ...

    def fail(self) -> None:
        """From now on, the source does not answer."""
        ...

    def mend(self) -> None:
        """From now on, the source answers again."""
        ...

    def damage(self, held: Held) -> bool:
        """From now on, what says who holds this device cannot be read, such as its file or its entry; the rest of the
        source can. Returns False if the source has no such parts."""
        ...


def held(found: Holdings) -> set[Held]:
    """Who holds what. The source knows it."""
    assert not isinstance(found.allocations, Unavailable), found.allocations
    return {(one.gpu_uuid, one.mig_uuid, one.holder.uid, one.holder.namespace) for one in found.allocations}


def sure(found: Holdings) -> frozenset[str]:
    """The GPUs whose holders are known."""
    if isinstance(found.allocations, Unavailable):
        return frozenset()
    return frozenset(gpu.uuid for gpu in GPUS) - found.unknown.keys()


class _Manifest:
    plugin: ClassVar[HolderPlugin]

    def test_its_manifest_is_complete(self) -> None:
        assert self.plugin.reaches, "say what it reads, writes and connects to"
        assert self.plugin.page, "name the page about it"

    def test_it_is_found_by_its_name(self) -> None:
        found = usable(SEAM, HolderPlugin).get(self.plugin.name)
        assert found is self.plugin, "register the entry point, and install"


class HolderSuite(_Manifest):
    """The tests that every source of holders passes.

    whole: whether the source can say that somebody holds a whole GPU.
    parts: whether it can say that somebody holds a MIG instance."""

    whole: ClassVar[bool] = True
    parts: ClassVar[bool] = True

    @pytest.fixture
    def site(self) -> Site:
        """The fake, which works. Nobody holds anything."""
        raise NotImplementedError("define the fixture `site` in your class")

    @pytest.fixture
    def source(self, site: Site) -> Iterator[HolderSource]:
        """The source of the fake."""
        source = self.open(site)
        yield source
        source.close()

    def open(self, site: Site) -> HolderSource:
        source = opening(self.plugin, site.place, self.surroundings(site.clock))()
        assert source is not None
        return source

    def surroundings(self, clock: VirtualClock) -> NodeSurroundings:
        return NodeSurroundings(NODE, clock, BackgroundTasks(clock), AgentSettings(node=NODE))

    def look(self, source: HolderSource, site: Site, after_ms: int = 2 * SECOND_MS) -> Holdings:
        site.clock.advance(after_ms)
        return checked(source.read(site.clock.wall_ms(), GPUS), GPUS, NODE)

    def devices(self) -> Sequence[tuple[str, str]]:
        whole = [("GPU-a", ""), ("GPU-b", "")] if self.whole else []
        return [*whole, *([("GPU-c", "MIG-c")] if self.parts else [])]

    def test_a_place_is_given_if_the_source_takes_one(self, site: Site) -> None:
        wrong = "" if self.plugin.place else "somewhere"
        with pytest.raises(SettingsError):
            opening(self.plugin, wrong, self.surroundings(site.clock))

    def test_free_gpus_are_held_by_nobody(self, source: HolderSource, site: Site) -> None:
        found = self.look(source, site)
        assert (held(found), found.fault) == (set(), "")
        assert sure(found) == {gpu.uuid for gpu in GPUS}

    def test_who_holds_what_is_told_until_it_is_free_again(self, source: HolderSource, site: Site) -> None:
        now: list[Held] = []
        for gpu_uuid, mig_uuid in self.devices():
            now.append(site.give(gpu_uuid, mig_uuid))
            assert now[-1][:2] == (gpu_uuid, mig_uuid)
            assert held(self.look(source, site)) == set(now)
        while now:
            site.take(now.pop())
            assert held(self.look(source, site)) == set(now)

    def test_the_same_state_is_told_in_the_same_way(self, source: HolderSource, site: Site) -> None:
        for gpu_uuid, mig_uuid in self.devices():
            site.give(gpu_uuid, mig_uuid)
        first, second = self.look(source, site), self.look(source, site)
        assert first.allocations == second.allocations

    def test_a_source_that_does_not_answer_is_named_and_nothing_counts_as_free(
        self, source: HolderSource, site: Site
    ) -> None:
        site.give(*self.devices()[0])
        self.look(source, site)
        site.fail()
        found = self.look(source, site, PATIENCE_MS)
        why = found.allocations.reason if isinstance(found.allocations, Unavailable) else found.fault
        assert why, "say why: what is not known is not free"
        assert sure(found) == frozenset()

    def test_a_device_of_which_nothing_can_be_read_is_not_free(self, source: HolderSource, site: Site) -> None:
        given = [site.give(*device) for device in self.devices()]
        self.look(source, site)
        if not site.damage(given[0]):
            return
        self._does_not_know(given[0][0], source, site)
        try:
            later = self.open(site)
        except (AgentError, FileFault):
            return
        self._does_not_know(given[0][0], later, site)
        later.close()

    def _does_not_know(self, gpu_uuid: str, source: HolderSource, site: Site) -> None:
        self.look(source, site, PATIENCE_MS)
        found = self.look(source, site)
        assert gpu_uuid not in sure(found), "its holders are unknown, even if nothing else is"
        assert found.fault or isinstance(found.allocations, Unavailable), "say what cannot be read"

    def test_it_tells_on_when_the_source_answers_again(self, source: HolderSource, site: Site) -> None:
        site.fail()
        self.look(source, site, PATIENCE_MS)
        site.mend()
        given = site.give(*self.devices()[0])
        self.look(source, site, PATIENCE_MS)
        found = self.look(source, site)
        assert (held(found), found.fault) == ({given}, "")
        assert sure(found) == {gpu.uuid for gpu in GPUS}

    def test_a_source_may_be_missing_at_the_start(self, site: Site) -> None:
        """It says so at once, with an error of the settings or the file, or later."""
        site.fail()
        try:
            source = self.open(site)
        except (AgentError, FileFault):
            return
        assert sure(self.look(source, site)) == frozenset()
        source.close()


class PartsSuite(_Manifest):
    """The tests of a system of virtual devices.

    names: names of virtual devices of the GPU `GPU-a` as the kubelet lists them.
    limits: limits of a container with one virtual device of a GPU with 80 GiB (81,920 MiB), each with its part of the
        GPU in millionths."""

    names: ClassVar[Sequence[str]]
    limits: ClassVar[Sequence[tuple[Mapping[str, str], int]]]

    def test_its_devices_are_found_by_name(self) -> None:
        found = [virtual_device(name, {gpu.uuid for gpu in GPUS}) for name in self.names]
        assert [one.uuid if one is not None else "" for one in found] == ["GPU-a"] * len(self.names)
        assert len(set(found)) == len(self.names), "each is a device of its own"

    def test_limits_are_parts(self) -> None:
        assert self.plugin.parts is not None
        for limits, ppm in self.limits:
            assert limits.keys() <= set(self.plugin.parts.resources)
            assert limited_ppm(limits, self.plugin.parts, MEMORY_MIB) == ppm, limits

    def test_a_part_of_an_unknown_memory_is_unknown(self) -> None:
        assert self.plugin.parts is not None
        assert limited_ppm({self.plugin.parts.memory: "1024"}, self.plugin.parts, None) is None


class JobsSuite(_Manifest):
    """The tests of a batch system's control groups.

    groups: texts of /proc/PID/cgroup, each with (job, step); the step is "" if there is none.
    strangers: texts that name no job, such as folders of users with the same names."""

    groups: ClassVar[Mapping[str, tuple[str, str]]]
    strangers: ClassVar[Sequence[str]] = ()

    def test_processes_belong_to_their_jobs(self) -> None:
        for text, (job, step) in self.groups.items():
            found = holder_in(text)
            assert found is not None, text
            assert (found.kind, found.uid, found.container) == (JOB, job, step), text

    def test_nobody_becomes_a_job_by_the_name_of_a_folder(self) -> None:
        ((text, (job, _)), *_) = self.groups.items()
        path = text.strip().rpartition(":")[2]
        for stranger in (*self.strangers, text.replace(path, f"/user.slice/user-1000.slice/user@1000.service{path}")):
            found = holder_in(stranger)
            assert found is None or (found.kind, found.uid) != (JOB, job), stranger
