"""The energy counter: continued over a wrap, begun anew with the driver."""

from __future__ import annotations

from agent.devices.utilization import MAX_POWER_MW, RANGE_MJ, EnergyCounter


def test_it_begins_where_the_driver_stands_and_goes_on() -> None:
    counter = EnergyCounter()
    assert counter.take(0, 123_456)
    assert counter.value_uj == 123_456_000
    assert counter.take(1_000, 123_956)
    assert counter.value_uj == 123_956_000


def test_a_wrap_is_no_reset() -> None:
    counter = EnergyCounter()
    counter.take(0, RANGE_MJ - 100)
    assert counter.take(1_000, 400)
    assert counter.value_uj == (RANGE_MJ + 400) * 1_000


def test_a_decrease_no_wrap_can_explain_begins_anew() -> None:
    counter = EnergyCounter()
    counter.take(0, 5_000_000)
    assert not counter.take(1_000, 7)
    assert counter.value_uj == 7_000
    counter = EnergyCounter()
    counter.take(0, RANGE_MJ - 1)
    assert not counter.take(1_000, MAX_POWER_MW)  # mW over a second, and the one to the wrap


def test_what_no_gpu_can_have_drawn_is_nobodys() -> None:
    """A driver that says 0 once must not put all it ever counted on whoever is there the moment after."""
    counter = EnergyCounter()
    counter.take(0, 900_000_000)
    assert not counter.take(2_000, 0)
    assert not counter.take(4_000, 900_000_100)
    assert counter.take(4_001, 900_000_200), "the driver's figure may be renewed between two readings"
    assert counter.value_uj == 900_000_200_000
