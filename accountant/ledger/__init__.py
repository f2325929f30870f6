"""Defines the ledger's protocols for writing, reading and maintenance, independent of the database that stores it."""
