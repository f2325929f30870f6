"""Prints one node's live state: `gputally agent top`, `--watch`, the smoke test and the check of the configuration."""
