"""What is stored under numbers that come again."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from accountant.store.database import Cursor
from accountant.store.writing import columns
from accountant.store.writing.incoming import Stream


def stored_digests(cursor: Cursor, stream: Stream, seqs: Sequence[int]) -> Mapping[int, frozenset[int]]:
    """Digests of everything stored or quarantined under each number; numbers without any are left out."""
    ids = cursor.run("SELECT id FROM stream WHERE cluster = ? AND node = ? AND epoch = ?", stream)
    if not ids:
        return {}
    found: dict[int, set[int]] = defaultdict(set)
    incoming = columns.table(columns.NUMBER, [(ids[0][0], seq) for seq in seqs])
    for seq, digest in cursor.rows("stored_digests", {"low": min(seqs), "high": max(seqs)}, incoming=incoming):
        found[seq].add(digest)
    return {seq: frozenset(digests) for seq, digests in found.items()}
