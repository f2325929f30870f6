"""Exposes the metered rows to Prometheus. These metrics are a view; bills come from the ledger."""
