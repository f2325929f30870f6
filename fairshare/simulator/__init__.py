"""A gang scheduler with queues, quotas, fair shares and reclaim, replayed over a list of jobs.

The one engine behind the demo, the tests and the evaluation of feedback laws.
"""
