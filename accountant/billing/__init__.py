"""Decides who pays for which time: bills, statements, budgets and idle time."""
