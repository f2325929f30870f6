"""Records of a node change no figures, bills, statements or closed months of other nodes."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from accountant.billing.cost_allocation import billed_tables
from accountant.billing.statements import canonical
from accountant.bookkeeping.bookkeeper import Bookkeeper
from accountant.core.periods import Month
from accountant.ledger.protocols import Facts, NamespaceFacts
from accountant.storage.duckdb_ledger import DuckLedger, open_ledger
from accountant.wire.policy_models import Policy
from agent.wire import Batch, Holder
from gputally.base.clock import VirtualClock
from tests.billing.usage_rows import price_book
from tests.empty_ledger import fresh
from tests.hypothesis_examples import examples
from tests.ledger.conftest import MINUTE, START_MS, Hand
from tests.moments import present

HAND = Hand()
END_MS = START_MS + 30 * MINUTE
STEPS = 15
"""Honest batches of each node, of two minutes each."""
MONTH_MS = 30 * 24 * 60 * MINUTE
CLOSED, OPEN = Month(2026, 9), Month(2026, 10)
"""The month before START_MS, and the month that starts there."""
BOOK = price_book("id: h100, model: H100, price: '2.10', valid_from: 2026-01-01", timezone="UTC")
VICTIMS = ("n1", "n2")
TEAMS = ("red", "blue")
QUEUES = [{"name": team, "refs": [f"kai:{team}"], "team": team} for team in TEAMS]
EPOCHS = ("00000000-0000-7000-8000-000000000000", "0192-a", "ffffffff-ffff-7fff-bfff-ffffffffffff")

KINDS = ("pod", "slurm", "container", "process")
CONTAINER = "c" * 63
UIDS = {
    "pod": {"n1": "pod-n1", "n2": "pod-n2"},
    "slurm": {"n1": "4711", "n2": "4712_3"},
    "container": {"n1": f"{CONTAINER}1", "n2": f"{CONTAINER}2"},
    "process": {"n1": "812:77", "n2": "812:77"},
}
"""The identifier of what holds each victim's GPU, by kind. Jobs and processes are numbered, so they can be guessed, and
two nodes can have a process of the same number."""
GUESSED = ("4711", "4712_3", "812:77", "pod-a", "12")
"""What an attacker can name before a victim does."""
KNOWN = ("pod-n1", "pod-n2", "pod-n1@n1", "812:77@n1", "4711@n1", f"{CONTAINER}1", f"{CONTAINER}2")
"""What it can name once the victim has."""
_uids = st.sampled_from((*GUESSED, *KNOWN))
_holders = st.none() | st.builds(
    Holder,
    kind=st.sampled_from(KINDS),
    uid=_uids,
    namespace=st.sampled_from(("", *TEAMS)),
    name=st.just("train-0"),
)


@st.composite
def _rows(draw: st.DrawFn) -> dict[str, Any]:
    """Generate one set: a victim's GPU or its own; now, earlier in the month, or in the month before."""
    start = draw(st.integers(0, 28))
    back = draw(st.sampled_from((0, 0, MONTH_MS)))
    gpu = draw(st.sampled_from(("gpu-n1", "gpu-n2", "gpu-a")))
    return {"start": start - back / MINUTE, "length": draw(st.integers(1, 15)), "gpu": gpu, "holder": draw(_holders)}


@st.composite
def _facts(draw: st.DrawFn) -> dict[str, Any]:
    return {
        "uid": draw(_uids),
        "node": draw(st.sampled_from(("n1", "n2", "a", ""))),
        "namespace": draw(st.sampled_from(TEAMS)),
        "queue_ref": draw(st.sampled_from(("", "kai:red", "kai:blue"))),
        "observed_ms": START_MS + draw(st.integers(-10, 25)) * MINUTE,
        "scheduled_ms": draw(st.none() | st.just(START_MS - MINUTE)),
    }


_batches = st.tuples(
    st.sampled_from(EPOCHS), st.integers(1, 9), st.lists(_rows(), max_size=4), st.lists(_facts(), max_size=3)
)
"""Epoch, distance from its last number, rows and facts."""


def _attack(number: int, epoch: str, ahead: int, rows: list[dict[str, Any]], facts: list[dict[str, Any]]) -> Batch:
    first = 100 * number + ahead
    made: list[Any] = [
        HAND.row(first + place, row["start"], row["start"] + row["length"], row["gpu"], holder=row["holder"])
        for place, row in enumerate(rows)
    ]
    made += [HAND.fact(first + len(rows) + place, **fact) for place, fact in enumerate(facts)]
    return HAND.batch(*made, node="a", epoch=epoch, first_seq=first, oldest_seq=first)


def _honest(minute: int, node: str, kind: Any) -> Batch:
    """Build two minutes of the node's own GPU and holder; facts of a pod come with the first, and once more later."""
    seq = 10 * minute + 11
    team = TEAMS[VICTIMS.index(node)]
    held = Holder(kind=kind, uid=UIDS[kind][node], namespace="" if kind == "slurm" else team, name="train-0")
    records: list[Any] = [HAND.row(seq, minute, minute + 2, f"gpu-{node}", holder=held)]
    if kind == "pod" and minute in (0, 10):
        told = {"namespace": team, "node": node, "queue_ref": f"kai:{team}", "observed_ms": START_MS + minute * MINUTE}
        records.append(HAND.fact(seq + 1, f"pod-{node}", **told))
    return HAND.batch(*records, node=node, epoch=f"0192-{node}", first_seq=seq, oldest_seq=seq)


def _tell_of_jobs(ledger: DuckLedger, now_ms: int, *, imported: bool) -> None:
    """Report what Slurm's accounting says about the victims' jobs: their account, and with it their team."""
    for node, team in zip(VICTIMS, TEAMS, strict=True):
        told = HAND.fact(
            1, UIDS["slurm"][node], node=node, namespace="", name="job", queue_ref=f"kai:{team}",
            observed_ms=START_MS, scheduled_ms=START_MS,
        )  # fmt: skip
        if imported:
            epoch = {"epoch": "import:slurm:00000000000000", "first_seq": 1, "oldest_seq": 1}
            ledger.append([HAND.batch(told, node=node, **epoch)], now_ms)
        else:
            ledger.observe(Facts(pods=(("prod", told),)), now_ms)


def _honest_past(node: str) -> Batch:
    """Build the records of the node in the month that was closed later."""
    pod = Holder(kind="pod", uid=f"old-{node}", namespace=TEAMS[VICTIMS.index(node)], name="train-0")
    row = HAND.row(1, -MONTH_MS / MINUTE, 30 - MONTH_MS / MINUTE, f"gpu-{node}", holder=pod)
    return HAND.batch(row, node=node, epoch=f"0192-{node}", first_seq=1, oldest_seq=1)


def _can_come_first(batch: Batch) -> bool:
    """Return whether an attacker can send the batch before the victims report anything."""
    holders = [row.holder.uid for row in batch.intervals if row.holder is not None]
    own_gpus = all(row.gpu_uuid == "gpu-a" for row in batch.intervals)
    return own_gpus and {*holders, *(fact.uid for fact in batch.facts)} <= set(GUESSED)


@dataclass(frozen=True)
class Found:
    """books, bills: of every node but the sender, in both months. kept: the bytes of the closed month, and the entries
    about it in the open one. acts: their numbers and kinds. stated: the whole statement of the open month, and the
    proposals for the closed one."""

    books: list[str]
    bills: list[Any]
    kept: tuple[object, ...]
    acts: list[tuple[int, str]]
    stated: tuple[object, ...]


def _found(ledger: DuckLedger, keeper: Bookkeeper) -> Found:
    books: list[str] = []
    bills: list[Any] = []
    with ledger.moment(START_MS - MONTH_MS - MINUTE, END_MS) as moment:
        for span in ((START_MS - MONTH_MS - 60 * MINUTE, START_MS - 60 * MINUTE), (START_MS - 60 * MINUTE, END_MS)):
            by = ("node", "team", "queue", "namespace", "pod", "gpu")
            lines = moment.usage(span, by, {"node": set(VICTIMS)}).lines()
            books += sorted(repr(line) for line in lines)
            (found,) = [table.by_line() for table in billed_tables(moment, BOOK, *span, [("team", "node", "pod")])]
            bills += [
                (found.groups.keys[place], line, gpu_us)
                for line, columns in found.groups.by_line.items()
                for place, gpu_us in zip(*(column.tolist() for column in columns), strict=True)
                if found.groups.keys[place][1] in VICTIMS
            ]
    month = keeper.month(OPEN)
    return Found(
        books,
        bills,
        (canonical(keeper.month(CLOSED)), month.corrections, month.previous_hash),
        [(act.number, act.kind) for act in present(ledger).acts()],
        (canonical(month), keeper.proposals()),
    )


Attacks = Sequence[tuple[int, tuple[str, int, list[dict[str, Any]], list[dict[str, Any]]]]]


def _figures(by_api: bool, kind: str, told_at: int | None, imported: bool, attacks: Attacks = ()) -> Found:
    """Return the figures of a ledger to which two nodes, and an attacker, sent their batches. For the parameters see
    the property; told_at is None without Slurm."""
    with (
        tempfile.TemporaryDirectory() as folder,
        closing(open_ledger(fresh(Path(folder) / "ledger.duckdb"), VirtualClock(END_MS))) as ledger,
    ):
        ledger.put_policy(Policy.model_validate({"queues": QUEUES}), START_MS - 2 * MONTH_MS)
        spaces = tuple(NamespaceFacts("prod", team, team=team) for team in TEAMS)
        ledger.observe(Facts(namespaces=spaces), START_MS)
        if by_api:
            pods = [
                ("prod", HAND.fact(0, f"pod-{node}", node=node, namespace=team))
                for node, team in zip(VICTIMS, TEAMS, strict=True)
            ]
            ledger.observe(Facts(pods=tuple(pods)), START_MS)
        ledger.append([_honest_past(node) for node in VICTIMS], START_MS)
        keeper = Bookkeeper(ledger, VirtualClock(END_MS), grace_days=0)
        keeper.prices.take(BOOK, "file", "prices.yaml", "", START_MS)
        keeper.close(CLOSED, "ada", "the month is over", ["coverage"])
        for step in range(STEPS):
            now = START_MS + (2 * step + 2) * MINUTE
            sent = [_attack(number, *batch) for number, (at, batch) in enumerate(attacks) if at == step]
            if guessed := [batch for batch in sent if _can_come_first(batch)]:
                ledger.append(guessed, now)
            ledger.append([_honest(2 * step, node, kind) for node in VICTIMS], now)
            if others := [batch for batch in sent if not _can_come_first(batch)]:
                ledger.append(others, now)
            if step == told_at:
                _tell_of_jobs(ledger, now, imported=imported)
        return _found(ledger, keeper)


_without_attacks = cache(_figures)


@settings(max_examples=examples(8, 24))
@given(
    attacks=st.lists(st.tuples(st.integers(0, STEPS - 1), _batches), max_size=8),
    by_api=st.booleans(),
    kind=st.sampled_from(KINDS),
    told_at=st.sampled_from((0, STEPS // 2)),
    imported=st.booleans(),
)
def test_a_nodes_batches_change_no_other_nodes_books(
    attacks: Attacks, by_api: bool, kind: str, told_at: int, imported: bool
) -> None:
    """attacks: the honest batch beside which each is sent, before it if its names can be guessed. by_api: whether the
    accountant sees the API server. kind: what holds the victims' GPUs. told_at, imported: the batch after which Slurm's
    accounting is reported, and whether an import or an admin reports it."""
    beside = (by_api, kind, told_at, imported) if kind == "slurm" else (by_api, kind, None, False)
    without, with_ = _without_attacks(*beside), _figures(*beside, attacks)
    assert with_.books == without.books
    assert with_.bills == without.bills
    assert (with_.kept, with_.acts) == (without.kept, without.acts)
    assert len(without.books) >= len(VICTIMS)
    assert {key[1] for key, *_ in without.bills} == set(VICTIMS)
    if not any(row["gpu"] == "gpu-a" for _, batch in attacks for row in batch[2]):
        assert with_.stated == without.stated  # else its own GPU's time is billed too
