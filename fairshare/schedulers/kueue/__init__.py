"""Weights for Kueue's ClusterQueues, Cohorts and LocalQueues."""
