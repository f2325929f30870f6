"""The short way to measure a step of a whole GPU says what the long one does, wherever it says anything."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from agent.core.readings import Allocation, DeviceReading, HolderReading, Reading, Unavailable
from agent.metering.busy_time_attribution import lay_out
from agent.metering.reading_deltas import index_holders, plain, reconciled
from agent.simulation.simulated_node import A100, H100, make_gpu
from agent.wire import Holder, Method
from tests.effort import examples

GPUS = (make_gpu("GPU-0", 0, H100), make_gpu("GPU-1", 1, A100, ["7g.80gb"]), make_gpu("GPU-2", 2, A100, ["3g.40gb"]))
SILENT = Unavailable("driver said no")
METHODS: tuple[Method, ...] = ("simulated", "device", "process", "accounting", "dcgm", "allocation")

amounts = st.integers(0, 3) | st.integers(0, 10**9)
readings = st.one_of(amounts, amounts, amounts, st.just(SILENT))
people = st.lists(st.integers(0, 3), max_size=4, unique=True)


def holder(number: int) -> Holder:
    return Holder(kind="pod", uid=f"pod-{number}", namespace="ns", name=f"pod-{number}")


@settings(max_examples=examples(150, 2_000), deadline=None)
@given(st.data())
def test_a_plain_step_is_what_reconciling_it_comes_to(data: st.DataObject) -> None:
    gpu = data.draw(st.sampled_from(GPUS))
    held = data.draw(people)
    of = data.draw(st.sampled_from((0, 0, max(1, len(held)), 6)))
    sharing = "time-slicing" if of else None
    mig_uuid = gpu.mig[0].uuid if gpu.mig else ""
    layout = lay_out(gpu, [Allocation(gpu.uuid, holder(n), mig_uuid, sharing, of) for n in held])

    def reading(device: Reading, method: Method) -> DeviceReading:
        seen = data.draw(st.just(held) | people)
        shown = tuple(HolderReading(holder(n), mig_uuid, data.draw(readings)) for n in seen)
        return DeviceReading(gpu, busy_us=device, holders=shown, method=method)

    method = data.draw(st.sampled_from(METHODS))
    before, after = reading(0, method), reading(data.draw(readings), method)
    holders, holders_after = index_holders(before), index_holders(after)
    short = plain(layout, after.busy_us, after, holders, holders_after)
    if short is None:
        return
    long = reconciled(layout, after.busy_us, before, after, holders, holders_after)
    assert (short.methods.shares, short.methods.parts) == (long.methods.shares, long.methods.parts)
    assert replace(short, methods=long.methods) == long


def test_most_readings_of_a_whole_gpu_are_plain() -> None:
    """That the short way is taken at all: one holder, twelve, nobody."""
    for many in (0, 1, 12):
        claims = [
            Allocation(GPUS[0].uuid, holder(n), sharing="time-slicing" if many > 1 else None, sharing_replicas=many)
            for n in range(many)
        ]
        layout = lay_out(GPUS[0], claims)
        shown = tuple(HolderReading(holder(n), busy_us=n) for n in range(many))
        seen = DeviceReading(GPUS[0], busy_us=100, holders=shown, method="accounting")
        holders = index_holders(seen)
        assert plain(layout, 100, seen, holders, holders) is not None
