"""Runs the background tasks of a serving accountant and exports the ledger's metrics to Prometheus."""
