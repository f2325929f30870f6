"""Volcano's kinds."""

from __future__ import annotations

from gputally.kubernetes.objects import Kind

QUEUE = Kind("scheduling.volcano.sh/v1beta1", "Queue", "queues")
POD_GROUP = Kind("scheduling.volcano.sh/v1beta1", "PodGroup", "podgroups", namespaced=True, status=False)
JOB = Kind("batch.volcano.sh/v1alpha1", "Job", "jobs", namespaced=True)
COMMAND = Kind("bus.volcano.sh/v1alpha1", "Command", "commands", namespaced=True, status=False)
"""A command to Volcano's controllers, for example `RestartJob`. The controllers delete it before they act on it."""
