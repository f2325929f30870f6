"""A withdrawn import is as if it had never arrived: for figures, capacity and facts, after a restart and a restore."""

from __future__ import annotations

from itertools import count
from pathlib import Path

import pytest
from msgspec.structs import replace

from accountant.bookkeeping.bookkeeper import Bookkeeper
from accountant.core.errors import LedgerUnavailable
from accountant.core.import_epochs import epoch
from accountant.history_import.import_run import Source, first_seq
from accountant.ledger.protocols import ImportSpan
from accountant.ledger.usage import coverage
from accountant.storage.duckdb_ledger import DuckLedger
from accountant.storage.folder_or_object_store import in_folder
from accountant.wire.policy_models import Policy, QueuePolicy
from agent.wire import Holder, PodFacts, UsageInterval
from gputally.base.clock import VirtualClock
from gputally.base.units import MS_PER_DAY, MS_PER_HOUR, MS_PER_MINUTE
from tests.billing.usage_rows import OCT, price_book
from tests.ledger.conftest import START_MS, Opener
from tests.moments import present
from tests.usage_records import batch, deliver, interval, pod_facts

HOUR_MS = START_MS // MS_PER_HOUR * MS_PER_HOUR
SPAN = HOUR_MS, HOUR_MS + 2 * MS_PER_HOUR
NOW_MS = HOUR_MS + 3 * MS_PER_HOUR
SLURM = ImportSpan(cluster="c", source="slurm", start_ms=SPAN[0], end_ms=SPAN[1])
QUEUES = Policy(queues=(QueuePolicy(name="vision", deserved=2, refs=("slurm:vision",)),))
MINE = Holder(kind="slurm", uid="101", name="job 101")


def quarters(
    gpu: str, holder: Holder | None = MINE, first: int = 0, last: int = 8, **fields: object
) -> list[UsageInterval]:
    fields = {"method": "imported", "busy_us": None, **fields}
    return [interval(HOUR_MS + n * 15 * MS_PER_MINUTE, gpu, holder, **fields) for n in range(first, last)]


def account(name: str) -> PodFacts:
    return pod_facts(
        "t", HOUR_MS + MS_PER_HOUR, uid="101", namespace=name, node="n[1-2]", workload="SlurmJob/101",
        queue_ref=f"slurm:{name}",
    )  # fmt: skip


def imports(
    ledger: DuckLedger, rows: list[UsageInterval], *facts: PodFacts, generation: int = 0, source: Source = "slurm"
) -> None:
    name = epoch(source, HOUR_MS, generation)
    first = first_seq(HOUR_MS)
    deliver(ledger, NOW_MS, replace(batch(rows, facts, epoch=name, first_seq=first), oldest_seq=first))


def figures(ledger: DuckLedger) -> object:
    return (
        present(ledger).usage(SPAN, ("cluster", "node", "gpu", "namespace", "queue", "job")).lines(),
        present(ledger).usage((SPAN[0] + 1, SPAN[1] - 1), ("namespace",)).lines(),
        ledger.status().gpu_hours(*SPAN),
        coverage(present(ledger).usage(SPAN, ())),
        present(ledger).imbalance(*SPAN).total_us,
        present(ledger).quarantined(),
        present(ledger).holes(),
    )


def others(ledger: DuckLedger) -> None:
    """Records of an agent and of another import, of the same GPU and of others."""
    imports(ledger, quarters("g1", None, 2, 6), source="prometheus")
    deliver(ledger, NOW_MS, batch(quarters("g2", None, 7, 8, method="device"), epoch="0192-a"))


@pytest.mark.parametrize("checkpoint", [False, True])
def test_figures_capacity_and_accounts_are_those_without_it(opened: Opener, tmp_path: Path, checkpoint: bool):
    plain, ledger = opened(tmp_path / "plain.duckdb"), opened(tmp_path / "ledger.duckdb")
    for one in (plain, ledger):
        others(one)
    imports(ledger, [*quarters("g1"), *quarters("g2", first=0, last=8), *quarters("g3")], account("visoin"))
    if checkpoint:
        ledger.checkpoint()
    assert ledger.withdraw_import(SLURM, NOW_MS, "ann", "wrong account") == 24
    assert figures(ledger) == figures(plain)
    assert ledger.withdraw_import(SLURM, NOW_MS, "ann", "again") == 0
    for one, generation in ((plain, 0), (ledger, 2)):
        imports(one, quarters("g1", last=4), account("vision"), generation=generation)
    assert figures(ledger) == figures(plain)
    ledger.checkpoint()
    assert figures(ledger) == figures(plain)
    ledger.close()
    assert figures(opened(tmp_path / "ledger.duckdb")) == figures(plain)


def named(ledger: DuckLedger) -> list[tuple[str, ...]]:
    return [tuple(line.key.values()) for line in present(ledger).usage(SPAN, ("namespace", "queue")).lines()]


def test_what_a_later_import_says_about_a_job_counts(opened: Opener, tmp_path: Path):
    """A corrected account: the job began in the chunk of the first import and goes on in that of the second."""
    ledger = opened(tmp_path / "ledger.duckdb")
    ledger.put_policy(QUEUES, HOUR_MS - 1)
    imports(ledger, quarters("g1", last=4), account("visoin"))
    later = replace(account("vision"), observed_ms=SPAN[1])
    name, first = epoch("slurm", HOUR_MS), first_seq(HOUR_MS + MS_PER_HOUR)
    deliver(
        ledger, NOW_MS, replace(batch(quarters("g1", first=4), [later], epoch=name, first_seq=first), oldest_seq=first)
    )
    assert named(ledger) == [("vision", "vision")]
    ledger.close()
    assert named(opened(tmp_path / "ledger.duckdb")) == [("vision", "vision")]


def test_facts_of_a_job_whose_time_agents_metered_are_replaced_too(opened: Opener, tmp_path: Path):
    archive = in_folder(tmp_path / "archive")
    ledger = opened(tmp_path / "ledger.duckdb", archive=archive)
    ledger.put_policy(QUEUES, HOUR_MS - 1)
    deliver(ledger, NOW_MS, batch(quarters("g1", method="device"), epoch="0192-a"))
    imports(ledger, [], account("zzz"))
    ledger.archive(NOW_MS)
    assert named(ledger) == [("zzz", "__unassigned__")]
    assert ledger.withdraw_import(SLURM, NOW_MS, "ann", "wrong account") == 0
    imports(ledger, [], account("vision"), generation=1)
    assert named(ledger) == [("vision", "vision")]
    ledger.archive(NOW_MS)
    assert named(opened(tmp_path / "rebuilt.duckdb", archive=archive)) == [("vision", "vision")]


def test_a_part_is_withdrawn_and_the_rest_stays(opened: Opener, tmp_path: Path):
    ledger = opened(tmp_path / "ledger.duckdb")
    imports(ledger, quarters("g1"), account("vision"))
    first = SLURM.model_copy(update={"end_ms": SLURM.start_ms + MS_PER_HOUR})
    assert ledger.withdraw_import(first, NOW_MS, "ann", "the first hour") == 4
    assert present(ledger).usage((first.start_ms, first.end_ms), ("namespace",)).lines() == []
    (line,) = present(ledger).usage(SPAN, ("job",)).lines()
    assert line.accounts_gpu_us.allocated == MS_PER_HOUR * 1000
    other = SLURM.model_copy(update={"cluster": "elsewhere"})
    assert ledger.withdraw_import(other, NOW_MS, "ann", "another cluster") == 0


@pytest.mark.parametrize("frozen", [False, True])
def test_it_stays_withdrawn_after_a_restore_from_the_archive(opened: Opener, tmp_path: Path, frozen: bool):
    archive = in_folder(tmp_path / "archive")
    ledger = opened(tmp_path / "ledger.duckdb", archive=archive)
    imports(ledger, [*quarters("g1"), *quarters("g3")], account("visoin"))
    ledger.checkpoint()
    ledger.archive(NOW_MS)
    if frozen:
        assert ledger.freeze(SPAN[1]) == 2
    ledger.withdraw_import(SLURM, NOW_MS, "ann", "wrong account")
    imports(ledger, quarters("g1", last=4), account("vision"), generation=1)
    ledger.checkpoint()
    ledger.archive(NOW_MS)
    ledger.freeze(SPAN[1])
    truth = figures(ledger), present(ledger).acts()
    plain = opened(tmp_path / "plain.duckdb")
    imports(plain, quarters("g1", last=4), account("vision"))
    assert figures(ledger) == figures(plain)
    rebuilt = opened(tmp_path / "rebuilt.duckdb", archive=archive)
    assert (figures(rebuilt), present(rebuilt).acts()) == truth


def test_a_replay_that_ends_at_any_commit_is_continued(opened: Opener, tmp_path: Path):
    archive = in_folder(tmp_path / "archive")
    ledger = opened(tmp_path / "ledger.duckdb", archive=archive)
    imports(ledger, quarters("g1"), account("visoin"))
    ledger.archive(NOW_MS)
    ledger.withdraw_import(SLURM, NOW_MS, "ann", "wrong account")
    imports(ledger, quarters("g1", last=4), account("vision"), generation=1)
    ledger.archive(NOW_MS)
    truth = figures(ledger), present(ledger).acts()
    for commits in count():
        left = iter(range(commits))
        try:
            opened(
                tmp_path / f"{commits}.duckdb",
                archive=archive,
                fence=lambda left=left: "stopped" if next(left, None) is None else "",
            ).close()
        except LedgerUnavailable:
            rebuilt = opened(tmp_path / f"{commits}.duckdb", archive=archive)
            assert (figures(rebuilt), present(rebuilt).acts()) == truth, commits
        else:
            break
    assert commits > 3


def test_a_closed_month_does_not_change_and_the_difference_is_a_proposal(opened: Opener, tmp_path: Path):
    later_ms = HOUR_MS + 50 * MS_PER_DAY
    ledger = opened(tmp_path / "ledger.duckdb", clock=VirtualClock(later_ms))
    keeper = Bookkeeper(ledger, VirtualClock(later_ms))
    keeper.prices.take(price_book("id: h100, model: H100, price: '2', valid_from: 2026-01-01"), "file", "p", "", 0)
    imports(ledger, [*quarters("g1"), *quarters("g2")], account("vision"))
    keeper.close(OCT, "ada")
    ledger.withdraw_import(SLURM, later_ms, "ann", "one GPU too many")
    imports(ledger, quarters("g1"), account("vision"), generation=1)
    assert keeper.month(OCT).cost == 8
    (proposal,) = keeper.proposals()
    assert [effect.amount for effect in proposal.effects()] == [-4]
