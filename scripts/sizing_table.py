"""Writes the table of docs/sizing.md from measured figures.

Every figure in `MEASURED` stands in docs/performance.md or docs/sizing.md with the command that took it; everything
else here is arithmetic that the page states in words. Nothing is rounded in favour of a figure: sizes and times round
up.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

PAGE = Path(__file__).parents[1] / "docs" / "sizing.md"
BEGIN, END = "<!-- computed by scripts/sizing_table.py -->", "<!-- end of what is computed -->"
FLEETS = (100, 1_000, 10_000, 100_000)
ROWS_PER_GPU_DAY = 24 * 60
GPUS_PER_NODE = 8
MINUTES_OF_OUTAGE = 60


@dataclass(frozen=True)
class Measured:
    """bytes_per_row: of the ledger file with its sums. ingest_us: processor time of the accountant per row. rows_per_s:
    acknowledged by a quiet machine with two cores, on which the senders run too. wire_bytes: of a batch of eight rows,
    gzip. report_us: processor time of a month's page per row of the month, the slower of two sizes."""

    bytes_per_row: float = 27
    ingest_us: float = 27.5
    rows_per_s: float = 35_736
    wire_bytes: float = 549
    report_us: float = 0.18


MEASURED = Measured()


@dataclass(frozen=True)
class Load:
    """What `gpus` whole GPUs mean for the accountant, with an interval of a minute."""

    gpus: int
    rows_per_day: int
    file_per_day_mb: float
    file_per_year_gb: float
    ingest_s_per_day: float
    arriving_kib_per_s: float
    catch_up_s: float
    report_s: float


def load(gpus: int, of: Measured = MEASURED) -> Load:
    rows = gpus * ROWS_PER_GPU_DAY
    return Load(
        gpus=gpus,
        rows_per_day=rows,
        file_per_day_mb=rows * of.bytes_per_row / 1e6,
        file_per_year_gb=rows * 365 * of.bytes_per_row / 1e9,
        ingest_s_per_day=rows * of.ingest_us / 1e6,
        arriving_kib_per_s=gpus / GPUS_PER_NODE * of.wire_bytes / 60 / 1024,
        catch_up_s=gpus * MINUTES_OF_OUTAGE / of.rows_per_s,
        report_s=rows * 31 * of.report_us / 1e6,
    )


def table(fleets: tuple[int, ...] = FLEETS) -> str:
    """One line per size of a fleet."""
    heads = ("GPUs", "Rows a day", "Ledger file a day", "in a year", "Processor for ingest", "Arrives")
    heads += ("After an hour's outage", "Page of a month, processor")
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    for gpus in fleets:
        one = load(gpus)
        cells = (
            f"{gpus:,}", f"{one.rows_per_day / 1e6:,.2f} M", f"{_up(one.file_per_day_mb)} MB",
            f"{_up(one.file_per_year_gb)} GB", _time(one.ingest_s_per_day) + " a day",
            f"{_up(one.arriving_kib_per_s)} KiB/s", _time(one.catch_up_s), _time(one.report_s),
        )  # fmt: skip
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _up(value: float) -> str:
    return f"{math.ceil(value):,}" if value >= 1 else "< 1"


def _time(seconds: float) -> str:
    if seconds < 1:
        return "< 1 s"
    return f"{math.ceil(seconds)} s" if seconds < 120 else f"{math.ceil(seconds / 60)} min"


def renewed(text: str) -> str:
    """The page with the table computed anew."""
    head, _, rest = text.partition(BEGIN)
    return f"{head}{BEGIN}\n\n{table()}\n\n{END}{rest.partition(END)[2]}"


def main() -> None:
    PAGE.write_text(renewed(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    print(f"{PAGE.name}: written")


if __name__ == "__main__":
    main()
