"""Turns readings into intervals of usage. Pure: no I/O, no logging."""
