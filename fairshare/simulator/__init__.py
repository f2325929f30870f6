"""Simulates a gang scheduler with queues, quotas, fair shares and reclaim over a list of jobs.

The demo, the tests and the evaluation of feedback laws use this one engine."""
