"""A process that books records and publishes its ledger again and again, until it is killed. A test sets its clock."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

from accountant.bookkeeping.bookkeeper import Bookkeeper
from accountant.core.errors import LakeUnavailable, LedgerUnavailable
from accountant.core.settings import Settings
from accountant.lake.iceberg_catalog import Catalogue
from accountant.lake.publisher import Publisher
from accountant.storage.duckdb_ledger import DuckLedger, open_ledger
from gputally.base.clock import SystemClock
from gputally.base.units import MS_PER_DAY
from tests.chaos.accountant_process import Outbox

STEP = "clock-step-ms"
"""File in a ledger's folder: by how much its machine's wall clock is wrong."""
PUBLISHED = "published"
"""File in a ledger's folder that grows by a byte with each publication."""
_PAUSE_S = 0.05
_DAYS = 3
"""All records lie on so many days, which ended a day ago, so that no clock that is a little behind refuses them."""


class SetClock(SystemClock):
    """The machine's clock, as a test has set it."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / STEP

    def wall_ms(self) -> int:
        return super().wall_ms() + int(self._file.read_text(encoding="ascii") or 0)


def outbox_of(settings: Settings, ledger: DuckLedger) -> Outbox:
    """Return the outbox whose records a ledger books, as far as the ledger has them."""
    assert settings.lake is not None
    begin_ms = int((settings.data / "begin").read_text(encoding="ascii"))
    found = Outbox(f"node-{settings.lake.ledger}", begin_ms, gpus=2, cluster=settings.lake.ledger)
    found.durable = ledger.outboxes().get((found.cluster, found.node, found.epoch), 0)
    found.made = min(found.durable // found.gpus + 8, _DAYS * 96)
    return found


def begin_of(now_ms: int) -> int:
    """Return the time of the first record."""
    return now_ms - now_ms % MS_PER_DAY - (_DAYS + 1) * MS_PER_DAY


@contextmanager
def publishing(settings: Settings) -> Iterator[tuple[DuckLedger, Publisher, SetClock]]:
    """Yield a ledger with its publisher, as a process that has just started."""
    assert settings.lake is not None
    lake, clock = settings.lake, SetClock(settings.data)
    with closing(open_ledger(settings.data / "ledger.duckdb", clock)) as ledger:
        opened: list[Catalogue] = []

        def connect() -> Catalogue:
            opened.append(Catalogue.connect(lake))
            return opened[-1]

        try:
            books = Bookkeeper(ledger, clock, settings.timezone)
            yield ledger, Publisher(ledger, books, settings, clock, connect), clock
        finally:
            for one in opened:
                one.close()


def run(arguments: Sequence[str]) -> int:
    """Book and publish until the process is killed. arguments: the file of the settings, in JSON."""
    settings = Settings.model_validate_json(Path(arguments[0]).read_bytes())
    with publishing(settings) as (ledger, publisher, clock):
        while True:
            try:
                ledger.require_present(clock.wall_ms())
                ledger.append([outbox_of(settings, ledger).batch(8)], clock.wall_ms())
                publisher.publish()
                publisher.remove_old_versions()
            except (LakeUnavailable, LedgerUnavailable) as error:
                print(type(error).__name__, error, flush=True)
                time.sleep(_PAUSE_S)  # as the accountant does, which tries again later
            else:
                with (settings.data / PUBLISHED).open("ab") as file:
                    file.write(b".")
