"""Defines the queues, pods, quotas, annotations and settings that every package of the controller uses."""
