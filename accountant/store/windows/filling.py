"""What nothing is remembered of, asked of the tables: stretches, and quarter-hours by the spans of their rows.

Whole quarter-hours are added up as columns (`accountant.store.windows.quarterly`); a part of one, and what columns do
not hold, row by row (`accountant.store.windows.measuring`). The digits are the same.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from contextlib import suppress

from accountant.store.database import Cursor
from accountant.store.spans import EVERY_GPU, TaggedSpan
from accountant.store.windows.figures import Figures, Found
from accountant.store.windows.grains import Grain, Span
from accountant.store.windows.measuring import Stretch, assigned, decayed, measure
from accountant.store.windows.quarterly import Refs, TooLargeError, WhoseUsage, found_in, grain_of
from accountant.store.windows.views import View
from agent.units import BUCKET_MS


def fill(
    cursor: Cursor,
    whose: WhoseUsage,
    unfolded: Collection[int],
    missing: Sequence[int],
    stretches: Sequence[Stretch],
    view: View,
) -> tuple[dict[int, Found], Refs]:
    """Figures of the missing stretches, and the queue_ref of every pod in them."""
    whole = {stretches[tag].start_ms: tag for tag in missing if stretches[tag].whole}
    filled: dict[int, Found] = {}
    refs: Refs = {}
    with suppress(TooLargeError):
        found, refs = found_in(cursor, whose, whole.keys(), unfolded, view)
        filled = {whole[start]: held for start, held in found.items()}
    rest = [tag for tag in missing if tag not in filled]
    spans = [TaggedSpan(tag, stretches[tag].start_ms, stretches[tag].end_ms) for tag in rest]
    by_payer = measure(cursor, spans, stretches, view)
    origins = whose({payer for held in by_payer.values() for payer in held})
    filled |= {tag: assigned(by_payer.get(tag, {}), origins) for tag in rest}
    return filled, refs | dict(origins.values())


def read_grain(cursor: Cursor, whose: WhoseUsage, bucket: int, view: View) -> tuple[Grain, Refs]:
    """A quarter-hour by the spans of its rows, and the queue_ref of every pod in it."""
    with suppress(TooLargeError):
        return grain_of(cursor, whose, bucket, view)
    whole = (0, EVERY_GPU, bucket, bucket + BUCKET_MS, bucket + BUCKET_MS)
    of_span: dict[Span, dict[int, Figures]] = defaultdict(dict)
    for _, payer, start, end, _, *values in decayed(cursor, [whole], view, apart=True):
        of_span[start, end][payer] = Figures(*values)
    origins = whose({payer for found in of_span.values() for payer in found})
    return {span: assigned(found, origins) for span, found in of_span.items()}, dict(origins.values())
