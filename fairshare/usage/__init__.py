"""Reads usage from the accountant and finds what it does not meter."""
