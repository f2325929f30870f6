"""Explains decisions: why a queue has its weight, a past decision recomputed, and one policy compared with another."""
