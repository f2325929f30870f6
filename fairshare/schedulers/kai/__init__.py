"""Weights for KAI-Scheduler's Queues, or usage that KAI reads itself."""
