"""Exports the metered rows to Prometheus. These metrics are for display; bills come from the ledger."""
