"""Answers the APIs of other programs (OpenCost, KAI) from the ledger.

Each API has a port of its own and is off by default: its clients send no credentials, so the operator decides by a
NetworkPolicy who reaches the port.
"""
