"""Says when a record is too old to describe the present: of the whole ledger, of a cluster or of a node."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from gputally.base.units import BUCKET_MS, MS_PER_MINUTE

OLD_MS: Final = 3 * BUCKET_MS
"""Three times the longest interval of agents, which is a quarter of an hour."""
BURN_MS: Final = 5 * MS_PER_MINUTE
"""Length of the time over which the burn rate is measured."""
SETTLE_MS: Final = 2 * MS_PER_MINUTE
"""The measured time ends this long before the newest record, because agents do not report at the same instant."""


def is_old(newest_ms: int, now_ms: int) -> bool:
    """Whether there are records, but the newest one is too old to describe the present. newest_ms: 0 if there are
    none."""
    return 0 < newest_ms < now_ms - OLD_MS


def silent_nodes(newest_by_node: Mapping[tuple[str, str], int], newest_ms: int) -> dict[tuple[str, str], int]:
    """The nodes whose newest record is old beside the newest one of the ledger, with the end of that record. Of a
    ledger that stopped as a whole no node is silent: it describes the instant at which it stopped."""
    return {node: at_ms for node, at_ms in newest_by_node.items() if is_old(at_ms, newest_ms)}
