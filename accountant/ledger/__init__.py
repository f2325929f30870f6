"""Defines the ledger's protocols for writing, reading and maintenance, independent of the storage."""
