"""Weights, quotas or paths for Volcano's Queues."""
