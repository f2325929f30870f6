"""Who pays for which charge: the price book's billing policy applied to what the ledger counted.

A bill begins as the charges of accountant.costs (held time to its holder, the rest to `__idle__`) and time is then
only moved between payers: never made, lost, split in two accounts or given another price. So the bills of a
span add up to its charges, account by account and price row by price row.

Asks the ledger; decides with accountant.billing and accountant.idle.
"""

from __future__ import annotations

from collections.abc import Sequence

from accountant.costs import Charge, charges
from accountant.ledger import Ledger
from accountant.prices import PriceBook
from accountant.wire import Dimension


def bills(
    ledger: Ledger, book: PriceBook | None, start_ms: int, end_ms: int, by: Sequence[Dimension], timezone: str = "UTC"
) -> list[Charge]:
    """Charges by who pays; `by` begins with the team. Sorted by key, place, account, detail and price row."""
    return charges(ledger, book, start_ms, end_ms, by, None, timezone)
