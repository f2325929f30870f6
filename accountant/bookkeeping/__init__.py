"""Closes months, computes late changes, and stores corrections, adjustments, credits and price book versions."""
