"""Reads, watches and writes the objects of a Kubernetes API server, simulates an API server in memory, and defines the
manifests of schedulers (`scheduler_plugins`) and rights (`rights`)."""
