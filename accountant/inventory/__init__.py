"""Collects facts about nodes, namespaces and pods from a YAML file and the API server."""
