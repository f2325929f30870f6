"""A ledger with every kind of record that the archive restores, and its figures."""

from __future__ import annotations

from accountant.ledger.protocols import Facts, NamespaceFacts, NodeFacts
from accountant.ledger.usage import START_UP
from accountant.storage.duckdb_ledger import DuckLedger
from accountant.wire.policy_models import Policy, QueuePolicy, WindowSpec
from accountant.wire.usage_cost_and_job_models import Dimension
from agent.wire import Batch, Skipped, Slice
from gputally.base.units import MS_PER_HOUR
from tests.ledger.conftest import MINUTE, NOW_MS, START_MS, Hand, booked
from tests.moments import present
from tests.usage_relation import start_up

BY: tuple[Dimension, ...] = ("gpu", "team", "queue", "job", "mig_profile")
POLICY = Policy(queues=(QueuePolicy(name="left", team="red", refs=("kai:left",)),))


def sent(hand: Hand) -> list[Batch]:
    """Build an outbox with facts, sets, a MIG slice, and overlapping, skipped and rejected records."""
    mig = Slice("1g.10gb", 7, 0, 1, 7, 9856, 81920)
    return [
        hand.batch(
            hand.fact(1, queue_ref="kai:left", labels={"team": "red"}),
            *(
                hand.row(
                    n,
                    n - 2,
                    n - 1,
                    energy_uj=n * 1000 + 7,
                    sm_active_us=n * 100 + 3,
                    tensor_active_us=n if n % 2 else None,
                )
                for n in range(2, 32)
            ),
        ),
        hand.batch(
            hand.row(32, 3.5, 4.5, method="carried"),
            Skipped(33, "outbox-full"),
            hand.row(34, 100_000, 100_001),
            hand.row(35, 40, 41, gpu="gpu-2", slice=mig, energy_uj=None, memory_mib_s=77),
        ),
    ]


def everything(ledger: DuckLedger) -> object:
    """Return all figures of the ledger."""
    end = START_MS + 2 * MS_PER_HOUR
    spec = WindowSpec(size=7200, half_life=3600)
    return (
        present(ledger).usage((START_MS, end), BY).lines(),
        present(ledger).usage((START_MS + 61_001, START_MS + 17 * MINUTE + 7), BY).lines(),
        start_up(present(ledger).usage((START_MS, end), ("team",), measures=START_UP)),
        present(ledger).window(spec, end - 12_345, "energy", 0.98),
        present(ledger).window(spec, end - 12_345, "busy", 0.98),
        present(ledger).quarantined(),
        present(ledger).holes(),
        ledger.status().policies(START_MS, end),
        ledger.status().nodes,
        present(ledger).acts(),
        present(ledger).imbalance(START_MS, end).total_us,
    )


def filled(ledger: DuckLedger, hand: Hand) -> DuckLedger:
    ledger.put_policy(POLICY, START_MS, "ann")
    ledger.observe(
        Facts(nodes=(NodeFacts("prod", "n1", pool="a"),), namespaces=(NamespaceFacts("prod", "vision", team="blue"),)),
        NOW_MS,
    )
    for batch in sent(hand):
        booked(ledger, NOW_MS, batch)
    ledger.checkpoint()
    return ledger
