"""Reads, watches and writes the objects of a Kubernetes API server, and simulates an API server in memory."""
