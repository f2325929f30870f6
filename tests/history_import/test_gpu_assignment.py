"""Holds and figures are divided into rows: the time of each GPU counts once, and unknown is not zero."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from accountant.core.record_faults import record_fault
from accountant.history_import.gpu_assignment import (
    Demand,
    FigureSeries,
    GpuLayout,
    GpuPart,
    SlotHold,
    TimeGrid,
    bridge_gaps,
    imported_time,
    mig_slice,
    place,
    rows,
    runs,
)
from accountant.storage.write import batch_admission
from agent.wire import Gap, Holder
from tests.hypothesis_examples import examples

MINUTE = 60_000
HOUR = 60 * MINUTE
START = 1_790_812_800_000
SPAN = (START, START + HOUR)
ALWAYS = (SPAN,)
A, B = Holder("pod", "a", "vision", "train-0", "main"), Holder("pod", "b", "nlp", "serve-0", "main")
GRID = TimeGrid(START, START + HOUR, MINUTE)


def hold(holder, start, end, part=0, slot=0):
    return SlotHold("g", part, slot, holder, START + start * MINUTE, START + end * MINUTE)


def made(gpu, holds, allowed=ALWAYS):
    """Return (start minute, end minute, holder, capacity µs, busy µs) of each row."""
    return [
        (
            *((at - START) // MINUTE for at in (r.start_ms, r.end_ms)),
            r.holder and r.holder.uid,
            r.capacity_us,
            r.busy_us,
        )
        for r in rows(gpu, holds, SPAN, allowed)
    ]


def us(minutes):
    return minutes * 60_000_000


def test_a_gpu_is_cut_at_quarters_and_at_each_change_and_nobodys_time_has_rows():
    gpu = GpuLayout("g", "H100", (GpuPart(),), ALWAYS)
    assert made(gpu, [hold(A, 5, 20)]) == [
        (0, 5, None, us(5), None),
        (5, 15, "a", us(10), None),
        (15, 20, "a", us(5), None),
        (20, 30, None, us(10), None),
        (30, 45, None, us(15), None),
        (45, 60, None, us(15), None),
    ]


def test_figures_of_the_only_holder_are_its_and_what_was_not_recorded_is_a_gap():
    busy = FigureSeries(GRID, {cell: 500_000 for cell in range(60) if cell != 3})
    power = FigureSeries(GRID, dict.fromkeys(range(60), 400_000))
    memory = FigureSeries(GRID, dict.fromkeys(range(60), 1_024))
    (row, *_) = rows(
        GpuLayout("g", "H100", (GpuPart(None, 1, busy, memory),), ALWAYS, power=power), [hold(A, 0, 60)], SPAN, ALWAYS
    )
    assert row.busy_us == us(14) // 2
    assert row.gaps == (Gap(START + 3 * MINUTE, START + 4 * MINUTE, "not recorded"),)
    assert row.memory_mib_s == 1_024 * 15 * 60
    assert row.energy_uj == 400_000 * 15 * MINUTE
    assert imported_time([row]).unknown_us == us(1)


def test_of_sharers_nobody_knows_whose_it_was():
    busy = FigureSeries(GRID, dict.fromkeys(range(60), 1_000_000))
    gpu = GpuLayout("g", "A100", (GpuPart(None, 3, busy),), ALWAYS)
    found = rows(gpu, [hold(A, 0, 60, slot=0), hold(B, 0, 15, slot=1)], SPAN, ALWAYS)
    shared, alone = [r for r in found if r.start_ms == START], [r for r in found if r.start_ms == START + 15 * MINUTE]
    assert [(r.holder and r.holder.kind, r.capacity_us, r.busy_us) for r in shared] == [
        ("pod", us(5), None), ("pod", us(5), None), ("unattributed", 0, us(15)), (None, us(5), None),
    ]  # fmt: skip
    assert [(r.holder and r.holder.uid, r.capacity_us, r.busy_us) for r in alone] == [
        ("a", us(5), us(15)), (None, us(10), None),
    ]  # fmt: skip
    assert all(r.sharing is not None and r.sharing.replicas == 3 for r in found)


def test_instances_have_their_part_and_what_no_instance_has_is_nobodys():
    model = "NVIDIA A100-SXM4-80GB"
    parts = tuple(GpuPart(mig_slice(profile, gi, model)) for gi, profile in enumerate(("3g.40gb", "2g.20gb")))
    found = [
        row
        for row in rows(GpuLayout("g", model, parts, ALWAYS), [hold(A, 0, 60)], SPAN, ALWAYS)
        if row.start_ms == START
    ]
    assert [(r.slice and r.slice.profile, r.holder and r.holder.uid) for r in found] == [
        ("3g.40gb", "a"), ("2g.20gb", None), (None, None),
    ]  # fmt: skip
    assert [round(r.capacity_us / us(15) * 7) for r in found] == [3, 2, 2]
    assert sum(r.capacity_us for r in found) == us(15)
    assert mig_slice("1c.2g.12gb+me", 1, "NVIDIA A30").compute_of == 4
    assert mig_slice("whole", 1, model) is None


def test_time_in_which_nobody_could_see_who_holds_it_has_rows_only_where_all_of_it_is_held():
    known = ((START, START + 15 * MINUTE),)
    assert made(GpuLayout("g", "H100", (GpuPart(),), known), [hold(A, 10, 40)])[-2:] == [
        (15, 30, "a", us(15), None), (30, 40, "a", us(10), None),
    ]  # fmt: skip
    half = made(GpuLayout("g", "H100", (GpuPart(None, 2),), known), [hold(A, 10, 40)])
    assert max(end for _, end, *_ in half) == 15


def test_what_may_not_be_imported_is_not_and_a_node_that_was_not_ready_is_down():
    gpu = GpuLayout("g", "H100", (GpuPart(),), ALWAYS, lost=((START, START + 7 * MINUTE),))
    allowed = [(START, START + 10 * MINUTE), (START + 50 * MINUTE, START + HOUR)]
    found = rows(gpu, [], SPAN, allowed)
    assert [(r.health, r.capacity_us) for r in found] == [("lost", us(7)), ("ok", us(3)), ("ok", us(10))]


def test_cells():
    assert runs([5, 1, 2, 4]) == [(1, 2), (4, 5)]
    assert bridge_gaps({1, 2, 6}, {3, 4, 5}) == {1, 2, 3, 4, 5, 6}
    assert bridge_gaps({1, 6}, {3, 4, 5}) == {1, 6}


_DEMANDS = st.lists(
    st.tuples(st.integers(0, 59), st.integers(1, 60), st.integers(1, 5), st.sampled_from([0, 0, 1, 2])), max_size=10
)


@settings(max_examples=examples(13, 80))
@given(_DEMANDS, st.integers(1, 3), st.integers(0, 5))
def test_conservation_whatever_was_asked_for(drawn, slots, tolerance):
    """No GPU exceeds its time, no holder its request, and the ledger accepts every set."""
    model = "NVIDIA A100-SXM4-80GB"
    instances = (GpuPart(mig_slice("3g.40gb", 1, model)), GpuPart(mig_slice("4g.40gb", 2, model), slots))
    layouts = [GpuLayout("g0", model, (GpuPart(None, slots),), ALWAYS), GpuLayout("g1", model, instances, ALWAYS)]
    pool = [(gpu.uuid, n, s) for gpu in layouts for n, part in enumerate(gpu.parts) for s in range(part.slots)]
    demands = [
        Demand(
            Holder("pod", f"p{n}"), "gpu", count, START + start * MINUTE, START + min(60, start + length) * MINUTE,
            frozenset({("g1", label - 1)} if label else ()),
        )
        for n, (start, length, count, label) in enumerate(drawn)
    ]  # fmt: skip
    placed = place(demands, {"gpu": pool}, tolerance * MINUTE)
    asked = {one.holder.uid: one for one in demands}
    for one in placed.holds:
        assert asked[one.holder.uid].start_ms == one.start_ms
        assert one.end_ms <= asked[one.holder.uid].end_ms
    for gpu in layouts:
        found = rows(gpu, [one for one in placed.holds if one.gpu == gpu.uuid], SPAN, ALWAYS)
        assert sum(row.capacity_us for row in found) == us(60)
        numbered = batch_admission.sets(found)
        assert all(record_fault(rows_of, START + HOUR) is None for rows_of in numbered)
        assert [rows_of[0].start_ms for rows_of in numbered[1:]] == [rows_of[0].end_ms for rows_of in numbered[:-1]]
