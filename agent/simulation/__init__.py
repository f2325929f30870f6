"""Simulates a node with GPUs, holders and faults, whose true usage is known to the microsecond."""
