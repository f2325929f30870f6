"""Turns readings into intervals of usage, without I/O or logging."""
