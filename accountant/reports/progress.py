"""What an epoch cost, of the jobs that report their progress (accountant.work.epochs).

An epoch that began before the span counts with its part inside. Costs are exact and of the job's own time, before
billing policy moves any of it. Asks the ledger for the few jobs that are shown.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction

from accountant.books.costs import Part, total_cost
from accountant.prices.book import PriceBook
from accountant.progress import EpochReport, JobKey
from accountant.reports.tables import JobRow
from accountant.work.jobs import EpochQuestions, Where, alone, epoch_lines


@dataclass(frozen=True, slots=True)
class EpochRow:
    """Of one job. cluster: where it ran. epochs: how many ended in the span; last: the number of the newest. gpu_us,
    cost: of all of them; rest_us, rest_cost: since the last of them. Costs are None where some of the time has no
    price."""

    cluster: str
    namespace: str
    job: str
    epochs: int
    last: int
    gpu_us: int
    cost: Decimal | None
    rest_us: int
    rest_cost: Decimal | None

    @property
    def mean_cost(self) -> Decimal | None:
        """Of an epoch, rounded to the places of the cost's own: for people."""
        if self.cost is None:
            return None
        exponent = self.cost.as_tuple().exponent
        places = -exponent if isinstance(exponent, int) and exponent < 0 else 0
        return Decimal(round(Fraction(self.cost) / self.epochs * 10**places)).scaleb(-places)


def rows(
    ledger: EpochQuestions,
    book: PriceBook | None,
    reported: Iterable[EpochReport],
    jobs: Callable[[Collection[tuple[str, str]]], Sequence[JobRow]],
    span: tuple[int, int],
    team: str | None,
    timezone: str,
    most: int,
) -> tuple[EpochRow, ...]:
    """Of the jobs with the highest cost that ended an epoch in the span; at most `most`. team: their part alone.
    reported: in the span. jobs: those of some namespaces and names."""
    reports: dict[JobKey, list[EpochReport]] = defaultdict(list)
    for report in reported:
        reports[report.key].append(report)
    costs: dict[JobKey, Decimal] = defaultdict(Decimal)
    for job in jobs({(key.namespace, key.job) for key in reports}):
        costs[JobKey(job.cluster, job.namespace, job.job)] += job.figures.cost
    shown = sorted(
        (key for key in reports if key in costs),
        key=lambda key: (-costs[key], key),
    )[:most]
    found = []
    for key in shown:
        mine: Where = {**alone(key), **({"team": {team}} if team is not None else {})}
        edges, parts = epoch_lines(ledger, book, reports[key], span, mine, timezone)
        of_stretch = list(zip(edges, parts, strict=True))
        ended = [part for stretch, several in of_stretch if stretch.epoch is not None for part in several]
        rest = [part for stretch, several in of_stretch if stretch.epoch is None for part in several]
        last = max(reports[key], key=lambda one: (one.at_ms, one.epoch)).epoch
        found.append(
            EpochRow(
                *key, len(reports[key]), last, _held(ended), total_cost(ended), _held(rest),
                total_cost(rest),
            )
        )  # fmt: skip
    return tuple(found)


def _held(parts: Iterable[Part]) -> int:
    return sum(part.gpu_us for part in parts)
