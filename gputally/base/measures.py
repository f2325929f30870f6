"""The table of measures: what agents report of a GPU beside who holds it and whether it is busy.

From `REPORTED` are made the columns of the ledger's rows and sums, of the archive and of the lake, what a batch is
checked for, the relation of usage, the fields of the API, the columns of `gputally.connect`, and those of Explore and
its files. A new measure is a field of the agent's record (`agent.wire.UsageInterval`) and a row at the end of this
table. A ledger, archive or lake from before has it as unknown, not as zero.

Example: of `sm_active` a record has the field `sm_active_us`. Where a GPU is held and the field is missing, the held
time counts as `sm_unknown`."""

from __future__ import annotations

from typing import Final, Literal, NamedTuple

Unit = Literal["GPU-µs", "MiB·s", "µJ"]
Known = Literal["held", "in service"]
"""Held time is that of three accounts; time in service is `unallocated` too."""


class Shown(NamedTuple):
    """A column of Explore, and of its files, that shows a measure.

    name: in addresses and files.
    note: what it is, for who points at its head.
    mean: whether it is the mean over the time for which the measure is known (per GPU-µs, or of MiB·s per GPU-second),
        else the sum.
    scale: how much of that is one unit of `kind`."""

    name: str
    title: str
    kind: Literal["share", "GiB", "W", "kWh"]
    note: str
    mean: bool = True
    scale: float = 1


class Measure(NamedTuple):
    """A figure that is added up over time, and the time for which it is unknown.

    name, unknown: the two in the relation of usage.
    field: the name in the agent's record, where it is None if unknown, in the API, the ledger, the lake and `connect`.
    unknown_column: the ledger's column of the unknown time.
    known: the time for which it should be known. A measure of held time is None in the API if it is known for none.
    text, unknown_text: the meaning, with the unit."""

    name: str
    unit: Unit
    unknown: str
    field: str
    unknown_column: str
    known: Known
    text: str
    unknown_text: str
    shown: tuple[Shown, ...] = ()

    @property
    def unknown_field(self) -> str:
        """The name of the unknown time in the API, the lake and `connect`."""
        return f"{self.unknown}_us"


REPORTED: Final = (
    Measure(
        "memory_mib_s", "MiB·s", "memory_unknown", "memory_mib_s", "memory_blind_us", "held",
        "GPU memory in use, MiB-seconds, of the time for which it is known",
        "held time whose memory is not known, GPU-µs",
        (Shown("memory", "Memory", "GiB", "mean memory in use of a held GPU", scale=1024),),
    ),
    Measure(
        "energy_uj", "µJ", "energy_unknown", "energy_uj", "energy_blind_us", "in service",
        "energy, µJ, of the time for which it is known",
        "time in service whose energy is not known, GPU-µs",
        (
            Shown("power", "Power", "W", "mean power of a GPU in service"),
            Shown("energy", "Energy", "kWh", "measured energy", mean=False, scale=3.6e12),
        ),
    ),
    Measure(
        "sm_active", "GPU-µs", "sm_unknown", "sm_active_us", "sm_blind_us", "held",
        "activity of the multiprocessors, averaged over them, of the time for which it is known, GPU-µs",
        "held time whose multiprocessor activity is not known, GPU-µs",
        (Shown("sm_active", "SM activity", "share", "mean activity of the multiprocessors in held time"),),
    ),
    Measure(
        "tensor_active", "GPU-µs", "tensor_unknown", "tensor_active_us", "tensor_blind_us", "held",
        "activity of the tensor cores, of the time for which it is known, GPU-µs",
        "held time whose tensor activity is not known, GPU-µs",
        (Shown("tensor_active", "Tensor activity", "share", "mean activity of the tensor cores in held time"),),
    ),
)  # fmt: skip
SHOWN: Final = {
    column.name: (measure, column)
    for share in (True, False)
    for measure in REPORTED
    for column in measure.shown
    if (column.kind == "share") == share
}
"""The columns of Explore with their measures, by name: first the shares."""
