"""Serves the HTTP API under `/v1`."""
