"""Time beyond a holder's share of a GPU, and whose it was: accountant.shared_gpus applied to the rows.

Worked out per GPU and quarter-hour (cut where a span ends inside one), and only where something was borrowed at
all. Borrowers are taken in the order of their names, so the answer does not depend on who was seen first.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from zoneinfo import ZoneInfo

from accountant.ledger import Lent
from accountant.shared_gpus import Share, lend
from accountant.store.database import Cursor
from accountant.store.names import NO_DEVICE, devices, holders
from accountant.store.scan import Sum, scan
from accountant.store.spans import TaggedSpan
from accountant.store.state import State
from accountant.store.usage import key_of, pieces_of
from accountant.wire import Dimension
from agent.units import BUCKET_MS


def lent(
    cursor: Cursor, state: State, start_ms: int, end_ms: int, by: Sequence[Dimension], timezone: str
) -> list[Lent]:
    """See accountant.ledger.Ledger.lent."""
    borrowed = cursor.rows("borrowed", {"low": start_ms - BUCKET_MS, "high": end_ms})
    if not borrowed:
        return []
    pieces = pieces_of(state, start_ms, end_ms, frozenset(by), ZoneInfo(timezone))
    spans: list[TaggedSpan] = []
    of: list[int] = []
    for number, piece in enumerate(pieces):
        for at, gpu in borrowed:
            begin, end = max(at, piece.start_ms), min(at + BUCKET_MS, piece.end_ms)
            if begin < end:
                spans.append(TaggedSpan(len(spans), begin, end, gpu))
                of.append(number)
    payers = {row[0]: row[0] for row in cursor.rows("payers", {"low": start_ms, "high": end_ms})}
    rows: dict[int, list[Sum]] = defaultdict(list)
    for found in scan(cursor, spans, state.unfolded, by_device=True, payers={**payers, 0: 0}):
        rows[found.tag].append(found)
    names = holders(
        cursor,
        {found.payer for group in rows.values() for found in group} - {0},
        state.fleet.team_labels,
        users="user" in by,
    )
    device_names = devices(cursor)
    sums: dict[tuple[tuple[str, ...], str], int] = defaultdict(int)
    for tag, group in rows.items():
        gpu, piece = spans[tag].gpu, pieces[of[tag]]
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
    return [
        Lent(dict(zip(by, key, strict=True)), account, gpu_us)
        for (key, account), gpu_us in sorted(sums.items())
        if gpu_us
    ]
