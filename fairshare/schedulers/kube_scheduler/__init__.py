"""Shares of queues that are a label, for the default kube-scheduler."""
