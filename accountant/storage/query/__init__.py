"""Answers queries about usage and usage windows from the stored rows and sums."""
