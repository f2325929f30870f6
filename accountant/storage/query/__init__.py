"""Answers questions about usage and windows from the stored rows."""
