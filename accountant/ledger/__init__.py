"""Defines the ledger's protocols: what callers may write, read and maintain, whatever stores it."""
