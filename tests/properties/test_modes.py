"""Conservation in every sharing mode of a GPU, from the driver's figures per process to the closed rows.

Whole, time-sliced, MPS, fractions, MIG, shared MIG and machines without Kubernetes. Each process is read by accounting,
by samples or not at all, and some have no known owner. Readings may contradict the device; the rows may not."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from random import Random
from zoneinfo import ZoneInfo

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from accountant.core.errors import SequenceGap
from accountant.ledger.protocols import Receipt
from accountant.storage.duckdb_ledger import open_ledger
from agent.core.readings import (
    Allocation,
    DeviceReading,
    Gpu,
    InstanceReading,
    NodeSnapshot,
    ProcessReading,
    Reading,
    Unavailable,
)
from agent.holders.reserved_gpus import replace_reservations
from agent.metering.meter import ClosedSet, Meter
from agent.node_reader import HolderCounters, OwnedProcess
from agent.simulation.simulated_node import A100, H100, make_gpu
from agent.wire import Batch, Holder
from gputally.base.clock import VirtualClock
from tests.empty_ledger import fresh
from tests.hypothesis_examples import examples
from tests.moments import present

START_MS = 1_790_812_800_000
SILENT = Unavailable("driver said no")
WHOLE = make_gpu("GPU-0", 0, H100)
MIG = make_gpu("GPU-1", 1, A100, ["3g.40gb", "2g.20gb", "1g.10gb"])
RESERVATION = Holder(kind="pod", uid="r", namespace="kai-resource-reservation", name="gpu-reservation")
MODES = ("whole", "time-slicing", "mps", "fraction", "reservation", "standalone", "mig", "mig-shared")


def pod(number: int) -> Holder:
    return Holder(kind="pod", uid=f"pod-{number}", namespace="ns", name=f"pod-{number}", container="main")


def process_holder(number: int) -> Holder:
    kinds: tuple[Holder, ...] = (
        Holder(kind="slurm", uid="7", namespace="ann", name="job 7", container="0"),
        Holder(kind="container", uid="c" * 64, namespace="docker", name="c" * 12),
        Holder(kind="process", uid="10:5", namespace="bob", name="python"),
    )
    return kinds[number % 3]


@dataclass(frozen=True)
class Ran:
    """A process in one second: its holder, its place, its reported busy ppm, and how it is read."""

    number: int
    ppm: int
    way: str
    stranger: bool
    unnamed: bool


@dataclass(frozen=True)
class Second:
    """One reading of the device. busy: of each part in ppm, None if unavailable."""

    present: frozenset[int]
    ran: tuple[Ran, ...]
    busy_ppm: tuple[int, ...]
    busy_known: bool
    sm_ppm: int | None


ran = st.builds(
    Ran,
    number=st.integers(0, 3),
    ppm=st.integers(0, 1_000_000),
    way=st.sampled_from(["accounting", "process", "process", "mps", "silent"]),
    stranger=st.sampled_from([False, False, False, True]),
    unnamed=st.sampled_from([False] * 9 + [True]),
)
seconds = st.builds(
    Second,
    present=st.frozensets(st.integers(0, 3), max_size=4),
    ran=st.lists(ran, max_size=5).map(tuple),
    busy_ppm=st.lists(st.integers(0, 1_000_000), min_size=3, max_size=3).map(tuple),
    busy_known=st.sampled_from([True, True, True, False]),
    sm_ppm=st.none() | st.integers(0, 1_000_000),
)


@dataclass
class Node:
    """A device in one sharing mode with its true counters."""

    mode: str
    counters: HolderCounters = field(default_factory=HolderCounters)
    busy_us: list[int] = field(default_factory=lambda: [0, 0, 0])
    sm_us: list[int] = field(default_factory=lambda: [0, 0, 0])
    energy_uj: int = 0

    @property
    def gpu(self) -> Gpu:
        return MIG if self.mode.startswith("mig") else WHOLE

    def place(self, number: int) -> str:
        """Return the instance of the process or claim with that number."""
        return self.gpu.mig[number % 3].uuid if self.gpu.mig else ""

    def claims(self, present: frozenset[int]) -> list[Allocation]:
        uuid = self.gpu.uuid
        ordered = sorted(present)
        if self.mode == "whole":
            return [Allocation(uuid, pod(n)) for n in ordered[:1]]
        if self.mode in ("time-slicing", "mps"):
            mode = "time-slicing" if self.mode == "time-slicing" else "mps"
            return [Allocation(uuid, pod(n), sharing=mode, sharing_replicas=4, replicas=1 + n % 2) for n in ordered]
        if self.mode == "fraction":
            return [Allocation(uuid, pod(n), sharing="fraction", fraction_ppm=250_000 + n) for n in ordered]
        if self.mode == "reservation":
            return [Allocation(uuid, RESERVATION)]
        if self.mode == "standalone":
            return [Allocation(uuid, h, sharing="processes") for h in {process_holder(n): None for n in ordered}]
        if self.mode == "mig":
            return [Allocation(uuid, pod(n), self.place(n)) for n in ordered if n < 3]
        return [Allocation(uuid, pod(n), self.gpu.mig[0].uuid, "time-slicing", 4) for n in ordered]

    def owned(self, second: Second) -> list[OwnedProcess]:
        found = []
        for position, one in enumerate(second.ran):
            amount = one.ppm
            reading = ProcessReading(
                100 + position,
                self.place(one.number),
                10 * position,
                busy_us=amount if one.way in ("process", "mps") else SILENT,
                accounted_us=amount if one.way == "accounting" else SILENT,
                mps_client=one.way == "mps",
            )
            holder: Holder | None = process_holder(one.number) if self.mode == "standalone" else pod(one.number)
            if one.stranger:
                holder = Holder(kind="pod", uid=f"stranger-{one.number}", namespace="ns", name="stranger")
            found.append(OwnedProcess(reading, None if one.unnamed else holder))
        return found

    def look(self, at_ms: int, second: Second) -> NodeSnapshot:
        parts = len(self.gpu.mig) or 1
        for part in range(parts):
            compute = self.gpu.mig[part].compute if self.gpu.mig else 1
            of = self.gpu.compute_slices if self.gpu.mig else 1
            self.busy_us[part] += second.busy_ppm[part] * compute // of
            self.sm_us[part] += (second.sm_ppm or 0) * compute // of
        self.energy_uj += 70_000_000 + sum(second.busy_ppm)

        def read(values: list[int], part: int, known: bool) -> Reading:
            return values[part] if known else SILENT

        known, sm = second.busy_known, second.sm_ppm is not None
        if self.gpu.mig:
            instances = tuple(
                InstanceReading(
                    m.uuid, read(self.busy_us, i, known), 1, read(self.sm_us, i, sm), SILENT, "gpm" if known else None
                )
                for i, m in enumerate(self.gpu.mig)
            )
            device = DeviceReading(
                self.gpu, busy_us=SILENT, energy_uj=self.energy_uj, memory_used_mib=100, power_mw=70_000,
                instances=instances, method="allocation",
            )  # fmt: skip
        else:
            device = DeviceReading(
                self.gpu, busy_us=read(self.busy_us, 0, known), energy_uj=self.energy_uj, memory_used_mib=100,
                power_mw=70_000, sm_active_us=read(self.sm_us, 0, sm),
            )  # fmt: skip
        owned = self.owned(second)
        seen = [(self.gpu.uuid, o.process.mig_uuid, o.holder) for o in owned if o.holder is not None]
        claims = replace_reservations(
            self.claims(second.present), seen, {}, {self.gpu.uuid: self.gpu}, frozenset({"kai"})
        )
        return NodeSnapshot(at_ms, (self.counters.read(device, owned, claims),), claims)


def play(mode: str, story: list[Second], interval_ms: int) -> tuple[list[ClosedSet], list[NodeSnapshot]]:
    node, meter = Node(mode), Meter(interval_ms, ZoneInfo("UTC"))
    snapshots = [node.look(START_MS + i * 1_000, second) for i, second in enumerate(story)]
    closed = [c for snapshot in snapshots for c in meter.observe(snapshot)]
    return [*closed, *meter.flush(snapshots[-1].at_ms)], snapshots


def known_sum(snapshots: list[NodeSnapshot], name: str) -> int:
    """Return the growth of the counters of the device, or of its instances, over steps whose both ends were read."""
    total = 0
    for before, after in pairwise(snapshots):
        first, last = before.devices[0], after.devices[0]
        places = zip(first.instances, last.instances, strict=True) if first.instances else [(first, last)]
        for one, other in places:
            a, b = getattr(one, name), getattr(other, name)
            if isinstance(a, int) and isinstance(b, int):
                total += b - a
    return total


modes = st.sampled_from(MODES)
stories = st.lists(seconds, min_size=2, max_size=8)


@settings(max_examples=examples(33, 200))
@given(modes, stories, st.sampled_from([1_000, 5_000, 60_000]))
def test_rows_add_up_to_the_device_in_every_mode(mode: str, story: list[Second], interval_ms: int) -> None:
    closed, snapshots = play(mode, story, interval_ms)
    rows = [row for one in closed for row in one.rows]
    end_ms = START_MS
    for one in closed:
        first = one.rows[0]
        assert first.start_ms == end_ms
        end_ms = first.end_ms
        assert sum(row.capacity_us for row in one.rows) == (first.end_ms - first.start_ms) * 1_000
        holders = [(row.holder.uid, row.holder.container, row.slice) for row in one.rows if row.holder]
        assert len(holders) == len(set(holders))
    assert end_ms == snapshots[-1].at_ms
    for row in rows:
        figures = (row.capacity_us, row.allocated_us, row.busy_us, row.sm_active_us, row.memory_mib_s, row.energy_uj)
        assert all(figure is None or figure >= 0 for figure in figures)
        assert (row.busy_us is None) <= (row.method == "allocation")
        assert row.busy_us is not None or row.sm_active_us is None
    first_uj, last_uj = snapshots[0].devices[0].energy_uj, snapshots[-1].devices[0].energy_uj
    assert isinstance(first_uj, int)
    assert isinstance(last_uj, int)
    assert sum(row.energy_uj or 0 for row in rows) == last_uj - first_uj
    if all(second.busy_known for second in story):
        assert sum(row.busy_us or 0 for row in rows) == known_sum(snapshots, "busy_us")
    if all(second.sm_ppm is not None for second in story):
        assert sum(row.sm_active_us or 0 for row in rows) == known_sum(snapshots, "sm_active_us")


@settings(max_examples=25)
@given(modes.filter(lambda mode: not mode.startswith("mig")), stories)
def test_without_a_process_in_sight_all_busy_time_of_a_shared_gpu_is_nobodys(mode: str, story: list[Second]) -> None:
    """The level `allocation`: the pods' busy time is unknown, never zero, unless the device was idle."""
    story = [replace(second, ran=(), busy_known=True, present=story[0].present) for second in story]
    closed, snapshots = play(mode, story, 60_000)
    rows = [row for one in closed for row in one.rows]
    total = known_sum(snapshots, "busy_us")
    shared = [row for row in rows if row.holder and row.sharing]
    nobody = sum(row.busy_us or 0 for row in rows if row.holder and row.holder.kind == "unattributed")
    if total and shared:
        assert all(row.busy_us is None and row.method == "allocation" for row in shared)
        assert nobody == total
    assert sum(row.busy_us or 0 for row in rows) == total


@settings(max_examples=25)
@given(stories)
def test_a_sole_holder_has_what_the_device_did_less_what_strangers_did(story: list[Second]) -> None:
    story = [replace(second, present=frozenset({0}), busy_known=True) for second in story]
    closed, snapshots = play("whole", story, 60_000)
    rows = [row for one in closed for row in one.rows]
    mine = sum(row.busy_us or 0 for row in rows if row.holder == pod(0))
    others = sum(row.busy_us or 0 for row in rows if row.holder and row.holder.kind == "unattributed")
    assert mine + others == known_sum(snapshots, "busy_us")
    if not any(one.stranger or one.number for second in story for one in second.ran):
        assert others == 0


def batches(sets: list[ClosedSet]) -> list[Batch]:
    """Return one batch for each set, numbered as an outbox would."""
    made: list[Batch] = []
    outbox = {"cluster": "c", "node": "n", "boot_id": "b", "epoch": "01990000-0000-7000-8000-000000000000"}
    seq = 1
    for one in sets:
        rows = tuple(msgspec.structs.replace(row, seq=number) for number, row in enumerate(one.rows, seq))
        made.append(Batch(**outbox, first_seq=seq, oldest_seq=1, intervals=rows))
        seq += len(rows)
    return made


@pytest.mark.thorough
@settings(max_examples=examples(3, 20))
@given(modes, stories, st.integers(0, 2**16))
def test_every_mode_is_booked_exactly_once_in_whatever_order(mode: str, story: list[Second], seed: int) -> None:
    """Each batch arrives twice and out of order; the ledger holds exactly the rows' content."""
    closed, snapshots = play(mode, story, 1_000)
    sent = [batch for batch in batches(closed) for _ in range(2)]
    Random(seed).shuffle(sent)
    clock = VirtualClock(snapshots[-1].at_ms)
    end_ms = snapshots[-1].at_ms
    with tempfile.TemporaryDirectory() as folder:
        ledger = open_ledger(fresh(Path(folder) / "ledger.duckdb"), clock)
        waiting = sent
        while waiting:
            results = [ledger.append([batch], clock.wall_ms())[0] for batch in waiting]
            refused = [b for b, result in zip(waiting, results, strict=True) if isinstance(result, SequenceGap)]
            assert not any(isinstance(r, Receipt) and r.quarantined for r in results)
            assert len(refused) < len(waiting)
            waiting = refused
        (line,) = present(ledger).usage((START_MS, end_ms), ("gpu",)).lines()
        ledger.close()
    accounts = line.accounts_gpu_us
    rows = [row for one in closed for row in one.rows]
    assert accounts.total == (end_ms - START_MS) * 1_000 == sum(row.capacity_us for row in rows)
    assert accounts.unmetered == 0
    assert accounts.allocated == sum(row.allocated_us for row in rows)
    assert min(accounts.model_dump().values()) >= 0
