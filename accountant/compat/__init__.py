"""Implements the APIs of other programs on the ledger.

Each API has a separate port and is off by default. Its clients send no credentials, so a NetworkPolicy must decide
which clients reach the port."""
