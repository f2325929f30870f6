"""Defines the ledger's protocols for writing, reading (`Moment`, `Status`) and maintenance, and the relation of usage,
independent of the database that stores them."""
