"""Explains decisions: why a queue has its weight, a past decision computed again, one policy compared with another."""
