"""Damages an agent's spool, one bit or one cut at a time, and starts an agent's outbox on it.

    nice python -m tests.attacks.spool_damage --flips 20000 --cuts 5000

Each trial copies one of two spools: one that was closed, and one whose process was killed within a transaction. It
flips one bit of the file or of sqlite's journal, or cuts one of them off at any length. Then it opens the outbox,
appends a set, delivers everything to a model of the accountant, and appends once more. A trial fails if

- it *crashes*: opening raises, or decoding what is stored beside the records
- it is *wedged*: what was appended does not arrive, or delivered records do not leave
- something changed *in silence*: a record or a value arrives altered, or is missing without an error in the log, or
  its number is neither delivered nor declared as skipped."""

from __future__ import annotations

import argparse
import contextlib
import logging
import random
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from agent.metering.meter import GpuState, decode, encode
from agent.simulation.simulated_node import H100, make_gpu
from agent.upload.spool import Outbox, Pending
from agent.upload.uploader import ClockOrigin, ClockOrigins
from agent.wire import Ack, PodFacts, UsageInterval
from gputally.base.clock import VirtualClock
from tests.agent.records import make_facts, make_set
from tests.agent.sample_values import MINUTE, T0

FILE = "outbox.sqlite"
BOOT = "boot-1"
STATE = encode(BOOT, [GpuState(T0, "ok", make_gpu(f"GPU-{number}", number, H100), ()) for number in range(8)])
MOST_STEPS = 300


class Crashed(Exception):
    """The outbox could not be opened, or a stored value ended the program."""


class Wedged(Exception):
    """The outbox delivers nothing more."""


class Silent(Exception):
    """Something changed that neither the log nor the accountant was told."""


def _content(record: UsageInterval | PodFacts) -> bytes:
    return msgspec.json.encode(msgspec.structs.replace(record, seq=0))


@dataclass(frozen=True)
class Spool:
    """The files of a spool, and what its undelivered numbers stand for: a record, or b"" for a skipped one."""

    folder: Path
    epoch: str
    origin: ClockOrigin | None
    expected: dict[int, bytes]


def build(folder: Path, *, killed: bool) -> Spool:
    """Write a spool with small and large records, delivered, parked and undelivered ones. killed: leave it as a process
    does that ends while it writes."""
    folder.mkdir()
    outbox = Outbox(folder / FILE, VirtualClock(T0))
    ClockOrigins(outbox, BOOT).date_following(T0)
    chance = random.Random(7)
    for number in range(40):
        labels = {f"label-{i}": "x" * 60 for i in range(100)} if number % 13 == 5 else {"team": "vision"}
        facts = [make_facts(f"u{number}", labels=labels)] if number % 3 == 0 else []
        outbox.append([make_set(T0 + number * MINUTE, chance.randint(1, 4))], facts, STATE)
    outbox.acknowledge(Ack(epoch=outbox.epoch, durable_seq=30, checkpointed_seq=12))
    outbox.park(40, "refused")
    unsent = _unsent(outbox)
    expected = {record.seq: _content(record) for record in _records(unsent)}
    expected |= {skip.seq: b"" for skip in unsent.skipped}
    spool = Spool(folder, outbox.epoch, ClockOrigins(outbox, BOOT).newest, expected)
    if killed:
        copy = folder.with_suffix(".killed")
        with contextlib.suppress(ZeroDivisionError), outbox._spool.transaction():
            outbox._spool.db.execute("PRAGMA cache_size = 1")  # pages are written before the end of the transaction
            outbox._spool.db.execute("UPDATE record SET payload = payload || payload WHERE seq % 3 = 0")
            shutil.copytree(folder, copy)
            1 / 0  # noqa: B018 - undo it
        outbox.close()
        return Spool(copy, spool.epoch, spool.origin, expected)
    outbox.close()
    return spool


def _records(pending: Pending) -> list[UsageInterval | PodFacts]:
    return [*pending.intervals, *pending.facts]


def _unsent(outbox: Outbox) -> Pending:
    pending = outbox.pending(10_000, 100_000_000)
    assert pending is not None
    return pending


@dataclass
class Books:
    """A model of the accountant: what arrived, and the skipped numbers, by epoch."""

    mark: dict[str, int] = field(default_factory=dict)
    arrived: dict[tuple[str, int], bytes] = field(default_factory=dict)
    skipped: set[tuple[str, int]] = field(default_factory=set)

    def deliver(self, outbox: Outbox) -> None:
        """Take everything, in small batches. Raises Wedged."""
        for _ in range(MOST_STEPS):
            pending = outbox.pending(9, 20_000)
            if pending is None:
                return
            epoch, mark = outbox.epoch, self.mark.get(outbox.epoch, 0)
            numbers = sorted([r.seq for r in _records(pending)] + [skip.seq for skip in pending.skipped])
            if numbers != list(range(pending.first_seq, pending.last_seq + 1)):
                raise Wedged(f"a batch with the numbers {numbers} is refused")
            if pending.first_seq <= mark + 1 or pending.first_seq == pending.oldest_seq:
                self.arrived |= {(epoch, r.seq): _content(r) for r in _records(pending)}
                self.skipped |= {(epoch, skip.seq) for skip in pending.skipped}
                self.mark[epoch] = max(mark, pending.last_seq)
            outbox.acknowledge(Ack(epoch=epoch, durable_seq=self.mark.get(epoch, 0), checkpointed_seq=0))
        raise Wedged("delivery does not end")


class _Errors(logging.Handler):
    """Collects errors of the log."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(self.format(record))


@contextlib.contextmanager
def _logged() -> Iterator[list[str]]:
    errors, logger = _Errors(), logging.getLogger("agent")
    before = logger.propagate
    logger.addHandler(errors)
    logger.propagate = False
    try:
        yield errors.lines
    finally:
        logger.removeHandler(errors)
        logger.propagate = before


def examine(spool: Spool, folder: Path) -> str:
    """Start on the damaged copy in `folder`. Return what the damage cost. Raises Crashed, Wedged, Silent."""
    with _logged() as errors, contextlib.ExitStack() as stack:
        try:
            outbox = Outbox(folder / FILE, VirtualClock(T0 + 3_600_000), fsync=False)
            stack.callback(outbox.close)
            origin, state = ClockOrigins(outbox, BOOT).newest, outbox.meter_state()
            decode(state or b"", BOOT)
        except Exception as error:
            raise Crashed(f"{type(error).__name__}: {error}") from error
        books = Books({spool.epoch: 30})
        try:
            for gpu in ("GPU-new", "GPU-newer"):
                outbox.append([make_set(gpu=gpu)], [], None)
                books.deliver(outbox)
                if _content(make_set(gpu=gpu).rows[0]) not in books.arrived.values():
                    raise Wedged("what was appended does not arrive")
                outbox.acknowledge(
                    Ack(epoch=outbox.epoch, durable_seq=outbox.last_seq, checkpointed_seq=outbox.last_seq)
                )
                if outbox.stats().rows:
                    raise Wedged("delivered records do not leave")
        except Wedged:
            raise
        except Exception as error:
            raise Wedged(f"{type(error).__name__}: {error}") from error
        return _compare(spool, outbox.epoch, books, errors, whole=(state, origin) == (STATE, spool.origin))


def _compare(spool: Spool, epoch: str, books: Books, errors: list[str], *, whole: bool) -> str:
    originals = {*spool.expected.values(), *(_content(make_set(gpu=f"GPU-{n}").rows[0]) for n in ("new", "newer"))}
    # A new epoch sends delivered records again.
    known = originals | {one for one in books.arrived.values() if epoch != spool.epoch and one in _EVERYTHING}
    if altered := set(books.arrived.values()) - known:
        raise Silent(f"altered: {min(altered)!r:.200}")
    missing = {seq for seq, one in spool.expected.items() if one and one not in books.arrived.values()}
    undeclared = {seq for seq in missing if (epoch, seq) not in books.skipped}
    if undeclared and (epoch == spool.epoch or not books.skipped):
        raise Silent(f"neither delivered nor declared: {sorted(undeclared)}")
    if (missing or not whole or epoch != spool.epoch) and not errors:
        raise Silent(f"nothing in the log about {sorted(missing) or 'a stored value or the epoch'}")
    if epoch != spool.epoch:
        return f"a new epoch, {'some' if missing else 'no'} records lost"
    return ("some records lost" if missing else "no record lost") + ("" if whole else ", a value lost")


_EVERYTHING: set[bytes] = set()


def attack(flips: int, cuts: int, seed: int, folder: Path) -> tuple[Counter[str], list[str]]:
    """Run the trials. Return the number of each outcome, and a line for each failed trial."""
    spools = [build(folder / name, killed=name == "killed") for name in ("closed", "killed")]
    for spool in spools:
        _EVERYTHING.update(_stored(spool, folder / "whole"))
    chance = random.Random(seed)
    outcomes: Counter[str] = Counter()
    failed: list[str] = []
    trial = folder / "trial"
    for number in range(flips + cuts):
        spool = chance.choice(spools)
        shutil.copytree(spool.folder, trial)
        files = [file for file in sorted(trial.iterdir()) if file.stat().st_size]
        file = chance.choices(files, [one.stat().st_size for one in files])[0]
        content = bytearray(file.read_bytes())
        place = chance.randrange(len(content))
        if number < flips:
            bit = chance.randrange(8)
            content[place] ^= 1 << bit
            what = f"bit {bit} of byte {place} of {spool.folder.name}/{file.name}"
        else:
            del content[place:]
            what = f"{spool.folder.name}/{file.name} cut at {place}"
        file.write_bytes(content)
        try:
            outcomes[examine(spool, trial)] += 1
        except (Crashed, Wedged, Silent) as error:
            outcomes[type(error).__name__.upper()] += 1
            failed.append(f"{what}: {type(error).__name__}: {error}")
        shutil.rmtree(trial)
    return outcomes, failed


def _stored(spool: Spool, folder: Path) -> set[bytes]:
    """Return everything that the spool contains, delivered records too."""
    shutil.copytree(spool.folder, folder)
    outbox = Outbox(folder / FILE, VirtualClock(T0), fsync=False)
    outbox.acknowledge(Ack(epoch=outbox.epoch, durable_seq=0, checkpointed_seq=0))
    everything = _unsent(outbox)
    outbox.close()
    shutil.rmtree(folder)
    return set(map(_content, _records(everything)))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--flips", type=int, default=20_000)
    parser.add_argument("--cuts", type=int, default=5_000)
    parser.add_argument("--seed", type=int, default=1)
    chosen = parser.parse_args()
    memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        outcomes, failed = attack(chosen.flips, chosen.cuts, chosen.seed, Path(folder))
    for outcome, count in outcomes.most_common():
        print(f"{count:7} {outcome}")
    for line in failed[:20]:
        print(line)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
