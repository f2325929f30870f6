"""Closes months, computes late changes, and stores corrections, adjustments, credits and price book versions.

`bookkeeper.Bookkeeper` is what routes and pages call, with its `invoices`, `credits`, `drafts`, `prices` and `teams`.
All that it decides is an act in the ledger's journal. `month_closing` reads the acts back as the present state
(`ClosedMonths`) and says what must be true before a month is closed; `corrections_and_adjustments` finds the
differences that late records make."""
