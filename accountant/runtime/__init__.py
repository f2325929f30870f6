"""Runs the background tasks of a serving accountant and exposes the ledger's metrics to Prometheus."""
