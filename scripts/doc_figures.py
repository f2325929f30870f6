"""Draws the figures of the concepts page.

Every value is computed by the function that bills or divides: accounts by `split`, ages by `age_weight`, shares by
`divide`. Equal code gives equal bytes."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accountant.core.gpu_time_accounts import split
from accountant.core.window_decay import age_weight
from agent.wire import Gap, Holder, UsageInterval
from fairshare.core.queues_and_weights import DivisionProblem, QueueClaim
from fairshare.laws.division import divide
from gputally.base.units import MS_PER_HOUR, MS_PER_MINUTE, US_PER_MS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MINUTE_US = MS_PER_MINUTE * US_PER_MS
POD = Holder(kind="pod", uid="u", namespace="vision", name="train-0")
ACCOUNTS = ("busy", "allocated_idle", "allocated_unknown", "unallocated", "down", "unmetered")
COLOURS = ("#009E73", "#E69F00", "#CC79A7", "#BBBBBB", "#D55E00", "#FFFFFF")
"""Okabe and Ito's colours, as in all figures, by account."""
STORY = (
    (8, "unheld"), (8, "held, nothing runs yet"), (22, "held and working"), (5, "driver silent"),
    (7, "held and working"), (5, "node without agent"), (5, "lost"),
)  # fmt: skip
POOL, KS = 16, (0.0, 1.0, 2.5)


def rows() -> list[tuple[str, UsageInterval | None]]:
    """Return (label, interval) for each minute of an hour of one GPU. The interval is the row that an agent reports;
    None if there is none."""
    found: list[tuple[str, UsageInterval | None]] = []
    for length, what in STORY:
        for _ in range(length):
            found.append((what, _row(len(found), what)))
    return found


def _row(minute: int, what: str) -> UsageInterval | None:
    if what == "node without agent":
        return None
    start, held = minute * MS_PER_MINUTE, what not in ("unheld", "lost")
    busy = MINUTE_US * (70 + minute * 7 % 25) // 100 if what == "held and working" else 0
    gaps = (Gap(start_ms=start, end_ms=start + MS_PER_MINUTE, reason="unread"),) if what == "driver silent" else ()
    return UsageInterval(
        seq=minute + 1, start_ms=start, end_ms=start + MS_PER_MINUTE, gpu_uuid="GPU-0", gpu_model="H100",
        method="device", capacity_us=MINUTE_US, holder=POD if held else None, allocated_us=MINUTE_US if held else 0,
        busy_us=busy, gaps=gaps, health="lost" if what == "lost" else "ok",
    )  # fmt: skip


def accounts(row: UsageInterval | None) -> tuple[int, ...]:
    """Return the microseconds of a minute in each of `ACCOUNTS`. They add up to the minute."""
    if row is None:
        return (0, 0, 0, 0, 0, MINUTE_US)
    cells = split(row)
    return (cells.busy_us, cells.idle_us, cells.unknown_us, cells.unheld_us, cells.down_us, 0)


def share(usage: float, k: float) -> float:
    """Return the GPUs of the first of two equal queues that both request all 16.

    usage: the fraction of the window's capacity that the first queue used; the second one used a quarter.
    k: the strength of the history (`fairshare.laws.division`)."""
    claims = (QueueClaim("a", POOL, usage=usage), QueueClaim("b", POOL, usage=0.25))
    return divide(DivisionProblem("figure", POOL, k, claims)).shares["a"]


def draw_concepts(folder: Path) -> None:
    """Write concept-accounts.svg and concept-history.svg."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "gputally"
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(10, 3), layout="constrained")
    _hour(axis)
    figure.savefig(folder / "concept-accounts.svg", metadata={"Date": None})
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 3.2), layout="constrained")
    _ages(left)
    _shares(right)
    figure.savefig(folder / "concept-history.svg", metadata={"Date": None})


def _hour(axis: Axes) -> None:
    parts = [accounts(row) for _, row in rows()]
    floor = [0.0] * len(parts)
    for account, colour in enumerate(COLOURS):
        heights = [part[account] / MINUTE_US for part in parts]
        label = f"{ACCOUNTS[account]}  {sum(heights):.1f} min"
        edge: dict[str, Any] = {"align": "edge", "edgecolor": "#888888", "linewidth": 0.2}
        axis.bar(range(60), heights, 1, floor, color=colour, label=label, **edge)
        floor = [low + high for low, high in zip(floor, heights, strict=True)]
    at = 0
    for length, what in STORY:
        axis.text(at + length / 2, 1.03, what.replace(" ", "\n", 1), ha="center", va="bottom", fontsize=7)
        at += length
    axis.set(xlim=(0, 60), ylim=(0, 1.3), xlabel="minute", ylabel="of the GPU's time", yticks=(0, 0.5, 1))
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(ncols=1, fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5))


def _ages(axis: Axes) -> None:
    hours = range(7 * 24 + 1)
    for half_life_d, colour in ((2, "#0072B2"), (4, "#56B4E9")):
        weights = [age_weight(-hour * MS_PER_HOUR, 0, half_life_d * 86_400) for hour in hours]
        axis.plot([hour / 24 for hour in hours], weights, color=colour, label=f"half-life {half_life_d} days")
    axis.plot((0, 7), (1, 1), color="#000000", linestyle="--", label="no half-life")
    axis.set(xlabel="age of a GPU-hour in days", ylabel="counts", ylim=(0, 1.1), xlim=(0, 7))
    axis.set_title("What counts of the past, window of 7 days", fontsize=9, loc="left")
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(fontsize=7)


def _shares(axis: Axes) -> None:
    usages = [step / 100 for step in range(101)]
    for k, colour, style in zip(KS, ("#000000", "#56B4E9", "#0072B2"), ("--", "-", "-"), strict=True):
        axis.step(usages, [share(used, k) for used in usages], color=colour, linestyle=style, label=f"k = {k:g}")
    axis.set(xlabel="part of the window's capacity that it used", ylabel="GPUs now, of 16", xlim=(0, 1))
    axis.set(ylim=(-0.5, 16.5), yticks=range(0, POOL + 1, 4))
    axis.set_title("What a queue gets for it (the other used 25 %)", fontsize=9, loc="left")
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(fontsize=7)


if __name__ == "__main__":
    draw_concepts(Path(sys.argv[1]))
