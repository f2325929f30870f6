"""Start-up time from hourly sums equals that from all rows to the microsecond."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from accountant.billing.idle_time_causes import Launch, gang, phase_spans
from accountant.ledger.protocols import IdlePhases
from accountant.storage.duckdb_engine import Database
from accountant.storage.duckdb_ledger import DuckLedger, open_ledger
from accountant.wire.policy_models import Policy, QueuePolicy
from accountant.wire.usage_cost_and_job_models import Dimension
from agent.wire import Holder, UsageInterval
from gputally.base.apportionment import prorate
from gputally.base.clock import VirtualClock
from gputally.base.units import BUCKET_MS, MS_PER_HOUR
from tests.effort import examples
from tests.fresh import fresh
from tests.ledger.conftest import MINUTE, START_MS, Hand

HOURS = 5
END_MS = START_MS + HOURS * MS_PER_HOUR
BY: tuple[Dimension, ...] = ("pod", "gpu", "hour")


@dataclass(frozen=True)
class Pod:
    """Minutes after the start; running None: nobody reported a start. gang: pods of one begin together."""

    bound: int
    running: int | None
    gang: int | None

    @property
    def observed_ms(self) -> int:
        return START_MS + min(self.bound + 45, HOURS * 60) * MINUTE

    def kind(self, name: str) -> str:
        return f"Job/{name}" if self.gang is None else f"PyTorchJob/g{self.gang}"


_pods = st.lists(
    st.builds(
        Pod,
        bound=st.integers(0, HOURS * 60 - 1),
        running=st.none() | st.integers(0, HOURS * 60 + 30),
        gang=st.none() | st.integers(0, 1),
    ),
    min_size=1,
    max_size=5,
)
_edges = st.lists(
    st.integers(-20 * MINUTE, HOURS * MS_PER_HOUR + 20 * MINUTE)
    | st.integers(0, HOURS * 4).map(lambda quarter: quarter * BUCKET_MS),
    min_size=2,
    max_size=5,
    unique=True,
).map(sorted)


def history(pods: list[Pod], step: int, fill: Callable[[DuckLedger], None], path: Path) -> None:
    """Each pod holds a GPU for up to two hours, with a row every `step` minutes. Some rows have no idle time."""
    hand, records, seq = Hand(), [], 0
    for number, pod in enumerate(pods):
        name = f"p{number}"
        minute = pod.bound - pod.bound % step
        while minute < min(pod.bound + 120, HOURS * 60):
            seq += 1
            whole = step * 60_000_000
            busy = whole if (minute // step) % 7 == 3 else (seq * 7_654_321) % whole
            records.append(
                hand.row(
                    seq,
                    minute,
                    minute + step,
                    f"gpu-{number}",
                    busy_us=busy,
                    holder=Holder("pod", name, "vision", name),
                )
            )
            minute += step
        seq += 1
        started = None if pod.running is None else START_MS + pod.running * MINUTE + 12_345
        records.append(
            hand.fact(
                seq, name, name=name, workload=pod.kind(name), created_ms=START_MS + pod.bound * MINUTE,
                scheduled_ms=START_MS + pod.bound * MINUTE, started_ms=started,
                observed_ms=pod.observed_ms,
            )
        )  # fmt: skip
    ledger = open_ledger(fresh(path), VirtualClock(END_MS))
    ledger.append([hand.batch(*sorted(records, key=lambda record: record.seq))], END_MS)
    fill(ledger)
    ledger.close()


def told_by_rows(pods: list[Pod], path: Path, start_ms: int, end_ms: int) -> list[IdlePhases]:
    """Computes start-up time by its definition: cuts every row at every phase."""
    database = Database(path)
    with database.cursor() as cursor:
        rows = cursor.run(
            "SELECT h.name, g.gpu_uuid, e.start_ms, e.end_ms, e.idle_us FROM entry e JOIN holder h ON h.id = e.payer "
            "JOIN gpu g ON g.id = e.gpu WHERE e.idle_us > 0"
        )
    database.close()
    numbers = {f"p{number}": number for number in range(len(pods))}
    spans = phase_spans(
        Launch(
            number, gang(pods[number].kind(name), "prod/vision"), START_MS + pods[number].bound * MINUTE,
            START_MS + pods[number].bound * MINUTE,
            None if (running := pods[number].running) is None else START_MS + running * MINUTE + 12_345,
            pods[number].observed_ms,
        )
        for name, number in numbers.items()
    )  # fmt: skip
    sums: dict[tuple[str, ...], dict[str, int]] = {}
    for name, gpu, begin, stop, idle in rows:
        hour = datetime.fromtimestamp(begin // 1000, UTC).strftime("%Y-%m-%dT%H")
        for span in spans:
            low, high = max(begin, span.start_ms, start_ms), min(stop, span.end_ms, end_ms)
            if numbers.get(name) == span.holder and low < high:
                part = prorate(idle, stop - begin, low - begin, high - begin)
                group = sums.setdefault((name, gpu, hour), {"starting": 0, "gang_waiting": 0})
                group[span.phase] += part
    return [
        IdlePhases(dict(zip(BY, key, strict=True)), found["starting"], found["gang_waiting"])
        for key, found in sorted(sums.items())
    ]


def some(found: list[IdlePhases]) -> list[IdlePhases]:
    return [one for one in found if one.starting_us or one.gang_waiting_us]


def added(found: list[IdlePhases]) -> dict[tuple[str, ...], tuple[int, int]]:
    sums: dict[tuple[str, ...], tuple[int, int]] = {}
    for one in found:
        starting, waiting = sums.get(tuple(one.key.values()), (0, 0))
        sums[tuple(one.key.values())] = starting + one.starting_us, waiting + one.gang_waiting_us
    return sums


def test_who_waits_for_a_member_that_never_idles_waits_in_every_span(tmp_path: Path) -> None:
    """The busy member has rows only before midnight. In the hour after midnight, the other member still waits for
    it."""
    hand = Hand()
    began = {"early": 5, "late": 90}
    facts = [
        hand.fact(
            seq, name, name=name, workload="PyTorchJob/g", created_ms=START_MS, scheduled_ms=START_MS,
            started_ms=START_MS + minute * MINUTE, observed_ms=START_MS + 120 * MINUTE,
        )
        for seq, (name, minute) in enumerate(began.items(), 1)
    ]  # fmt: skip
    busy = hand.row(3, 0, 1, "gpu-1", busy_us=60_000_000, holder=Holder("pod", "late", "vision", "late"))
    idle = [
        hand.row(4 + n, n, n + 1, "gpu-0", busy_us=0, holder=Holder("pod", "early", "vision", "early"))
        for n in range(120)
    ]
    ledger = open_ledger(tmp_path / "ledger.duckdb", VirtualClock(END_MS))
    ledger.append([hand.batch(*facts, busy, *idle)], END_MS)
    hours = [START_MS, START_MS + MS_PER_HOUR, START_MS + 2 * MS_PER_HOUR]
    by_hour = [ledger.idle_phases(*span, ("pod",)) for span in pairwise(hours)]
    whole = ledger.idle_phases(hours[0], hours[-1], ("pod",))
    ledger.close()
    assert whole == [IdlePhases({"pod": "early"}, 5 * MINUTE * 1000, 85 * MINUTE * 1000)]
    assert [(one.starting_us, one.gang_waiting_us) for piece in by_hour for one in piece] == [
        (5 * MINUTE * 1000, 55 * MINUTE * 1000), (0, 30 * MINUTE * 1000),
    ]  # fmt: skip


@given(pods=_pods, edges=_edges, step=st.sampled_from((1, 5, 15)), folded=st.booleans(), late=st.booleans())
@pytest.mark.thorough
@settings(max_examples=examples(5, 30), deadline=None)
def test_sums_and_rows_say_the_same(pods: list[Pod], edges: list[int], step: int, folded: bool, late: bool) -> None:
    """For folded and unfolded hours, hours that changed after folding, and any span. Parts add up to the whole."""

    def fill(ledger: DuckLedger) -> None:
        if folded:
            ledger.checkpoint()
        if late:
            middle = HOURS * 30
            row: UsageInterval = Hand().row(
                1, middle, middle + 10, "gpu-late", busy_us=0, holder=Holder("pod", "p0", "vision", "p0")
            )
            ledger.append([Hand().batch(row, epoch="late")], END_MS)
        ledger.put_policy(Policy(queues=(QueuePolicy(name="a", team="t"),)), START_MS + 100 * MINUTE)

    with TemporaryDirectory() as folder:
        path = Path(folder) / "ledger.duckdb"
        history(pods, step, fill, path)
        ledger = open_ledger(path, VirtualClock(END_MS))
        asked = [(START_MS + low, START_MS + high) for low, high in [*pairwise(edges), (edges[0], edges[-1])]]
        found = [some(ledger.idle_phases(*span, BY)) for span in asked]
        ledger.close()
        assert found == [some(told_by_rows(pods, path, *span)) for span in asked]
        *pieces, whole = found
        assert added([one for piece in pieces for one in piece]) == added(whole)
