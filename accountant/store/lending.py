"""Time beyond a holder's share of a GPU, and whose it was: accountant.books.shared_gpus applied to the rows.

Worked out per GPU and quarter-hour (cut where a span ends inside one), and only where something was borrowed at
all. Borrowers are taken in the order of their names, so the answer does not depend on who was seen first. However
long the span, only some hours of it are held in memory.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from zoneinfo import ZoneInfo

from accountant.books.shared_gpus import Share, lend
from accountant.ledger import Lent
from accountant.store.database import Cursor, Row, statement
from accountant.store.names import NO_DEVICE, devices, holders
from accountant.store.pieces import Piece, key_of, pieces_of
from accountant.store.scan import Sum, scan
from accountant.store.spans import TaggedSpan
from accountant.store.state import State
from accountant.wire import Dimension
from agent.units import BUCKET_MS, MS_PER_HOUR

MOST_QUARTERS = 50_000
"""Quarter-hours of GPUs looked at together: some 100 MiB."""


def lent(
    cursor: Cursor,
    state: State,
    start_ms: int,
    end_ms: int,
    by: Sequence[Dimension],
    timezone: str,
    most: int = MOST_QUARTERS,
) -> list[Lent]:
    """See accountant.ledger.Ledger.lent. most: quarter-hours of GPUs that are held in memory at one time (all of an
    hour at least)."""
    sums: dict[tuple[tuple[str, ...], str], int] = defaultdict(int)
    for begin, end in _stretches(cursor, start_ms, end_ms, most):
        _lend_in(cursor, state, begin, end, by, timezone, sums)
    return [
        Lent(dict(zip(by, key, strict=True)), account, gpu_us)
        for (key, account), gpu_us in sorted(sums.items())
        if gpu_us
    ]


def _stretches(cursor: Cursor, start_ms: int, end_ms: int, most: int) -> list[tuple[int, int]]:
    """[start_ms, end_ms) in parts of whole hours in which so much was borrowed; none where nothing was."""
    edges: list[int] = []
    taken = 0
    for hour, count in cursor.run(
        f"SELECT at_ms - at_ms % {MS_PER_HOUR} AS hour, count(*) FROM ({statement('borrowed')}) GROUP BY 1 ORDER BY 1",  # noqa: S608 - our own text
        {"low": start_ms - BUCKET_MS, "high": end_ms},
    ):
        if not edges or taken + count > most:
            edges.append(max(start_ms, hour) if edges else start_ms)
            taken = 0
        taken += count
    return [(begin, end) for begin, end in pairwise([*edges, end_ms]) if begin < end]


def _spans(
    borrowed: Sequence[Row], pieces: Sequence[Piece], start_ms: int, end_ms: int
) -> tuple[list[TaggedSpan], list[Piece]]:
    """The borrowed quarter-hours, in order, cut to the span and its pieces; and the piece of each."""
    spans: list[TaggedSpan] = []
    of: list[Piece] = []
    first = 0
    for at, gpu in borrowed:
        while first < len(pieces) and pieces[first].end_ms <= at:
            first += 1
        for piece in pieces[first:]:
            begin, end = max(at, piece.start_ms, start_ms), min(at + BUCKET_MS, piece.end_ms, end_ms)
            if piece.start_ms >= at + BUCKET_MS:
                break
            if begin < end:
                spans.append(TaggedSpan(len(spans), begin, end, gpu))
                of.append(piece)
    return spans, of


def _lend_in(
    cursor: Cursor,
    state: State,
    start_ms: int,
    end_ms: int,
    by: Sequence[Dimension],
    timezone: str,
    sums: dict[tuple[tuple[str, ...], str], int],
) -> None:
    """Add what was lent in [start_ms, end_ms)."""
    borrowed = cursor.rows("borrowed", {"low": start_ms - BUCKET_MS, "high": end_ms})
    pieces = pieces_of(state, start_ms, end_ms, frozenset(by), ZoneInfo(timezone))
    spans, of = _spans(borrowed, pieces, start_ms, end_ms)
    payers = {row[0]: row[0] for row in cursor.rows("payers", {"low": start_ms, "high": end_ms})}
    rows: dict[int, list[Sum]] = defaultdict(list)
    for found in scan(cursor, spans, state.unfolded, state.days.kept, by_device=True, payers={**payers, 0: 0}):
        rows[found.tag].append(found)
    names = holders(
        cursor,
        {found.payer for group in rows.values() for found in group} - {0},
        state.fleet.team_labels,
        users="user" in by,
    )
    device_names = devices(cursor)
    for tag, group in rows.items():
        gpu, piece = spans[tag].gpu, of[tag]
        held = sorted(
            (found for found in group if found.payer),
            key=lambda found: (
                names[found.payer].cluster,
                names[found.payer].namespace,
                names[found.payer].name,
                found.device,
                found.payer,
            ),
        )
        nobody = [found for found in group if found.cells.unheld_us]
        span = spans[tag]
        # What nobody held while the node was down is down time, and nothing to lend.
        down = any(start < span.end_ms and end > span.start_ms for start, end in state.fleet.life(gpu).down)
        unallocated = 0 if down else sum(found.cells.unheld_us for found in nobody)
        free, parts = lend(unallocated, [Share(found.cells.idle_us, found.cells.borrowed_us) for found in held])
        keys = [
            key_of(by, state.fleet, piece, gpu, device_names.get(found.device, NO_DEVICE), names[found.payer])
            for found in held
        ]
        for borrower, key in enumerate(keys):
            sums[key, "busy"] += free[borrower] + sum(parts[borrower])
            for lender, gpu_us in enumerate(parts[borrower]):
                sums[keys[lender], "allocated_idle"] -= gpu_us
        if sum(free):
            device = device_names.get(nobody[0].device, NO_DEVICE)
            sums[key_of(by, state.fleet, piece, gpu, device, None), "unallocated"] -= sum(free)
