"""The outbox against a model of the accountant: lost answers, restarts of both, restored ledgers."""

from __future__ import annotations

import tempfile
from pathlib import Path

import msgspec
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from agent.metering.meter import ClosedSet
from agent.upload.spool import Outbox
from agent.wire import Ack, PodFacts, Skipped, UsageInterval
from gputally.base.clock import VirtualClock
from tests.effort import examples

Record = UsageInterval | PodFacts | Skipped


class Protocol(RuleBasedStateMachine):
    """One node's outbox and a ledger that may forget what it had not yet made safe."""

    @initialize(archive=st.booleans())
    def begin(self, archive: bool) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.clock = VirtualClock(1_790_812_800_000)
        self.archive = archive
        self.outbox = self.open()
        self.epoch = self.outbox.epoch
        self.written: dict[int, UsageInterval | PodFacts] = {}
        self.unit_of: dict[int, int] = {}
        self.parked: set[int] = set()
        self.ledger: dict[int, Record] = {}
        self.safe: dict[int, Record] = {}
        self.units = 0

    def open(self) -> Outbox:
        return Outbox(Path(self.folder.name) / "outbox.sqlite", self.clock, fsync=False)

    @rule(sizes=st.lists(st.integers(1, 3), max_size=3), facts=st.integers(0, 2))
    def append(self, sizes: list[int], facts: int) -> None:
        seq = self.outbox.last_seq
        made_facts = []
        for _ in range(facts):
            seq, self.units = seq + 1, self.units + 1
            fact = PodFacts(seq=seq, uid=f"u{seq}", namespace="n", name="p", node="n1", observed_ms=seq)
            made_facts.append(fact)
            self.written[seq], self.unit_of[seq] = fact, self.units
        made_sets = []
        for size in sizes:
            self.units += 1
            rows = []
            for _ in range(size):
                seq += 1
                row = UsageInterval(
                    seq=seq, start_ms=self.units, end_ms=self.units + 1, gpu_uuid="G", gpu_model="M",
                    capacity_us=seq, allocated_us=0, method="device",
                )  # fmt: skip
                rows.append(row)
                self.written[seq], self.unit_of[seq] = row, self.units
            made_sets.append(ClosedSet(tuple(rows)))
        assert self.outbox.append(made_sets, made_facts, b"%d" % seq).last_seq == seq

    @rule(max_rows=st.integers(1, 6), arrives=st.booleans(), answered=st.booleans())
    def send(self, max_rows: int, arrives: bool, answered: bool) -> None:
        pending = self.outbox.pending(max_rows, 1_000_000)
        if pending is None:
            return
        records: list[Record] = [*pending.intervals, *pending.facts, *pending.skipped]
        seqs = sorted(r.seq for r in records)
        assert seqs == list(range(pending.first_seq, pending.last_seq + 1))
        units = {self.unit_of[seq] for seq in seqs}
        assert {s for s, unit in self.unit_of.items() if unit in units} == set(seqs), "a set was split"
        if not arrives:
            return
        durable = max(self.ledger, default=0)
        assert pending.first_seq <= durable + 1 or pending.first_seq == pending.oldest_seq
        for record in sorted(records, key=lambda r: r.seq):
            self.ledger.setdefault(record.seq, record)
        if answered:
            self.answer()

    @rule()
    def answer(self) -> None:
        safe = max(self.safe, default=0)
        self.outbox.acknowledge(
            Ack(
                epoch=self.epoch,
                durable_seq=max(self.ledger, default=0),
                checkpointed_seq=max(self.ledger, default=0) if self.archive else safe,
                archived_seq=safe if self.archive else None,
            )
        )

    @rule()
    def make_safe(self) -> None:
        self.safe = dict(self.ledger)

    @rule()
    def ledger_restored(self) -> None:
        """Whatever the ledger forgets, the outbox gives every number that was not safe, unchanged."""
        self.ledger = dict(self.safe)
        self.answer()
        pending = self.outbox.pending(10_000, 100_000_000)
        there = {r.seq: r for r in (*pending.intervals, *pending.facts, *pending.skipped)} if pending else {}
        assert set(there) == self.written.keys() - self.safe.keys()
        for seq, record in there.items():
            if seq in self.parked:
                assert record == Skipped(seq, "refused")
            else:
                assert msgspec.json.encode(record) == msgspec.json.encode(self.written[seq])

    @precondition(lambda self: self.written)
    @rule(data=st.data())
    def park(self, data: st.DataObject) -> None:
        held = [s for s in self.written if s not in self.ledger]
        if held:
            seq = data.draw(st.sampled_from(held))
            self.outbox.park(seq, "refused")
            self.parked |= {s for s, unit in self.unit_of.items() if unit == self.unit_of[seq]}

    @rule()
    def agent_restarted(self) -> None:
        self.outbox.close()
        self.outbox = self.open()

    @invariant()
    def numbers_and_state_are_kept(self) -> None:
        if not hasattr(self, "outbox"):
            return
        assert self.outbox.epoch == self.epoch
        assert self.outbox.last_seq == max(self.written, default=0)

    @invariant()
    def the_ledger_has_what_was_written(self) -> None:
        if not hasattr(self, "outbox"):
            return
        for seq, record in self.ledger.items():
            assert seq in self.parked if isinstance(record, Skipped) else record == self.written[seq]

    def teardown(self) -> None:
        if hasattr(self, "outbox"):
            self.ledger_restored()
            self.outbox.close()
            self.folder.cleanup()


TestProtocol = Protocol.TestCase
TestProtocol.settings = settings(
    max_examples=examples(13, 80), stateful_step_count=30, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
