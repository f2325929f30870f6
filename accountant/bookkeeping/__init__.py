"""Closes months, values late changes, and keeps corrections, adjustments, credits and price book versions."""
