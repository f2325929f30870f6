"""The rows of a group, column by column.

A group has up to a hundred thousand rows of a few thousand GPUs, pods and slices. What is asked of every row is asked
of whole columns; what is asked of a name is asked of each *distinct* one once. Rows stay in the order in which they
came; the *sets* of accountant.store.writing.validation are told by their places. Knows nothing of the tables. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from accountant.store.writing.digest import CONTENT_FIELDS, contents, digests
from agent.wire import Holder, Sharing, Slice, UsageInterval

Stream = tuple[str, str, str]
"""(cluster, node, epoch)."""
NodeName = tuple[str, str]
GpuName = tuple[str, str]
"""(cluster, gpu_uuid)."""
Whole: TypeAlias = npt.NDArray[np.int64]
Truth: TypeAlias = npt.NDArray[np.bool_]
K = TypeVar("K")
L = TypeVar("L")


class Section(NamedTuple):
    """New rows of one outbox that came together: a set is never split over two. digests: where they are known."""

    stream: Stream
    rows: Sequence[UsageInterval]
    digests: Sequence[int] | None = None


class Distinct(NamedTuple, Generic[K]):
    """A column as its different values and the place among them of each row's."""

    values: list[K]
    of_row: Whole


class _Numbered(dict[K, int]):
    """Keys in the order in which they were first asked for, each with its place."""

    def __missing__(self, key: K) -> int:
        place = self[key] = len(self)
        return place


def distinct(values: Sequence[K]) -> Distinct[K]:
    seen: _Numbered[K] = _Numbered()
    of_row = np.fromiter(map(seen.__getitem__, values), np.int64, len(values))
    return Distinct(list(seen), of_row)


def paired(first: Distinct[K], second: Distinct[L]) -> Distinct[tuple[K, L]]:
    """Both columns as one."""
    if len(second.values) == 1:
        return Distinct([(value, second.values[0]) for value in first.values], first.of_row)
    if len(first.values) == 1:
        return Distinct([(first.values[0], value) for value in second.values], second.of_row)
    width = len(second.values)
    keys, of_row = np.unique(first.of_row * width + second.of_row, return_inverse=True)
    return Distinct([(first.values[key // width], second.values[key % width]) for key in keys.tolist()], of_row)


class Sets(NamedTuple):
    """The rows of one GPU with equal span in one section: one number per set, by section, GPU and start.

    places: of all rows, set after set; first: where in it each set begins. seq: the lowest of the set."""

    places: Whole
    first: Whole
    section: Whole
    gpu: Whole
    start_ms: Whole
    end_ms: Whole
    seq: Whole

    def spread(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """What is said of each set, for each of its rows."""
        spread = np.empty(len(self.places), values.dtype)
        spread[self.places] = np.repeat(values, np.diff(self.first, append=len(self.places)))
        return spread

    def members(self, number: int) -> list[int]:
        """The places of one set's rows."""
        end = self.first[number + 1] if number + 1 < len(self.first) else len(self.places)
        found: list[int] = self.places[self.first[number] : end].tolist()
        return found


class Numbers(NamedTuple):
    """A column of whole numbers, some of which may be unknown. told: as Arrow has it; value: 0 where unknown."""

    told: Any
    value: Whole

    @classmethod
    def of(cls, values: Sequence[int | None]) -> Numbers:
        """Raises OverflowError for what does not fit 64 bits."""
        try:
            told = pa.array(values, pa.int64())
        except pa.ArrowInvalid as error:
            raise OverflowError(str(error)) from error
        if told.null_count == len(told):
            return cls(told, np.zeros(len(told), np.int64))
        return cls(told, (told.fill_null(0) if told.null_count else told).to_numpy())

    @property
    def known(self) -> Truth:
        known: Truth = self.told.is_valid().to_numpy(zero_copy_only=False)
        return known


@dataclass(frozen=True)
class Incoming:
    """All rows of `sections`, at least one. Raises OverflowError for a figure that does not fit 64 bits."""

    sections: Sequence[Section]

    @cached_property
    def records(self) -> list[UsageInterval]:
        return [row for section in self.sections for row in section.rows]

    @cached_property
    def _contents(self) -> list[tuple[Any, ...]]:
        return contents(self.records)

    @cached_property
    def _columns(self) -> dict[str, tuple[Any, ...]]:
        return dict(zip(CONTENT_FIELDS, zip(*self._contents, strict=True), strict=True))

    @cached_property
    def digests(self) -> npt.NDArray[np.uint64]:
        if all(section.digests is None for section in self.sections):
            return digests(self._contents)
        return np.array([mark for section in self.sections for mark in section.digests or ()], np.uint64)

    @cached_property
    def section(self) -> Whole:
        """The section of each row."""
        return np.repeat(np.arange(len(self.sections)), [len(section.rows) for section in self.sections])

    def by_section(self, values: Sequence[K]) -> Distinct[K]:
        """What is said of each section, as a column."""
        of_section = distinct(values)
        return Distinct(of_section.values, of_section.of_row[self.section])

    @cached_property
    def seq(self) -> Whole:
        return np.array([row.seq for row in self.records], np.int64)

    @cached_property
    def start_ms(self) -> Whole:
        return self.numbers("start_ms").value

    @cached_property
    def end_ms(self) -> Whole:
        return self.numbers("end_ms").value

    @cached_property
    def _numbers(self) -> dict[str, Numbers]:
        return {}

    def numbers(self, name: str) -> Numbers:
        found = self._numbers.get(name)
        if found is None:
            found = self._numbers[name] = Numbers.of(self._columns[name])
        return found

    def names(self, name: str) -> Distinct[str]:
        """gpu_model, health or method."""
        return distinct(self._columns[name])

    def with_gaps(self) -> list[int]:
        """The places of rows for part of which something could not be read."""
        gaps = self._columns["gaps"]
        return [place for place, some in enumerate(gaps) if some] if any(gaps) else []

    @cached_property
    def lost(self) -> Truth:
        health = self.names("health")
        return np.array([value == "lost" for value in health.values])[health.of_row]

    @cached_property
    def sharing(self) -> Distinct[Sharing | None]:
        return distinct(self._columns["sharing"])

    @cached_property
    def node(self) -> Distinct[NodeName]:
        return self.by_section([section.stream[:2] for section in self.sections])

    @cached_property
    def gpu(self) -> Distinct[GpuName]:
        return paired(self.cluster, distinct(self._columns["gpu_uuid"]))

    @cached_property
    def cluster(self) -> Distinct[str]:
        return self.by_section([section.stream[0] for section in self.sections])

    @cached_property
    def device(self) -> Distinct[tuple[tuple[NodeName, GpuName], tuple[str, Slice | None]]]:
        """Where a row's GPU stood, and which part of it the row is of: node and GPU, model and slice."""
        sort = paired(distinct(self._columns["gpu_model"]), distinct(self._columns["slice"]))
        return paired(paired(self.node, self.gpu), sort)

    @cached_property
    def holder(self) -> Distinct[tuple[str, Holder | None]]:
        """Who holds it, by cluster."""
        return paired(self.cluster, distinct(self._columns["holder"]))

    @cached_property
    def sets(self) -> Sets:
        keys = (self.section, self.gpu.of_row, self.start_ms, self.end_ms)
        places = np.lexsort(keys[::-1])
        ordered = [key[places] for key in keys]
        begins = np.ones(len(places), np.bool_)
        begins[1:] = np.logical_or.reduce([key[1:] != key[:-1] for key in ordered])
        first = np.flatnonzero(begins)
        section, gpu, start, end = (key[first] for key in ordered)
        return Sets(places, first, section, gpu, start, end, np.minimum.reduceat(self.seq[places], first))
