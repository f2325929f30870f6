"""Law 1 at its source: whatever happens on a node, the closed rows add up to the time, the busy time and the energy of
every GPU, in exact integers, and agree with the simulated node's truth."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import pairwise
from zoneinfo import ZoneInfo

from hypothesis import given, settings
from hypothesis import strategies as st

from agent.core.readings import Allocation, DeviceReading, NodeSnapshot, Unavailable
from agent.metering.meter import ClosedSet, Meter
from agent.simulation.simulated_node import A100, H100, SimulatedNode, make_gpu
from agent.wire import Holder, UsageInterval
from tests.hypothesis_examples import examples

START_MS = 1_793_483_990_000
"""2026-10-31T21:59:50Z: the histories run over a month edge of Europe/Berlin (22:00Z) and beyond."""

WHOLE, MIG, SLICED, FRACTION = "GPU-whole", "GPU-mig", "GPU-sliced", "GPU-fraction"

operations = st.one_of(
    st.tuples(st.just("place"), st.integers(0, 5), st.integers(0, 1_000_000)),
    st.tuples(st.just("place"), st.integers(0, 5), st.integers(0, 1_000_000)),
    st.tuples(st.just("remove"), st.integers(0, 30), st.just(0)),
    st.tuples(st.just("utilisation"), st.integers(0, 30), st.integers(0, 1_000_000)),
    st.tuples(st.just("stray"), st.integers(0, 2), st.integers(0, 1_000_000)),
    st.tuples(st.just("lose"), st.integers(0, 3), st.just(0)),
    st.tuples(st.just("recover"), st.integers(0, 3), st.just(0)),
    st.tuples(st.just("reset"), st.integers(0, 3), st.just(0)),
    st.tuples(st.just("holders"), st.integers(0, 1), st.just(0)),
    st.tuples(st.just("restart"), st.just(0), st.just(0)),
    st.tuples(st.just("nothing"), st.just(0), st.just(0)),
)
Steps = list[tuple[int, tuple[str, int, int]]]
histories = st.lists(st.tuples(st.integers(1, 7_000), operations), min_size=1, max_size=25)


def make_node(per_holder: bool) -> SimulatedNode:
    gpus = [
        make_gpu(WHOLE, 0, H100),
        make_gpu(MIG, 1, A100, ["3g.40gb", "2g.20gb", "1g.10gb"]),
        make_gpu(SLICED, 2, A100),
        make_gpu(FRACTION, 3, H100),
    ]
    return SimulatedNode("node-1", gpus, start_ms=START_MS, per_holder=per_holder)


@dataclass
class History:
    """A node, its meter, all closed sets, and the readings in between."""

    node: SimulatedNode
    interval_ms: int
    closed: list[ClosedSet] = field(default_factory=list)
    carried: bool = False
    busy_us: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    energy_uj: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    unknown_busy_us: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    unknown_energy_uj: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    """The part of it for which the holders were unknown. No row contains it unless the GPU was wholly held."""
    unread: set[str] = field(default_factory=set)
    placed: int = 0
    unknown_since_ms: int | None = None
    unknown: list[tuple[int, int]] = field(default_factory=list)
    """The time in which the kubelet did not report holders."""
    last: NodeSnapshot | None = None

    def __post_init__(self) -> None:
        self.meter = self.new_meter()
        self.present: list[str] = []

    def new_meter(self) -> Meter:
        return Meter(self.interval_ms, ZoneInfo("Europe/Berlin"), boot_id="boot-1")

    def look(self, at_ms: int, state: bytes | None = None) -> None:
        snapshot = self.node.snapshot(at_ms)
        if state is None:
            self.closed += self.meter.observe(snapshot)
            if self.last is not None:
                for before, after in zip(self.last.devices, snapshot.devices, strict=True):
                    self.expect(before, after, self.last.at_ms, at_ms)
        else:
            self.meter = self.new_meter()
            self.closed += self.meter.resume(state, snapshot)
            self.carried = True
        self.last = snapshot

    def expect(self, before: DeviceReading, after: DeviceReading, start_ms: int, end_ms: int) -> None:
        uuid = before.gpu.uuid
        first, last = before.energy_uj, after.energy_uj
        if isinstance(first, int) and isinstance(last, int) and before.counter_epoch == after.counter_epoch:
            self.busy_us[uuid] += self.node.device_busy_us(uuid, start_ms, end_ms)
            self.energy_uj[uuid] += last - first
            if self.last is not None and isinstance(self.last.allocations, Unavailable):
                self.unknown_busy_us[uuid] += self.node.device_busy_us(uuid, start_ms, end_ms)
                self.unknown_energy_uj[uuid] += last - first
        else:
            self.unread.add(uuid)

    def act(self, at_ms: int, kind: str, which: int, amount: int) -> None:
        node, gpus = self.node, (WHOLE, SLICED, FRACTION, MIG)
        if kind == "place":
            self.place(at_ms, which, amount)
        elif kind == "remove" and self.present:
            node.remove(at_ms, self.present.pop(which % len(self.present)))
        elif kind == "utilisation" and self.present:
            node.set_utilisation(at_ms, self.present[which % len(self.present)], amount)
        elif kind == "stray":
            node.set_stray(at_ms, gpus[which], amount)
        elif kind == "lose":
            node.lose(at_ms, gpus[which])
        elif kind == "recover":
            node.recover(at_ms, gpus[which])
        elif kind == "reset":
            node.reset_counters(at_ms, gpus[which])
        elif kind == "holders":
            self.set_unknown(at_ms, bool(which))

    def set_unknown(self, at_ms: int, unknown: bool) -> None:
        self.node.set_holders_unavailable(at_ms, "kubelet gone" if unknown else "")
        if unknown and self.unknown_since_ms is None:
            self.unknown_since_ms = at_ms
        elif not unknown and self.unknown_since_ms is not None:
            self.unknown.append((self.unknown_since_ms, at_ms))
            self.unknown_since_ms = None

    def was_unknown(self, start_ms: int, end_ms: int) -> bool:
        """Return whether nothing in the span was known."""
        return any(since <= start_ms and end_ms <= until for since, until in self.unknown)

    def place(self, at_ms: int, which: int, utilisation_ppm: int) -> None:
        uid = f"pod-{self.placed}"
        holder = Holder(kind="pod", uid=uid, namespace="ns", name=uid, container="main")
        instances = self.node.gpus[1].mig
        allocation = {
            0: Allocation(WHOLE, holder),
            1: Allocation(SLICED, holder, sharing="time-slicing", sharing_replicas=4),
            2: Allocation(SLICED, holder, sharing="time-slicing", sharing_replicas=4, replicas=2),
            3: Allocation(FRACTION, holder, sharing="fraction", fraction_ppm=300_000),
            4: Allocation(MIG, holder, instances[0].uuid, sharing="time-slicing", sharing_replicas=3),
            5: Allocation(MIG, holder, instances[utilisation_ppm % 2 + 1].uuid),
        }[which]
        self.placed += 1
        self.present.append(uid)
        self.node.place(at_ms, allocation, utilisation_ppm, 1_000)

    def rows(self) -> list[UsageInterval]:
        return [row for closed in self.closed for row in closed.rows]


def play(steps: Steps, interval_ms: int, per_holder: bool) -> History:
    history = History(make_node(per_holder), interval_ms)
    at_ms = START_MS
    history.look(at_ms)
    for pause_ms, (kind, which, amount) in steps:
        at_ms += pause_ms
        state = history.meter.state() if kind == "restart" else None
        history.act(at_ms, kind, which, amount)
        if kind == "restart":
            history.look(at_ms + 1_234, state)
            at_ms += 1_234
        else:
            history.look(at_ms)
    for _ in range(2):
        at_ms += 500
        history.set_unknown(at_ms, False)  # whatever happened, in the end the holders are known again
        history.look(at_ms)
    history.closed += history.meter.flush(at_ms)
    return history


def by_gpu(history: History) -> dict[str, list[ClosedSet]]:
    sets: dict[str, list[ClosedSet]] = defaultdict(list)
    for closed in history.closed:
        assert len({(r.gpu_uuid, r.start_ms, r.end_ms) for r in closed.rows}) == 1
        sets[closed.rows[0].gpu_uuid].append(closed)
    return sets


@settings(max_examples=examples(40, 240))
@given(histories, st.sampled_from([1_000, 5_000, 60_000]), st.booleans())
def test_rows_add_up_to_the_time_and_never_overlap(steps: Steps, interval_ms: int, per_holder: bool) -> None:
    history = play(steps, interval_ms, per_holder)
    for uuid, sets in by_gpu(history).items():
        end_ms = START_MS
        for closed in sets:
            first = closed.rows[0]
            span_us = (first.end_ms - first.start_ms) * 1_000
            total = sum(r.capacity_us for r in closed.rows)
            assert first.end_ms > first.start_ms >= end_ms
            if first.method == "carried":
                assert 0 < total <= span_us
            elif history.was_unknown(first.start_ms, first.end_ms):
                assert total == sum(row.allocated_us for row in closed.rows) <= span_us
            else:
                assert total == span_us
            if not history.carried and first.start_ms != end_ms:
                assert history.was_unknown(end_ms, first.start_ms)
            end_ms = first.end_ms
            assert first.start_ms // interval_ms == (first.end_ms - 1) // interval_ms
            for row in closed.rows:
                figures = (row.capacity_us, row.allocated_us, row.busy_us or 0, row.energy_uj or 0)
                assert min(*figures, row.memory_mib_s or 0) >= 0
                assert row.allocated_us == (row.capacity_us if row.holder else 0)
                assert all(first.start_ms <= g.start_ms < g.end_ms <= first.end_ms for g in row.gaps)
                assert all(a.end_ms <= b.start_ms for a, b in pairwise(row.gaps))
                assert row.busy_us is not None or row.gaps
        assert history.last is not None
        assert end_ms == history.last.at_ms, uuid


@settings(max_examples=examples(40, 240))
@given(histories, st.sampled_from([1_000, 5_000, 60_000]), st.booleans())
def test_busy_time_and_energy_add_up_to_the_device(steps: Steps, interval_ms: int, per_holder: bool) -> None:
    steps = [step for step in steps if step[1][0] != "restart"]
    history = play(steps, interval_ms, per_holder)
    for uuid, sets in by_gpu(history).items():
        rows = [row for closed in sets for row in closed.rows]
        busy_us, energy_uj = sum(row.busy_us or 0 for row in rows), sum(row.energy_uj or 0 for row in rows)
        assert 0 <= history.busy_us[uuid] - busy_us <= history.unknown_busy_us[uuid]
        assert 0 <= history.energy_uj[uuid] - energy_uj <= history.unknown_energy_uj[uuid]


@settings(max_examples=examples(40, 240))
@given(histories, st.sampled_from([1_000, 5_000, 60_000]))
def test_holders_get_what_the_node_knows_they_had(steps: Steps, interval_ms: int) -> None:
    """If the node is read at every change, a holder's rows equal the truth: to the microsecond if its share divides the
    span, else within one microsecond per row."""
    steps = [step for step in steps if step[1][0] not in ("restart", "holders")]
    history = play(steps, interval_ms, per_holder=True)
    assert history.last is not None
    end_ms = history.last.at_ms
    for uid in history.node.holders():
        rows = [row for row in history.rows() if row.holder is not None and row.holder.uid == uid]
        truth = history.node.allocated(uid, START_MS, end_ms)
        booked = sum(row.allocated_us for row in rows)
        if rows and rows[0].gpu_uuid == WHOLE and all(row.allocated_us % 1_000 == 0 for row in rows):
            assert booked == truth
        assert abs(booked - truth) < max(len(rows), 1)
        if rows and rows[0].gpu_uuid not in history.unread:
            assert sum(row.busy_us or 0 for row in rows) == history.node.busy_us(uid, START_MS, end_ms)


@settings(max_examples=examples(26, 160))
@given(histories, st.sampled_from([1_000, 5_000, 60_000]))
def test_a_restart_never_adds_time(steps: Steps, interval_ms: int) -> None:
    """With restarts a holder gets at most its true time, and a lone holder that stays gets all of it."""
    steps = [step for step in steps if step[1][0] != "holders"]
    history = play(steps, interval_ms, per_holder=True)
    assert history.last is not None
    end_ms = history.last.at_ms
    for uid in history.node.holders():
        rows = [row for row in history.rows() if row.holder is not None and row.holder.uid == uid]
        truth: Fraction = history.node.allocated(uid, START_MS, end_ms)
        assert sum(row.allocated_us for row in rows) <= truth + len(rows)


def test_the_same_history_gives_the_same_rows() -> None:
    steps = [
        (1_500, ("place", 0, 400_000)),
        (2_700, ("place", 1, 900_000)),
        (1, ("place", 2, 300_000)),
        (4_000, ("place", 4, 123_457)),
        (6_999, ("stray", 1, 500_000)),
        (3_000, ("lose", 1, 0)),
        (3_000, ("recover", 1, 0)),
        (2_000, ("restart", 0, 0)),
        (2_000, ("remove", 0, 0)),
    ]
    assert play(steps, 5_000, True).closed == play(steps, 5_000, True).closed
