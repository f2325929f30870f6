"""Serves the accountant's HTML pages. They need no scripts and can be printed."""
