"""Simulates a node whose true usage is known to the microsecond."""
