"""Computes who pays for which GPU time: bills, statements, budgets and idle time."""
