"""Reads, watches and writes the objects of a Kubernetes API server, and of one in memory."""
