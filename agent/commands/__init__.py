"""Implements the commands `gputally agent top` and `gputally agent smoke`, and the table of `--watch`."""
