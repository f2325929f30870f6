"""The protocol between outbox and ledger, as a state machine against an oracle in plain Python.

Nodes close sets on a grid of half minutes and send them over a network that loses answers, repeats and reorders
batches. Both sides restart, outboxes are lost, two agents claim the same GPU, and the ledger is restored from an older
copy. In every case the ledger's booked time equals the oracle's, the rest of a GPU's life is `unmetered`, and nothing
is counted twice."""

from __future__ import annotations

import copy
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, precondition, rule

from accountant.core.errors import SequenceGap
from accountant.ledger.protocols import Receipt
from accountant.storage.duckdb_ledger import DuckLedger, open_ledger
from agent.wire import Batch, Gap, Holder, PodFacts, Sharing, Skipped, UsageInterval
from gputally.base.clock import VirtualClock
from tests.empty_ledger import fresh
from tests.hypothesis_examples import examples
from tests.moments import acks, present

START_MS = 1_790_812_800_000
CELL_MS = 30_000
CELL_US = 30_000_000
PODS = ("a", "b", "c")


@dataclass(frozen=True)
class Part:
    """A row of a set, per cell of the grid: µs of capacity, pod or none, µs busy or unknown."""

    capacity: int
    pod: str | None
    busy: int | None


@dataclass(frozen=True)
class Set:
    """cells: [first, last) on the grid."""

    gpu: str
    first: int
    last: int
    parts: tuple[Part, ...]
    carried: bool = False


Record = Set | PodFacts | Skipped


@dataclass
class Outbox:
    """The outbox of an agent: records by number. A set has as many numbers as parts."""

    node: str
    epoch: str
    groups: list[tuple[int, Record]] = field(default_factory=list)
    next_seq: int = 1
    acknowledged: int = 0
    sent: list[Batch] = field(default_factory=list)

    def put(self, record: Record) -> None:
        self.groups.append((self.next_seq, record))
        self.next_seq += len(record.parts) if isinstance(record, Set) else 1

    @property
    def oldest(self) -> int:
        return self.groups[0][0] if self.groups else self.next_seq

    def batch(self, after: int, most: int) -> Batch:
        """Up to `most` records above a number."""
        chosen = [(seq, record) for seq, record in self.groups if seq > after][:most]
        intervals: list[UsageInterval] = []
        facts: list[PodFacts] = []
        skipped: list[Skipped] = []
        for seq, record in chosen:
            if isinstance(record, Set):
                intervals += rows(record, seq)
            elif isinstance(record, PodFacts):
                facts.append(fact(record.uid, seq))
            else:
                skipped.append(Skipped(seq=seq, reason=record.reason))
        return Batch(
            cluster="c", node=self.node, boot_id="boot", epoch=self.epoch,
            first_seq=chosen[0][0] if chosen else self.next_seq, oldest_seq=self.oldest,
            intervals=tuple(intervals), facts=tuple(facts), skipped=tuple(skipped),
        )  # fmt: skip


def rows(item: Set, seq: int) -> list[UsageInterval]:
    cells = item.last - item.first
    return [
        UsageInterval(
            seq=seq + i, start_ms=START_MS + item.first * CELL_MS, end_ms=START_MS + item.last * CELL_MS,
            gpu_uuid=item.gpu, gpu_model="H100",
            holder=None if part.pod is None else Holder(kind="pod", uid=part.pod, namespace="ns", name=part.pod),
            sharing=Sharing(mode="mps") if len(item.parts) > 1 else None,
            capacity_us=part.capacity * cells, allocated_us=part.capacity * cells if part.pod else 0,
            busy_us=None if part.busy is None else part.busy * cells,
            gaps=(Gap(START_MS + item.first * CELL_MS, START_MS + item.last * CELL_MS, "x"),) if item.carried else (),
            method="carried" if item.carried else "simulated",
        )
        for i, part in enumerate(item.parts)
    ]  # fmt: skip


def fact(uid: str, seq: int) -> PodFacts:
    return PodFacts(seq=seq, uid=uid, namespace="ns", name=uid, node="n", observed_ms=START_MS)


@dataclass
class Oracle:
    """The expected state of the ledger: the accepted sets, and the mark of each outbox."""

    marks: dict[tuple[str, str], int] = field(default_factory=dict)
    claims: list[tuple[tuple[bool, str, int, str], Set]] = field(default_factory=list)

    def accept(self, outbox: Outbox, sent: Batch, groups: list[tuple[int, Record]]) -> bool:
        key = (outbox.node, outbox.epoch)
        mark = self.marks.get(key, 0)
        if sent.first_seq > mark + 1 and sent.first_seq != sent.oldest_seq:
            return False
        for seq, record in groups:
            if seq > mark and isinstance(record, Set):
                self.claims.append(((record.carried, outbox.epoch, seq, outbox.node), record))
        count = len(sent.intervals) + len(sent.facts) + len(sent.skipped)
        self.marks[key] = max(mark, sent.first_seq + count - 1)
        return True

    def books(self) -> Counter[tuple[str, str]]:
        """(gpu, account or pod:account) -> µs, cell by cell."""
        owner: dict[tuple[str, int], Set] = {}
        for _, item in sorted(self.claims, key=lambda claim: claim[0]):
            for cell in range(item.first, item.last):
                owner.setdefault((item.gpu, cell), item)
        found: Counter[tuple[str, str]] = Counter()
        for (gpu, _), item in owner.items():
            for part in item.parts:
                if part.pod is None:
                    found[gpu, "unallocated"] += part.capacity
                    continue
                busy = 0 if part.busy is None else min(part.busy, part.capacity)
                found[gpu, f"{part.pod}:busy"] += busy
                found[gpu, f"{part.pod}:rest"] += part.capacity - busy
        for gpu, (first, last) in self.lives().items():
            metered = sum(value for (g, _), value in found.items() if g == gpu)
            found[gpu, "unmetered"] += (last - first) * CELL_US - metered
        return +found

    def lives(self) -> dict[str, tuple[int, int]]:
        """First cell of each GPU, and the end of the test's time."""
        gpus = {item.gpu for _, item in self.claims}
        return {gpu: (min(i.first for _, i in self.claims if i.gpu == gpu), HORIZON) for gpu in gpus}


HORIZON = 400
"""Number of cells; every check queries all of them."""

BATCHES = st.integers(1, 4)
WHOLE = st.tuples(st.sampled_from([*PODS, None]), st.integers(0, CELL_US)).map(
    lambda drawn: (Part(CELL_US, drawn[0], drawn[1] if drawn[0] else None),)
)
SHARED = st.tuples(st.sampled_from(PODS), st.integers(0, CELL_US), st.integers(0, CELL_US)).map(
    lambda drawn: (Part(CELL_US // 2, drawn[0], drawn[1]), Part(CELL_US // 2, None, None))
)
PARTS = st.one_of(WHOLE, SHARED)


class Protocol(RuleBasedStateMachine):
    """Two nodes with a GPU each; a rival agent may claim either GPU under an epoch of its own."""

    batches = Bundle("batches")

    @initialize()
    def open(self) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.generation = 0
        self.epochs = 0
        self.clock = VirtualClock(START_MS + HORIZON * CELL_MS)
        self.ledger: DuckLedger = open_ledger(fresh(self.path), self.clock)
        self.oracle = Oracle()
        self.contradicted: set[tuple[str, str, int]] = set()
        self.backup: tuple[Path, Oracle] | None = None
        self.reached = {"n1": 0, "n2": 0}
        self.boxes = {node: self.fresh_box(node) for node in self.reached}
        self.rivals: list[Outbox] = []

    @property
    def path(self) -> Path:
        return Path(self.folder.name) / f"ledger-{self.generation}.duckdb"

    def fresh_box(self, node: str) -> Outbox:
        self.epochs += 1
        return Outbox(node, f"epoch-{self.epochs:04d}")

    def deliver(self, outbox: Outbox, sent: Batch, groups: list[tuple[int, Record]]) -> Receipt | Exception:
        (result,) = self.ledger.append([sent], self.clock.wall_ms())
        accepted = self.oracle.accept(outbox, sent, groups)
        assert isinstance(result, Receipt if accepted else SequenceGap), result
        ack = result.ack if isinstance(result, Receipt | SequenceGap) else None
        assert ack is not None
        assert ack.durable_seq == self.oracle.marks.get((outbox.node, outbox.epoch), 0)
        assert ack.checkpointed_seq <= ack.durable_seq
        return result

    # --- the node's side ----------------------------------------------------------------------

    @rule(node=st.sampled_from(["n1", "n2"]), lengths=st.lists(st.integers(1, 3), min_size=1, max_size=4), parts=PARTS)
    def close_sets(self, node: str, lengths: list[int], parts: tuple[Part, ...]) -> None:
        for cells in lengths:
            at = self.reached[node]
            if at + cells > HORIZON:
                return
            self.boxes[node].put(Set(f"gpu-{node}", at, at + cells, parts))
            self.reached[node] = at + cells

    @rule(node=st.sampled_from(["n1", "n2"]), what=st.sampled_from(["fact", "skip", "hole"]))
    def close_something_else(self, node: str, what: str) -> None:
        if what == "fact":
            self.boxes[node].put(fact("a", 0))
        elif what == "skip":
            self.boxes[node].put(Skipped(seq=0, reason="undecodable"))
        else:
            self.reached[node] = min(HORIZON, self.reached[node] + 2)

    @rule(node=st.sampled_from(["n1", "n2"]), most=st.integers(1, 6), answered=st.booleans())
    def send(self, node: str, most: int, answered: bool) -> None:
        box = self.boxes[node]
        sent = box.batch(box.acknowledged, most)
        chosen = [group for group in box.groups if group[0] > box.acknowledged][:most]
        result = self.deliver(box, sent, chosen)
        box.sent.append(sent)
        if answered:
            ack = result.ack if isinstance(result, Receipt | SequenceGap) else None
            assert ack is not None
            box.acknowledged = ack.durable_seq

    @rule(node=st.sampled_from(["n1", "n2"]), pick=st.integers(0, 50))
    def repeat_an_old_batch(self, node: str, pick: int) -> None:
        box = self.boxes[node]
        if not box.sent:
            return
        sent = box.sent[pick % len(box.sent)]
        numbers = {row.seq for row in sent.intervals}
        self.deliver(box, sent, [group for group in box.groups if group[0] in numbers])

    @rule(node=st.sampled_from(["n1", "n2"]), ahead=st.integers(1, 3))
    def overtake(self, node: str, ahead: int) -> None:
        """A later batch arrives first. It is refused unless the agent has no older records."""
        box = self.boxes[node]
        waiting = [group for group in box.groups if group[0] > box.acknowledged]
        if len(waiting) > ahead:
            after = waiting[ahead - 1]
            end = after[0] + (len(after[1].parts) if isinstance(after[1], Set) else 1) - 1
            self.deliver(box, box.batch(end, 3), [group for group in box.groups if group[0] > end][:3])

    @rule(node=st.sampled_from(["n1", "n2"]))
    def drop_what_is_checkpointed(self, node: str) -> None:
        box = self.boxes[node]
        ack = acks(self.ledger, node, "c").get(box.epoch)
        if ack is not None:
            box.groups = [group for group in box.groups if group[0] > min(ack.checkpointed_seq, box.acknowledged)]
            box.sent = [sent for sent in box.sent if sent.first_seq >= box.oldest]

    @rule(node=st.sampled_from(["n1", "n2"]))
    def lose_the_outbox(self, node: str) -> None:
        self.boxes[node] = self.fresh_box(node)

    @rule(
        node=st.sampled_from(["n1", "n2"]),
        back=st.integers(0, 12),
        cells=st.integers(1, 12),
        parts=PARTS,
        carried=st.booleans(),
        elder=st.booleans(),
    )
    def claim_the_same_time(
        self, node: str, back: int, cells: int, parts: tuple[Part, ...], carried: bool, elder: bool
    ) -> None:
        """Another outbox reports a set that overlaps booked time."""
        first = max(0, self.reached[node] - back)
        rival = self.fresh_box(node)
        if elder:
            rival.epoch = f"elder-{self.epochs:04d}"  # sorts before every epoch-
        if first + cells <= HORIZON:
            if carried:
                parts = tuple(Part(part.capacity, part.pod, None) for part in parts)
            rival.put(Set(f"gpu-{node}", first, first + cells, parts, carried))
            self.deliver(rival, rival.batch(0, 9), rival.groups)

    @rule(node=st.sampled_from(["n1", "n2"]), pick=st.integers(0, 50))
    def contradict(self, node: str, pick: int) -> None:
        """A record with an old number and other content is quarantined. If it is repeated, it is a duplicate."""
        box = self.boxes[node]
        mark = self.oracle.marks.get((box.node, box.epoch), 0)
        known = [
            group for group in box.groups if isinstance(group[1], Set) and group[0] + len(group[1].parts) - 1 <= mark
        ]
        if not known:
            return
        seq, record = known[pick % len(known)]
        assert isinstance(record, Set)
        other = Set(record.gpu, record.first, record.last, (Part(CELL_US, "c", CELL_US - 7),))
        (row,) = rows(other, seq)
        sent = Batch(
            cluster="c", node=box.node, boot_id="boot", epoch=box.epoch, first_seq=seq, oldest_seq=seq, intervals=(row,)
        )
        result = self.deliver(box, sent, [])
        assert isinstance(result, Receipt)
        again = (box.node, box.epoch, seq) in self.contradicted
        self.contradicted.add((box.node, box.epoch, seq))
        found = (result.stored, result.duplicates, result.quarantined)
        assert found == (0, 0, 1) or (again and found == (0, 1, 0))

    # --- the ledger's side --------------------------------------------------------------------

    @rule()
    def checkpoint(self) -> None:
        self.ledger.checkpoint()

    @rule()
    def restart(self) -> None:
        self.ledger.close()
        self.ledger = open_ledger(self.path, self.clock)

    @precondition(lambda self: self.backup is None)
    @rule()
    def back_up(self) -> None:
        path = Path(self.folder.name) / "backup.duckdb"
        path.unlink(missing_ok=True)
        self.ledger.copy_to(path)
        self.backup = (path, copy.deepcopy(self.oracle))

    @precondition(lambda self: self.backup is not None)
    @rule()
    def restore(self) -> None:
        assert self.backup is not None
        self.ledger.close()
        path, self.oracle = self.backup
        self.backup = None
        self.generation += 1
        path.rename(self.path)
        self.ledger = open_ledger(self.path, self.clock)
        for box in self.boxes.values():
            box.acknowledged = min(box.acknowledged, self.oracle.marks.get((box.node, box.epoch), 0))

    # --- the law ------------------------------------------------------------------------------

    @invariant()
    def the_books_are_the_oracles(self) -> None:
        if not hasattr(self, "ledger"):
            return
        end = START_MS + HORIZON * CELL_MS
        found: Counter[tuple[str, str]] = Counter()
        for line in present(self.ledger).usage((START_MS, end), ("gpu", "pod")).lines():
            gpu, pod, accounts = line.key["gpu"], line.key["pod"], line.accounts_gpu_us
            assert min(accounts.model_dump().values()) >= 0
            if pod:
                found[gpu, f"{pod}:busy"] += accounts.busy
                found[gpu, f"{pod}:rest"] += accounts.allocated_idle + accounts.allocated_unknown
                assert accounts.total == accounts.allocated
            else:
                found[gpu, "unallocated"] += accounts.unallocated
                found[gpu, "unmetered"] += accounts.unmetered
        assert +found == self.oracle.books()
        examined = present(self.ledger).imbalance(START_MS, end)
        assert examined.total_us == 0, examined.lines

    def teardown(self) -> None:
        if hasattr(self, "ledger"):
            self.ledger.close()
            self.folder.cleanup()


TestProtocol = pytest.mark.thorough(Protocol.TestCase)
TestProtocol.settings = settings(
    max_examples=examples(5, 40), stateful_step_count=18, suppress_health_check=list(HealthCheck)
)
