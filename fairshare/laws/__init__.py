"""Computes queue weights from usage history."""
