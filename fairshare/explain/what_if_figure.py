"""Draws what a `what-if` found: the GPUs of each queue, day by day, in the past and under both policies.

Equal figures give equal bytes. matplotlib is imported only to draw."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gputally.base.errors import FairshareError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""The colours of Okabe and Ito, which people with any colour vision can distinguish. Lines also differ in dashes."""
DASHES = ("-", "--", ":", "-.", (0, (5, 1)), (0, (3, 1, 1, 1)), (0, (1, 1)))


class PlotsMissing(FairshareError):
    """matplotlib is not installed."""


def available() -> None:
    """Raise PlotsMissing if matplotlib is not installed."""
    if find_spec("matplotlib") is None:
        raise PlotsMissing("plots need matplotlib: `pip install gputally` brings it")


@contextmanager
def figure(path: Path, rows: int, columns: int, height: float, **options: Any) -> Iterator[list[Axes]]:
    """Yield the axes of a new figure, and write it as SVG. Raises FairshareError. height: in inches."""
    available()
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "gputally"
    from matplotlib import pyplot

    drawn, grid = pyplot.subplots(rows, columns, figsize=(11.0, height), squeeze=False, layout="constrained", **options)
    axes = [axis for row in grid for axis in row]
    try:
        yield axes
        for axis in axes:
            axis.spines[["top", "right"]].set_visible(False)
        path.parent.mkdir(parents=True, exist_ok=True)
        drawn.savefig(path, metadata={"Date": None})
    except OSError as error:
        raise FairshareError(f"{path.parent}: {error.strerror or error}") from error
    finally:
        pyplot.close(drawn)


def draw_days(folder: Path, panels: Sequence[tuple[str, Mapping[str, Sequence[tuple[float, float]]]]]) -> Path:
    """Draw `what-if.svg`: GPUs held day by day for at most eight queues, one line per case. Raises FairshareError."""
    shown = panels[:8]
    path = folder / "what-if.svg"
    with figure(path, len(shown), 1, 1.9 * len(shown), sharex=True) as axes:
        for (queue, lines), axis in zip(shown, axes, strict=True):
            for (label, points), colour, dash in zip(lines.items(), COLOURS, DASHES, strict=False):
                axis.plot([at for at, _ in points], [held for _, held in points], color=colour, ls=dash, label=label)
            axis.set_ylim(bottom=0)
            axis.set_ylabel("GPUs")
            axis.set_title(f"{queue}: mean GPUs held, 24 h to the day shown", fontsize=9)
        axes[0].legend(ncols=3, fontsize=8, frameon=False)
        axes[-1].set_xlabel("day")
    return path
