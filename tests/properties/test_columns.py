"""Checks and figures of a whole group equal those of each row and each set."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from accountant.core.gpu_time_accounts import split
from accountant.core.record_faults import record_fault
from accountant.storage.write import batch_admission, record_columns
from accountant.storage.write.interval_writer import simple
from accountant.storage.write.record_columns import Incoming, Section, contents, digest, digests
from agent.wire import UNATTRIBUTED, Gap, Holder, Sharing, Slice, UsageInterval
from gputally.base.units import BUCKET_MS, MS_PER_MINUTE
from tests.hypothesis_examples import examples

NOW_MS = 1_790_812_800_000
FIGURE = st.sampled_from([None, 0, 1, 30_000_000, 60_000_000, 10**15, 10**15 + 1, 2**62, -1])
NAMES = st.sampled_from(["a", "b\n", "é" * 700, "x" * 1025, ""])
HOLDERS = st.one_of(
    st.none(),
    st.just(UNATTRIBUTED),
    st.builds(Holder, st.just("pod"), NAMES, NAMES, NAMES),
    st.builds(Holder, st.sampled_from(["pod", "slurm"]), st.sampled_from("uv")),
)
SLICES = st.one_of(st.none(), st.builds(Slice, NAMES, *[st.sampled_from([0, 1, 7, -1, 2**31])] * 6))
SHARING = st.one_of(st.none(), st.builds(Sharing, st.just("mps"), st.sampled_from([0, 2, -1, 2**31])))


@st.composite
def rows(draw: Any, seq: int) -> UsageInterval:
    start = NOW_MS - draw(st.sampled_from([0, 1, 2, 61])) * MS_PER_MINUTE
    span = draw(
        st.sampled_from([0, MS_PER_MINUTE, MS_PER_MINUTE, MS_PER_MINUTE, 2 * MS_PER_MINUTE, 61 * MS_PER_MINUTE])
    )
    capacity = draw(st.sampled_from([span * 1000, span * 1000, span * 1000, span * 500, 0, 10**16, -1]))
    return UsageInterval(
        seq=seq,
        start_ms=start - span,
        end_ms=start,
        gpu_uuid=draw(st.one_of(st.sampled_from("gh"), NAMES)),
        gpu_model=draw(NAMES),
        slice=draw(SLICES),
        holder=draw(HOLDERS),
        sharing=draw(SHARING),
        health=draw(st.sampled_from(["ok", "ok", "lost"])),
        capacity_us=capacity,
        allocated_us=draw(st.sampled_from([capacity, 0, capacity // 2])),
        busy_us=draw(FIGURE),
        sm_active_us=draw(FIGURE),
        memory_mib_s=draw(FIGURE),
        energy_uj=draw(FIGURE),
        method=draw(st.sampled_from(["device", "carried"])),
        gaps=draw(st.sampled_from([(), (), (Gap(start - span, start - span // 2, "x"),)])),
    )


@st.composite
def groups(draw: Any) -> list[Section]:
    found = []
    for stream in draw(st.lists(st.sampled_from([("c", "n", "e"), ("d", "n", "e"), ("c", "m", "e")]), min_size=1)):
        count = draw(st.integers(1, 4))
        found.append(Section(stream, [draw(rows(seq)) for seq in draw(st.permutations(range(1, count + 1)))]))
    return found


@settings(max_examples=examples(13, 80))
@given(groups())
def test_a_group_is_judged_as_its_sets_are(sections: list[Section]) -> None:
    incoming = Incoming(sections)
    sure = batch_admission.beyond_doubt(incoming, NOW_MS)
    of_sets = [[incoming.records[place] for place in incoming.sets.members(n)] for n in range(len(sure))]
    alone = [(number, of_set) for number, part in enumerate(sections) for of_set in batch_admission.sets(part.rows)]
    assert sorted(map(repr, alone)) == sorted(
        repr((int(number), batch_admission.sets(found)[0]))
        for number, found in zip(incoming.sets.section, of_sets, strict=True)
    )
    for certain, found in zip(sure.tolist(), of_sets, strict=True):
        assert not certain or record_fault(batch_admission.sets(found)[0], NOW_MS) is None
    assert incoming.sets.seq.tolist() == [min(row.seq for row in found) for found in of_sets]


@settings(max_examples=examples(13, 80))
@given(groups())
def test_accounts_and_digests_are_those_of_each_row(sections: list[Section]) -> None:
    records = [row for section in sections for row in section.rows]
    assert digests(contents(records)).tolist() == [digest(row) for row in records]
    valid = [
        Section(section.stream, [row for of_set in good for row in of_set])
        for section in sections
        if (good := [found for found in batch_admission.sets(section.rows) if record_fault(found, NOW_MS) is None])
    ]
    if valid:
        incoming = Incoming(valid)
        assert record_columns.cells(incoming).tolist() == [list(split(row)) for row in incoming.records]


def test_a_set_in_order_is_beyond_doubt() -> None:
    whole = MS_PER_MINUTE * 1000
    row = UsageInterval(
        seq=1, start_ms=NOW_MS - MS_PER_MINUTE, end_ms=NOW_MS, gpu_uuid="g", gpu_model="m", holder=Holder("pod", "u"),
        capacity_us=whole, allocated_us=whole, busy_us=1, method="device",
    )  # fmt: skip
    assert batch_admission.beyond_doubt(Incoming([Section(("c", "n", "e"), [row])]), NOW_MS).all()


@settings(max_examples=examples(13, 80))
@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 40), st.integers(1, 16)), min_size=1, max_size=12),
    st.lists(st.integers(0, 20), min_size=3, max_size=3),
)
def test_a_set_counts_as_it_came_where_it_follows_all_before_it(
    found: list[tuple[int, int, int]], known: list[int]
) -> None:
    begin = NOW_MS - NOW_MS % BUCKET_MS
    row: dict[str, Any] = {"gpu_model": "m", "capacity_us": 0, "allocated_us": 0, "method": "device"}
    sections = [
        Section(
            ("c", "n", "e"),
            [
                UsageInterval(
                    seq=1, gpu_uuid=str(gpu), start_ms=begin + at * 60_000, end_ms=begin + (at + length) * 60_000, **row
                )
            ],
        )
        for gpu, at, length in found
    ]
    incoming = Incoming(sections)
    last = {str(gpu): begin + minute * 60_000 for gpu, minute in enumerate(known)}
    told = simple(incoming.sets, np.array([last[uuid] for _, uuid in incoming.gpu.values]))
    expected = []
    for gpu, at, length in found:
        start, end = begin + at * 60_000, begin + (at + length) * 60_000
        expected.append(start >= last[str(gpu)] and end - (start - start % BUCKET_MS) <= BUCKET_MS)
        last[str(gpu)] = max(last[str(gpu)], end)
    assert incoming.sets.spread(told).tolist() == expected
